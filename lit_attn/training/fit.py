"""Train one cell with Lightning and write its records (lit_attn.train describes the whole path)."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.profilers import Profiler
from torch.utils.tensorboard.summary import hparams

from lit_attn.cells.inputs import collect_modules
from lit_attn.cells.records import Result
from lit_attn.config.cell import Cell
from lit_attn.models.sharding import READ_OUTSIDE, gather, gathered_weights, is_sharded
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.publish import hide_private
from lit_attn.schema.yaml_text import format_yaml
from lit_attn.tasks.base import TaskModule
from lit_attn.tasks.metrics import MetricChoice
from lit_attn.tasks.pictures import Pictures
from lit_attn.tasks.task import MOST_PICTURES
from lit_attn.tasks.tf32 import products_in_tf32, require_tf32
from lit_attn.training.board_images import BoardImages, write_pictures
from lit_attn.training.build import build
from lit_attn.training.checkpoints import Checkpoints
from lit_attn.training.compilation import is_compilation_failure, read_reason
from lit_attn.training.diagnostics import DiagnosticsCallback
from lit_attn.training.process_group import ProcessGroup
from lit_attn.training.provenance import Provenance, code_hash, package_versions
from lit_attn.training.recording import Console, MetricsFile, Progress, flatten_settings
from lit_attn.training.result import FinishedRun, Limits, UnitRecorder, make_result
from lit_attn.training.step_values import StepValuesCallback
from lit_attn.training.timing import make_clock
from lit_attn.training.trainer import make_profiler, make_trainer
from lit_attn.training.trainer_data import TrainerData

MIXED_WITH_SHARDS = "got mixed torch.Tensor and DTensor"
"""Part of PyTorch's error about an operation with a weight of which each device has a part."""

MISFIT = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Exceptions of restoring a checkpoint that does not fit the cell."""


class Outputs(NamedTuple):
    """Pictures and weights of a trained cell on rank 0; `weights` are named after their files."""

    pictures: Pictures | None
    weights: dict[str, dict[str, Any]]


def fit(
    cell: Cell, cell_dir: Path, group: ProcessGroup, limits: Limits | None = None
) -> FinishedRun | None:
    """Train `cell`, evaluate it and write its result.json. Return None on ranks other than 0.

    Training continues from the newest checkpoint in `cell_dir`; a run with `limits` starts afresh.
    Raises ConfigError, Diverged or Preempted as `lit_attn.train.run_cell` does.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # The log of the cell has the messages of callbacks, for example the table of ModelSummary.
    logging.getLogger("lightning.pytorch.callbacks").setLevel(logging.INFO)
    is_tf32 = cell.experiment.training.precision == "tf32"
    if is_tf32:
        require_tf32(group.device)
    with products_in_tf32(is_tf32):
        run = Attempt(cell, cell_dir, group, limits)
        while not run.train():
            # Half of a checkpoint may have been restored, so everything is built again.
            compile_failure = run.compile_failure
            del run
            run = Attempt(cell, cell_dir, group, limits, compile_failure)
    result = run.collect_result()
    outputs = run.collect_outputs()
    if result is None:
        return None
    run.write_outputs(result, outputs)
    result.write(cell_dir / "result.json")
    run.checkpoints.clear()
    return FinishedRun(run.parts, run.total_steps, result, run.diagnostics)


