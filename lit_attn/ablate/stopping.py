"""Variants that end before their last seed by the rule `stop`, and their cells.

The rule follows from the results alone (`lit_attn.report.statistics.futility`). Each command
derives the decisions again and records them in `endings.json`, which `status` and the report read,
so a resumed run, several runners and the jobs of a cluster decide in the same way.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from lit_attn.cells.decisions import Ending, Endings
from lit_attn.cells.folder import RETRIED, read_cell
from lit_attn.cells.records import Metric, Plan, PlannedCell
from lit_attn.cells.rules import list_ended_cells
from lit_attn.config.study import StudySource
from lit_attn.files import one_at_a_time
from lit_attn.report.statistics.futility import find_end
from lit_attn.report.statistics.stats import ALPHA, pairs_for_a_star
from lit_attn.schema.errors import plural

Ends = dict[int, float | None]
"""Values of a variant by seed, None for a failed seed; seeds without an end are absent."""


def require_seeds_for_stop(source: StudySource, seeds: tuple[int, ...]) -> None:
    """Raise the study's error if it ends variants by futility with too few seeds."""
    if source.study.stop is None:
        return
    planned = {*source.study.seeds, *seeds}
    has_margin = source.study.metric.margin is not None
    needed = 3 if has_margin else pairs_for_a_star(1, ALPHA)
    if len(planned) >= needed:
        return
    reason = "the rule decides after two seeds at the earliest"
    advice = f"use at least {needed} seeds, or leave out `stop`"
    if not has_margin:
        reason = "no variant can have a star"
        advice = f"use at least {needed} seeds, set metric.margin, or leave out `stop`"
    raise source.error(("stop",), f"with {plural(len(planned), 'planned seed')} {reason}; {advice}")


def find_endings(plan: Plan, folder: Path) -> dict[str, Ending]:
    """Return the variants of the study in `folder` that its rule ends now, by name."""
    endings: dict[str, Ending] = {}
    if plan.stop is None:
        return endings
    by_variant: dict[str, list[PlannedCell]] = {}
    for cell in plan.cells:
        by_variant.setdefault(cell.variant, []).append(cell)
    baseline = _read_ends(by_variant.pop(plan.baseline, []), folder, plan.metric)
    for name, cells in by_variant.items():
        ends = _read_ends(cells, folder, plan.metric)
        differences = _pair_first_seeds(plan.seeds, ends, baseline)
        end = find_end(differences, len(plan.seeds), len(by_variant), ALPHA, plan.metric.margin)
        if end is not None:
            seeds, power = end
            endings[name] = Ending(
                variant=name,
                identity=cells[0].identity,
                rule=plan.stop,
                seeds=seeds,
                planned=len(plan.seeds),
                power=power,
            )
    return endings


def _read_ends(cells: Iterable[PlannedCell], folder: Path, metric: Metric) -> Ends:
    """Return the values of the cells that have ended, in printed units, by seed."""
    ends: Ends = {}
    for cell in cells:
        status = read_cell(folder / cell.path, cell.identity)
        if status.result is not None:
            # A result leaves out a metric that is not finite. The cell is not trained again.
            value = status.result.metrics.get(metric.name)
            ends[cell.seed] = None if value is None else value * metric.scale
        elif status.exit is not None and status.exit.failure not in RETRIED:
            ends[cell.seed] = None
    return ends


def _pair_first_seeds(seeds: Iterable[int], ends: Ends, baseline: Ends) -> list[float | None]:
    """Return the differences to the baseline of all seeds before the first one without an end."""
    differences: list[float | None] = []
    for seed in seeds:
        if seed not in ends or seed not in baseline:
            break
        value = ends[seed]
        reference = baseline[seed]
        if value is None or reference is None:
            differences.append(None)
        else:
            differences.append(value - reference)
    return differences


def update_endings(folder: Path) -> dict[Path, Ending]:
    """Record the variants of the study in `folder` that its rule ends, and return their cells.

    The cells have no result yet, and need not run. A variant under several criteria shares cells
    with others, which still need them. The plan of the study must have been written.
    """
    plan = Plan.read_valid(folder / "plan.json")
    if plan is None or plan.stop is None:
        return {}
    endings = find_endings(plan, folder)
    path = folder / "endings.json"
    # On a full disk the decisions hold for this command, and the next one records them.
    with contextlib.suppress(OSError), one_at_a_time(folder, "endings"):
        recorded = Endings.read_valid(path)
        current = Endings(entries=list(endings.values()))
        if recorded != current and (endings or recorded is not None):
            current.write(path)
    return list_ended_cells(plan, folder, endings)


def find_ended_cells(plan: Plan, folder: Path) -> dict[Path, Ending]:
    """Return the cells that need not run by the results of a study, without recording it."""
    return list_ended_cells(plan, folder, find_endings(plan, folder))
