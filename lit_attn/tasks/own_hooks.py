"""Hooks of a LightningModule of a user that are refused, and why.

Lightning calls the hooks of the adapter (lit_attn.tasks.adapter), which calls those of the module.
A hook that would never be called is refused before anything runs, because the class would silently
train differently than it reads.
"""

import inspect
import io
import pickle
from abc import ABC
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.base import TaskModule

REQUIRED = ("training_step", "validation_step")

_OPTIMIZER = "`optimizer` and `schedule` of the experiment train it"
_DATA = "`data` of the experiment loads the batches"
_TRANSFER = "diagnostics read batches without it; change the batch in training_step"
_SPLITS = "validation_step evaluates every split, also test"
_MODEL = "the module has to be complete after __init__"
_MODES = "the training loop does this; change the modes of modules in on_validation_start"

REFUSED = {
    "configure_optimizers": _OPTIMIZER,
    "optimizer_step": _OPTIMIZER,
    "optimizer_zero_grad": _OPTIMIZER,
    "lr_scheduler_step": _OPTIMIZER,
    "backward": "the training loop computes the gradients of the loss that training_step returns",
    "configure_gradient_clipping": "`training.clip` of the experiment limits the gradients",
    "configure_callbacks": "`training.callbacks` of the experiment has the callbacks",
    "configure_model": _MODEL,
    "configure_sharded_model": _MODEL,
    "prepare_data": _DATA,
    "train_dataloader": _DATA,
    "val_dataloader": _DATA,
    "test_dataloader": _DATA,
    "predict_dataloader": _DATA,
    "transfer_batch_to_device": "the batches are on the device of the training",
    "on_before_batch_transfer": _TRANSFER,
    "on_after_batch_transfer": _TRANSFER,
    "on_validation_model_zero_grad": _MODES,
    "on_validation_model_eval": _MODES,
    "on_validation_model_train": _MODES,
    "test_step": _SPLITS,
    "on_test_start": _SPLITS,
    "on_test_end": _SPLITS,
    "on_test_epoch_start": _SPLITS,
    "on_test_epoch_end": _SPLITS,
    "on_test_batch_start": _SPLITS,
    "on_test_batch_end": _SPLITS,
    "on_test_model_eval": _SPLITS,
    "on_test_model_train": _SPLITS,
    "predict_step": _SPLITS,
    "on_predict_start": _SPLITS,
    "on_predict_end": _SPLITS,
    "on_predict_epoch_start": _SPLITS,
    "on_predict_epoch_end": _SPLITS,
    "on_predict_batch_start": _SPLITS,
    "on_predict_batch_end": _SPLITS,
    "on_predict_model_eval": _SPLITS,
}
"""Hooks that a class must not define, with the reason."""


def is_defined(module_class: type[L.LightningModule], hook: str) -> bool:
    """Return True if the class or one of its bases replaces Lightning's method."""
    return getattr(module_class, hook) is not getattr(L.LightningModule, hook)


def check_hooks(module_class: type[L.LightningModule], target: str) -> None:
    """Raise ConfigError if the class lacks a step or defines a hook that would not be called."""
    for name in REQUIRED:
        if not is_defined(module_class, name):
            raise ConfigError(f"{target} does not define {name}")
        if "dataloader_iter" in inspect.signature(getattr(module_class, name)).parameters:
            raise ConfigError(f"{target}: {name} takes dataloader_iter; it gets a batch instead")
    for name, reason in REFUSED.items():
        if hasattr(L.LightningModule, name) and is_defined(module_class, name):
            raise ConfigError(f"{target} defines {name}, but {reason}; remove the method")


def require_plain_state(state: dict[str, Any], place: str) -> None:
    """Raise ConfigError, which begins with `place`, if a checkpoint cannot restore `state`.

    Checkpoints are loaded without unpickling objects, so only numbers, texts, tensors and
    containers of them can be restored.
    """
    content = io.BytesIO()
    try:
        torch.save(state, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{place} stores an object that a checkpoint cannot restore; store numbers, texts, "
            "tensors, and lists or dictionaries of them"
        ) from error


class HookCaller(TaskModule, ABC):
    """Task whose `network` is a LightningModule, and whose hooks call those of this module.

    Hooks of an evaluation are called on the module and on its copy with averaged weights. The
    subclass calls those of a validation epoch, which are those of one split.
    """

    network: L.LightningModule

    def evaluated_modules(self) -> list[L.LightningModule]:
        """Return the module, and its copy with averaged weights if there is one."""
        modules = [self.network]
        if self.average is not None:
            copy = self.average.module
            assert isinstance(copy, L.LightningModule)
            modules.append(copy)
        return modules

    def setup(self, stage: str) -> None:
        """Call `setup`; ConfigError if it adds or removes parameters, which are counted before."""
        for module in self.evaluated_modules():
            # Lightning attaches only the children of a module to the trainer.
            module.trainer = self.trainer
            names = [name for name, _ in module.named_parameters()]
            module.setup(stage)
            if [name for name, _ in module.named_parameters()] != names:
                raise ConfigError("task: setup changes the parameters; create them in __init__")

    def teardown(self, stage: str) -> None:
        for module in self.evaluated_modules():
            module.teardown(stage)

    def on_fit_start(self) -> None:
        self.network.on_fit_start()

    def on_fit_end(self) -> None:
        self.network.on_fit_end()

    def on_train_start(self) -> None:
        self.network.on_train_start()

    def on_train_end(self) -> None:
        self.network.on_train_end()

    def on_train_epoch_start(self) -> None:
        self.network.on_train_epoch_start()

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.network.on_train_epoch_end()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.network.on_train_batch_start(batch, batch_idx) == -1:
            raise ConfigError(
                "task: on_train_batch_start returns -1, which would end the epoch; every variant "
                "has the same steps, so return nothing"
            )

    def on_before_backward(self, loss: Tensor) -> None:
        self.network.on_before_backward(loss)

    def on_after_backward(self) -> None:
        self.network.on_after_backward()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.network.on_before_optimizer_step(optimizer)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.network.on_before_zero_grad(optimizer)

    def on_validation_start(self) -> None:
        self.late_losses.require_finite(waits=True)
        for module in self.evaluated_modules():
            module.on_validation_start()

    def on_validation_end(self) -> None:
        for module in self.evaluated_modules():
            module.on_validation_end()
