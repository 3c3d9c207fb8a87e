"""The result of a trained cell, values of each sample, and the cost estimated from a short run."""

import io
import math
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lit_attn.cells.inputs import add_changes, collect_data
from lit_attn.cells.ranks import SHARED_DEVICE
from lit_attn.cells.records import Metric, Result, Timing, utc_now
from lit_attn.cells.rows import MetricRow, read_metrics
from lit_attn.config.cell import Cell
from lit_attn.data.loading import start_copy
from lit_attn.files import write_atomic
from lit_attn.tasks.base import TaskModule
from lit_attn.training.build import Parts
from lit_attn.training.checkpoints import Checkpoints
from lit_attn.training.diagnostics import DiagnosticsCallback
from lit_attn.training.process_group import ProcessGroup
from lit_attn.training.recording import Progress, measure_memory
from lit_attn.training.selection import criterion, find_best, find_row, select_epoch


class Limits(NamedTuple):
    """Number of training steps, and of batches of every evaluated split, in a short run."""

    steps: int
    evaluation_batches: int


SMOKE_LIMITS = Limits(steps=1, evaluation_batches=1)
SAMPLE_LIMITS = Limits(steps=15, evaluation_batches=2)
"""Limits of the run from which the cost of a cell is estimated."""


DIVERGED = 10.0
"""Factor between the first loss of a training and its last one above which it has diverged."""


class FinishedRun(NamedTuple):
    """A run that has trained to its end, on rank 0.

    `total_steps` counts the steps without limits; without records, `diagnostics` is None.
    """

    parts: Parts
    total_steps: int
    result: Result
    diagnostics: DiagnosticsCallback | None


def make_result(
    cell: Cell,
    cell_dir: Path,
    parts: Parts,
    group: ProcessGroup,
    progress: Progress,
    checkpoints: Checkpoints,
    steps: int,
) -> Result | None:
    """Return the result of a cell after `steps` steps, or None on ranks other than 0.

    Every rank must call this. Raises ConfigError if the study's metric was not measured at the
    selected evaluation, and Diverged if it is not finite there.
    """
    peak_memory = group.maximum(measure_memory(group.device))
    if not group.is_rank_zero:
        return None
    rows = read_metrics(cell_dir / "metrics.csv")
    speed = _measure_speed(cell, parts, progress)
    # The speed is not in metrics.csv, so that a stopped cell leaves the same file as another one.
    last_epoch = rows[-1].epoch
    rows += [MetricRow(steps, last_epoch, name, value) for name, value in speed.items()]
    selected = select_epoch(rows, cell.metric)
    epoch = selected[0].epoch
    _print_undefined(rows, epoch)
    metrics = {row.name: row.value for row in selected}
    diverged = has_diverged(rows, parts.task.first_loss)
    if diverged:
        print(
            f"diverged: train/loss ended above {DIVERGED:g} times its first value,"
            f" {parts.task.first_loss:.4g}; the result says so",
            flush=True,
        )
    device = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "CPU"
    provenance = checkpoints.provenance
    training = cell.experiment.training
    # Images are read while the cell trains.
    inputs = add_changes(parts.inputs, collect_data(cell.experiment.input_paths()))
    return Result(
        study=cell.study,
        variant=cell.variant,
        seed=cell.seed,
        identity=cell.fingerprint,
        metrics=metrics | speed,
        chance=list_chance_levels(parts.task),
        diverged=diverged,
        selected_epoch=epoch,
        steps=steps,
        epochs=math.ceil(steps / parts.data.steps_per_epoch),
        devices=group.world_size,
        nodes=group.nodes,
        strategy=training.strategy if group.world_size > 1 else None,
        recompute=training.recompute,
        batch_size=cell.experiment.data.batch_size,
        **parts.costs._asdict(),
        step_time=progress.steps.device_time,
        step_wall_time=progress.steps.wall_time,
        evaluation_time=progress.evaluation_time,
        is_device_shared=SHARED_DEVICE in os.environ,
        is_compiled=parts.is_compiled,
        peak_memory=peak_memory,
        wall_time=checkpoints.elapsed,
        device=device,
        attempts=max(1, len(list((cell_dir / "attempts").glob("*")))),
        inputs=inputs | provenance.modules,
        code=provenance.code,
        data=provenance.data,
        versions=provenance.versions,
        finished=utc_now(),
    )


def has_diverged(rows: list[MetricRow], first_loss: float | None) -> bool | None:
    """Return True if `train/loss` of the last epoch is above DIVERGED times `first_loss`.

    The result is None if that is unknown: an old checkpoint has no first loss, and a loss of the
    user can be negative.
    """
    losses = [row.value for row in rows if row.name == "train/loss"]
    if not losses or first_loss is None or first_loss <= 0:
        return None
    return losses[-1] > DIVERGED * first_loss


def _measure_speed(cell: Cell, parts: Parts, progress: Progress) -> dict[str, float]:
    """Return the tokens per second of training and the seconds of an evaluation, if measured."""
    speed = {}
    tokens_per_sample = parts.data.signature.tokens
    step_seconds = progress.steps.device_time.median
    if tokens_per_sample is not None and step_seconds > 0:
        tokens_per_step = cell.experiment.data.batch_size * tokens_per_sample
        speed["train/tokens_per_second"] = tokens_per_step / step_seconds
    if progress.evaluation_time is not None:
        speed["evaluation/seconds"] = progress.evaluation_time.median
    return speed


