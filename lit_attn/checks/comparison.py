"""Comparison of a layer with its formula: values and gradients, with one unit of errors.

An error is the norm of a difference over the norm of the reference, in multiples of the precision's
eps. Some gradients are sensitive: a change of the inputs by one eps changes them by many. Their
errors are multiples of this change. Half precisions are autocast, as in training. The reference is
computed in float64 on the CPU.
"""

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_attn.attention import reference
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.checks.apart import Unavailable
from lit_attn.schema.mistakes import describe_check_failure
from lit_attn.tasks.tf32 import products_in_tf32

MOST_EPS = 30.0
"""Largest error of a value, or of a gradient, in multiples of the precision's eps."""

SMALL = 0.1
"""A gradient whose norm is below this share of the largest parameter's gradient is compared with
this share: a gradient that is exactly zero has no relative error."""

NOISE = 0.05
"""Standard deviation of the noise on all parameters, many of which start as zeros: a gate of zero
would hide a wrong term."""


class Precision(NamedTuple):
    """Arithmetic of a training: the type of autocast or None, and the rounding error eps."""

    name: str
    autocast: torch.dtype | None
    eps: float


FLOAT64 = Precision("float64", None, torch.finfo(torch.float64).eps)
FLOAT32 = Precision("float32", None, torch.finfo(torch.float32).eps)
TF32 = Precision("tf32", None, 2.0**-10)
BF16 = Precision("bf16", torch.bfloat16, torch.finfo(torch.bfloat16).eps)
FP16 = Precision("fp16", torch.float16, torch.finfo(torch.float16).eps)


class Shape(NamedTuple):
    """Size of a layer and its input."""

    batch: int
    tokens: int
    dim: int
    heads: int


class Case(NamedTuple):
    """One comparison of one layer.

    `has_mask`: the last tokens of the first sample are padding. `is_cross`: keys and values come
    from other tokens.
    """

    precision: Precision
    is_causal: bool
    shape: Shape
    has_mask: bool = False
    is_cross: bool = False


class LayerCheck(NamedTuple):
    """Outcome of one comparison: errors in multiples of eps, or the text of an exception."""

    preset: str
    path: str
    precision: str
    is_causal: bool
    value_error: float
    gradient_error: float
    exception: str = ""

    @property
    def error(self) -> float:
        """Larger one of both errors; NaN if one is NaN."""
        return largest([self.value_error, self.gradient_error])

    def describe(self) -> str:
        """Return one line for a person."""
        if self.failure:
            return f"FAILED {self.failure}"
        return f"{self.case}: holds, error {self.error:.1f} eps"

    @property
    def case(self) -> str:
        """Preset, precision and order."""
        order = "causal" if self.is_causal else "not causal"
        return f"{self.preset}, {self.precision}, {order}"

    @property
    def failure(self) -> str:
        """Why the comparison fails, or an empty text."""
        if self.exception:
            return f"{self.case}: {self.exception}"
        for name, error in (("value", self.value_error), ("gradient", self.gradient_error)):
            if not math.isfinite(error):
                return f"{self.case}: the {name} is not a number"
            if error > MOST_EPS:
                return f"{self.case}: the {name} is off by {error:,.0f} eps (limit {MOST_EPS:.0f})"
        return ""


