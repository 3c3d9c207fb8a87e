"""Verdicts of a study, and the next action that can change one of them.

Every number comes from the comparison that the table of results prints
(`lit_attn.report.comparison`), so a verdict never differs from the table.
"""

import os
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from lit_attn.cells.decisions import Seals
from lit_attn.cells.records import Plan
from lit_attn.report import stats
from lit_attn.report.answers import (
    Action,
    Cost,
    EndedVariant,
    InterimLook,
    Interval,
    JudgedMetric,
    JudgedStudy,
    JudgedVariant,
    Power,
    Range,
    SealedPlan,
    SeedCounts,
    Verdict,
)
from lit_attn.report.comparison import (
    ALPHA,
    POWERS,
    Comparisons,
    compare_variants,
    find_verdict,
)
from lit_attn.report.labels import find_labels
from lit_attn.report.results import describe_records
from lit_attn.report.study_record import CellRecord, StudyRecord
from lit_attn.schema.errors import plural, program

MOST_PAIRS = 1000
"""Largest number of pairs that is suggested."""

MakeCommand = Callable[..., str | None]
"""Function that returns the command line of further words, None if the file is unknown."""


def judge_study(
    study: StudyRecord,
    make_command: MakeCommand = lambda *_: None,
    comparisons: Comparisons | None = None,
) -> JudgedStudy:
    """Return the verdict of every variant but the baseline, and the next action.

    `make_command("run", "--seeds", 20)` returns the command line of an action. `comparisons` are
    those of `study`, if they are known already.
    """
    plan = study.plan
    if comparisons is None:
        comparisons = compare_variants(study)
    labels = find_labels(plan)
    metric = plan.metric
    _, warnings = describe_records(study)
    variants = []
    for variant in plan.variants:
        if variant.name != plan.baseline:
            judged = _judge_variant(study, variant.name, labels[variant.name], comparisons)
            variants.append(judged)
    return JudgedStudy(
        study=plan.study,
        title=" ".join(plan.title.split()),
        metric=JudgedMetric(
            name=metric.name, label=metric.label, goal=metric.goal, margin=metric.margin
        ),
        baseline=plan.baseline,
        baseline_label=labels[plan.baseline],
        rule="star" if metric.margin is None else "margin",
        level=comparisons.look_level,
        interim=_describe_interim(plan, comparisons),
        look=1 + _count_added_looks(study.seals),
        is_interim=any(cell.is_waiting for cell in study.cells) or bool(_list_searched(study)),
        sealed=None if study.seals is None else _describe_seals(study.seals),
        warnings=warnings,
        variants=variants,
        next=_find_action(study, variants, make_command),
    )


def is_decided(study: JudgedStudy) -> bool:
    """Return True if every verdict is final, and none but those of ended variants is undecided."""
    is_open = any(_is_undecided(variant) for variant in study.variants)
    return not study.is_interim and not is_open


def _is_undecided(variant: JudgedVariant) -> bool:
    """Return True if a variant has no verdict, and no rule of the plan has ended it."""
    return variant.verdict == "undecided" and variant.ended is None


def _describe_interim(plan: Plan, comparisons: Comparisons) -> InterimLook | None:
    """Return the bound of the running variant with the fewest pairs, None without one."""
    for pairs, level in comparisons.interim.items():
        return InterimLook(seeds=pairs, planned=len(plan.seeds), level=level)
    return None


def _count_added_looks(seals: Seals | None) -> int:
    return 0 if seals is None else len(seals.added_seeds)


def _describe_seals(seals: Seals) -> SealedPlan:
    """Return the first seal and the changes after results had been seen."""
    first = seals.entries[0]
    added = sorted(seed for seeds in seals.added_seeds for seed in seeds)
    return SealedPlan(
        hash=first.hash,
        time=first.time,
        is_before_results=seals.is_before_results,
        added_seeds=added,
        **seals.changes(),
    )


def _judge_variant(
    study: StudyRecord, name: str, label: str, comparisons: Comparisons
) -> JudgedVariant:
    """Return the verdict of a variant and its numbers."""
    record = comparisons.records[name]
    cells = study.variant_cells(name)
    pairs = record["pairs"]
    differences = _pair_differences(study, name)
    # A variant without pairs is undecided.
    verdict = cast("Verdict", find_verdict(record, study.plan) or "undecided")
    needed = stats.seeds_needed_range(differences)
    ending = study.endings.get(name)
    forecast = None
    if verdict == "undecided" and not record["failed"] and ending is None:
        forecast = _forecast_pairs(study, differences, comparisons)
    return JudgedVariant(
        variant=name,
        label=label,
        verdict=verdict,
        is_final=not any(cell.is_waiting for cell in cells) and name not in _list_searched(study),
        ended=None if ending is None else EndedVariant.describe(ending),
        level=record["level"],
        difference=_find_interval(record),
        p=record.get("p_adjusted"),
        is_significant=record["significant"],
        seeds=SeedCounts(
            done=len(study.values(name)),
            planned=len(cells),
            failed=record["failed"],
            pairs=pairs,
        ),
        power=_list_powers(record, pairs),
        seeds_needed=_make_range(needed, 0),
        seeds_missing=_make_range(needed, pairs),
        pairs_for_verdict=forecast,
        cost=_measure_cost(study.finished_cells(name)),
    )


