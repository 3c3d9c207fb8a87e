"""Fitting one cell: what Lightning is given, and what is left in the cell's folder.

A cell that was stopped goes on from its newest checkpoint. `result.json` is written last.
"""

import math
import statistics
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lit_attn.cells.ranks import Place
from lit_attn.cells.records import Result
from lit_attn.config.cell import Cell
from lit_attn.config.data.class_folders import ClassFolders
from lit_attn.training import build, measurement
from lit_attn.training.checkpoints import Checkpoints
from lit_attn.training.diagnostics import Diagnostics
from lit_attn.training.environment import cluster, precision, without_noise
from lit_attn.training.process_group import Group
from lit_attn.training.recording import MetricsFile, Progress, write_pictures
from lit_attn.training.result import SPEED, result_of
from lit_attn.training.run_length import ESTIMATE, Extent, Limits


def fit(
    cell: Cell,
    cell_dir: Path,
    device: torch.device,
    group: Group,
    here: Place,
    limits: Limits | None,
) -> Extent | None:
    """Train `cell` and write its result.json; what it would be without `limits`.

    None on all processes but the first. Raises what `lit_attn.train.run_cell` does.
    """
    training = cell.experiment.training
    parts = build.build(_grown(cell) if limits is ESTIMATE else cell, device)
    data, task = parts.data, parts.task
    whole = int(min(training.epochs * data.steps_per_epoch, training.max_steps or math.inf))
    total = whole if limits is None else min(whole, limits.steps)
    checkpoints = Checkpoints(cell_dir / "checkpoints", cell.seed, training.checkpoint_every, group)
    resume = None if limits else checkpoints.latest_that_loads()
    start = 0 if resume is None else checkpoints.step_of(resume)
    metrics = MetricsFile(cell_dir / "metrics.csv")
    if group.is_first:
        metrics.start(start)
    tensorboard = _tensorboard(cell_dir, start)
    progress = Progress(cell_dir / "progress.json", total)
    # In this order a step's time is without the checkpoint before it, an evaluation's without what
    # is looked at after it.
    callbacks: list[L.Callback] = [checkpoints, progress]
    looking = None
    if training.diagnostics is not None:
        every = training.evaluate_every * data.steps_per_epoch
        looking = Diagnostics(cell_dir, training.diagnostics, every, total, tensorboard)
        callbacks.append(looking)
        if group.is_first:
            looking.start(start)
    with without_noise():
        trainer = L.Trainer(
            accelerator=device.type,
            devices=here.on_node,
            num_nodes=here.nodes,
            strategy="auto" if group.world == 1 else "ddp",
            plugins=[precision(training.precision, device), cluster(here)],
            max_epochs=training.epochs,
            max_steps=total,
            limit_train_batches=parts.accumulate * limits.steps if limits else 1.0,
            limit_val_batches=limits.evaluation_batches if limits else 1.0,
            check_val_every_n_epoch=1 if limits else training.evaluate_every,
            accumulate_grad_batches=parts.accumulate,
            gradient_clip_val=training.clip,
            logger=[metrics, tensorboard],
            callbacks=callbacks,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            default_root_dir=cell_dir,
        )
        trainer.fit(task, data, ckpt_path=resume, weights_only=True)
        if trainer.global_step < total:
            raise RuntimeError(f"training ended at step {trainer.global_step} of {total}")
        # Where the last epoch is none of every `evaluate_every`, or `max_steps` cut it short.
        if task.evaluated_at < total:
            trainer.validate(task, datamodule=data, verbose=False)

    peak_memory = group.most(measurement.peak_memory(device))
    if not group.is_first:
        return None
    elapsed, world = checkpoints.elapsed, group.world
    result = result_of(cell, parts, cell_dir, total, progress, peak_memory, elapsed, device, world)
    _log_settings(cell, result, tensorboard)
    if pictures := task.pictures(data, device, cell.metric.averaged):
        write_pictures(pictures, cell_dir / "pictures", tensorboard, result.steps)
    tensorboard.finalize("success")
    checkpoints.keep_weights(task.network)
    if task.average is not None:
        checkpoints.keep_weights(task.average.module, "ema.pt")
    result.write(cell_dir / "result.json")
    checkpoints.clear()
    return _extent(cell, data, whole, limits, looking)


def _extent(
    cell: Cell,
    data: build.AnyData,
    steps: int,
    limits: Limits | None,
    looking: Diagnostics | None,
) -> Extent:
    training = cell.experiment.training
    batches = [len(loader) for loader in data.val_dataloader()]
    evaluated = [min(count, limits.evaluation_batches) if limits else count for count in batches]
    evaluations = math.ceil(steps / (training.evaluate_every * data.steps_per_epoch))
    share = sum(batches) / sum(evaluated)
    if looking is None:
        return Extent(steps, evaluations, share, looked=0.0, looking=0.0)
    of_all = statistics.fmean(looking.times) * math.ceil(evaluations / looking.chosen.every)
    return Extent(steps, evaluations, share, sum(looking.times), of_all)


def _grown(cell: Cell) -> Cell:
    """`cell` with images of their last size from the first step on, as most of its steps have."""
    data = cell.experiment.data
    if not isinstance(data, ClassFolders):
        return cell
    grown = {"data": data.model_copy(update={"sizes": ()})}
    return cell.model_copy(update={"experiment": cell.experiment.model_copy(update=grown)})


def _tensorboard(cell_dir: Path, start: int) -> TensorBoardLogger:
    """Scalars named after the folder; those that a stopped attempt wrote past `start` are void."""
    return TensorBoardLogger(
        cell_dir, name=None, version="", default_hp_metric=False, purge_step=start + 1
    )


def _log_settings(cell: Cell, result: Result, tensorboard: TensorBoardLogger) -> None:
    """The cell's settings beside its metric and speed, for TensorBoard's table of runs."""
    of_interest = (cell.metric.name, *SPEED)
    found = {name: result.metrics[name] for name in of_interest if name in result.metrics}
    settings = {"variant": cell.variant, "seed": cell.seed, "ffn_width": result.ffn_width}
    settings |= cell.experiment.model_dump(mode="json")
    tensorboard.log_hyperparams(settings, found, step=result.steps)
