"""Values that a LightningModule of a user logs, and the entries of its cell in TensorBoard."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.finished_cells import train_cell
from helpers.mistakes import find_message
from helpers.own_tasks import Plain, own_cell
from helpers.training_cells import digits_cell, folder_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchmetrics.classification import MulticlassAccuracy

from lit_attn.cells.rows import read_metrics
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.train import run_cell


class Logging(Plain):
    """Module with the usual idioms of Lightning."""

    def __init__(self, network: torch.nn.Module, gamma: float = 2.0) -> None:
        super().__init__(network)
        self.save_hyperparameters(ignore="network")
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("seen", 10.0 * self.global_step, prog_bar=True)
        self.log_dict({"loss": loss, "double": 2 * loss})
        if batch_idx == 0:
            self.logger.experiment.add_histogram("own/weights", torch.ones(3), self.global_step)
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("largest", max(self.losses) * self.hparams["gamma"])
        self.losses.clear()


def train(cls: type[L.LightningModule], tmp_path: Path, monkeypatch: Any) -> Path:
    folder = folder_of(own_cell(cls, monkeypatch, training={"log_every": 2}), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_cell(folder)
    return folder


@pytest.mark.process
def test_the_usual_idioms_of_lightning_work(tmp_path: Path, monkeypatch: Any) -> None:
    folder = train(Logging, tmp_path, monkeypatch)
    events = EventAccumulator(str(folder), {"histograms": 0}).Reload()
    # Steps 2, 4, 6 and 8 are recorded, and `global_step` counts the steps before.
    assert [(e.step, e.value) for e in events.Scalars("train/seen")] == [
        (2, 10),
        (4, 30),
        (6, 50),
        (8, 70),
    ]
    losses = [event.value for event in events.Scalars("steps/loss")]
    doubles = [event.value for event in events.Scalars("train/double")]
    assert doubles == pytest.approx([2 * loss for loss in losses])
    largest = events.Scalars("train/largest")
    assert [event.step for event in largest] == [4, 8]
    assert largest[0].value >= 2 * max(losses[:2]) * (1 - 1e-6)
    assert [event.step for event in events.Histograms("own/weights")] == [0, 4]
    # The loss of the step is no second value of the mean of the epoch.
    rows = read_metrics(folder / "metrics.csv")
    means = [(row.step, row.value) for row in rows if row.name == "train/loss"]
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(step, pytest.approx(value)) for step, value in means]
    names = {row.name for row in rows}
    assert not names & {"train/seen", "train/double", "train/largest"}


class LogsMetric(Plain):
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__(network)
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("accuracy", self.accuracy)
        return super().training_step(batch, batch_idx)


def test_a_metric_that_is_logged_is_one_line_before_the_first_cell(monkeypatch: Any) -> None:
    message = find_message(own_cell(LogsMetric, monkeypatch), untried=[0])
    assert message.startswith(
        "task: self.log: 'accuracy' is of type MulticlassAccuracy; in the training log a number"
    )


@pytest.mark.process
def test_tensorboard_has_the_configuration_as_text(tmp_path: Path) -> None:
    folder = train_cell(digits_cell(training={"epochs": 1, "profiler": "simple"}), tmp_path)
    events = EventAccumulator(str(folder), {"tensors": 0}).Reload()
    (event,) = events.Tensors("configuration/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    content = text.removeprefix("```yaml\n").removesuffix("```")
    settings = parse_plain(content, "text")
    assert settings["optimizer"]["lr"] == 3e-3
    assert settings["seed"] == 0
    # The profiler has written its report.
    assert "run_training_epoch" in (folder / "fit-profile.txt").read_text()
    assert digits_cell(training={"profiler": "simple"}).fingerprint == digits_cell().fingerprint