def _list_searched(study: StudyRecord) -> list[str]:
    """Return the variants whose search has not ended, so that their cells are not planned yet."""
    searched = []
    for entry in () if study.tuning is None else study.tuning.variants:
        has_diverged = bool(entry.trials) and all(trial.mean is None for trial in entry.trials)
        if entry.chosen is None and not has_diverged:
            searched.append(entry.variant)
    return searched


def _pair_differences(study: StudyRecord, name: str) -> list[float]:
    """Return the differences of a variant to the baseline, one for each seed of both."""
    baseline = study.values(study.plan.baseline)
    values = study.values(name)
    return [value - baseline[seed] for seed, value in values.items() if seed in baseline]


def _find_interval(record: dict[str, Any]) -> Interval | None:
    """Return the mean difference with its interval, None without pairs."""
    if "difference" not in record:
        return None
    return Interval(mean=record["difference"], low=record.get("low"), high=record.get("high"))


def _list_powers(record: dict[str, Any], pairs: int) -> list[Power]:
    """Return the simulated powers that the table prints."""
    powers = []
    for field, factor in POWERS.items():
        if record.get(field) is not None:
            powers.append(Power(pairs=factor * pairs, probability=record[field]))
    return powers


def _make_range(needed: tuple[int, int | None] | None, done: int) -> Range | None:
    """Return a range of numbers of seeds without the first `done` ones."""
    if needed is None:
        return None
    low, high = needed
    missing_high = None
    if high is not None and high <= MOST_PAIRS:
        missing_high = max(0, high - done)
    return Range(low=max(0, low - done), high=missing_high)


def _measure_cost(cells: list[CellRecord]) -> Cost:
    """Return the median and the sum of the seconds of finished cells."""
    times = []
    for cell in cells:
        seconds = cell.measurements.get("wall_time")
        if seconds is not None:
            times.append(float(seconds))
    if not times:
        return Cost(seconds_per_seed=None, seconds_spent=None)
    return Cost(seconds_per_seed=statistics.median(times), seconds_spent=sum(times))


def _forecast_pairs(
    study: StudyRecord, differences: list[float], comparisons: Comparisons
) -> int | None:
    """Return the pairs that would decide an undecided variant, None if none up to MOST_PAIRS do.

    Mean and standard deviation of the differences are taken as they are. Pairs that are planned
    already belong to this look; a number beyond them needs the smaller level of the next look.
    """
    planned = len(study.plan.seeds)
    looks = _count_added_looks(study.seals)
    next_level = ALPHA / 2 ** (looks + 2)
    compared = max(1, len(comparisons.pairs))
    margin = study.plan.metric.margin
    for level, first, last in (
        (comparisons.level, len(differences) + 1, planned),
        (next_level, planned + 1, MOST_PAIRS),
    ):
        pairs = stats.pairs_for_decision(differences, level, compared, margin, (first, last))
        if pairs is not None:
            return pairs
    return None


def _find_action(
    study: StudyRecord, variants: list[JudgedVariant], make_command: MakeCommand
) -> Action:
    """Return the next action that can change a verdict at the lowest cost."""
    waiting = [cell for cell in study.cells if cell.is_waiting]
    if waiting or _list_searched(study):
        return _complete_plan(study, waiting, make_command)
    undecided = [variant for variant in variants if _is_undecided(variant)]
    if not undecided and any(variant.ended for variant in variants):
        text = "Every other verdict is decided, and the plan has ended the variants without one."
        return _make_action("none", text)
    if not undecided:
        return _make_action("none", "Every verdict is decided; nothing remains to run.")
    possible = [variant for variant in undecided if variant.pairs_for_verdict is not None]
    if possible:
        cheapest = min(possible, key=lambda variant: variant.pairs_for_verdict or 0)
        return _add_seeds(study, cheapest, make_command)
    failed = [variant for variant in undecided if variant.seeds.failed]
    baseline_failed = any(
        cell.status != "done" for cell in study.variant_cells(study.plan.baseline)
    )
    if failed or baseline_failed:
        return _repeat_failed(study, failed, make_command)
    text = (
        f"Stop: {_name_all(undecided)} would stay undecided with {MOST_PAIRS:,} seeds if the"
        " measured differences are the true ones."
    )
    return _make_action("stop", text, variants=[variant.variant for variant in undecided])


