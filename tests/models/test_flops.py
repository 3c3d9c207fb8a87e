"""FLOPs of networks with equal and with different attention layers."""

from typing import Any

import pytest
import torch
from helpers import gpt_cases
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import PRESETS
from lit_attn.models.factory import count_flops


def build(preset: str) -> nn.Module:
    """Return a network whose five layers have two different windows, if the preset has windows."""
    spec = PRESETS[preset]
    has_windows = spec.similarity.kind != "linear" and spec.filter.kind == "none"
    windows = (3, None) if has_windows else (None,)
    # The latents of a layer have norms of their own.
    has_norms = spec.latent is None
    network = gpt_cases.network(
        "transformer++", attention=spec, windows=windows, qk_norm=has_norms, depth=5
    )
    return network.eval().requires_grad_(False)


# Layers of each path, with values of the first layer, with a latent, and with blocks of keys.
PRESETS_COUNTED = ["standard", "belief2", "mgk", "linear", "dcmha", "value-residual-learned"]
PRESETS_COUNTED += ["mla", "moba"]


@pytest.mark.parametrize("preset", PRESETS_COUNTED)
def test_equal_layers_are_computed_once_and_counted_each_time(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = torch.zeros(1, gpt_cases.CONTEXT, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        build(preset)(sample)
    computed = []
    forward = Attention.forward

    def follow(layer: Attention, *inputs: Any) -> torch.Tensor:
        shapes = tuple(parameter.shape for parameter in layer.parameters())
        computed.append((layer.spec, shapes))
        return forward(layer, *inputs)

    monkeypatch.setattr(Attention, "forward", follow)
    with torch.no_grad():
        assert count_flops(build(preset), (sample,)) == counter.get_total_flops()
    assert computed
    # A first layer has no factors of the first layer's values.
    assert len(computed) == len(set(computed))
    assert len({spec for spec, _ in computed}) <= 2
