"""Average of the weights during a training, which is evaluated beside the weights."""

from typing import TYPE_CHECKING

from pydantic import Field

from lit_attn.schema.base import Config, consistency_check

if TYPE_CHECKING:
    from timm.utils import ModelEmaV3
    from torch import nn


class WeightAverage(Config):
    """Exponential moving average, or the mean of the weights after each of the last epochs."""

    decay: float | None = Field(None, gt=0, lt=1, description="decay of the moving average")
    epochs: int | None = Field(None, ge=2, description="last epochs of which the mean is taken")

    @consistency_check
    def _is_of_one_kind(self) -> None:
        """Refuse both or none of the averages."""
        if (self.decay is None) == (self.epochs is None):
            raise ValueError("set either `decay` or `epochs`")

    def build(self, network: "nn.Module") -> "ModelEmaV3":
        """Return a copy of `network`, for the averages of its parameters and buffers.

        Each `update` takes over 1 - `decay` of the weights. For the mean of epochs, the training
        sets this attribute before each update (`decay_of_mean`).
        """
        from timm.utils import ModelEmaV3

        average = ModelEmaV3(network, self.decay or 0.0).requires_grad_(False)
        # Lightning switches all modules to evaluation and back, and warns of those in that mode.
        return average.train()


def decay_of_mean(step: int, epoch_steps: int, unaveraged_epochs: int) -> float:
    """Return the decay after `step` that makes the average the mean of the weights of epochs.

    It is 1 within an epoch of `epoch_steps`, which keeps the average. The first `unaveraged_epochs`
    do not count.
    """
    epochs, steps_of_next = divmod(step, epoch_steps)
    if steps_of_next > 0:
        return 1.0
    averaged_before = max(0, epochs - 1 - unaveraged_epochs)
    return averaged_before / (averaged_before + 1)
