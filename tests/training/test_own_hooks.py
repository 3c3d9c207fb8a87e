"""Hooks of a LightningModule of a user: each is called at Lightning's time, or refused."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.commands import run_python
from helpers.finished_cells import assert_same_weights, train_cell
from helpers.own_tasks import Plain, own_cell
from helpers.stopping import run_until, stop_at
from helpers.training_cells import folder_of, result_of
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch.nn import functional as F

from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import format_yaml
from lit_attn.tasks.own_hooks import REFUSED, REQUIRED, check_hooks
from lit_attn.train import run_cell
from lit_attn.training.build import build
from lit_attn.training.trainer_data import TrainerData

CALLED = (
    *REQUIRED,
    "forward",
    "setup",
    "teardown",
    "on_fit_start",
    "on_fit_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_save_checkpoint",
    "on_load_checkpoint",
)
"""Hooks that are called, with Lightning's arguments and at Lightning's times."""

TOOLS = {
    "all_gather",
    "automatic_optimization",
    "clip_gradients",
    "current_epoch",
    "device_mesh",
    "example_input_array",
    "fabric",
    "freeze",
    "global_rank",
    "global_step",
    "load_from_checkpoint",
    "local_rank",
    "log",
    "log_dict",
    "logger",
    "loggers",
    "lr_schedulers",
    "manual_backward",
    "on_gpu",
    "optimizers",
    "print",
    "strict_loading",
    "to_onnx",
    "to_tensorrt",
    "to_torchscript",
    "toggle_optimizer",
    "toggled_optimizer",
    "trainer",
    "unfreeze",
    "untoggle_optimizer",
}
"""Public names of LightningModule that a class uses and does not define."""


def list_hooks() -> list[str]:
    """Return the methods of Lightning's classes of hooks, and the others that it may call."""
    names = [name for cls in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(cls)]
    names += [name for name in vars(L.LightningModule) if name not in TOOLS]
    return [name for name in names if not name.startswith("_") and name.islower()]


def test_every_hook_of_lightning_is_called_or_refused() -> None:
    hooks = list_hooks()
    assert len(hooks) > 60
    assert set(hooks) == {*CALLED, *REFUSED}
    assert not {*CALLED} & {*REFUSED}


@pytest.mark.parametrize("hook", sorted(REFUSED))
def test_a_refused_hook_is_named_in_one_line(hook: str) -> None:
    cls = type("Own", (Plain,), {hook: lambda self, *arguments, **keywords: None})
    with pytest.raises(ConfigError) as error:
        check_hooks(cls, "mine:Own")
    message = str(error.value)
    assert message.startswith(f"mine:Own defines {hook}, but ")
    assert "\n" not in message
    # Restoring Lightning's method is a way out for a class that cannot be changed.
    restored = type("Restored", (cls,), {hook: getattr(L.LightningModule, hook)})
    check_hooks(restored, "mine:Restored")


def test_a_step_that_takes_an_iterator_is_refused() -> None:
    class Iterating(Plain):
        def training_step(self, dataloader_iter: Any) -> Any: ...

    with pytest.raises(ConfigError, match="mine:Iterating: training_step takes dataloader_iter"):
        check_hooks(Iterating, "mine:Iterating")


EVENTS: list[str] = []


def record(hook: str) -> Any:
    """Return a method that records its call and does what the method of Plain does."""

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        EVENTS.append(hook)
        return getattr(super(Recording, self), hook)(*arguments, **keywords)

    return method


class Recording(Plain):
    """Module whose every hook is recorded."""


for _hook in CALLED:
    # The loss of a step calls `forward`; checkpoints are saved at other times.
    if _hook not in ("forward", "on_save_checkpoint", "on_load_checkpoint"):
        setattr(Recording, _hook, record(_hook))


SPLIT_HOOKS = ("on_validation_epoch_start", "on_validation_epoch_end")


def test_hooks_are_called_in_the_order_of_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only validation epochs differ: each split is one, and Lightning has one for all loaders."""
    cell = own_cell(Recording, monkeypatch, training={"evaluate_every": 1})
    EVENTS.clear()
    run_cell(folder_of(cell, tmp_path))
    ours = EVENTS.copy()

    parts = build(cell, torch.device("cpu"))

    class Alone(Recording):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            EVENTS.append("validation_step")
            return Plain.validation_step(self, batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    EVENTS.clear()
    parts.task.network._trainer = None
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Alone(parts.task.network.network), TrainerData(parts.data))
    theirs = EVENTS.copy()

    def without_splits(events: list[str]) -> list[str]:
        return [event for event in events if event not in SPLIT_HOOKS]

    assert without_splits(ours) == without_splits(theirs)
    assert {*ours} | {"forward", "on_save_checkpoint", "on_load_checkpoint"} == {*CALLED}
    assert ours.count("on_validation_epoch_end") == 2 * len(parts.data.splits)
    first = ours.index("on_validation_epoch_start")
    assert ours[first - 1 : first + 2] == [
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
    ]
    last = ours.index("on_validation_epoch_end")
    assert ours[last - 1 : last + 2] == [
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_validation_epoch_start",
    ]


class AtTheEnd(Plain):
    """Numbers of a split that are computed from all of its samples."""

    def on_validation_epoch_start(self) -> None:
        self.wrong = 0
        self.count = 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 7) -> Any:
        assert self.trainer.training or self.trainer.validating
        images, labels = batch
        logits = self(images).float()
        self.log("loss", F.cross_entropy(logits, labels))
        return {"wrong": (logits.argmax(1) != labels).sum().item(), "split": dataloader_idx}

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert outputs["split"] == dataloader_idx
        self.wrong += outputs["wrong"]
        self.count += len(batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("error", self.wrong / self.count)


def test_numbers_of_an_epoch_equal_the_means_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For both splits, whose batches are of several sizes, and for averaged weights."""
    results = []
    for cls in (Plain, AtTheEnd):
        training = {"epochs": 1, "average": {"decay": 0.5}}
        data = {"eval_batch_size": 100, "augment": ["normalize"]}
        fields = own_cell(cls, monkeypatch, training=training).model_dump(mode="json")
        fields["experiment"]["data"].update(data)
        folder = train_cell(Cell.model_validate(fields), tmp_path / cls.__name__)
        results.append(result_of(folder).metrics)
    for split in ("val", "test"):
        for name in ("loss", "error", "averaged-loss", "averaged-error"):
            key = f"{split}/{name}"
            assert results[0][key] == pytest.approx(results[1][key], rel=1e-6), key
    assert results[0]["val/error"] != results[0]["test/error"]


