"""Comparison of layers with their formulas in float64, before or instead of a measurement."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lit_attn.attention import reference
from lit_attn.attention.agreement import build_noisy_layer, differentiate, largest
from lit_attn.attention.parts import Part
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.schema.base import Kind
from lit_attn.schema.errors import ConfigError

LIMIT = 1e-6
"""Largest error of a value or gradient, relative to the largest number of the same tensor."""

SMALL = 1e-3
"""A gradient whose numbers are below this share of the largest gradient is compared with the share:
a gradient that is exactly zero has no relative error."""


class Size(NamedTuple):
    """Size of the compared layer; the formulas need far more memory than the layer."""

    batch: int = 2
    tokens: int = 33
    dim: int = 192
    heads: int = 12


class Comparison(NamedTuple):
    """Largest relative errors of the output and of all gradients of one layer."""

    preset: str
    is_causal: bool
    value: float
    gradient: float

    @property
    def holds(self) -> bool:
        # A comparison with NaN is false.
        return self.value <= LIMIT and self.gradient <= LIMIT

    def describe(self) -> str:
        """Return one line for a person."""
        order = "causal" if self.is_causal else "all pairs"
        verdict = "agrees with its formula" if self.holds else "DISAGREES with its formula"
        errors = f"largest error of values {self.value:.1e}, of gradients {self.gradient:.1e}"
        return f"{self.preset}, {order}: {verdict} ({errors})"


def compare(preset: str, size: Size, is_causal: bool) -> Comparison:
    """Return the comparison of the layer called `preset` with the formulas of its parts."""
    layer = build_noisy_layer(preset, size.dim, size.heads, torch.double)
    x = torch.randn(size.batch, size.tokens, size.dim, dtype=torch.double, requires_grad=True)
    leaves = [x, *layer.parameters()]
    by_layer = layer(x, is_causal=is_causal)
    by_formulas = reference.attention(layer, x, is_causal=is_causal)
    direction = torch.randn_like(by_layer)
    value, *gradients = differentiate(by_layer, leaves, direction)
    exact_value, *exact_gradients = differentiate(by_formulas, leaves, direction)
    value_error = _largest_number(value - exact_value) / _largest_number(exact_value)
    largest_gradient = max(_largest_number(gradient) for gradient in exact_gradients)
    gradient_errors = []
    for gradient, exact in zip(gradients, exact_gradients, strict=True):
        scale = max(_largest_number(exact), SMALL * largest_gradient)
        gradient_errors.append(_largest_number(gradient - exact) / scale)
    return Comparison(preset, is_causal, value_error, largest(gradient_errors))


def _largest_number(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def list_kinds() -> dict[str, set[str]]:
    """Return the names of the registered parts of each family."""
    kinds = {}
    for base in _list_families():
        kinds[base.family_name()] = set(base.family)
    return kinds


def add_presets(before: Mapping[str, Iterable[str]]) -> None:
    """Add a preset for each part that is not in `before`, as `residual=reflected`.

    The other parts of such a preset are those of the standard layer. A part that a preset already
    uses gets none. Raises ConfigError if a part has a choice without a default.
    """
    used: set[tuple[str, str]] = set()
    for spec in PRESETS.values():
        used |= {(family, part.kind) for family, part in spec.parts.items()}
    for base in _list_families():
        family = base.family_name()
        for kind in base.family:
            if kind in before[family] or (family, kind) in used:
                continue
            try:
                PRESETS[f"{family}={kind}"] = AttentionSpec.model_validate({family: kind})
            except ValueError as error:
                raise ConfigError(
                    f"--parts: {family} '{kind}' is no layer with its defaults; add a preset with "
                    f"your choices to the file, as PRESETS['{kind}'] = AttentionSpec(...)"
                ) from error


def _list_families() -> list[type[Kind]]:
    """Return the base classes of the families of parts."""
    return [base for base in Kind.__subclasses__() if issubclass(base, Part)]
