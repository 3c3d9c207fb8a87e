"""Readers of studies: the plan of each, and the state and measurements of every planned cell."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lit_attn.cells import decisions, records
from lit_attn.cells.floors import FLOORS_FILE, Floors
from lit_attn.cells.folder import read_cell, read_result
from lit_attn.cells.samples import SAMPLES_FILE, Samples
from lit_attn.cells.screening import SCREENING_FILE, Screening
from lit_attn.files import require_folder
from lit_attn.report.records.measurements import measure, measure_size, shorten_hashes
from lit_attn.report.records.skipped import LOG, describe_failure, read_or_skip
from lit_attn.report.records.study_record import NEWER, CellRecord, StudyRecord
from lit_attn.report.statistics.significance import TESTS
from lit_attn.report.statistics.times import Censored, has_event
from lit_attn.schema.errors import ConfigError, explain, require, suggest

LARGEST_VALUE = 1e250
"""Size of a metric beyond which its intervals would leave the range of floating point."""


def read_studies(runs: Path, names: list[str] | None = None) -> Iterator[StudyRecord]:
    """Read the studies below `runs` (all that have a plan, or those in `names`) one by one.

    A study that cannot be read is skipped with a warning, whatever is wrong with its records.
    Raises ConfigError if `runs` holds no plan, if a name has no plan, or if not one of the studies
    can be read.
    """
    require_folder(runs)
    plans = {path.parent.name: path for path in sorted(runs.glob("*/plan.json"))}
    if not plans:
        raise ConfigError(f"{runs}: contains no study (no */plan.json)")
    for name in names or []:
        require(f"{runs}: has no study", name, plans)
    chosen = names or list(plans)
    skipped_count = 0
    for name in chosen:
        try:
            study = _read_study(plans[name])
        except Exception as error:
            reason = describe_failure(error)
            if not isinstance(error, ConfigError):
                reason = f"{plans[name].parent}: {reason}"
            skipped_count += 1
            if skipped_count == len(chosen):
                raise ConfigError(reason) from error
            LOG.warning("%s. This study is skipped.", reason)
        else:
            yield study


def _read_study(path: Path) -> StudyRecord:
    """Read the study of the plan at `path`. Raises ConfigError if that is not possible."""
    plan = records.Plan.load(path)
    # The folder of the report has the study's name, so that name must not lead elsewhere.
    if plan.study != path.parent.name:
        raise ConfigError(f"{path}: is the plan of '{plan.study}', not of '{path.parent.name}'")
    require(f"{path}: baseline: no variant", plan.baseline, (v.name for v in plan.variants))
    folder = path.parent
    cells = _read_cells(folder, plan)
    if plan.is_smoke:
        # Its seals, floors and searches are those of values that mean nothing.
        return StudyRecord(plan, cells, folder=folder)
    seals = read_or_skip(decisions.Seals.read, folder, "seals.json")
    tuning = read_or_skip(records.Tuning.read, folder, "tuning.json")
    screening = read_or_skip(Screening.read, folder, SCREENING_FILE)
    step_times = read_or_skip(records.StepTimes.read, folder, "step_times.json")
    looks = read_or_skip(decisions.Looks.read, folder, "looks.json")
    floors = read_or_skip(Floors.read, folder, FLOORS_FILE)
    samples = read_or_skip(Samples.read, folder, SAMPLES_FILE)
    files = {
        "seals.json": seals,
        "tuning.json": tuning,
        SCREENING_FILE: screening,
        "step_times.json": step_times,
        "looks.json": looks,
        FLOORS_FILE: floors,
        SAMPLES_FILE: samples,
    }
    unreadable = []
    for name, content in files.items():
        if content is None and (folder / name).exists():
            unreadable.append(name)
    study = StudyRecord(
        plan,
        cells,
        seals=seals,
        tuning=tuning,
        screening=screening,
        step_times=step_times,
        looks=looks,
        floors=floors,
        samples=samples,
        unreadable=unreadable,
        folder=folder,
        test=TESTS[plan.metric.pairs],
    )
    _require_metric(path, study)
    return study


def _read_cells(folder: Path, plan: records.Plan) -> list[CellRecord]:
    """Read the planned cells in their order, and remove them from the plan.

    Each is freed as soon as its record has been read: a study can have 50,000 cells.
    """
    plan.cells.reverse()
    cells = []
    while plan.cells:
        cells.append(_read_cell(str(folder), plan.cells.pop(), plan))
    return cells


def _require_metric(path: Path, study: StudyRecord) -> None:
    """Raise ConfigError if cells have results, and not one of them has the study's metric."""
    name = study.plan.metric.name
    without = [cell for cell in study.cells if cell.status == f"without {name}"]
    if not without or study.finished_cells():
        return
    result = read_result(Path(without[0].path), without[0].identity)
    nearest = suggest(name, result.metrics) if result else ""
    raise ConfigError(f"{path}: metric.name: no cell has '{name}'{nearest}")


def _explain_unreadable(path: Path, identity: str) -> str:
    """Return why a result is none of the cell with this identity, as a line."""
    try:
        result = records.Result.model_validate_json(path.read_bytes())
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    except ValidationError as error:
        return str(explain(error, str(path)))
    return f"{path}: identity: is {result.identity}, and the plan has {identity}"


def _read_cell(study: str, planned: records.PlannedCell, plan: records.Plan) -> CellRecord:
    """Read the folder of a planned cell of the study in the folder `study`.

    A cell of a smoke run has no value, because one step of training means nothing.
    """
    metric = plan.metric
    path = f"{study}/{planned.path}"
    result = read_result(Path(path), planned.identity)

    def record(status: str, **content: Any) -> CellRecord:
        # Thousands of cells share the names of variants and states.
        variant = sys.intern(planned.variant)
        return CellRecord(
            variant,
            planned.seed,
            sys.intern(status),
            identity=planned.identity,
            path=path,
            **content,
        )

    if result is None:
        identity = planned.identity
        state = read_or_skip(lambda folder: read_cell(folder, identity).state, Path(path))
        if state == "unreadable":
            LOG.warning("%s", _explain_unreadable(Path(path, "result.json"), identity))
        return record(state or "unreadable")
    if result.version > records.VERSION:
        LOG.warning("%s: was written by a newer version of lit_attn; install it", path)
        return record(NEWER)
    if plan.is_smoke:
        return record("done", measurements=measure_size(result))
    if metric.name not in result.metrics:
        return record(f"without {metric.name}")
    recorded = result.metrics[metric.name]
    value = recorded * metric.scale
    if metric.event and not has_event(recorded, result.steps):
        # The metric is the number of all planned steps, which a mean needs as a limit. A median
        # needs the last step, because `training.stop` can end a run before the limit.
        has_means = TESTS[metric.pairs].has_means
        value = Censored(value if has_means else result.steps * metric.scale)
    if not math.isfinite(value):
        LOG.warning("%s: %s times %g is not finite", path, metric.name, metric.scale)
        return record("unreadable")
    if abs(value) > LARGEST_VALUE:
        LOG.warning("%s: %s is %.3g, which counts as diverged", path, metric.name, value)
        return record("diverged")
    return record(
        "done",
        value=value,
        measurements=measure(result, metric),
        modules=shorten_hashes(result.inputs),
    )
