"""Losses of the classification tasks: the configuration of each, and the function it builds."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from lit_attn.schema.base import Kind

if TYPE_CHECKING:
    from torch import Tensor


class Loss(Kind):
    """Base of the losses; `loss` without a kind is cross-entropy."""

    default_kind: ClassVar[str] = "cross-entropy"

    @abstractmethod
    def build(self) -> "Callable[[Tensor, Tensor], Tensor]":
        """Return a function from logits (B, classes) and targets to the mean loss, a scalar.

        Targets are class indices (B,), or probabilities (B, classes) after MixUp or CutMix.
        """


class CrossEntropyLoss(Loss):
    """Cross-entropy."""

    kind: Literal["cross-entropy"] = "cross-entropy"
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of the target that is spread over all classes"
    )

    def build(self) -> "Callable[[Tensor, Tensor], Tensor]":
        """Return torch's cross-entropy."""
        from torch.nn import functional as F

        return partial(F.cross_entropy, label_smoothing=self.label_smoothing)
