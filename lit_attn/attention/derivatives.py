"""Errors of derivatives that the operators with a hand-written gradient do not have.

Such an operator has first derivatives in reverse mode only. Without these errors, PyTorch would
take some of the missing derivatives for zero.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lit_attn.private_names.of_torch import hides_tangents, is_in_forward_mode

NO_SECOND = (
    "an operator whose gradient is written by hand has no second derivatives. Compute first "
    "derivatives only (without `create_graph=True`). Attention has them on the path ONE_CALL "
    "inside `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, and on the path FORMED with at most "
    "384 tokens; docs/mechanisms.md has the path of each layer. The loss of tokens has them with "
    "at most 2^26 logits"
)
NO_FORWARD_MODE = (
    "an operator whose gradient is written by hand has no derivatives in forward mode "
    "(torch.func.jvp, jacfwd, forward_ad). Use reverse mode (backward, torch.autograd.grad)"
)


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise RuntimeError if one of `tensors` carries a tangent of forward-mode derivatives."""
    if not is_in_forward_mode():
        return
    if hides_tangents():
        # A nested transform hides the tangents of the outer ones.
        raise RuntimeError(NO_FORWARD_MODE)
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(NO_FORWARD_MODE)


def refuse_second_derivatives(
    gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return `gradients` of a backward pass, whose own derivatives raise RuntimeError.

    `sources` are the tensors that the gradients depend on. `once_differentiable` of PyTorch raises
    no error if the gradient of the output is constant, as that of a sum is.
    """
    if not torch.is_grad_enabled():
        return list(gradients)
    existing = [gradient for gradient in gradients if gradient is not None]
    guarded = iter(_FirstOnly.apply(len(existing), *existing, *sources))
    return [None if gradient is None else next(guarded) for gradient in gradients]


def raise_no_second(*_: Any) -> Any:
    """Raise the error of second derivatives; the gradient of an operator that is a gradient."""
    raise RuntimeError(NO_SECOND)


class _FirstOnly(torch.autograd.Function):
    """Identity of the first `count` tensors, which depend on all; its gradient is an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(NO_SECOND)
