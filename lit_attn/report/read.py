"""From a folder of runs to one study's records: what was planned beside what is there."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from lit_attn.cells.folder import list_attempts, read_exit, read_result
from lit_attn.cells.records import Metric, MetricRow, Plan, PlannedCell, Result, read_metrics
from lit_attn.schema.errors import ConfigError, suggest


@dataclass(frozen=True)
class CellRecord:
    """A planned cell and what its folder holds.

    `status` is "done"; or the failure class of the last attempt; or "missing" (never begun),
    "unfinished" (begun, with no recorded end: running, or cut off), "unreadable" (a result that is
    torn or of another cell), "without <metric>". Only a cell that is done has a result and a value,
    which is the study's metric in printed units.
    """

    planned: PlannedCell
    folder: Path
    status: str
    result: Result | None = None
    value: float | None = None

    def curve(self, metric: Metric) -> list[MetricRow]:
        """The logged rows of `metric`, in printed units."""
        return [
            row._replace(value=row.value * metric.scale)
            for row in read_metrics(self.folder / "metrics.csv")
            if row.name == metric.name
        ]


@dataclass(frozen=True)
class StudyRecord:
    """A plan and all of its cells, in the plan's order."""

    plan: Plan
    cells: list[CellRecord]

    def of(self, variant: str) -> list[CellRecord]:
        """The cells of one variant, in the order of the plan's seeds."""
        return [cell for cell in self.cells if cell.planned.variant == variant]

    def results(self, variant: str | None = None) -> list[Result]:
        """The results of one variant, or of all."""
        cells = self.cells if variant is None else self.of(variant)
        return [cell.result for cell in cells if cell.result is not None]

    def values(self, variant: str) -> dict[int, float]:
        """The study's metric by seed, of the cells that have it."""
        cells = self.of(variant)
        return {cell.planned.seed: cell.value for cell in cells if cell.value is not None}


def read_studies(runs: Path, names: list[str] | None = None) -> list[StudyRecord]:
    """Every study below `runs` that has a plan, or those in `names`, by name.

    Raises ConfigError where `runs` holds no plan, or none of a name, or a plan cannot be read.
    """
    found = {path.parent.name: path for path in sorted(runs.glob("*/plan.json"))}
    if not found:
        raise ConfigError(f"{runs}: holds no study (no */plan.json)")
    for name in names or []:
        if name not in found:
            raise ConfigError(f"{runs}: has no study '{name}'{suggest(name, found)}")
    return [_study(found[name]) for name in (names or found)]


def _study(path: Path) -> StudyRecord:
    try:
        plan = Plan.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path}: is not a plan: {str(error).splitlines()[0]}") from error
    if plan.study != path.parent.name:
        # The report's folder is called after the study.
        raise ConfigError(f"{path}: is the plan of '{plan.study}', not of '{path.parent.name}'")
    record = StudyRecord(plan, [_cell(path.parent, cell, plan.metric) for cell in plan.cells])
    _some_have_the_metric(path, record)
    return record


def _some_have_the_metric(path: Path, record: StudyRecord) -> None:
    """Raise ConfigError where cells have results and none of them the study's metric."""
    name = record.plan.metric.name
    lacking = [cell for cell in record.cells if cell.status == f"without {name}"]
    if not lacking or record.results():
        return
    found = read_result(lacking[0].folder, lacking[0].planned.identity)
    known = [] if found is None else sorted(found.metrics)
    raise ConfigError(f"{path}: metric.name: no cell has '{name}'{suggest(name, known)}")


def _cell(study: Path, planned: PlannedCell, metric: Metric) -> CellRecord:
    folder = study / planned.path
    found = read_result(folder, planned.identity)
    if found is None:
        return CellRecord(planned, folder, _unsuccessful(folder))
    if metric.name not in found.metrics:
        return CellRecord(planned, folder, f"without {metric.name}")
    value = found.metrics[metric.name] * metric.scale
    return CellRecord(planned, folder, "done", found, value)


def _unsuccessful(folder: Path) -> str:
    if (folder / "result.json").exists():
        return "unreadable"
    if not (begun := list_attempts(folder)):
        return "missing"
    ended = read_exit(begun[-1])
    return "unfinished" if ended is None else ended.failure
