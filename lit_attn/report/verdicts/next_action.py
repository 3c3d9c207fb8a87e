"""The next action that can change a verdict of a study at the lowest cost."""

import os
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lit_attn.cells.records import Plan
from lit_attn.report.answers.judged import Action, JudgedVariant
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.statistics.significance_base import MOST_RUNS
from lit_attn.report.statistics.stats import ALPHA
from lit_attn.report.verdicts.evidence import list_unplanned, measure_cost
from lit_attn.report.verdicts.floors import is_below_floor
from lit_attn.schema.errors import plural, program

MakeCommand = Callable[..., str | None]
"""Function that returns the command line of further words, None if the file is unknown."""


def is_undecided(variant: JudgedVariant) -> bool:
    """Return True if a variant has no verdict, and no stream has ended it."""
    return variant.verdict == "undecided" and variant.ended is None


def find_action(
    study: StudyRecord, variants: list[JudgedVariant], make_command: MakeCommand
) -> Action:
    """Return the next action that can change a verdict at the lowest cost."""
    waiting = [cell for cell in study.cells if cell.is_waiting]
    if waiting or list_unplanned(study):
        return complete_plan(study, waiting, make_command)
    undecided = [variant for variant in variants if is_undecided(variant)]
    if not undecided:
        return make_action("none", "Every verdict is decided; nothing remains to run.")
    names = [variant.variant for variant in undecided]
    if is_below_floor(study):
        text = (
            f"Add no seeds: train longer or with more data, until {study.plan.baseline} is better"
            " than the floor. Until then no variant can be called better."
        )
        return make_action("stop", text, variants=names)
    if not study.test.has_seeds:
        valued = [variant for variant in undecided if variant.values.mean is not None]
        untested = [variant for variant in valued if variant.difference is None]
        if untested:
            return _add_first_runs(study, untested)
    possible = [variant for variant in undecided if variant.pairs_for_verdict is not None]
    if possible:
        cheapest = min(possible, key=lambda variant: variant.pairs_for_verdict or 0)
        needed = cheapest.pairs_for_verdict or 0
        if not study.test.has_seeds:
            reason = (
                f": {cheapest.label} would be decided with {needed} runs of each if means and"
                " spreads stay as measured"
            )
            return add_runs(study, cheapest, needed, reason)
        reason = (
            f": {cheapest.label} would be decided if its mean difference and its spread stay as"
            " measured"
        )
        done = cheapest.seeds.done if cheapest.seeds.pairs is None else cheapest.seeds.pairs
        added = max(1, needed - done)
        return add_seeds(study, cheapest, added, make_command, reason)
    failed = [variant for variant in undecided if variant.seeds.failed]
    baseline_failed = any(
        cell.status != "done" for cell in study.variant_cells(study.plan.baseline)
    )
    if failed or baseline_failed:
        return _repeat_failed(study, failed, make_command)
    text = (
        f"Stop: {_name_all(undecided)} would stay undecided with {MOST_RUNS:,} seeds if the"
        " measured differences are the true ones."
    )
    return make_action("stop", text, variants=names)


def complete_plan(
    study: StudyRecord, waiting: list[CellRecord], make_command: MakeCommand
) -> Action:
    """Return the action that trains the planned cells without a result."""
    names = list(dict.fromkeys(cell.variant for cell in waiting))
    counts = Counter(cell.status for cell in waiting)
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    text = f"Complete the plan: {plural(len(waiting), 'planned cell')} without a result ({states})."
    if not waiting:
        text = "Complete the plan."
    searched = list_unplanned(study)
    if searched and study.screening is not None:
        text += " The screening has not ended."
    elif searched:
        text += f" The search of {plural(len(searched), 'variant')} has not ended."
        names += [name for name in searched if name not in names]
    return Action(
        kind="run",
        text=text,
        command=make_command("run"),
        variants=names,
        runs=dict(Counter(cell.variant for cell in waiting)),
        cells=len(waiting),
        seconds=expect_seconds(study, [cell.variant for cell in waiting]),
    )


