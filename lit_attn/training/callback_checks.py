"""Checks of a user's callbacks after the training step that comes before the first cell."""

from collections.abc import Sequence
from typing import Any

import lightning as L

from lit_attn.config.callbacks import CallbackConfig
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.own_hooks import require_plain_state

LOOP = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "max_epochs",
    "max_steps",
    "val_check_interval",
)
"""Settings of Lightning's trainer on which the number of steps and exact resuming depend."""


def describe_loop(trainer: L.Trainer) -> dict[str, Any]:
    """Return the settings of the training loop."""
    return {name: getattr(trainer, name) for name in LOOP}


def list_parameters(task: L.LightningModule) -> list[str]:
    """Return the names of the parameters that a checkpoint contains."""
    return [name for name, _ in task.named_parameters()]


def require_same_loop(trainer: L.Trainer, loop: dict[str, Any]) -> None:
    """Raise ConfigError if a callback has changed the settings `loop` of the training loop."""
    for name, value in loop.items():
        now = getattr(trainer, name)
        if now != value:
            raise ConfigError(
                f"training.callbacks: a callback has changed {name} of the trainer from {value} to "
                f"{now}, but every variant has the loop of `training`; remove that"
            )


def check_callbacks(
    configs: Sequence[CallbackConfig],
    callbacks: Sequence[L.Callback],
    trainer: L.Trainer,
    parameters: list[str],
) -> None:
    """Raise ConfigError if a callback has changed the optimisation, or has a state of objects.

    `parameters` are those before the step. A stopped cell could not continue exactly.
    """
    if trainer.lr_scheduler_configs:
        raise ConfigError(
            "training.callbacks: a callback has added a learning-rate scheduler, but `schedule` "
            "sets the rate; remove it"
        )
    task = trainer.lightning_module
    if list_parameters(task) != parameters:
        raise ConfigError(
            "training.callbacks: a callback has added, removed or renamed parameters, so a stopped "
            "cell could not continue; change the model instead"
        )
    for config, callback in zip(configs, callbacks, strict=True):
        name = getattr(config, "target", config.kind)
        checkpoint: dict[str, Any] = {"state": callback.state_dict()}
        callback.on_save_checkpoint(trainer, task, checkpoint)
        require_plain_state(checkpoint, f"training.callbacks: {name}")
