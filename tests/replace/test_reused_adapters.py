"""Adapters of other layers: what looks like attention, and what reuses an adapter by its name."""

from typing import Any

import pytest
import torch
from helpers.replaced_models import Renamed, assert_refused, layers
from torch import nn

from lit_attn import replace_attention
from lit_attn.replace.transformers_layers import Hub

RENAMED = "helpers.replaced_models:Renamed"


class TokenMixer(nn.Module):
    """Attention whose class has a name of its own kind."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(8, 8))


@pytest.mark.parametrize("names", [("qkv",), ("q", "k", "v"), ("q_proj", "k_proj", "v_proj")])
def test_attention_is_recognised_by_its_projections(names: tuple[str, ...]) -> None:
    """A layer whose class has an unusual name must not remain without a word."""
    model = nn.Sequential(nn.MultiheadAttention(8, 2), TokenMixer(names))
    assert_refused(model, "standard", r": 1 \(TokenMixer\): it has projections as attention")
    assert layers(replace_attention(model, "standard", skip="1")) == ["0.layer"]


@pytest.mark.parametrize("adapter", ["Hub", "lit_attn.replace.transformers_layers:Hub", Hub])
def test_an_adapter_is_reused_by_its_name(adapter: Any) -> None:
    model = nn.Sequential(Renamed())
    x = torch.randn(2, 5, 16)
    assert_refused(model, "standard", r"0 \(Renamed\): it has projections as attention has")
    expected = model(x)[0]
    replace_attention(model, "standard", adapters={RENAMED: adapter})
    assert layers(model) == ["0.layer"]
    torch.testing.assert_close(model(x)[0], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip": 0.1}, r"its option `clip` \(0\.1\) is unknown to the adapter Hub"),
        ({"heads_factor": 2.0}, "without a mask, it differs from the standard layer by "),
        ({"v_proj": nn.Linear(16, 32)}, "its projections to .* 16, 16 and 32 outputs"),
        ({"q_norm": nn.LayerNorm(4)}, r"its `q_norm` has weights of shape \(4,\), neither"),
        ({"k_norm": nn.Softmax(-1)}, r"its `k_norm` has weights of shape \(0,\), neither"),
    ],
)
def test_a_reused_adapter_refuses_what_it_does_not_know(
    change: dict[str, Any], message: str
) -> None:
    model = nn.Sequential(Renamed())
    for name, value in change.items():
        setattr(model[0], name, value)
    adapters = {RENAMED: "Hub"}
    assert_refused(model, "standard", rf"0 \(Renamed\): {message}", adapters=adapters)


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({RENAMED: "Hubb"}, "adapters: there is no adapter 'Hubb'; did you mean 'Hu"),
        ({"mine:Attention": "Hub"}, "adapters: Sequential has no module of class 'mine:Attention'"),
    ],
)
def test_a_mistake_in_adapters_is_one_line(adapters: dict[str, Any], message: str) -> None:
    assert_refused(nn.Sequential(Renamed()), "standard", message, adapters=adapters)


def test_an_adapter_of_another_family_does_not_fit() -> None:
    model = nn.Sequential(nn.Identity(), Renamed())
    message = r"1 \(Renamed\): the adapter Falcon does not fit this class: 'Renamed' object has"
    assert_refused(model, "standard", message, adapters={RENAMED: "Falcon"})


class BlockWithAttention(nn.Module):
    """Block whose name matches that of attention, as that of Zamba 2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.own_attention = OwnAttention()


class OwnAttention(TokenMixer):
    """Attention without adapter."""

    def __init__(self) -> None:
        super().__init__(("q_proj", "k_proj", "v_proj"))


def test_the_attention_in_a_block_is_named_and_not_the_block() -> None:
    message = r": 0\.own_attention \(OwnAttention\): its class has no"
    assert_refused(nn.Sequential(BlockWithAttention()), "standard", message)
