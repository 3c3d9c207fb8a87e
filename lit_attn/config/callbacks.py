"""Callbacks of Lightning in `training.callbacks`: which can run in a cell, and which change it."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from lit_attn.schema.base import Kind, OwnClass, outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

OBSERVERS = {
    "DeviceStatsMonitor",
    "LearningRateMonitor",
    "ModelSummary",
    "RichModelSummary",
    "Timer",
}
"""Lightning's callbacks that record, and change nothing that a cell computes."""

REFUSED = {
    "BaseFinetuning": "the optimiser has all trained parameters from the first step; write "
    "patterns in training.freeze",
    "BasePredictionWriter": "a cell makes no predictions with `predict`",
    "BatchSizeFinder": "data.batch_size is equal for all variants",
    "Checkpoint": "a cell resumes from checkpoints of its own, and checkpoints/weights.pt has the "
    "trained weights",
    "GradientAccumulationScheduler": "the number of micro-batches in a step is a key of `data`",
    "LearningRateFinder": "`tune` in a study searches the learning rate",
    "ModelPruning": "it renames parameters, so a stopped cell could not continue",
    "ProgressBar": "a cell shows its own progress",
    "SpikeDetection": "it ends the training, to leave batches out in another one",
    "StochasticWeightAveraging": "training.average averages the weights",
    "WeightAveraging": "training.average averages the weights",
}
"""Lightning's callbacks that cannot work in a cell, with the reason; subclasses are refused too."""


class CallbackConfig(Kind):
    """Family of the callbacks, whose hooks Lightning calls during the training of a cell."""

    @abstractmethod
    def build(self) -> "Callback":
        """Return the callback. Raises ConfigError, in one line, if it cannot run in a cell."""

    @property
    def is_observer(self) -> bool:
        """True if the callback changes no result, so that it is outside of the identity."""
        return False

    def try_out(self, signature: Any) -> None:
        self.build()


class ModuleCallback(OwnClass, CallbackConfig, kind="module"):
    """A callback class of Lightning, of another package, or of a user."""

    base_class: ClassVar[str] = "lightning.pytorch.callbacks:Callback"
    runs_foreign_code: ClassVar[bool] = True

    observes: bool | None = outside_identity(
        None,
        "true: the callback changes no result, so it is outside of the identity; null: true for "
        f"Lightning's {', '.join(sorted(OBSERVERS))}",
    )

    @property
    def is_observer(self) -> bool:
        if self.observes is not None:
            return self.observes
        module, _, name = self.target.partition(":")
        return module.startswith("lightning.") and name in OBSERVERS

    def build(self) -> "Callback":
        callback_class = self.load()
        self._require_usable(callback_class)
        try:
            built: Callback = callback_class(**self.arguments)
        except Exception as error:
            # A constructor of a user can raise any exception.
            raise ConfigError(explain_failure(error, f"import: {self.target}")) from error
        return built

    def _require_usable(self, callback_class: type) -> None:
        """Raise ConfigError for a class of Lightning that cannot work in a cell."""
        from lightning.pytorch import callbacks

        for name, reason in REFUSED.items():
            # Some of these classes exist in later versions of Lightning only.
            refused = getattr(callbacks, name, None)
            if refused is not None and issubclass(callback_class, refused):
                raise ConfigError(
                    f"import: {self.target}: a {name} cannot be used: {reason}; remove it"
                )
        ends_by_time = self.arguments.get("duration") is not None
        if ends_by_time and issubclass(callback_class, callbacks.Timer):
            raise ConfigError(
                f"arguments.duration: {self.target} would end a cell after as many steps as the "
                "machine is fast; remove it, or write training.max_steps"
            )