def build_noisy_layer(
    chosen: str | type[Attention],
    dim: int,
    heads: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Attention:
    """Return the layer of a preset or class in evaluation mode, without parameters that are zero.

    Random numbers start from seed 0. `options` are further arguments of the layer.
    """
    torch.manual_seed(0)
    layer_class = attn_layer(chosen) if isinstance(chosen, str) else chosen
    layer = layer_class(dim, heads, **options).to(dtype).eval()
    number_layers(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(NOISE * torch.randn_like(parameter))
    return layer


def check_layer(
    name: str, path: str, layer: Attention, case: Case, device: torch.device
) -> LayerCheck:
    """Return the comparison of one layer with its reference."""
    x, direction = make_tokens(case.shape)
    parts = (name, path, case.precision.name, case.is_causal)
    eps = case.precision.eps
    expected = compute_reference(layer, x, direction, case)
    changed = compute_reference(layer, x, direction, case, noise=eps)
    units = [max(eps, change) for change in relative_errors(changed, expected)]
    try:
        actual = compute_layer(layer, x, direction, case, device)
    except torch.OutOfMemoryError as error:
        # Another program uses the memory of the GPU.
        raise Unavailable(f"{name}, {case.precision.name}: out of memory") from error
    except Exception as error:
        reason = describe_check_failure(error)
        return LayerCheck(*parts, math.inf, math.inf, exception=reason)
    errors = []
    for difference, unit in zip(relative_errors(actual, expected), units, strict=True):
        errors.append(difference / unit)
    # The first tensor is the output, and all others are gradients.
    return LayerCheck(*parts, errors[0], largest(errors[1:]))


def make_tokens(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return an input and a direction of the gradient, both (B, n, d) in float32."""
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch, shape.tokens, shape.dim)
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


def make_arguments(layer: Attention, case: Case, device: torch.device | str) -> dict[str, Any]:
    """Return the arguments of the layer's call beside its tokens."""
    batch, tokens, dim, _ = case.shape
    mask = None
    if case.has_mask:
        mask = torch.ones(batch, 1, 1, tokens, dtype=torch.bool, device=device)
        mask[0, ..., -(tokens // 3) :] = False
    memory = None
    if case.is_cross:
        generator = torch.Generator().manual_seed(3)
        memory = torch.randn(batch, tokens, dim, generator=generator)
        memory = memory.to(device, layer.qkv.weight.dtype)
    return {"is_causal": case.is_causal, "attn_mask": mask, "memory": memory}


def compute_reference(
    layer: Attention, x: Tensor, direction: Tensor, case: Case, noise: float = 0.0
) -> list[Tensor]:
    """Return the output of the formulas and all its gradients, in float64 on the CPU.

    `noise` is the standard deviation of a relative change of the input and of all parameters.
    """
    exact = copy.deepcopy(layer).cpu().double()
    inputs = x.double()
    if noise:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for tensor in (inputs, *exact.parameters()):
                change = torch.randn(tensor.shape, dtype=torch.double, generator=generator)
                tensor.mul_(1 + noise * change)
    inputs.requires_grad_()
    out = reference.attention(exact, inputs, **make_arguments(exact, case, "cpu"))
    return differentiate(out, [inputs, *exact.parameters()], direction)


def compute_layer(
    layer: Attention, x: Tensor, direction: Tensor, case: Case, device: torch.device
) -> list[Tensor]:
    """Return the output of the layer on the device and all its gradients, in float64 on the CPU."""
    inputs = x.to(device, layer.qkv.weight.dtype).requires_grad_()
    named = make_arguments(layer, case, device)
    with in_precision(case.precision, device):
        out = layer(inputs, **named)
        results = differentiate(out, [inputs, *layer.parameters()], direction)
    return [tensor.cpu().double() for tensor in results]


@contextlib.contextmanager
def in_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute with the arithmetic of `precision`."""
    is_half = precision.autocast is not None
    autocast = torch.autocast(device.type, precision.autocast, enabled=is_half)
    with products_in_tf32(precision is TF32), autocast:
        yield


def relative_errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the relative errors of the output, the input's gradient and the parameters' gradients.

    All tensors are in this order.
    """
    norms = [tensor.norm().item() for tensor in expected]
    smallest = SMALL * max(norms[2:])
    norms[2:] = [max(norm, smallest) for norm in norms[2:]]
    errors = []
    for one, other, norm in zip(actual, expected, norms, strict=True):
        errors.append((one - other).norm().item() / norm)
    return errors


def differentiate(output: Tensor, leaves: Sequence[Tensor], direction: Tensor) -> list[Tensor]:
    """Return `output` and the gradients of its product with `direction` for each of `leaves`.

    The gradient of a leaf that `output` does not depend on is zero.
    """
    gradients = torch.autograd.grad(
        output, leaves, direction.to(output), allow_unused=True, materialize_grads=True
    )
    return [output.detach(), *gradients]


def largest(errors: Sequence[float]) -> float:
    """Return the largest error, or NaN if one is NaN."""
    if any(math.isnan(error) for error in errors):
        return math.nan
    return max(errors)
