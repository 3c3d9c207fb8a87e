"""Tests of the short convolutions on q, k, v and the output."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import gpt_cases
from helpers.attention_checks import DIM, HEADS, assert_same, make, tokens
from pydantic import ValidationError
from torch import nn
from torch.nn import functional as F

from lit_attn.attention.convolution import ShortConvolutionConfig
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.columns import FeatureTransformerConfig
from lit_attn.signatures import ColumnLabels


def spec_of(**choices: Any) -> AttentionSpec:
    return AttentionSpec(convolution=ShortConvolutionConfig(**choices))


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_convolution_is_a_depthwise_convolution_of_torch(
    width: int, skip: bool, silu: bool
) -> None:
    """flash-linear-attention's ShortConvolution and Canon layers are this nn.Conv1d."""
    layer = make(spec_of(width=width, skip=skip, activation="silu" if silu else "none", on="k"))
    released = nn.Conv1d(DIM, DIM, width, groups=DIM, padding=width - 1, bias=False).double()
    released.weight.data.copy_(layer.convolution.weights["k"])
    x = tokens(9)
    expected = released(x.transpose(1, 2))[..., :9].transpose(1, 2)
    if silu:
        expected = F.silu(expected)
    if skip:
        expected = x + expected
    torch.testing.assert_close(layer.convolution("k", x, None, None), expected)


def test_a_token_reads_itself_and_the_tokens_before_it() -> None:
    layer = make(spec_of(width=3, on="output", skip=False))
    x = torch.zeros(1, 6, DIM, dtype=torch.double)
    x[0, 2] = 1
    mixed = layer.convolution("output", x, None, None)
    reads = mixed.abs().sum(-1)[0] > 0
    assert reads.tolist() == [False, False, True, True, True, False]


def test_zero_weights_with_a_skip_connection_are_the_standard_layer() -> None:
    layer = make(spec_of(on="qkv"))
    for weight in layer.convolution.weights.values():
        nn.init.zeros_(weight)
    standard = make(AttentionSpec())
    standard.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(tokens(7)), standard(tokens(7)))


@pytest.mark.parametrize("on", ["qkv", "output"])
def test_a_mask_of_heads_or_without_a_batch_equals_the_reference(on: str) -> None:
    for shape in [(9, 9), (HEADS, 9, 9), (2, 1, 9, 9), (1, HEADS, 9, 9)]:
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.3
        mask[..., 4] = False
        assert_same(make(spec_of(on=on)), tokens(9), attn_mask=mask)


def test_padding_on_the_left_changes_no_other_token() -> None:
    layer = make(spec_of(on="qkv"))
    x = tokens(9)
    present = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    present[..., :4] = False
    out = layer(x, attn_mask=present, is_causal=True)[:, 4:]
    torch.testing.assert_close(out, layer(x[:, 4:], is_causal=True))


@pytest.mark.parametrize("on", ["qkv", "output"])
@pytest.mark.parametrize("attention", [{}, {"similarity": "linear"}, {"kv_heads": 1}], ids=str)
def test_a_model_decodes_with_a_cache_of_the_width(on: str, attention: dict[str, Any]) -> None:
    """A cache has the last w - 1 vectors, also beside the running sums of linear keys."""
    spec = AttentionSpec.model_validate(
        {**attention, "convolution": {"kind": "short", "on": on, "width": 3}}
    )
    network = gpt_cases.network("casted", attention=spec)
    ids = gpt_cases.tokens()
    caches = network.trunk.new_caches()
    pieces = []
    with torch.no_grad():
        for start, stop in pairwise([0, 1, 2, 9, 10, gpt_cases.CONTEXT]):
            pieces.append(network(ids[:, start:stop], caches))
        torch.testing.assert_close(torch.cat(pieces, 1), network(ids), rtol=1e-9, atol=1e-10)
    names = ["output"] if on == "output" else ["q", "k", "v"]
    for name in names:
        assert caches[0].totals[f"convolution {name}"].shape[1] == 2


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"convolution": {"kind": "short", "width": 1}}, "greater than or equal to 2"),
        (
            {"convolution": {"kind": "short", "on": "q"}, "residual": "value"},
            "convolution.on: q has no effect",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AttentionSpec.model_validate(choices)


def test_documents_and_memories_refuse_a_convolution() -> None:
    spec = AttentionSpec(convolution="short")
    assert spec.find_document_problem() == (
        "convolution: 'short' reads the last tokens of the document before"
    )
    assert spec.find_cross_problem().startswith(
        "convolution: 'short' reads neighbouring tokens of one sequence"
    )


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"convolution": "short"}, "attention.convolution: 'short' reads the tokens before"),
        ("alibi", "attention.bias: 'alibi' adds a distance of two tokens, and columns have no"),
        ("t5", "attention.bias: 't5' adds a number for the distance"),
        ("forgetting", "attention.bias: 'forgetting' adds the gates between two tokens"),
        ("selective", "attention.filter: 'selective' changes logits by those of the queries"),
        ("multi-token", "attention.filter: 'multi-token' changes logits by those of the quer"),
        ({"window": 2}, "attention.window: columns have no order"),
        ({"layers": [{"last": 1, "use": "t5"}]}, "attention.bias: 't5' adds a number"),
    ],
    ids=str,
)
def test_columns_refuse_what_needs_an_order(attention: Any, message: str) -> None:
    model = FeatureTransformerConfig(dim=8, depth=2, heads=2, ffn={"width": 8}, attention=attention)
    with pytest.raises(ValueError, match=message):
        model.check(ColumnLabels(3, (4, 5), classes=2))
