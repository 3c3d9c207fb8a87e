"""`Attention.record` returns what the reference computes, for every part and every mask."""

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import make, tokens
from torch import Tensor

from lit_attn.attention import reference
from lit_attn.attention.layer import Attention
from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec

every_choice = pytest.mark.parametrize(
    "spec", attention_cases.covering_specs(), ids=attention_cases.label
)


def expected(
    layer: Attention, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Return the weights of all queries (B, Q H, n, m) by the reference."""
    present = None if attn_mask is None else attn_mask.any(-2).any(1)
    q, keys, _ = reference.project(layer, x, None, present=present)
    attended = reference.may_attend(
        x.shape[1], layer.spec.window, layer.local_self_attention, is_causal
    )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attended = attended & attn_mask
    if isinstance(layer.spec.similarity, LinearConfig):
        return layer.spec.similarity.reference_weights(
            layer.similarity, q, keys, attended, is_causal
        )
    return reference.weights(layer, x, q, keys, attended, attn_mask, is_causal=is_causal)


@every_choice
@pytest.mark.parametrize("is_causal", [False, True])
def test_record_equals_the_reference_and_the_forward_pass(
    spec: AttentionSpec, is_causal: bool
) -> None:
    layer, x = make(spec), tokens(9)
    record = layer.record(x, is_causal=is_causal)
    of_queries = expected(layer, x, is_causal=is_causal)
    weights = spec.pair.reference(layer.pair, x, of_queries)
    torch.testing.assert_close(record.weights, weights, rtol=1e-9, atol=1e-10)
    values = record.values.transpose(1, 2).repeat_interleave(spec.pair.queries, 1)
    heads = spec.normaliser.reference_heads(layer.normaliser, of_queries @ values)
    heads = spec.filter.reference_heads(layer.filter, heads)
    heads = spec.pair.reference(layer.pair, x, heads).transpose(1, 2)
    torch.testing.assert_close(record.heads, heads, rtol=1e-9, atol=1e-10)
    _, _, v = reference.project(layer, x, None)
    torch.testing.assert_close(values, v)
    out = layer.output(x, record.heads, record.values, record.inputs.masks)
    torch.testing.assert_close(out, layer(x, is_causal=is_causal), rtol=1e-9, atol=1e-10)


@every_choice
def test_record_equals_the_forward_pass_with_padding(spec: AttentionSpec) -> None:
    layer, x = make(spec), tokens(9)
    present = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    present[1, ..., 6:] = False
    record = layer.record(x, present)
    weights = layer.spec.pair.reference(layer.pair, x, expected(layer, x, present))
    torch.testing.assert_close(record.weights, weights, rtol=1e-9, atol=1e-10)
    assert not record.weights[1, ..., 6:].any()
    out = layer.output(x, record.heads, record.values, record.inputs.masks)
    torch.testing.assert_close(out, layer(x, present), rtol=1e-9, atol=1e-10)


def test_record_equals_the_forward_pass_beyond_one_chunk() -> None:
    """The forward pass computes so many tokens in chunks."""
    layer, x = make(PRESETS["dcmha"]), tokens(400, batch=1)
    record = layer.record(x, is_causal=True)
    out = layer.output(x, record.heads, record.values, record.inputs.masks)
    torch.testing.assert_close(out, layer(x, is_causal=True), rtol=1e-8, atol=1e-9)


def test_record_applies_no_dropout_and_changes_no_buffer() -> None:
    layer, x = make(PRESETS["mgk-soft-e"]).train(), tokens(9)
    layer.attn_drop = 0.5
    prior = layer.similarity.prior.clone()
    state = torch.get_rng_state()
    first, second = layer.record(x), layer.record(x)
    assert torch.equal(first.weights, second.weights)
    assert torch.equal(layer.similarity.prior, prior)
    assert torch.equal(torch.get_rng_state(), state)