def _print_undefined(rows: list[MetricRow], epoch: int) -> None:
    """Print the names of the metrics that are not finite at `epoch`."""
    undefined = set()
    for row in rows:
        if row.epoch == epoch and not math.isfinite(row.value):
            undefined.add(row.name)
    if undefined:
        names = ", ".join(sorted(undefined))
        print(f"not finite at the selected epoch, and not in the result: {names}", flush=True)


def list_chance_levels(task: TaskModule) -> dict[str, float]:
    """Return the chance level of every metric that has one, also for averaged weights."""
    levels = {}
    for split in task.splits:
        for name, level in task.chance_levels(split).items():
            levels[f"{split}/{name}"] = level
            if task.average is not None:
                levels[f"{split}/averaged-{name}"] = level
    return levels


@dataclass(eq=False)
class UnitRecorder(L.Callback):
    """Callback that writes `units.npz`: loss and correct predictions of each evaluated sample.

    For every split it has the arrays `<split>/loss` (nats, summed over the targets of a sample),
    `<split>/targets` and `<split>/correct` (absent if the task counts none), and for averaged
    weights `<split>/averaged-loss` and so on, in the order of the data set. They belong to the
    evaluation that `metric` selects. From the training step `total` on, an evaluation is the last.
    """

    path: Path
    metric: Metric
    total: int
    values: dict[str, Tensor] = field(default_factory=dict, init=False)

    def on_validation_start(self, trainer: L.Trainer, module: Any) -> None:
        is_selectable = self.metric.selection != "last" or trainer.global_step >= self.total
        if not is_selectable or type(module).unit_values is TaskModule.unit_values:
            return
        prefixes = [""] if module.average is None else ["", "averaged-"]
        # Every process has the same arrays and fills the places of its own samples.
        self.values = {}
        for split, loader in zip(module.splits, trainer.val_dataloaders or (), strict=True):
            for prefix in prefixes:
                zeros = torch.zeros(loader.count, 3, dtype=torch.float32, device=module.device)
                self.values[f"{split}/{prefix}"] = zeros

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, _: Any, batch_idx: int, split: int = 0
    ) -> None:
        assert trainer.val_dataloaders is not None
        loader = trainer.val_dataloaders[split]
        # Padding has the last places, and a task may leave out its rows.
        places = [place for place in loader.units[batch_idx] if place < loader.count]
        rows = start_copy(torch.tensor(places, dtype=torch.long), module.device)
        for prefix, values in outputs.items():
            name = f"{module.splits[split]}/{prefix}"
            if name in self.values:
                self.values[name][rows] = values[: len(places)].float()

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        arrays: dict[str, Any] = {}
        for name, values in self.values.items():
            total = trainer.strategy.reduce(values, reduce_op="sum")
            losses, targets, correct = total.T.cpu().numpy()
            arrays[f"{name}loss"] = losses
            arrays[f"{name}targets"] = targets.astype(np.int32)
            if not np.isnan(correct).any():
                arrays[f"{name}correct"] = correct.astype(np.int32)
        self.values = {}
        if not arrays or not trainer.is_global_zero:
            return
        # With `selection: last` only an evaluation that can be the last one gets here.
        if self.metric.selection == "last" or self._is_best(trainer.global_step):
            content = io.BytesIO()
            np.savez_compressed(content, **arrays)
            write_atomic(self.path, content.getvalue())

    def _is_best(self, step: int) -> bool:
        """Return True if the evaluation after `step` steps is the best one so far."""
        rows = read_metrics(self.path.with_name("metrics.csv"))
        row = find_row(rows, criterion(self.metric), step)
        if row is not None and not math.isfinite(row.value):
            return False
        return find_best(rows, self.metric).step == step


def at_final_image_size(cell: Cell) -> Cell:
    """Return `cell` with the final image size, which most steps of growing images have."""
    changes = {"data": cell.experiment.data.at_final_size()}
    experiment = cell.experiment.model_copy(update=changes)
    return cell.model_copy(update={"experiment": experiment})


def estimate_cost(cell: Cell, run: FinishedRun, seconds: float) -> Timing:
    """Return the cost of the whole `cell`, from a `run` that took `seconds` (SAMPLE_LIMITS)."""
    data = run.parts.data
    result = run.result
    steps_between = cell.experiment.training.evaluate_every * data.steps_per_epoch
    evaluations = math.ceil(run.total_steps / steps_between)

    # A cell takes as long as the wall clock says, with the waiting for data.
    step_time = (result.step_wall_time or result.step_time).median
    # A limited evaluation has some of the batches of each split.
    batches = [len(loader) for loader in data.val_dataloader()]
    limited_batches = [min(count, SAMPLE_LIMITS.evaluation_batches) for count in batches]
    limited_time = 0.0 if result.evaluation_time is None else result.evaluation_time.median
    evaluation_time = limited_time * sum(batches) / sum(limited_batches)

    diagnostics_time = 0.0  # Seconds of this run.
    diagnostics_total = 0.0  # Seconds of the complete cell.
    if run.diagnostics is not None:
        times = run.diagnostics.times
        recordings = math.ceil(evaluations / run.diagnostics.settings.every)
        diagnostics_time = sum(times)
        diagnostics_total = statistics.fmean(times) * recordings

    # The rest of the time went into reading the data, building the model and compiling it.
    startup = seconds - result.steps * step_time - limited_time - diagnostics_time
    return Timing(
        startup=max(0.0, startup),
        step_time=step_time,
        steps=run.total_steps,
        evaluation_time=evaluation_time + diagnostics_total / evaluations,
        evaluations=evaluations,
    )