class Equal(Plain):
    """Two measures that are equal in the first batch of a split and not in the second."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0)
        self.log("error", 1.0 if batch_idx == 0 else 3.0)


def test_measures_that_are_equal_in_the_first_batch_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = own_cell(Equal, monkeypatch, training={"epochs": 1}).model_dump(mode="json")
    fields["experiment"]["data"]["eval_batch_size"] = 100
    metrics = result_of(train_cell(Cell.model_validate(fields), tmp_path)).metrics
    assert metrics["test/loss"] == 1
    assert metrics["test/error"] > 2


class Counting(Plain):
    """State outside the parameters that changes the weights, kept by the hooks of checkpoints."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__(network)
        self.steps = 0

    def training_step(self, batch: Any) -> Any:
        images, labels = batch
        return {"loss": F.cross_entropy(self(images), labels), "labels": labels}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["labels"] is batch[1]
        assert outputs["loss"].ndim == 0
        self.steps += 1
        with torch.no_grad():
            next(self.parameters()).mul_(1 - 1e-2 * (self.steps % 3))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["steps"] = self.steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps = checkpoint["steps"]


def test_a_module_with_a_state_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = own_cell(Counting, monkeypatch)
    undisturbed = train_cell(cell, tmp_path / "undisturbed")
    stopped = folder_of(cell, tmp_path / "stopped")
    run_until(5, stopped)
    run_cell(stopped)
    assert_same_weights(stopped, undisturbed)


class StoresObject(Plain):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["path"] = Path("state")


class AddsParameters(Plain):
    def setup(self, stage: str) -> None:
        self.head = torch.nn.Linear(2, 2)


class Skips(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class WithoutLoss(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class Forgets(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", 1.0)


class ByHand(Plain):
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__(network)
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (StoresObject, "task: on_save_checkpoint stores an object that a checkpoint cannot"),
        (AddsParameters, "task: setup changes the parameters; create them in __init__"),
        (Skips, "task: on_train_batch_start returns -1, which would end the epoch"),
        (WithoutLoss, "task: training_step returns NoneType instead of a loss"),
        (Forgets, "task: validation_step does not log 'error' of `measures`, and neither does on"),
        (ByHand, "task: mine:ByHand sets automatic_optimization to False, but `optimizer`"),
    ],
)
def test_a_hook_that_cannot_be_followed_is_one_error(
    cls: type[L.LightningModule], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(own_cell(cls, monkeypatch, training={"epochs": 1}), tmp_path)
    with monkeypatch.context() as patch:
        if cls is StoresObject:
            stop_at(patch, 2)
        with pytest.raises(ConfigError, match=message):
            run_cell(folder)


TWO_WAYS = """
import lightning as L
from torch.nn import functional as F


class TwoWays(L.LightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def training_step(self, batch):
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def on_validation_epoch_start(self):
        self.total, self.count = 0.0, 0

    def validation_step(self, batch):
        loss = F.cross_entropy(self.network(batch[0]).float(), batch[1])
        self.log("loss", loss)
        self.total += loss.item() * len(batch[1])
        self.count += len(batch[1])

    def on_validation_epoch_end(self):
        self.log("error", self.total / self.count)
"""


@pytest.mark.process
def test_numbers_of_an_epoch_are_averaged_over_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices have different numbers of samples."""
    fields = own_cell(Plain, monkeypatch, training={"epochs": 1}).model_dump(mode="json")
    (tmp_path / "two_ways.py").write_text(TWO_WAYS)
    fields["parts"] = [str(tmp_path / "two_ways.py")]
    fields["experiment"]["task"]["target"] = "two_ways:TwoWays"
    fields["experiment"]["training"]["devices"] = 2
    fields["experiment"]["data"]["eval_batch_size"] = 37
    folder = tmp_path / "cell"
    folder.mkdir()
    (folder / "config.yaml").write_text(format_yaml(fields))
    done = run_python(tmp_path, "-m", "lit_attn.train", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = result_of(folder).metrics
    for split in ("val", "test"):
        assert metrics[f"{split}/error"] == pytest.approx(metrics[f"{split}/loss"], rel=1e-6)
