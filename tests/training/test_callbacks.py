"""`training.callbacks`: Lightning's own and a user's, their identity, and what is refused."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.finished_cells import train_cell
from helpers.mistakes import find_message
from helpers.stopping import run_until
from helpers.training_cells import accuracy_at, digits_cell, folder_of, result_of
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.types import LRSchedulerConfig
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_attn.config.callbacks import OBSERVERS, REFUSED
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError
from lit_attn.train import run_cell
from lit_attn.training.first_step import find_mistake

LIGHTNING = "lightning.pytorch.callbacks"
STOP = {
    "kind": "module",
    "import": f"{LIGHTNING}:EarlyStopping",
    "arguments": {"monitor": "val/accuracy", "patience": 2, "mode": "max"},
}
USABLE = {*OBSERVERS, "Callback", "EarlyStopping", "LambdaCallback"}
SUBCLASSES = {
    "BackboneFinetuning",
    "EMAWeightAveraging",
    "ModelCheckpoint",
    "OnExceptionCheckpoint",
    "RichProgressBar",
    "TQDMProgressBar",
}
"""Lightning's classes that are refused because of a base class."""
NEEDS_FUNCTION = {"ThroughputMonitor"}
"""Lightning's classes with an argument that no file can contain."""


class Counter(L.Callback):
    """Callback that counts steps and notes what it can read."""

    def __init__(self, start: int = 0) -> None:
        self.steps = start
        self.read_metrics: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps += 1
        trainer.loggers[0].experiment.add_scalar("own/steps", self.steps, trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.read_metrics.update({name: float(v) for name, v in trainer.callback_metrics.items()})
        text = "\n".join(f"{name} {value!r}" for name, value in self.read_metrics.items())
        Path(str(trainer.log_dir), "read.txt").write_text(text)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


class Accumulates(L.Callback):
    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.accumulate_grad_batches = 4


class Renames(L.Callback):
    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        module.network.added = torch.nn.Linear(1, 1)


class Schedules(L.Callback):
    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizers[0], 1)
        trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(scheduler)]


class KeepsObjects(L.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"trainer": Path}


class SavesObjects(L.Callback):
    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["folder"] = Path()


class NeedsTracker(L.Callback):
    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.loggers[0].experiment.log_artifact("weights")


