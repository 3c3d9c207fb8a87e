"""Verdicts about a stream of ideas, from the runs of another program or from a sealed study."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lit_attn.cells.decisions import Seals
from lit_attn.cells.records import PlannedVariant
from lit_attn.judging.stream import SCREEN_RUNS, Idea, count_runs, find_level, follow_ideas
from lit_attn.judging.stream_action import find_stream_action
from lit_attn.report.answers.judged import (
    Action,
    JudgedStudy,
    JudgedVariant,
    SeedCounts,
    Stage,
    Stream,
    StreamStep,
)
from lit_attn.report.answers.runs import EndedVariant
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.statistics import stats
from lit_attn.report.tables.labels import find_labels
from lit_attn.report.verdicts.comparison import compare_variants
from lit_attn.report.verdicts.evidence import list_unplanned, measure_cost
from lit_attn.report.verdicts.judge import describe_study, judge_variant
from lit_attn.report.verdicts.modes import warn_of_modes
from lit_attn.report.verdicts.next_action import MakeCommand, complete_plan, make_action
from lit_attn.report.verdicts.spreads import warn_of_spreads
from lit_attn.schema.errors import ConfigError


def judge_stream(study: StudyRecord, notes: Sequence[str] = ()) -> JudgedStudy:
    """Return the verdicts about the ideas of another program.

    The cells of `study` are its runs in the order in which they ended.
    """
    plan = study.plan
    runs = study.cells
    ideas = follow_ideas(runs, plan.baseline, plan.metric.goal, study.test)
    by_name = {variant.name: variant for variant in plan.variants}
    variants = []
    warnings: list[str] = []
    unused_runs = []
    for place, idea in enumerate(ideas, start=1):
        chosen = _list_confirmation(idea, runs, study.test.is_paired)
        level = stats.ALPHA if idea.number is None else find_level(idea.number)
        confirmation = _select(study, by_name, idea.name, chosen, level)
        variants.append(_judge_idea(study, confirmation, idea, place))
        if idea.stage == "judged":
            warnings += [*warn_of_spreads(confirmation), *warn_of_modes(confirmation)]
        used = len(idea.screening) + len(idea.confirmation)
        unused = len(study.variant_cells(idea.name)) - used
        if unused > 0:
            unused_runs.append(f"'{idea.name}' {unused}")
    notes = list(notes)
    if unused_runs:
        notes.append(
            "Runs that are not used, because neither the screening nor the confirmation of their"
            f" idea needs them: {', '.join(unused_runs)}."
        )
    passed = sum(idea.number is not None for idea in ideas)
    judged = describe_study(
        study,
        variants,
        find_stream_action(study, ideas),
        test=_name_test(study),
        level=find_level(passed + 1),
        notes=notes,
        warnings=warnings,
        stream=_describe_stream(passed, study),
    )
    is_open = any(idea.stage in ("screening", "confirming") for idea in ideas)
    return judged.model_copy(update={"is_interim": is_open})


def _describe_stream(confirmations: int, study: StudyRecord) -> Stream:
    level = find_level(confirmations + 1)
    return Stream(
        error=stats.ALPHA,
        confirmations=confirmations,
        next_level=level,
        next_runs=count_runs(level, study.test),
    )


def _name_test(study: StudyRecord) -> str:
    return f"{study.test.name}, each idea alone at the level of its confirmation"


def _list_confirmation(idea: Idea, runs: Sequence[CellRecord], is_paired: bool) -> list[CellRecord]:
    """Return the cells of a complete confirmation, none before its last run.

    Independent runs are numbered within idea and baseline.
    """
    if idea.stage != "judged":
        return []
    cells = []
    for places in (idea.baseline, idea.confirmation):
        for number, place in enumerate(places):
            run = runs[place]
            cells.append(run if is_paired else replace(run, seed=number))
    return cells


def _select(
    study: StudyRecord,
    variants: Mapping[str, PlannedVariant],
    name: str,
    cells: list[CellRecord],
    alpha: float,
) -> StudyRecord:
    """Return the study of an idea and the baseline alone, with these cells and this error.

    `variants` are those of the study by name, because a stream has thousands of them.
    """
    plan = study.plan
    kept = [variants[plan.baseline], variants[name]]
    seeds = sorted({cell.seed for cell in cells})
    changes = {"variants": kept, "seeds": seeds, "cells": []}
    return replace(
        study,
        plan=plan.model_copy(update=changes),
        cells=cells,
        alpha=alpha,
        seals=None,
    )


def _judge_idea(
    study: StudyRecord, confirmation: StudyRecord, idea: Idea, place: int
) -> JudgedVariant:
    """Return the verdict about an idea of another program."""
    name = idea.name
    judged = judge_variant(
        confirmation, name, name, compare_variants(confirmation, with_power=False)
    )
    done = min(len(idea.confirmation), len(idea.baseline))
    is_final = idea.stage in ("screened-out", "judged")
    step = StreamStep.from_record(
        idea,
        place=place,
        screening_runs=len(idea.screening),
        confirmation=idea.number,
        confirm_runs=idea.runs,
        confirmed_runs=done,
    )
    counts = judged.seeds
    if idea.stage != "judged":
        counts = SeedCounts(
            done=done,
            planned=idea.runs or 0,
            failed=0,
            pairs=study.test.count_pairs(done),
        )
    ended = None
    if idea.stage == "screened-out":
        ended = _end_by_screening(idea)
    elif idea.stage == "judged":
        ended = _end_by_confirmation(judged, idea.runs or done)
    update = {
        "is_final": is_final,
        "ended": ended,
        "seeds": counts,
        "stream": step,
        "cost": measure_cost(study, name),
    }
    return _close(judged, update)


def _close(judged: JudgedVariant, update: Mapping[str, Any]) -> JudgedVariant:
    """Return a verdict without the numbers of further runs, which a stream does not have."""
    nothing: dict[str, Any] = {
        "power": [],
        "seeds_needed": None,
        "seeds_missing": None,
        "pairs_for_verdict": None,
    }
    return judged.model_copy(update={**nothing, **update})


def _end_by_screening(idea: Idea) -> EndedVariant:
    """Return why an idea is not confirmed."""
    text = "screened out: a run of its screening failed"
    if idea.screened is not None and idea.threshold is not None:
        text = (
            f"screened out: {SCREEN_RUNS} runs differ from the baseline by {idea.screened:.3g},"
            f" and an improvement of {idea.threshold:.3g} is needed"
        )
    return _end(idea.name, "screening", len(idea.screening), text)


def _end_by_confirmation(judged: JudgedVariant, runs: int) -> EndedVariant | None:
    """Return why an idea is not kept, None if it has a verdict."""
    if judged.verdict != "undecided":
        return None
    p = "there is no p" if judged.p is None else f"p is {judged.p:.2g}"
    text = f"not kept: {p} after {runs} runs, and a star needs p ≤ {judged.level:.2g}"
    return _end(judged.variant, "confirmation", runs, text)


def _end(name: str, rule: str, runs: int, text: str) -> EndedVariant:
    return EndedVariant(variant=name, rule=rule, seeds=runs, planned=runs, text=text)


def judge_sealed_stream(
    study: StudyRecord, make_command: MakeCommand = lambda *_: None
) -> JudgedStudy:
    """Return the verdicts about the variants of a study, each an idea that is confirmed.

    Their order is that in which the seals have them, and each is judged by the seeds that were
    planned when it was added. Raises ConfigError for a study that was not sealed.
    """
    plan = study.plan
    if study.seals is None:
        raise ConfigError(
            f"{plan.study}: has no seal, so the order of its ideas is not known; `lit-attn seal` or"
            " `lit-attn run` seals a study"
        )
    if study.screening is not None:
        raise ConfigError(
            f"{plan.study}: --stream: its `design` has screened the ideas together; judge it"
            " without --stream"
        )
    planned = _order_variants(study.seals)
    by_name = {variant.name: variant for variant in plan.variants}
    labels = find_labels(plan)
    notes = []
    warnings: list[str] = []
    variants = []
    for variant in plan.variants:
        if variant.name == plan.baseline:
            continue
        written = variant.variant or variant.name
        if written not in planned:
            raise ConfigError(
                f"{plan.study}: {written}: is not in the last seal; run the study to seal it"
            )
        place, seeds = planned[written]
        chosen = []
        for name in (plan.baseline, variant.name):
            chosen += [cell for cell in study.variant_cells(name) if cell.seed in seeds]
        # Several criteria of `match` are several tests of one idea.
        alpha = find_level(place) / _count_criteria(plan.variants, written)
        confirmation = _select(study, by_name, variant.name, chosen, alpha)
        judged = judge_variant(
            confirmation,
            variant.name,
            labels[variant.name],
            compare_variants(confirmation, with_power=False),
        )
        is_open = not judged.is_final or any(
            cell.is_waiting for cell in confirmation.variant_cells(plan.baseline)
        )
        stage: Stage = "confirming" if is_open else "judged"
        ended = None if is_open else _end_by_confirmation(judged, len(seeds))
        step = StreamStep(
            place=place,
            stage=stage,
            screening_runs=0,
            screened=None,
            threshold=None,
            confirmation=place,
            confirm_runs=len(seeds),
            confirmed_runs=judged.seeds.pairs or 0,
        )
        update = {"is_final": not is_open, "ended": ended, "stream": step}
        variants.append(_close(judged, update))
        warnings += [*warn_of_spreads(confirmation), *warn_of_modes(confirmation)]
        later = len(study.variant_cells(variant.name)) - judged.seeds.planned
        if later > 0 and variant.variant is None:
            notes.append(f"{variant.name}: {later} seeds were added later and are not used.")
    variants.sort(key=lambda judged: judged.stream.place if judged.stream else 0)
    last = max((place for place, _ in planned.values()), default=0)
    return describe_study(
        study,
        variants,
        _find_sealed_action(study, make_command),
        test=_name_test(study),
        level=find_level(last + 1),
        notes=notes,
        warnings=warnings,
        stream=_describe_stream(last, study),
    )


def _order_variants(seals: Seals) -> dict[str, tuple[int, list[int]]]:
    """Return the place and the first seeds of each variant as written, in the last seal.

    A variant that was removed keeps its place, and one whose settings were changed is a new idea.
    """
    places: dict[tuple[str, str], tuple[int, list[int]]] = {}
    for entry in seals.entries:
        if entry.results == 0:
            # Nothing has been seen, so this plan replaces the earlier ones.
            places = {}
        for name, identity in entry.variants.items():
            is_new = name != entry.baseline and (name, identity) not in places
            if is_new:
                places[name, identity] = (len(places) + 1, entry.seeds)
    last = seals.entries[-1]
    return {
        name: places[name, identity]
        for name, identity in last.variants.items()
        if (name, identity) in places
    }


def _count_criteria(variants: Sequence[PlannedVariant], written: str) -> int:
    return sum((variant.variant or variant.name) == written for variant in variants)


def _find_sealed_action(study: StudyRecord, make_command: MakeCommand) -> Action:
    """Return the action that completes the plan, or none."""
    waiting = [cell for cell in study.cells if cell.is_waiting]
    if waiting or list_unplanned(study):
        return complete_plan(study, waiting, make_command)
    return make_action("none", "Every idea is judged. Add the next one to `cells` of the study.")
