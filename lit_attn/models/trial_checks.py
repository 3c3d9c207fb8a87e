"""Checks of what a user's code computes: which inputs may change which outputs.

A part, a layer or a model of a user may compute something else than its author thinks: a mask that
is one token off, or a mean over the batch, changes results without an error. `Trial` has the checks
that layers (lit_attn.models.own_trial) and networks (lit_attn.models.network_trial) share.

Shapes: B batch, n tokens.
"""

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import locate_code

NOISE = 0.05
"""Standard deviation of the noise on all parameters, many of which start as zeros: a gate of zero
would hide what is behind it."""

TRIAL_TOLERANCE = 1e-4
"""Largest difference, relative to the largest output, that counts as rounding in float32."""

Region: TypeAlias = tuple[Any, ...]
"""Index of the outputs that a change of the inputs must leave as they are."""


class Trial(ABC):
    """Trial of a module with outputs (B, n, ...) for inputs (B, n, ...).

    Each check raises ConfigError if the module lacks a property. `x` are the inputs of the current
    length, and `output` are the outputs for them.
    """

    module: nn.Module
    x: Tensor
    output: Tensor
    is_causal: bool
    seed = 0
    """Start of the random numbers of each call in training, such as those of dropout."""

    @abstractmethod
    def draw(self, tokens: int) -> Tensor:
        """Return random inputs of two samples."""

    @abstractmethod
    def redraw(self, x: Tensor) -> Tensor:
        """Return other random values in the shape of `x`."""

    @abstractmethod
    def call(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """Return the outputs for `x`, as the model calls the module; `present` hides padding."""

    @abstractmethod
    def refuse(self, reason: str, region: Region = ()) -> ConfigError:
        """Return the error that names the user's code, whose outputs in `region` are wrong."""

    def start(self, tokens: int) -> None:
        """Compute the outputs for new inputs of another length."""
        self.x = self.draw(tokens)
        self.output = self.call(self.x)

    def check_dependence(self) -> None:
        """Require that the module reads only what it may, for the current inputs and mode."""
        self.check_samples()
        if not self.is_random():
            self.check_batch()
        if self.is_causal:
            self.check_order()

    def is_random(self) -> bool:
        """Return True if the outputs depend on random numbers, as dropout does in training."""
        self.seed = 1
        output = self.call(self.x)
        self.seed = 0
        return differ(output, self.output)

    def require_equal(self, output: Tensor, region: Region, reason: str) -> None:
        """Require that `output` equals the present outputs in `region`."""
        if differ(output[region], self.output[region]):
            raise self.refuse(reason, region)

    def check_samples(self) -> None:
        """Require that a sample does not change the output of another one."""
        changed = self.x.clone()
        changed[1] = self.redraw(changed[1])
        reason = "a sample of a batch changes the output of another sample"
        self.require_equal(self.call(changed), (slice(0, 1),), reason)

    def check_batch(self) -> None:
        """Require that a sample has the same output in a batch of its own."""
        reason = "the size of the batch changes the output of a sample"
        self.require_equal(self.call(self.x[:1]), (slice(0, 1),), reason)

    def check_order(self) -> None:
        """Require that a later token does not change an earlier output."""
        tokens = self.x.shape[1]
        for first in (1, tokens // 2, tokens - 1):
            changed = self.x.clone()
            changed[:, first:] = self.redraw(changed[:, first:])
            region = (slice(None), slice(0, first))
            self.require_equal(self.call(changed), region, self.explain_order())

    def explain_order(self) -> str:
        """Return why a later token must not change an earlier output."""
        return "this task needs causal order, but a later token changes an earlier output"


def differ(output: Tensor, expected: Tensor) -> bool:
    """Return True if two outputs differ by more than rounding, or if only one of them is finite."""
    limit = TRIAL_TOLERANCE * (1 + float(expected.abs().max()))
    # A comparison with NaN is false.
    return not bool((output - expected).abs().max() <= limit)


def add_noise(module: nn.Module) -> None:
    """Change every parameter, so that none of them is zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(NOISE * torch.randn_like(parameter))


def name_class(member: type) -> str:
    """Return the name of a module's class with the file and line of its `forward`."""
    place = locate_code(vars(member).get("forward", member))
    return f"class {member.__name__}" + (f", {place}" if place else "")
