"""A layer says exactly when some of its parameters get no gradient."""

import contextlib
from typing import Any

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, HEADS, tokens
from pydantic import ValidationError
from torch import nn

from lit_attn.attention.layer import attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.attention.spec import AttentionSpec
from lit_attn.training.several_devices import choose_ddp_options

NORMED: dict[str, Any] = {"qk_norm": True, "norm_layer": nn.LayerNorm}


def with_unused_heads() -> list[AttentionSpec]:
    """Return each choice with a residual part that does not use the heads, if it is valid."""
    specs = []
    for spec in attention_cases.covering_specs():
        choices = {**dict(spec), "residual": "value", "filter": "none", "window": None}
        with contextlib.suppress(ValidationError):
            specs.append(AttentionSpec.model_validate(choices))
    return specs


SPECS = [*attention_cases.covering_specs(), *attention_cases.covering(with_unused_heads())]


@pytest.mark.parametrize("spec", SPECS, ids=attention_cases.label)
@pytest.mark.parametrize("options", [{}, NORMED], ids=["", "normed"])
def test_the_strategy_searches_for_unused_parameters_where_there_are_some(
    spec: AttentionSpec, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    for lsa in (False, True):
        if lsa and not spec.similarity.has_logits:
            continue
        layer = attn_layer(spec, local_self_attention=lsa)(DIM, HEADS, **options).double()
        number_layers(layer)
        layer(tokens(5)).sum().backward()
        has_unused = any(parameter.grad is None for parameter in layer.parameters())
        assert layer.leaves_parameters_unused == has_unused
        network = nn.Sequential(nn.Linear(DIM, DIM), layer)
        assert choose_ddp_options(network, 1)["find_unused_parameters"] == has_unused


def test_frozen_parameters_are_not_missing() -> None:
    layer = attn_layer({"residual": "value"})(DIM, HEADS, qk_norm=True, norm_layer=nn.LayerNorm)
    assert layer.leaves_parameters_unused
    layer.q_norm.requires_grad_(False)
    layer.k_norm.requires_grad_(False)
    assert not layer.leaves_parameters_unused