class Stops(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = True


OWN = (Counter, Accumulates, Renames, Schedules, KeepsObjects, SavesObjects, NeedsTracker, Stops)


@pytest.fixture(autouse=True)
def _module_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("mine")
    for own_class in OWN:
        setattr(module, own_class.__name__, own_class)
    monkeypatch.setitem(sys.modules, "mine", module)


def with_callbacks(*written: dict[str, Any], **training: Any) -> Cell:
    """Return a cell of the digits with callbacks of kind module."""
    entries = [{"kind": "module", **entry} for entry in written]
    return digits_cell(training={"callbacks": entries, **training})


def test_every_class_of_lightning_is_usable_or_refused() -> None:
    handled = {*USABLE, *REFUSED, *SUBCLASSES, *NEEDS_FUNCTION}
    assert set(callbacks.__all__) <= handled
    # A class that a version of Lightning lacks does not make the tests fail.
    assert {"Checkpoint", "ProgressBar", "LearningRateMonitor"} <= set(callbacks.__all__)


@pytest.mark.process
def test_observers_change_no_record_of_a_cell(uninterrupted: Path, tmp_path: Path) -> None:
    monitor = {"import": f"{LIGHTNING}:LearningRateMonitor", "arguments": {"log_momentum": True}}
    counter = {"import": "mine:Counter", "observes": True, "arguments": {"start": 10}}
    cell = with_callbacks(
        monitor,
        {"import": f"{LIGHTNING}:ModelSummary", "arguments": {"max_depth": 2}},
        {"import": f"{LIGHTNING}:DeviceStatsMonitor", "arguments": {"cpu_stats": True}},
        counter,
    )
    assert cell.fingerprint == digits_cell().fingerprint
    folder = train_cell(cell, tmp_path)
    written = (folder / "metrics.csv").read_bytes()
    assert written == (uninterrupted / "metrics.csv").read_bytes()
    events = EventAccumulator(str(folder)).Reload()
    names = events.Tags()["scalars"]
    assert "lr-AdamW" in names or "lr-AdamW/pg1" in names
    assert any(name.startswith("DeviceStatsMonitor.on_train_batch_end/cpu") for name in names)
    assert [event.value for event in events.Scalars("own/steps")] == list(range(11, 23))
    # The values that a callback can read are those of the records.
    read_values = dict(line.split(" ") for line in (folder / "read.txt").read_text().splitlines())
    metrics = result_of(folder).metrics
    for name in ("val/accuracy", "test/loss", "train/loss"):
        assert float(read_values[name]) == pytest.approx(metrics[name], rel=1e-6)


@pytest.mark.process
def test_early_stopping_by_callback_continues_exactly(tmp_path: Path) -> None:
    cell = digits_cell(training={"epochs": 6, "callbacks": [STOP]}, optimizer={"lr": 1e-30})
    folder = folder_of(cell, tmp_path)
    for step in (4, 8):
        run_until(step, folder)
    run_cell(folder)
    result = result_of(folder)
    assert (result.stopped_early, result.steps, result.epochs) == (True, 12, 3)
    assert accuracy_at(folder) == [(4, 0), (8, 1), (12, 2)]
    assert (folder / "units.npz").exists()


@pytest.mark.process
def test_the_state_of_an_own_callback_survives_a_kill(tmp_path: Path) -> None:
    folder = folder_of(with_callbacks({"import": "mine:Counter"}), tmp_path)
    run_until(5, folder)
    run_cell(folder)
    events = EventAccumulator(str(folder)).Reload()
    assert [event.value for event in events.Scalars("own/steps")] == list(range(1, 13))


def test_a_callback_that_can_change_a_result_is_in_the_identity() -> None:
    plain = digits_cell()
    changing = with_callbacks({"import": "mine:Counter"})
    others = [
        with_callbacks({"import": "mine:Counter", "arguments": {"start": 1}}),
        with_callbacks({"import": "mine:Stops"}),
        with_callbacks(STOP),
        with_callbacks({"import": f"{LIGHTNING}:ModelSummary", "observes": False}),
        plain,
    ]
    fingerprints = {cell.fingerprint for cell in [changing, *others]}
    assert len(fingerprints) == 6
    observing = with_callbacks({"import": "mine:Counter", "observes": True})
    assert observing.fingerprint == with_callbacks().fingerprint == plain.fingerprint


@pytest.mark.parametrize("name", sorted(set(REFUSED) | SUBCLASSES))
def test_a_callback_that_cannot_work_is_refused_in_one_line(name: str) -> None:
    if not hasattr(callbacks, name):
        pytest.fail(f"Lightning has no {name}")
    with pytest.raises(ValidationError) as error:
        with_callbacks({"import": f"{LIGHTNING}:{name}"})
    (problem,) = error.value.errors()
    message = problem["msg"]
    assert f"training.callbacks: import: {LIGHTNING}:{name}: a " in message
    assert message.endswith("; remove it")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"import": "mine:Conter"}, "import: module 'mine' has no 'Conter'; did you mean 'Count"),
        ({"import": "os:system"}, "import: os:system is not a subclass of lightning.pytorch.call"),
        (
            {"import": "mine:Counter", "arguments": {"steps": 1}},
            "got an unexpected keyword argument 'steps'",
        ),
        (
            {"import": f"{LIGHTNING}:Timer", "arguments": {"duration": "00:00:10:00"}},
            "arguments.duration: lightning.pytorch.callbacks:Timer would end a cell",
        ),
        (
            {"import": f"{LIGHTNING}:EarlyStopping", "arguments": {"monitor": "a", "mode": "up"}},
            "`mode` can be min, max, got up",
        ),
    ],
)
def test_a_mistake_in_an_entry_is_one_line(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)) as error:
        with_callbacks(entry)
    assert len(error.value.errors()) == 1


def test_the_same_callback_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="callbacks: the same callback stands there twice"):
        with_callbacks({"import": "mine:Counter"}, {"import": "mine:Counter"})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"import": "mine:Accumulates"}, "changed accumulate_grad_batches of the trainer from 1"),
        ({"import": "mine:Renames"}, "has added, removed or renamed parameters"),
        ({"import": "mine:Schedules"}, "has added a learning-rate scheduler"),
        ({"import": "mine:KeepsObjects"}, "mine:KeepsObjects stores an object that a checkpoint"),
        ({"import": "mine:SavesObjects"}, "mine:SavesObjects stores an object that a checkpoint"),
        ({"import": "mine:NeedsTracker"}, "'SummaryWriter' object has no attribute 'log_artifact'"),
        (
            {"import": f"{LIGHTNING}:EarlyStopping", "arguments": {"monitor": "val/los"}},
            "Early stopping conditioned on metric `val/los` which is not available.",
        ),
    ],
)
def test_the_first_step_finds_what_a_callback_does(entry: dict[str, Any], message: str) -> None:
    assert message in find_message(with_callbacks(entry), untried=[0])


def test_usable_callbacks_pass_the_first_step() -> None:
    cell = with_callbacks({"import": "mine:Counter"}, STOP).model_dump(mode="json")
    assert find_mistake([cell], untried=[0]) is None


@pytest.mark.process
def test_a_callback_that_observes_cannot_end_a_training(tmp_path: Path) -> None:
    folder = folder_of(with_callbacks({"import": "mine:Stops", "observes": True}), tmp_path)
    with pytest.raises(ConfigError, match="a callback with `observes: true` has ended the trai"):
        run_cell(folder)