def _complete_plan(
    study: StudyRecord, waiting: list[CellRecord], make_command: MakeCommand
) -> Action:
    """Return the action that trains the planned cells without a result."""
    names = list(dict.fromkeys(cell.variant for cell in waiting))
    counts = Counter(cell.status for cell in waiting)
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    text = f"Complete the plan: {plural(len(waiting), 'planned cell')} without a result ({states})."
    if not waiting:
        text = "Complete the plan."
    searched = _list_searched(study)
    if searched:
        text += f" The search of {plural(len(searched), 'variant')} has not ended."
        names += [name for name in searched if name not in names]
    return Action(
        kind="run",
        text=text,
        command=make_command("run"),
        variants=names,
        cells=len(waiting),
        seconds=_expect_seconds(study, [cell.variant for cell in waiting]),
    )


def _add_seeds(study: StudyRecord, variant: JudgedVariant, make_command: MakeCommand) -> Action:
    """Return the action that adds seeds until `variant` is expected to be decided."""
    plan = study.plan
    needed = variant.pairs_for_verdict or 0
    added_count = max(1, needed - variant.seeds.pairs)
    next_seed = max(plan.seeds) + 1
    added = list(range(next_seed, next_seed + added_count))
    seeds = [*plan.seeds, *added]
    is_count = seeds == list(range(len(seeds)))
    words = str(len(seeds)) if is_count else ",".join(str(seed) for seed in seeds)
    trained = [planned.name for planned in plan.variants for _ in added]
    text = (
        f"Add {plural(added_count, 'seed')} to every variant: {variant.label} would be decided if"
        " its mean difference and its spread stay as measured. This is one more look, with a"
        " smaller level."
    )
    return Action(
        kind="add-seeds",
        text=text,
        command=make_command("run", "--seeds", words),
        variants=[variant.variant],
        cells=len(trained),
        seconds=_expect_seconds(study, trained),
    )


def _repeat_failed(
    study: StudyRecord, failed: list[JudgedVariant], make_command: MakeCommand
) -> Action:
    """Return the action for seeds that have failed, without which no verdict is possible."""
    cells = [cell for cell in study.cells if cell.status != "done"]
    names = list(dict.fromkeys(cell.variant for cell in cells))
    text = (
        f"{plural(len(cells), 'cell')} failed. Remove the reason (`lit-attn status` shows it), then"
        " train them again; a failed seed counts as the worst value until then."
    )
    return Action(
        kind="rerun",
        text=text,
        command=make_command("rerun"),
        variants=[variant.variant for variant in failed] or names,
        cells=len(cells),
        seconds=_expect_seconds(study, [cell.variant for cell in cells]),
    )


def _make_action(kind: str, text: str, variants: list[str] | None = None) -> Action:
    """Return an action that trains no cell."""
    values = {"kind": kind, "text": text, "command": None, "variants": variants or []}
    return Action.model_validate({**values, "cells": 0, "seconds": 0.0})


def _name_all(variants: list[JudgedVariant]) -> str:
    return ", ".join(variant.label for variant in variants)


def _expect_seconds(study: StudyRecord, variants: list[str]) -> float | None:
    """Return the seconds of one cell of each entry of `variants`, None without a measured cell.

    A variant without a finished cell is expected to take the median of the others.
    """
    by_variant: dict[str, float] = {}
    for variant in study.plan.variants:
        seconds = _measure_cost(study.finished_cells(variant.name)).seconds_per_seed
        if seconds is not None:
            by_variant[variant.name] = seconds
    if not by_variant:
        return None
    usual = statistics.median(by_variant.values())
    return sum(by_variant.get(name, usual) for name in variants)


def make_study_command(folder: Path, file: Path | None, plan: Plan) -> MakeCommand:
    """Return the function that makes the command lines of a study in `folder`.

    `file` is the file of the study; None gives no command. A side study (`--set`) has no command
    either, because its changes are not recorded in the plan.
    """
    name = plan.family or plan.study
    if file is None or "@" in folder.name:
        return lambda *_: None

    is_below = file.is_relative_to(Path.cwd())
    shown = Path(os.path.relpath(file)) if is_below else file
    out: list[object] = [] if folder.parent == Path("runs") else ["--out", folder.parent]

    def make_command(kind: str, *words: str) -> str:
        choice = ["failed"] if kind == "rerun" else []
        return program(kind, *choice, shown, "--study", name, *words, *out)

    return make_command
