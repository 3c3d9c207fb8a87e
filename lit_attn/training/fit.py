"""Train one cell with Lightning and write its records (lit_attn.train describes the whole path)."""

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from lit_attn.config.cell import Cell
from lit_attn.training.build import build
from lit_attn.training.checkpoints import Checkpoints
from lit_attn.training.diagnostics import DiagnosticsCallback
from lit_attn.training.process_group import ProcessGroup
from lit_attn.training.provenance import Provenance, code_hash, package_versions
from lit_attn.training.recording import Console, MetricsFile, Progress, write_pictures
from lit_attn.training.result import SPEED, FinishedRun, Limits, UnitRecorder, make_result

NOISE = (
    # The data lies on the device in one piece, so nothing is loaded while training.
    ".*does not have many workers",
    # Lightning says this on every machine that has SLURM's commands.
    ".*`srun` command is available",
    # The memory layout of a convolution's gradient may differ from the buckets that ranks exchange.
    "Grad strides do not match bucket view strides",
    # Lightning itself uses a deprecated torch function.
    ".*LeafSpec.*is deprecated",
)

MISFIT = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Exceptions of restoring a checkpoint that does not fit the cell."""


def fit(
    cell: Cell, cell_dir: Path, group: ProcessGroup, limits: Limits | None = None
) -> FinishedRun | None:
    """Train `cell`, evaluate it and write its result.json. Return None on ranks other than 0.

    Training continues from the newest checkpoint in `cell_dir`; a run with `limits` starts afresh.
    Raises ConfigError, Diverged or Preempted as `lit_attn.train.run_cell` does.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    training, device = cell.experiment.training, group.device
    parts = build(cell, device)
    data, task = parts.data, parts.task
    total_steps = training.steps(data.steps_per_epoch)
    steps = total_steps if limits is None else min(total_steps, limits.steps)

    @cache
    def describe() -> Provenance:
        return Provenance(code_hash(cell.parts), data.fingerprint(), package_versions())

    folder, interval = cell_dir / "checkpoints", training.checkpoint_every
    checkpoints = Checkpoints(folder, cell.seed, interval, group, describe)
    resume_from = None if limits else checkpoints.find_newest()
    first_step = int(resume_from.stem.removeprefix("step-")) if resume_from else 0
    epochs = math.ceil(steps / data.steps_per_epoch)
    console = Console(steps, epochs, cell.metric.name)
    metrics = MetricsFile(cell_dir / "metrics.csv", lambda: checkpoints.elapsed, console)
    if group.is_rank_zero:
        metrics.start(first_step)
    # `purge_step` makes TensorBoard drop what a stopped attempt wrote after its last checkpoint.
    tensorboard = TensorBoardLogger(
        cell_dir, name=None, version="", default_hp_metric=False, purge_step=first_step + 1
    )
    progress = Progress(cell_dir / "progress.json", steps, console)
    # The order matters: a step's time excludes the checkpoint before it, and an evaluation's time
    # excludes the diagnostics after it.
    units = UnitRecorder(cell_dir / "units.npz", cell.metric, steps)
    callbacks: list[L.Callback] = [checkpoints, progress, units]
    diagnostics = None
    if training.diagnostics is not None:
        every = training.evaluate_every * data.steps_per_epoch
        diagnostics = DiagnosticsCallback(cell_dir, training.diagnostics, every, steps, tensorboard)
        callbacks.append(diagnostics)
        if group.is_rank_zero:
            diagnostics.start(first_step)
    # Without an environment, Lightning takes any SLURM allocation around the cell for its ranks.
    is_slurm = group.ranks.nodes > 1
    environment = SLURMEnvironment(auto_requeue=False) if is_slurm else LightningEnvironment()
    has_trackers = group.is_rank_zero and limits is None
    with _open_loggers(cell, cell_dir, has_trackers) as trackers:
        trainer = L.Trainer(
            accelerator=device.type,
            devices=group.ranks.ranks_per_node,
            num_nodes=group.ranks.nodes,
            strategy="auto" if group.world_size == 1 else "ddp",
            plugins=[make_precision(training.precision, device), environment],
            max_epochs=max(training.epochs, epochs),
            max_steps=steps,
            limit_train_batches=data.accumulate * limits.steps if limits else 1.0,
            limit_val_batches=limits.evaluation_batches if limits else 1.0,
            check_val_every_n_epoch=1 if limits else training.evaluate_every,
            accumulate_grad_batches=data.accumulate,
            gradient_clip_val=training.clip,
            logger=[metrics, tensorboard, *trackers],
            callbacks=callbacks,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            default_root_dir=cell_dir,
        )
        try:
            trainer.fit(task, data, ckpt_path=resume_from, weights_only=True)
        except MISFIT as error:
            if resume_from is None or not checkpoints.reject(resume_from, error):
                raise
            # Half of the checkpoint may have been restored, so everything is built again.
            return fit(cell, cell_dir, group, limits)
        if trainer.global_step < steps:
            raise RuntimeError(f"training ended at step {trainer.global_step} of {steps}")
        # The last epoch is not evaluated yet if it is no multiple of `evaluate_every`, or if
        # `max_steps` cut it short.
        if task.evaluated_at < steps:
            trainer.validate(task, datamodule=data, verbose=False)
        for tracker in trackers:
            tracker.log_hyperparams(_settings(cell))
        console.print_line()

    result = make_result(cell, cell_dir, parts, group, progress, checkpoints, steps)
    if result is None:
        return None
    names = (cell.metric.name, *SPEED)
    values = {name: result.metrics[name] for name in names if name in result.metrics}
    settings = _settings(cell) | {"ffn_width": result.ffn_width}
    tensorboard.log_hyperparams(settings, values, step=result.steps)
    if pictures := task.pictures(data, device, cell.metric.averaged):
        write_pictures(pictures, cell_dir / "pictures", tensorboard, result.steps)
    tensorboard.finalize("success")
    checkpoints.write_weights(task.network)
    if task.average is not None:
        checkpoints.write_weights(task.average.module, "ema.pt")
    result.write(cell_dir / "result.json")
    checkpoints.clear()
    return FinishedRun(parts, total_steps, result, diagnostics)


def make_precision(name: str, device: torch.device) -> Precision:
    """Return Lightning's plug-in for fp32, bf16 or fp16.

    Given only a name, Lightning computes in bf16 for fp16 on a CPU.
    """
    if name == "fp32":
        return Precision()
    return MixedPrecision("bf16-mixed" if name == "bf16" else "16-mixed", device.type)


def _settings(cell: Cell) -> dict[str, Any]:
    experiment = cell.experiment.model_dump(mode="json")
    return {"variant": cell.variant, "seed": cell.seed} | experiment


@contextlib.contextmanager
def _open_loggers(cell: Cell, folder: Path, has_trackers: bool) -> Iterator[list[Logger]]:
    """Yield the loggers of the cell's experiment trackers, if it has any, and end their runs."""
    members = cell.experiment.training.loggers if has_trackers else ()
    study, name = cell.study, f"{cell.variant}/{cell.seed}"
    loggers = [member.build(study, name, cell.fingerprint, folder) for member in members]
    has_succeeded = False
    try:
        yield loggers
        has_succeeded = True
    finally:
        for member, logger in zip(members, loggers, strict=True):
            member.close(logger, has_succeeded)
