"""Parts that learn from statistics of a training step, such as the M-step of a mixture's prior.

A training step can have several forward passes of a layer: micro-batches whose gradients are
accumulated, and the parts of a batch on several processes. Activation checkpointing computes a
layer once more in the backward pass, which must not count, and must use the same values. So a
part only adds up its statistics in a forward pass, and changes its buffers once, in `end_step`.

By default the end of each backward pass is the end of a step. A training loop that accumulates
gradients or trains on several processes calls `leave_steps_to_loop` once, and `end_step` after
every step of its optimiser. The training of this package does both.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.private_names.of_torch import (
    call_after_backward,
    is_in_backward,
    outside_compiled_code,
)

Reduce = Callable[[Tensor], object]
"""Function that replaces a tensor by its sum over all processes, in place."""


class Learner(nn.Module):
    """Base of the parts that may learn from statistics; by default a part has none."""

    ends_steps = True
    """True if the end of a backward pass ends a step; False if the training loop ends it."""

    observes_compiled = False
    """True if compiled code can contain `observe`, which then multiplies what it adds by
    `one_unless_repeated`."""

    @property
    def has_statistics(self) -> bool:
        """True if training forward passes must be observed."""
        return False

    def end_step(self, reduce: Reduce | None = None) -> None:
        """Change the buffers by the statistics since the last step, summed with `reduce`."""


def leave_steps_to_loop(network: nn.Module) -> None:
    """Let the training loop end the steps of all parts of `network`, with `end_step`."""
    for module in network.modules():
        if isinstance(module, Learner):
            module.ends_steps = False


def end_step(network: nn.Module, reduce: Reduce | None = None) -> None:
    """End a training step of all parts of `network`; call it after each step of the optimiser.

    `reduce` sums the statistics over the processes that share a batch; every process calls this.
    """
    for part in find_learners(network):
        part.end_step(reduce)


def find_learners(network: nn.Module) -> list[Learner]:
    """Return the parts of `network` that learn from statistics."""
    parts = [module for module in network.modules() if isinstance(module, Learner)]
    return [part for part in parts if part.has_statistics]


# In compiled code, the first answer of `is_in_backward` would be a constant.
@outside_compiled_code
def observe_once(observe: Callable[..., None], *arguments: Any) -> None:
    """Call `observe` in a forward pass, but not in its repetition for the gradient."""
    if not is_in_backward():
        observe(*arguments)


@torch.library.custom_op("lit_attn::one_unless_repeated", mutates_args=())
def one_unless_repeated(like: Tensor) -> Tensor:
    """Return 1, or 0 in the repetition of a forward pass for the gradient, as compiled code runs.

    The scalar has the type and device of `like`.
    """
    return like.new_full((), 0.0 if is_in_backward() else 1.0)


@one_unless_repeated.register_fake
def _(like: Tensor) -> Tensor:
    return like.new_empty(())


@outside_compiled_code
def end_step_after_backward(part: Learner, out: Tensor) -> None:
    """Call `part.end_step` at the end of the backward pass that reaches `out`.

    The end is that of the whole backward pass: activation checkpointing may compute the layer
    again until then.
    """

    def end_later(gradient: Tensor | None = None) -> None:
        call_after_backward(part.end_step)

    if is_in_backward():
        # The first forward pass of a reentrant checkpoint has no graph.
        end_later()
    elif out.requires_grad:
        out.register_hook(end_later)
