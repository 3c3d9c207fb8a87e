"""What a training cell writes: metric rows and progress while it runs, pictures at its end."""

import io
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from lit_attn.cells.records import MetricRow, csv_lines, read_metrics
from lit_attn.files import append, write_atomic
from lit_attn.tasks.base import Pictures
from lit_attn.training import measurement

RECENT = 100
"""Steps whose times say how long one takes now."""


class MetricsFile(Logger):
    """Appends every logged value to `metrics.csv` as step,epoch,name,value, and fsyncs.

    Lightning's CSVLogger rewrites its file when a new name appears and deletes it on a second run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> int:
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        return self.path

    def start(self, step: int) -> None:
        """Begin, or go on from a checkpoint at `step`: rows past it will be written again."""
        kept = [row for row in read_metrics(self.path) if row.step <= step] if step else []
        write_atomic(self.path, csv_lines([("step", "epoch", "name", "value"), *kept]))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The cell's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one row for each metric."""
        epoch = int(metrics.get("epoch", 0))
        rows = [
            MetricRow(step or 0, epoch, name, float(value))
            for name, value in sorted(metrics.items())
            if name != "epoch"
        ]
        append(self.path, csv_lines(rows))


def write_pictures(pictures: Pictures, folder: Path, logger: TensorBoardLogger, step: int) -> None:
    """As `folder`/0.png, 1.png, ..., legend.json, and as images and a table of TensorBoard."""
    legend = pictures.legend
    legend.write(folder / "legend.json")
    rows = [f"| {name} | #{bytes(legend.classes[name]).hex()} |" for name in legend.shown]
    table = "\n".join([f"{legend.weights} weights", "", "| class | colour |", "|---|---|", *rows])
    logger.experiment.add_text("pictures/legend", table, step)
    for number, picture in enumerate(pictures.drawn):
        content = io.BytesIO()
        Image.fromarray(picture).save(content, format="PNG")
        write_atomic(folder / f"{number}.png", content.getvalue())
        logger.experiment.add_image(f"pictures/{number}", picture, step, dataformats="HWC")


class Progress(L.Callback):
    """Writes `progress.json`, at most once a second.

    It has "step" and "total", "step_time" (seconds, the median of the last steps) and "memory" (the
    most bytes of its device that this process has held).

    Times the steps, and the evaluations of all splits with their reading, in seconds. Every batch
    of an evaluation counts as a sign of life too: the runner gives up a cell whose file stays as it
    is (lit_attn.ablate.runner.Limits).
    """

    def __init__(self, path: Path, total: int) -> None:
        self.path = path
        self.total = total
        self.step_times: list[float] = []
        self.evaluation_times: list[float] = []
        self.started = 0.0
        self.written = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.started = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.step_times.append(time.perf_counter() - self.started)
        self._tell(trainer)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._tell(trainer)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.started = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # The metrics have been taken off the device by now: there is nothing left to wait for.
        self.evaluation_times.append(time.perf_counter() - self.started)

    def _tell(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        now = time.perf_counter()
        if now - self.written >= 1 or trainer.global_step == self.total:
            self.written = now
            said = {
                "step": trainer.global_step,
                "total": self.total,
                "step_time": statistics.median(self.step_times[-RECENT:]),
                "memory": measurement.held_memory(trainer.strategy.root_device),
            }
            # No fsync: the display reads it, nothing depends on it.
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(said) + "\n")
            temporary.replace(self.path)
