"""The result of a trained cell: metrics of the selected epoch, values of each sample, and costs."""

import datetime
import io
import math
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lit_attn.cells.records import Metric, MetricRow, Result, read_metrics
from lit_attn.config.cell import Cell
from lit_attn.files import write_atomic
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.base import TaskModule
from lit_attn.training import measurement
from lit_attn.training.build import Parts
from lit_attn.training.process_group import ProcessGroup
from lit_attn.training.provenance import Provenance
from lit_attn.training.recording import Progress

SPEED = ("train/tokens_per_second", "train/mfu", "evaluation/seconds")
"""Names of the metrics that describe the speed of a run."""


def make_result(
    cell: Cell,
    parts: Parts,
    cell_dir: Path,
    group: ProcessGroup,
    progress: Progress,
    steps: int,
    peak_memory: int,
    elapsed: float,
    provenance: Provenance,
) -> Result:
    """Return the result of a cell after `steps` steps.

    `elapsed` (seconds) and `provenance` cover all attempts.

    Raises ConfigError if the study's metric was not logged.
    """
    costs = parts.costs
    rows = read_metrics(cell_dir / "metrics.csv")
    speed = _measure_speed(cell, parts, progress, group)
    # The speed is not in metrics.csv, so that a stopped cell leaves the same file as another one.
    rows += [MetricRow(steps, rows[-1].epoch, name, value) for name, value in speed.items()]
    selected = select_epoch(rows, cell.metric)
    return Result(
        study=cell.study,
        variant=cell.variant,
        seed=cell.seed,
        identity=cell.fingerprint,
        metrics={row.name: row.value for row in selected} | speed,
        selected_epoch=selected[0].epoch,
        steps=steps,
        epochs=math.ceil(steps / parts.data.steps_per_epoch),
        devices=group.world_size,
        batch_size=cell.experiment.data.batch_size,
        parameters=costs.parameters,
        flops=costs.flops,
        ffn_width=costs.ffn_width,
        step_time=measurement.step_time(progress.step_times),
        evaluation_time=measurement.evaluation_time(progress.evaluation_times),
        peak_memory=peak_memory,
        wall_time=elapsed,
        device=measurement.device_name(group.device),
        attempts=max(1, len(list((cell_dir / "attempts").glob("*")))),
        code=provenance.code,
        data=provenance.data,
        versions=provenance.versions,
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _measure_speed(
    cell: Cell, parts: Parts, progress: Progress, group: ProcessGroup
) -> dict[str, float]:
    """Return tokens per second, MFU and seconds per evaluation by metric name."""
    data, training = cell.experiment.data, cell.experiment.training
    peak = measurement.peak_flops(measurement.device_name(group.device), training.precision)
    if peak is not None:
        peak *= group.world_size
    if data != data.at_final_size():
        # The FLOPs are counted at the final image size, and the images grew.
        peak = None
    step_time = measurement.step_time(progress.step_times)
    speed = measurement.speed(
        step_time, data.batch_size, parts.data.signature.tokens, parts.costs.flops, peak
    )
    evaluation = measurement.evaluation_time(progress.evaluation_times)
    if evaluation is not None:
        speed["evaluation/seconds"] = evaluation.median
    return speed


def select_epoch(rows: list[MetricRow], metric: Metric) -> list[MetricRow]:
    """Return the rows of the selected epoch: the last evaluated, or the best on validation.

    Raises ConfigError if the metric was not logged.
    """
    criterion = metric.name
    if metric.selection == "best-validation":
        criterion = "val/" + metric.name.split("/", 1)[1]
    candidates = [row for row in rows if row.name == criterion]
    if not candidates:
        names = ", ".join(sorted({row.name for row in rows}))
        raise ConfigError(f"metric: '{criterion}' was not logged. These metrics were: {names}.")
    best = candidates[-1]
    if metric.selection == "best-validation":
        sign = 1 if metric.goal == "max" else -1
        best = max(candidates, key=lambda row: sign * row.value)
    return [row for row in rows if row.epoch == best.epoch]


class UnitRecorder(L.Callback):
    """Callback that writes `units.npz`: loss and correct predictions of each evaluated sample.

    For every split it has the arrays `<split>/loss` (nats, summed over the targets of a sample),
    `<split>/targets` and `<split>/correct` (absent if the task counts none), and for averaged
    weights `<split>/ema-loss` and so on, in the order of the data set. They belong to the
    evaluation that `metric` selects.
    """

    def __init__(self, path: Path, metric: Metric, total: int) -> None:
        """`total` is the number of training steps."""
        self.path = path
        self.metric = metric
        self.total = total
        self.values: dict[str, Tensor] = {}

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, TaskModule)
        is_selectable = self.metric.selection != "last" or trainer.global_step >= self.total
        if not is_selectable or type(module).unit_values is TaskModule.unit_values:
            return
        # Every process has the same arrays and fills the places of its own samples.
        loaders = zip(module.splits, trainer.val_dataloaders or (), strict=True)
        self.values = {
            f"{split}/{prefix}": torch.zeros(loader.count, 3, device=module.device)
            for split, loader in loaders
            for prefix in ([""] if module.average is None else ["", "ema-"])
        }

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert isinstance(module, TaskModule)
        assert trainer.val_dataloaders is not None
        loader = trainer.val_dataloaders[dataloader_idx]
        # Padding has the last places, and a task may leave out its rows.
        places = [place for place in loader.units[batch_idx] if place < loader.count]
        for prefix, values in outputs.items():
            name = f"{module.splits[dataloader_idx]}/{prefix}"
            if name in self.values:
                self.values[name][places] = values[: len(places)].float()

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        arrays: dict[str, Any] = {}
        for name, values in self.values.items():
            total = trainer.strategy.reduce(values, reduce_op="sum")
            losses, targets, correct = total.T.cpu().numpy()
            arrays |= {f"{name}loss": losses, f"{name}targets": targets.astype(np.int32)}
            if not np.isnan(correct).any():
                arrays[f"{name}correct"] = correct.astype(np.int32)
        self.values = {}
        if not arrays or not trainer.is_global_zero:
            return
        rows = read_metrics(self.path.with_name("metrics.csv"))
        if select_epoch(rows, self.metric)[-1].step == trainer.global_step:
            content = io.BytesIO()
            np.savez_compressed(content, **arrays)
            write_atomic(self.path, content.getvalue())
