"""Padding on either side changes no output of mechanisms that count tokens."""

from typing import Any

import pytest
import torch
from helpers.attention_checks import make, tokens
from torch import Tensor

from lit_attn.attention.spec import PRESETS, AttentionSpec

LENGTH = 9
PADDING = 3

COUNTING: dict[str, dict[str, Any]] = {
    "ssmax": {"scale": "ssmax"},
    "t5": {"bias": "t5"},
    "alibi": {"bias": "alibi"},
    "window": {"window": 4},
    "window and ssmax": {"window": 4, "scale": "ssmax"},
    "forgetting": {"bias": "forgetting"},
    "selective": {"filter": "selective"},
    "multi-token": {"filter": "multi-token"},
    "convolution": {"convolution": "short"},
    "convolution of the output": {"convolution": {"kind": "short", "on": "output"}},
    "moba": {"filter": {"kind": "moba", "block": 2, "blocks": 2}},
    "moba of one block": {"filter": {"kind": "moba", "block": 4, "blocks": 1}},
    "mixture": {"similarity": "mixture"},
}
"""Mechanisms whose numbers depend on the places of tokens, or on how many there are."""


def pad(x: Tensor, side: str) -> tuple[Tensor, slice]:
    """Return one sequence with noise as padding, and the places of its tokens."""
    noise = torch.randn(1, PADDING, x.shape[-1], dtype=x.dtype)
    if side == "left":
        return torch.cat([noise, x], 1), slice(PADDING, None)
    return torch.cat([x, noise], 1), slice(LENGTH)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", COUNTING)
def test_a_padded_sequence_has_the_outputs_that_it_has_alone(name: str, side: str) -> None:
    spec = AttentionSpec.model_validate(COUNTING[name])
    layer = make(spec)
    x = tokens(LENGTH, batch=1)
    padded, places = pad(x, side)
    other = tokens(LENGTH + PADDING, batch=1, seed=3)
    batch = torch.cat([padded, other])
    present = torch.ones(2, 1, 1, LENGTH + PADDING, dtype=torch.bool)
    present[0] = False
    present[0, ..., places] = True
    order = torch.ones(LENGTH + PADDING, LENGTH + PADDING, dtype=torch.bool).tril()
    with torch.no_grad():
        for mask, is_causal in ((present, True), (present & order, False), (present, False)):
            is_ordered = is_causal or mask.shape[-2] > 1
            # A layer cannot see from a mask that its T5 buckets are those of a decoder.
            if name == "t5" and mask.shape[-2] > 1:
                continue
            alone = layer(x, is_causal=is_ordered)
            ours = layer(batch, mask, is_causal)
            torch.testing.assert_close(ours[:1, places], alone, rtol=1e-9, atol=1e-10)
            rest = layer(other, is_causal=is_ordered)
            torch.testing.assert_close(ours[1:], rest, rtol=1e-9, atol=1e-10)


def test_the_list_has_every_preset_with_a_bias_a_filter_or_a_scale() -> None:
    covered = set()
    for chosen in COUNTING.values():
        covered.update(AttentionSpec.model_validate(chosen).parts.values())
    kinds = {part.kind for part in covered}
    for name, spec in PRESETS.items():
        for family in ("bias", "filter", "scale", "convolution"):
            assert spec.parts[family].kind in kinds, name
