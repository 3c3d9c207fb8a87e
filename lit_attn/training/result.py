"""What a trained cell leaves: its result, by the epoch that counts."""

import datetime
import math
from pathlib import Path

import torch

from lit_attn.cells.records import Metric, MetricRow, Result, read_metrics
from lit_attn.config.cell import Cell
from lit_attn.config.data.class_folders import ClassFolders
from lit_attn.schema.errors import ConfigError
from lit_attn.training import measurement
from lit_attn.training.build import Parts
from lit_attn.training.recording import Progress

# What a result says of its speed, by the names of metrics.
SPEED = ("train/tokens_per_second", "train/mfu", "evaluation/seconds")


def result_of(
    cell: Cell,
    parts: Parts,
    cell_dir: Path,
    steps: int,
    progress: Progress,
    peak_memory: int | None,
    elapsed: float,
    device: torch.device,
    world: int,
) -> Result:
    """The result of a cell of `world` processes after `steps` and `elapsed` seconds.

    Raises ConfigError where the metric was not logged.
    """
    experiment, costs = cell.experiment, parts.costs
    rows = read_metrics(cell_dir / "metrics.csv")
    step_time = measurement.step_time(progress.step_times)
    evaluation = measurement.evaluation_time(progress.evaluation_times)
    speed = _speed(cell, parts, progress, device, world)
    # Not in the file, which is the same however often a cell was stopped.
    rows += [MetricRow(steps, rows[-1].epoch, name, value) for name, value in speed.items()]
    chosen = selected(rows, cell.metric)
    return Result(
        study=cell.study,
        variant=cell.variant,
        seed=cell.seed,
        identity=cell.fingerprint,
        metrics={row.name: row.value for row in chosen} | speed,
        selected_epoch=chosen[0].epoch,
        steps=steps,
        epochs=math.ceil(steps / parts.data.steps_per_epoch),
        devices=world,
        batch_size=experiment.data.batch_size,
        parameters=costs.parameters,
        flops=costs.flops,
        ffn_width=costs.ffn_width,
        step_time=step_time,
        evaluation_time=evaluation,
        peak_memory=peak_memory,
        wall_time=elapsed,
        device=measurement.device_name(device),
        attempts=max(1, len(list((cell_dir / "attempts").glob("*")))),
        code=measurement.code_of(cell.parts),
        data=parts.data.fingerprint(),
        versions=measurement.versions(),
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _speed(
    cell: Cell, parts: Parts, progress: Progress, device: torch.device, world: int
) -> dict[str, float]:
    """Tokens a second, MFU and the seconds of an evaluation, by the names of metrics."""
    data, training = cell.experiment.data, cell.experiment.training
    peak = measurement.peak_flops(measurement.device_name(device), training.precision)
    if isinstance(data, ClassFolders) and data.sizes:
        # FLOPs are of the last size of images, and these grew.
        peak = None
    peak = None if peak is None else peak * world
    step_time = measurement.step_time(progress.step_times)
    speed = measurement.speed(step_time, data.batch_size, parts.tokens, parts.costs.flops, peak)
    evaluation = measurement.evaluation_time(progress.evaluation_times)
    if evaluation is not None:
        speed["evaluation/seconds"] = evaluation.median
    return speed


def selected(rows: list[MetricRow], metric: Metric) -> list[MetricRow]:
    """The rows of the epoch that counts: the last evaluated, or the best on validation.

    Raises ConfigError where the metric was not logged.
    """
    criterion = metric.name
    if metric.selection == "best-validation":
        criterion = "val/" + metric.name.split("/", 1)[1]
    found = [row for row in rows if row.name == criterion]
    if not found:
        names = ", ".join(sorted({row.name for row in rows}))
        raise ConfigError(f"metric: '{criterion}' was not logged; logged were {names}")
    best = found[-1]
    if metric.selection == "best-validation":
        sign = 1 if metric.goal == "max" else -1
        best = max(found, key=lambda row: sign * row.value)
    return [row for row in rows if row.epoch == best.epoch]
