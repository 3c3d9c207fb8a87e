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
from lightning.fabric.utilities.logger import _flatten_dict, _sanitize_params
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.tensorboard.summary import hparams

from lit_attn.cells.inputs import collect_modules
from lit_attn.cells.records import Result
from lit_attn.config.cell import Cell
from lit_attn.config.metrics import MetricChoice
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.publish import hide_private
from lit_attn.training.build import build
from lit_attn.training.checkpoints import Checkpoints
from lit_attn.training.diagnostics import DiagnosticsCallback
from lit_attn.training.process_group import ProcessGroup
from lit_attn.training.provenance import Provenance, code_hash, package_versions
from lit_attn.training.recording import Console, MetricsFile, Progress
from lit_attn.training.result import FinishedRun, Limits, UnitRecorder, make_result
from lit_attn.training.several_devices import choose_strategy
from lit_attn.training.timing import make_clock

NOISE = (
    # The loaders of this project start their workers themselves.
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
    run = Attempt(cell, cell_dir, group, limits)
    task, data = run.parts.task, run.parts.data
    with _open_trackers(cell, cell_dir, group.is_rank_zero and limits is None) as trackers:
        trainer = run.make_trainer(trackers)
        try:
            trainer.fit(task, data, ckpt_path=run.resume_from, weights_only=True)
        except MISFIT as error:
            if run.resume_from is None or not run.checkpoints.reject(run.resume_from, error):
                raise
            # Half of the checkpoint may have been restored, so everything is built again.
            return fit(cell, cell_dir, group, limits)
        finally:
            # Lightning does not tear the data down after an error.
            data.stop_workers()
        has_stopped = trainer.global_step < run.steps
        if has_stopped and not trainer.should_stop:
            raise RuntimeError(f"training ended at step {trainer.global_step} of {run.steps}")
        run.steps = trainer.global_step
        # `evaluate_every` or `max_steps` can leave the last epoch without an evaluation.
        if task.evaluated_at < run.steps:
            trainer.validate(task, datamodule=data, verbose=False)
        for tracker in trackers:
            tracker.log_hyperparams(_settings(cell))
        run.metrics.console.print_line()
    result = make_result(cell, cell_dir, run.parts, group, run.progress, run.checkpoints, run.steps)
    if result is None:
        return None
    result = result.model_copy(update={"stopped_early": has_stopped})
    run.write_outputs(result)
    result.write(cell_dir / "result.json")
    run.checkpoints.clear()
    return FinishedRun(run.parts, run.total_steps, result, run.diagnostics)


class Attempt:
    """Training and records of a cell, from its newest checkpoint on."""

    def __init__(
        self, cell: Cell, folder: Path, group: ProcessGroup, limits: Limits | None
    ) -> None:
        self.cell, self.folder, self.group, self.limits = cell, folder, group, limits
        self.parts = build(cell, group.device)
        training, data = cell.experiment.training, self.parts.data
        self.total_steps = training.steps(data.steps_per_epoch)
        self.steps = min(self.total_steps, limits.steps) if limits else self.total_steps
        self.epochs = math.ceil(self.steps / data.steps_per_epoch)

        code, fingerprint = code_hash(cell.parts), cache(data.fingerprint)

        def describe() -> Provenance:
            # The training can import further modules.
            modules = collect_modules(cell.parts)
            return Provenance(code, fingerprint(), package_versions(), modules)

        interval = training.checkpoint_every
        checkpoints = Checkpoints(folder / "checkpoints", cell.seed, interval, group, describe)
        self.checkpoints = checkpoints
        self.resume_from = path = None if limits else checkpoints.find_newest()
        first_step = int(path.stem.removeprefix("step-")) if path else 0
        console = Console(self.steps, self.epochs, cell.metric.name)
        clock = make_clock(group.device)
        self.progress = Progress(folder / "progress.json", self.steps, console, clock)
        self.metrics = MetricsFile(folder / "metrics.csv", lambda: checkpoints.elapsed, console)
        self.diagnostics = None
        if (settings := training.diagnostics) is not None:
            every = training.evaluate_every * data.steps_per_epoch
            arguments = (folder, settings, every, self.steps, self.metrics)
            self.diagnostics = DiagnosticsCallback(*arguments)
        self.stopping = None
        if (stop := training.stop) is not None and limits is None:
            goal = MetricChoice(name=stop.metric).resolve(cell.experiment).goal
            if "val" not in data.splits:
                raise ConfigError("training.stop: this data has no split val")
            self.parts.task.monitored = stop.metric
            # Without `check_finite=False` the first NaN would end the training as if it were done.
            self.stopping = EarlyStopping(
                stop.metric,
                patience=stop.patience,
                mode=goal,
                check_finite=False,
                check_on_train_epoch_end=False,
            )
        for record in (self.metrics, self.diagnostics):
            if record is not None and group.is_rank_zero:
                record.start(first_step)

    def make_trainer(self, trackers: list[Logger]) -> L.Trainer:
        """Return Lightning's trainer with all callbacks and loggers."""
        training, data, group = self.cell.experiment.training, self.parts.data, self.group
        limits, steps, device = self.limits, self.steps, group.device
        precision = Precision()
        if training.precision != "fp32":
            # A name alone would make Lightning compute in bf16 for fp16 on a CPU.
            is_bf16 = training.precision == "bf16"
            precision = MixedPrecision("bf16-mixed" if is_bf16 else "16-mixed", device.type)
        # The order matters: a step's time excludes the checkpoint before it, and an evaluation's
        # time excludes the diagnostics after it.
        # With early stopping, any evaluation can be the last one.
        first = steps if self.stopping is None else 0
        units = UnitRecorder(self.folder / "units.npz", self.cell.metric, first)
        callbacks = (self.checkpoints, self.progress, units, self.diagnostics, self.stopping)
        return L.Trainer(
            accelerator=device.type,
            devices=group.world_size,
            strategy=choose_strategy(self.parts.task.network, group.world_size),
            # By default Lightning takes any SLURM allocation around the cell for its ranks.
            plugins=[precision, LightningEnvironment()],
            max_epochs=max(training.epochs, self.epochs),
            max_steps=steps,
            limit_train_batches=data.accumulate * limits.steps if limits else 1.0,
            limit_val_batches=limits.evaluation_batches if limits else 1.0,
            check_val_every_n_epoch=1 if limits else training.evaluate_every,
            accumulate_grad_batches=data.accumulate,
            gradient_clip_val=training.clip,
            logger=[self.metrics, *trackers],
            callbacks=[callback for callback in callbacks if callback is not None],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            default_root_dir=self.folder,
        )

    def write_outputs(self, result: Result) -> None:
        """Write the weights, and the last values and the settings for TensorBoard."""
        task, metric, step = self.parts.task, self.cell.metric, result.steps
        events = self.metrics.events
        events.add_scalar(f"result/{metric.name}", result.metrics[metric.name], step)
        settings = _flatten_dict(_settings(self.cell) | {"ffn_width": result.ffn_width})
        # The first summary lists the columns of this cell alone. Without it, TensorBoard's HPARAMS
        # tab has the columns of all cells, first those in which cells differ.
        for summary in hparams(_sanitize_params(settings), {})[1:]:
            events._get_file_writer().add_summary(summary, step)
        events.close()
        self.checkpoints.write_weights(task.network)
        if task.average is not None:
            self.checkpoints.write_weights(task.average.module, "averaged.pt")


def _settings(cell: Cell) -> dict[str, Any]:
    """Return the settings of a cell for TensorBoard and trackers, which others may read."""
    settings = {"variant": cell.variant, "seed": cell.seed}
    return settings | hide_private(cell.experiment.model_dump(mode="json"))


@contextlib.contextmanager
def _open_trackers(cell: Cell, folder: Path, has_trackers: bool) -> Iterator[list[Logger]]:
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