def add_seeds(
    study: StudyRecord,
    variant: JudgedVariant,
    added_count: int,
    make_command: MakeCommand,
    reason: str = "",
) -> Action:
    """Return the action that adds seeds to every variant, above all for `variant`."""
    plan = study.plan
    next_seed = max(plan.seeds) + 1
    added = list(range(next_seed, next_seed + added_count))
    seeds = [*plan.seeds, *added]
    is_count = seeds == list(range(len(seeds)))
    words = str(len(seeds)) if is_count else ",".join(str(seed) for seed in seeds)
    trained = [planned.name for planned in plan.variants for _ in added]
    command = make_command("run", "--seeds", words)
    how = f"Add {plural(added_count, 'seed')} to every variant"
    if study.screening is not None:
        # --seeds is refused, because a seed of the screening could be among them.
        command = make_command("run")
        how = (
            f"Add {plural(added_count, 'fresh seed')} to every kept variant (`confirm:"
            f" {len(seeds)}` in the study's `design`)"
        )
    text = f"{how}{reason}. This is one more look, with a smaller level."
    return Action(
        kind="add-seeds",
        text=text,
        command=command,
        variants=[variant.variant],
        runs=dict(Counter(trained)),
        seeds={planned.name: added for planned in plan.variants},
        cells=len(trained),
        seconds=expect_seconds(study, trained),
    )


def add_runs(study: StudyRecord, variant: JudgedVariant, needed: int, reason: str = "") -> Action:
    """Return the action after which `variant` and the baseline have `needed` independent runs."""
    runs = _count_missing(study, variant.variant, needed)
    text = (
        f"Run {describe_runs(runs)}{reason}. Judging again after each run would find differences"
        " that are not there."
    )
    return _make_runs(study, text, runs)


def _count_missing(study: StudyRecord, variant: str, needed: int) -> dict[str, int]:
    """Return the runs that a variant and the baseline lack for `needed` runs of each."""
    runs = {}
    for name in (study.plan.baseline, variant):
        missing = needed - len(study.values(name))
        if missing > 0:
            runs[name] = missing
    return runs


def _add_first_runs(study: StudyRecord, untested: list[JudgedVariant]) -> Action:
    """Return the action that repeats the best variant without a spread as often as needed."""
    needed = study.test.find_fewest(ALPHA)
    sign = 1.0 if study.plan.metric.goal == "max" else -1.0
    best = max(untested, key=lambda variant: sign * (variant.values.mean or 0.0))
    runs = _count_missing(study, best.variant, needed)
    text = (
        f"Run {describe_runs(runs)}: one run has no spread, and no verdict is possible below"
        f" {needed} runs of each. {best.label} has the best value of the"
        f" {plural(len(untested), 'variant')} that cannot be compared yet."
    )
    return _make_runs(study, text, runs)


def describe_runs(runs: dict[str, int]) -> str:
    """Return `base 3 more times and idea 1 more time`."""
    return " and ".join(f"{name} {plural(count, 'more time')}" for name, count in runs.items())


def _make_runs(study: StudyRecord, text: str, runs: dict[str, int]) -> Action:
    """Return the action that makes independent runs of another program."""
    trained = [name for name, count in runs.items() for _ in range(count)]
    return Action(
        kind="add-seeds",
        text=text,
        command=None,
        variants=list(runs),
        runs=runs,
        cells=len(trained),
        seconds=expect_seconds(study, trained),
    )


def _repeat_failed(
    study: StudyRecord, failed: list[JudgedVariant], make_command: MakeCommand
) -> Action:
    """Return the action for seeds that have failed, without which no verdict is possible."""
    cells = [cell for cell in study.cells if cell.status != "done"]
    names = list(dict.fromkeys(cell.variant for cell in cells))
    remedy = "Remove the reason (`lit-attn status` shows it), then train them again"
    if not any(cell.path for cell in study.cells):
        # The runs are those of another program, of which no command knows anything.
        remedy = "Remove the reason, then run their variants again"
    text = (
        f"{plural(len(cells), 'cell')} failed. {remedy}; a failed seed counts as the worst value"
        " until then."
    )
    return Action(
        kind="rerun",
        text=text,
        command=make_command("rerun"),
        variants=[variant.variant for variant in failed] or names,
        runs=dict(Counter(cell.variant for cell in cells)),
        cells=len(cells),
        seconds=expect_seconds(study, [cell.variant for cell in cells]),
    )


def make_action(kind: str, text: str, variants: list[str] | None = None) -> Action:
    """Return an action that trains no cell."""
    values = {"kind": kind, "text": text, "command": None, "variants": variants or []}
    return Action.model_validate({**values, "runs": {}, "cells": 0, "seconds": 0.0})


def _name_all(variants: list[JudgedVariant]) -> str:
    return ", ".join(variant.label for variant in variants)


def expect_seconds(study: StudyRecord, variants: list[str]) -> float | None:
    """Return the seconds of one cell of each entry of `variants`, None without a measured cell.

    A variant without a finished cell is expected to take the median of the others.
    """
    by_variant: dict[str, float] = {}
    for variant in study.plan.variants:
        seconds = measure_cost(study, variant.name).seconds_per_seed
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