class Attempt:
    """Training and records of a cell, from its newest checkpoint on.

    `compile_failure` is why torch.compile failed in an attempt before; then nothing is compiled.
    """

    def __init__(
        self,
        cell: Cell,
        folder: Path,
        group: ProcessGroup,
        limits: Limits | None,
        compile_failure: str = "",
    ) -> None:
        self.cell = cell
        self.folder = folder
        self.group = group
        self.limits = limits
        self.compile_failure = compile_failure
        self.parts = build(cell, group.device, may_compile=not compile_failure)
        training = cell.experiment.training
        steps_per_epoch = self.parts.data.steps_per_epoch
        self.total_steps = training.steps(steps_per_epoch)
        self.steps = min(self.total_steps, limits.steps) if limits else self.total_steps
        self.epochs = math.ceil(self.steps / steps_per_epoch)
        # Every epoch has a value, also if it is short.
        self.log_every = min(training.log_every, steps_per_epoch)

        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            cell.seed,
            training.checkpoint_every,
            group,
            self._make_description(),
        )
        # A short run starts afresh.
        self.resume_from = self.checkpoints.find_newest() if limits is None else None
        self.console = Console(self.steps, self.epochs, cell.metric.name)
        clock = make_clock(group.device)
        self.progress = Progress(folder / "progress.json", self.steps, self.console, clock)
        self.metrics = MetricsFile(
            folder / "metrics.csv", lambda: self.checkpoints.elapsed, self.console
        )
        self.diagnostics = self._make_diagnostics()
        self.parts.task.write_rows = self.metrics.write_rows
        self.stopping = self._make_stopping()
        self.own_callbacks = [callback.build() for callback in training.callbacks]
        self.parts.task.has_callbacks = bool(self.own_callbacks)
        self.has_stopped = False  # True if early stopping ends the training.
        if group.is_rank_zero:
            self._start_records()

    def _make_description(self) -> Callable[[], Provenance]:
        """Return the function that describes the code and the data of this attempt."""
        # The code that runs is that of now; the hash of the data is only computed if it is needed.
        parts = self.cell.parts
        code = code_hash(parts)
        fingerprint = cache(self.parts.data.fingerprint)

        def describe() -> Provenance:
            # The training can import further modules.
            modules = collect_modules(parts)
            return Provenance(code, fingerprint(), package_versions(), modules)

        return describe

    def _make_diagnostics(self) -> DiagnosticsCallback | None:
        """Return the callback that records diagnostics, if the configuration has any."""
        training = self.cell.experiment.training
        if training.diagnostics is None:
            return None
        interval = training.evaluate_every * self.parts.data.steps_per_epoch
        return DiagnosticsCallback(
            self.folder, training.diagnostics, interval, self.steps, self.metrics
        )

    def _make_stopping(self) -> EarlyStopping | None:
        """Return the callback of early stopping, which runs with limits do not have."""
        stop = self.cell.experiment.training.stop
        if stop is None or self.limits is not None:
            return None
        goal = MetricChoice(name=stop.metric).resolve(self.cell.experiment).goal
        self.parts.task.monitored = stop.metric
        # Without `check_finite=False` the first NaN would end the training as if it were done.
        return EarlyStopping(
            stop.metric,
            patience=stop.patience,
            stopping_threshold=stop.threshold,
            mode=goal,
            check_finite=False,
            check_on_train_epoch_end=False,
        )

    @property
    def _can_stop(self) -> bool:
        """True if early stopping or a callback may end the training before its last step."""
        has_changing = bool(self.cell.experiment.training.changing_callbacks)
        return self.stopping is not None or has_changing

    def _start_records(self) -> None:
        """Start the files of metrics and diagnostics, or continue them from the checkpoint."""
        first_step = 0
        if self.resume_from is not None:
            first_step = int(self.resume_from.stem.removeprefix("step-"))
        self.metrics.start(first_step)
        settings = format_yaml(_settings(self.cell))
        self.metrics.events.add_text("configuration", f"```yaml\n{settings}```", first_step)
        if self.diagnostics is not None:
            self.diagnostics.start(first_step)

    def train(self) -> bool:
        """Train and evaluate; return False if another attempt has to start from scratch.

        That is after a checkpoint that does not fit the cell, and after a failed compilation.
        """
        task = self.parts.task
        data = self.parts.data
        has_trackers = self.group.is_rank_zero and self.limits is None
        with _open_trackers(self.cell, self.folder, has_trackers) as trackers:
            trainer = self.make_trainer(trackers)
            try:
                trainer.fit(task, TrainerData(data), ckpt_path=self.resume_from, weights_only=True)
            except MISFIT as error:
                if not self._can_try_again(error):
                    raise
                return False
            finally:
                # Lightning does not tear the data down after an error.
                data.stop_workers()
            self.has_stopped = trainer.global_step < self.steps
            if self.has_stopped and not trainer.should_stop:
                raise RuntimeError(f"training ended at step {trainer.global_step} of {self.steps}")
            if self.has_stopped and not self._can_stop:
                raise ConfigError(
                    "training.callbacks: a callback with `observes: true` has ended the training "
                    f"at step {trainer.global_step} of {self.steps}; write `observes: false`"
                )
            self.steps = trainer.global_step
            # `evaluate_every` or `max_steps` can leave the last epoch without an evaluation.
            if task.evaluated_at < self.steps:
                trainer.validate(task, datamodule=TrainerData(data), verbose=False)
            for tracker in trackers:
                tracker.log_hyperparams(_settings(self.cell))
            self.console.print_line()
        return True

    def _can_try_again(self, error: Exception) -> bool:
        """Return True if another attempt can do without what raised `error`.

        Raises ConfigError if torch.compile failed and the cell may not train without it, and if
        code reads sharded weights.
        """
        if MIXED_WITH_SHARDS in str(error):
            raise ConfigError(READ_OUTSIDE) from error
        if self.parts.is_compiled and is_compilation_failure(error):
            reason = read_reason(error)
            training = self.cell.experiment.training
            # Several ranks would have to agree, and only one of them may have failed.
            if training.compile != "auto" or training.is_distributed:
                raise ConfigError(
                    f"training.compile: torch.compile failed: {reason}. To train uncompiled, write "
                    "`compile: none`, which changes no identity."
                ) from error
            print(
                f"training.compile: torch.compile failed: {reason}. This cell trains uncompiled, "
                "and its result says so.",
                flush=True,
            )
            self.compile_failure = reason
            torch.compiler.reset()
            return True
        return self.resume_from is not None and self.checkpoints.reject(self.resume_from, error)

    def collect_result(self) -> Result | None:
        """Return the result of the trained cell, or None on ranks other than 0."""
        result = make_result(
            self.cell,
            self.folder,
            self.parts,
            self.group,
            self.progress,
            self.checkpoints,
            self.steps,
        )
        if result is None:
            return None
        changes: dict[str, Any] = {
            "stopped_early": self.has_stopped,
            "compile_failure": self.compile_failure,
        }
        return result.model_copy(update=changes)

    def make_trainer(
        self,
        trackers: list[Logger],
        further: Sequence[L.Callback] = (),
        profiler: Profiler | None = None,
    ) -> L.Trainer:
        """Return Lightning's trainer with all callbacks, `further` ones after them, and loggers.

        `profiler` replaces the profiler of the configuration.
        """
        return make_trainer(
            self.cell.experiment.training,
            self.parts.task,
            self.group,
            self.folder,
            steps=self.steps,
            epochs=self.epochs,
            micro_batches=self.parts.data.accumulate,
            limits=self.limits,
            loggers=[self.metrics, *trackers],
            callbacks=[*self._list_callbacks(), *further],
            log_every=self.log_every,
            profiler=profiler or make_profiler(self.cell.experiment.training.profiler, self.folder),
        )

    def _list_callbacks(self) -> list[L.Callback]:
        """Return the callbacks in their order.

        The order matters: a step's time excludes the checkpoint before it, and an evaluation's time
        excludes the diagnostics after it.
        """
        # With early stopping, any evaluation can be the last one.
        first_last_step = 0 if self._can_stop else self.steps
        units = UnitRecorder(self.folder / "units.npz", self.cell.metric, first_last_step)
        step_values = StepValuesCallback(
            self.metrics,
            self.progress.clock,
            self.progress.steps,
            self.cell.experiment.data.batch_size,
            self.parts.data.signature.tokens,
            self.log_every,
        )
        callbacks: list[L.Callback] = [self.checkpoints]
        images = BoardImages(
            self.metrics, self.cell.experiment.training.histograms, first_last_step
        )
        callbacks += [self.progress, step_values, units, images]
        if self.diagnostics is not None:
            callbacks.append(self.diagnostics)
        if self.stopping is not None:
            callbacks.append(self.stopping)
        return callbacks + self.own_callbacks

    def collect_outputs(self) -> Outputs:
        """Return the pictures and the weights on rank 0; every rank must call this."""
        task = self.parts.task
        is_rank_zero = self.group.is_rank_zero
        if not is_rank_zero and not is_sharded(task.network):
            return Outputs(None, {})
        pictures = self._draw_pictures()
        weights = {"weights.pt": gather(task.network.state_dict(), is_rank_zero)}
        if task.average is not None:
            averaged = task.average.module.state_dict()
            weights["averaged.pt"] = gather(averaged, is_rank_zero)
        return Outputs(pictures, weights)

    def _draw_pictures(self) -> Pictures | None:
        """Return the task's pictures on rank 0; the ranks of a sharded network must call this."""
        task = self.parts.task
        if type(task).draw_pictures is TaskModule.draw_pictures:
            return None
        most_pictures = MOST_PICTURES if self.limits is None else self.limits.evaluation_batches
        has_averaged = self.cell.metric.averaged
        network = task.network
        if has_averaged and task.average is not None:
            network = task.average.module
        if not is_sharded(network):
            # Lightning has moved the task to the CPU.
            task.to(self.group.device)
            pictures = task.draw_pictures(most_pictures, has_averaged)
            task.cpu()
            return pictures
        with gathered_weights(network):
            if not self.group.is_rank_zero:
                return None
            return task.draw_pictures(most_pictures, has_averaged)

    def write_outputs(self, result: Result, outputs: Outputs) -> None:
        """Write weights and pictures, and the last values and the settings for TensorBoard."""
        metric_name = self.cell.metric.name
        events = self.metrics.events
        events.add_scalar(f"result/{metric_name}", result.metrics[metric_name], result.steps)
        settings = _settings(self.cell)
        settings["ffn_width"] = result.ffn_width
        summaries = hparams(flatten_settings(settings), {})
        # The first summary lists the columns of this cell alone. Without it, TensorBoard's HPARAMS
        # tab has the columns of all cells, first those in which cells differ.
        writer: Any = events.file_writer
        for summary in summaries[1:]:
            writer.add_summary(summary, result.steps)
        if outputs.pictures is not None:
            write_pictures(outputs.pictures, self.folder / "pictures", events, result.steps)
        events.close()
        for name, weights in outputs.weights.items():
            self.checkpoints.write_weights(weights, name)


def _settings(cell: Cell) -> dict[str, Any]:
    """Return the settings of a cell for TensorBoard and trackers, which others may read."""
    settings = {"variant": cell.variant, "seed": cell.seed}
    return settings | hide_private(cell.experiment.model_dump(mode="json"))


@contextlib.contextmanager
def _open_trackers(cell: Cell, folder: Path, has_trackers: bool) -> Iterator[list[Logger]]:
    """Yield the loggers of the cell's experiment trackers, if it has any, and end their runs."""
    members = cell.experiment.training.loggers if has_trackers else ()
    name = f"{cell.variant}/{cell.seed}"
    loggers = [member.build(cell.study, name, cell.fingerprint, folder) for member in members]
    has_succeeded = False
    try:
        yield loggers
        has_succeeded = True
    finally:
        for member, logger in zip(members, loggers, strict=True):
            member.close(logger, has_succeeded)
