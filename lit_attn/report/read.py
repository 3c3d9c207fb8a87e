"""From a folder of runs to one study's records: what was planned beside what is there."""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from lit_attn.config.errors import ConfigError, nearest
from lit_attn.records import Exit, MetricRow, Plan, PlannedCell, Result, read_metrics


@dataclass(frozen=True)
class CellRecord:
    """A planned cell with its result, or with the failure class of its last attempt.

    `status` is "done", a failure class, or "missing".
    """

    planned: PlannedCell
    status: str
    result: Result | None
    metrics: list[MetricRow]


@dataclass(frozen=True)
class StudyRecord:
    """A plan and all of its cells, in the plan's order."""

    plan: Plan
    cells: list[CellRecord]

    def of(self, variant: str) -> list[CellRecord]:
        """The cells of one variant, in the order of its seeds."""
        return [cell for cell in self.cells if cell.planned.variant == variant]

    @property
    def results(self) -> list[Result]:
        """What is there."""
        return [cell.result for cell in self.cells if cell.result is not None]


def read_studies(runs: Path, names: list[str] | None = None) -> list[StudyRecord]:
    """Every study below `runs` that has a plan, or those in `names`, by name.

    Raises ConfigError where `runs` holds no plan, or none of a name, or a plan cannot be read.
    """
    found = {path.parent.name: path for path in sorted(runs.glob("*/plan.json"))}
    if not found:
        raise ConfigError(f"{runs}: holds no study (no */plan.json)")
    for name in names or []:
        if name not in found:
            raise ConfigError(f"{runs}: has no study '{name}'{nearest(name, found)}")
    return [_study(found[name]) for name in (names or found)]


def _study(path: Path) -> StudyRecord:
    try:
        plan = Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path}: is not a plan: {str(error).splitlines()[0]}") from error
    return StudyRecord(plan, [_cell(path.parent, cell) for cell in plan.cells])


def _cell(study: Path, planned: PlannedCell) -> CellRecord:
    folder = study / planned.path
    metrics = read_metrics(folder / "metrics.csv")
    result = _result(folder / "result.json")
    if result is not None:
        return CellRecord(planned, "done", result, metrics)
    return CellRecord(planned, _last_failure(folder) or "missing", None, metrics)


def _result(path: Path) -> Result | None:
    """None for a file that is not there or not a whole result: only a whole one is a success."""
    try:
        return Result.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def _last_failure(folder: Path) -> str | None:
    attempts = [p for p in (folder / "attempts").glob("*") if p.name.isdigit()]
    for attempt in sorted(attempts, key=lambda p: int(p.name), reverse=True):
        try:
            return Exit.model_validate(json.loads((attempt / "exit.json").read_text())).failure
        except (OSError, ValueError):
            continue
    return None
