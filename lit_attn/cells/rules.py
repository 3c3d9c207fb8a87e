"""Effects of the rules `stop` and `gates` on the cells of a study, read from its records alone.

No function of this file computes a statistic, so `status` answers at once. The decisions themselves
are those of `endings.json` (lit_attn.ablate.stopping).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from lit_attn.cells.decisions import GATE, Ending, Endings
from lit_attn.cells.folder import FINAL_FAILURES, UNENDED, read_cell
from lit_attn.cells.records import Gate, Plan, Tuning
from lit_attn.schema.errors import plural


class GateState(NamedTuple):
    """State of the gates of a study: the size that it waits for, and the undecided variants.

    `waits` names the first smaller size that is not complete, "" if all are. `undecided` has the
    reason, by variant, why a gate that the variant passed has not decided about it. `follows` names
    the first larger size that is not complete, "" if all are or if the runs have none.
    """

    waits: str
    undecided: Mapping[str, str]
    follows: str = ""


def list_ended_cells(plan: Plan, folder: Path, endings: Mapping[str, Ending]) -> dict[Path, Ending]:
    """Return the cells of ended variants that no other variant needs.

    A variant that has ended before its search has no cells but those of its trials.
    """
    needed = {cell.path for cell in plan.cells if cell.variant not in endings}
    ended = {}
    for cell in plan.cells:
        if cell.variant in endings and cell.path not in needed:
            ended[folder / cell.path] = endings[cell.variant]
    untuned = endings.keys() - {cell.variant for cell in plan.cells}
    for trial in plan.trials:
        name = trial.variant.partition("@")[0]
        if name in untuned:
            ended[folder / trial.path] = endings[name]
    return ended


def read_endings(plan: Plan, folder: Path) -> dict[str, Ending]:
    """Return the recorded endings that hold for `plan`, by variant."""
    recorded = Endings.read_valid(folder / "endings.json") if plan.has_rule else None
    return {} if recorded is None else recorded.of_plan(plan)


def read_ended_cells(plan: Plan, folder: Path) -> dict[Path, Ending]:
    """Return the cells that need not run by the recorded decisions of a study."""
    return list_ended_cells(plan, folder, read_endings(plan, folder))


def find_open_size(gate: Gate | None, runs: Path, seeds: Iterable[int] = ()) -> str:
    """Return the first smaller size that is not complete, in words; "" if there is none.

    The study must wait for it. `runs` is the folder of the studies, and `seeds` are those with
    which the file of the study plans every size: a gate decides nothing on a part of them.
    """
    if gate is None:
        return ""
    for name in gate.before:
        plan = _read_plan(runs, name)
        if plan is None:
            return f"{name} has no results"
        missing_seeds = set(seeds).difference(plan.seeds)
        if missing_seeds:
            return f"{name} has not run with {plural(len(missing_seeds), 'planned seed')}"
        count = count_open(plan, runs / name)
        if count:
            return f"{name} has {plural(count, 'cell')} to run"
    return ""


def count_open(plan: Plan, folder: Path) -> int:
    """Return the number of cells that run, are still to run or are retried.

    A variant whose search has not ended counts as one cell.
    """
    endings = read_endings(plan, folder)
    ended_cells = list_ended_cells(plan, folder, endings)
    identities = {cell.path: cell.identity for cell in plan.cells}
    count = 0
    for path, identity in identities.items():
        is_ended = folder / path in ended_cells
        if not is_ended and read_cell(folder / path, identity).state in UNENDED:
            count += 1
    return count + len(list_searched(Tuning.read_valid(folder / "tuning.json"), endings))


def list_searched(tuning: Tuning | None, endings: Mapping[str, Ending]) -> list[str]:
    """Return the variants whose search of `tune` has not ended; they have no cells yet."""
    searched = []
    for entry in () if tuning is None else tuning.variants:
        has_ended = entry.variant in endings or entry.chosen is not None
        has_diverged = bool(entry.trials) and all(trial.mean is None for trial in entry.trials)
        if not has_ended and not has_diverged:
            searched.append(entry.variant)
    return searched


def read_gate_state(
    plan: Plan, folder: Path, endings: Mapping[str, Ending], seeds: Iterable[int] = ()
) -> GateState | None:
    """Return the state of the gates of the study in `folder`, None without the rule.

    `endings` are the variants that have ended, and `seeds` are those of `find_open_size`.
    """
    gate = plan.gate
    if gate is None:
        return None
    runs = folder.parent
    waits = find_open_size(gate, runs, seeds)
    undecided = _find_undecided(plan, gate, runs, endings)
    return GateState(waits, undecided, _find_open_successor(plan, runs))


def _find_undecided(
    plan: Plan, gate: Gate, runs: Path, endings: Mapping[str, Ending]
) -> dict[str, str]:
    """Return why gates have not decided about variants that go on, by variant.

    A gate without all values of a variant and the baseline does not show that the variant is not
    worse. The first such size is named.
    """
    undecided: dict[str, str] = {}
    for name in gate.before:
        smaller = _read_plan(runs, name)
        if smaller is None or count_open(smaller, runs / name):
            break
        size = name if smaller.gate is None else f"{gate.axis} {smaller.gate.size}"
        failed = _count_failed(smaller, runs / name)
        of_baseline = failed[smaller.baseline]
        for variant in plan.variants:
            count = failed[variant.name]
            is_gated = variant.name in endings and endings[variant.name].rule == GATE
            is_judged = variant.name != plan.baseline and not is_gated
            if not is_judged or not count + of_baseline:
                continue
            causes = []
            if count:
                causes.append(f"{count} of {plural(len(smaller.seeds), 'seed')} failed")
            if of_baseline:
                causes.append(f"{plural(of_baseline, 'seed')} of the baseline failed")
            undecided.setdefault(variant.name, f"undecided at {size}: {' and '.join(causes)}")
    return undecided


def _count_failed(plan: Plan, folder: Path) -> Counter[str]:
    """Return the number of cells of each variant that have ended without a value."""
    failed: Counter[str] = Counter()
    for cell in plan.cells:
        status = read_cell(folder / cell.path, cell.identity)
        is_without = status.result is not None and plan.metric.name not in status.result.metrics
        if is_without or status.state in FINAL_FAILURES:
            failed[cell.variant] += 1
    return failed


def _find_open_successor(plan: Plan, runs: Path) -> str:
    """Return the first larger size of the study that is not complete, in words, "" without one."""
    larger: list[Plan] = []
    family = plan.family.partition("@")[0]
    for path in runs.glob("*/plan.json"):
        is_sibling = path.parent.name.startswith(f"{family}-")
        other = Plan.read_valid(path) if is_sibling else None
        if other is not None and other.gate is not None and plan.study in other.gate.before:
            larger.append(other)
    larger.sort(key=lambda other: len(other.gate.before) if other.gate is not None else 0)
    for other in larger:
        count = count_open(other, runs / other.study)
        if count:
            return f"{other.study} has {plural(count, 'cell')} to run"
    return ""


def _read_plan(runs: Path, name: str) -> Plan | None:
    """Return the plan of a study in the folder `runs`, None if it cannot be read."""
    return Plan.read_valid(runs / name / "plan.json")
