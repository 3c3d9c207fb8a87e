"""Choice of few blocks of keys for each query (MoBA)."""

from typing import Any

import pytest
import torch
from helpers.attention_checks import DIM, HEADS, assert_same, make, tokens
from helpers.flex_on_cpu import flex_by_formula, flex_of_torch, use_flex
from torch import Tensor

from lit_attn.attention import flex
from lit_attn.attention.filters import KeyBlocks
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.spec import AttentionSpec

CASES: list[dict[str, Any]] = [
    {},
    {"normaliser": "sigmoid"},
    {"normaliser": "differential", "bias": "alibi"},
    {"normaliser": "softpick", "compose": "query+key"},
    {"pair": "difference", "kv_heads": 2, "similarity": "mixture"},
    {"normaliser": "sink", "zz": True, "residual": "split"},
]


def choose(block: int = 3, blocks: int = 2, **others: Any) -> AttentionSpec:
    chosen = {"kind": "moba", "block": block, "blocks": blocks}
    return AttentionSpec.model_validate({"filter": chosen, **others})


@pytest.mark.parametrize("others", CASES, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "additive"])
def test_values_and_gradients_equal_the_reference(others: dict[str, Any], mask: str) -> None:
    n = 11
    arguments: dict[str, Any] = {"is_causal": mask in ("causal", "padding")}
    if mask == "padding":
        arguments["attn_mask"] = torch.ones(2, 1, 1, n, dtype=torch.bool)
        arguments["attn_mask"][1, ..., :4] = False
    if mask == "additive":
        arguments["attn_mask"] = torch.randn(1, HEADS, n, n, dtype=torch.double)
    assert_same(make(choose(**others)), tokens(n), **arguments)


def attend_by_mean_keys(q: Tensor, k: Tensor, v: Tensor, block: int, blocks: int) -> Tensor:
    """Return the sums (H, n, D) of MoBA's equations 2 to 6, with mean keys of complete blocks."""
    n = q.shape[1]
    count = -(-n // block)
    means = [k[:, start : start + block].mean(1) for start in range(0, n, block)]
    gates = q @ torch.stack(means, 1).mT
    own_blocks = torch.arange(n) // block
    for number in range(count):
        gates[:, own_blocks < number, number] = -torch.inf
        gates[:, own_blocks == number, number] = torch.inf
    best = gates.topk(min(blocks, count), -1).indices
    is_chosen = torch.zeros_like(gates, dtype=torch.bool).scatter(-1, best, True)
    visible = is_chosen.repeat_interleave(block, -1)[..., :n].tril()
    logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return logits.softmax(-1) @ v


@pytest.mark.parametrize("n", [1, 7, 12, 20])
@pytest.mark.parametrize(("block", "blocks"), [(3, 2), (4, 1), (2, 3), (4, 9)])
def test_mean_logits_choose_the_blocks_of_mean_keys(n: int, block: int, blocks: int) -> None:
    """The released code (MoonshotAI/MoBA, moba_naive.py) gave the same sums to 2e-15."""
    layer = make(choose(block, blocks))
    with torch.no_grad():
        inputs = layer.inputs(tokens(n, batch=1), None, True, None)
        heads = layer.similarity.attend(inputs)[0]
        q, k, v = inputs.q[0], inputs.keys[0, :, 0], inputs.v[0].transpose(0, 1)
        expected = attend_by_mean_keys(q, k, v, block, blocks)
    torch.testing.assert_close(heads, expected, rtol=1e-10, atol=1e-12)


def test_a_query_sees_its_own_block_alone_with_one_block() -> None:
    layer, x = make(choose(block=3, blocks=1)), tokens(9)
    changed = x.clone()
    changed[:, :6] += 1.0
    with torch.no_grad():
        kept = layer(x, is_causal=True)[:, 6:]
        torch.testing.assert_close(layer(changed, is_causal=True)[:, 6:], kept)
        changed[:, 6] += 1.0
        assert not torch.allclose(layer(changed, is_causal=True)[:, 7:], kept[:, 1:])


@pytest.mark.parametrize("others", CASES, ids=str)
@pytest.mark.parametrize("sizes", [[1] * 11, [4, 1, 1, 3, 2], [11]], ids=str)
def test_decoding_gives_the_output_of_the_sequence(
    others: dict[str, Any], sizes: list[int]
) -> None:
    layer, x = make(choose(**others)), tokens(11)
    cache = layer.new_cache()
    with torch.no_grad():
        pieces = [layer(piece, is_causal=True, cache=cache) for piece in x.split(sizes, 1)]
        expected = layer(x, is_causal=True)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-10, atol=1e-11)


def test_enough_blocks_give_the_standard_layer() -> None:
    layer = make(choose(block=3, blocks=4))
    standard = make(AttentionSpec())
    standard.load_state_dict(layer.state_dict())
    x = tokens(11)
    torch.testing.assert_close(layer(x), standard(x))


SKIPPING: list[dict[str, Any]] = [
    {},
    {"normaliser": "sink", "kv_heads": 2},
    {"similarity": "gaussian", "residual": "split", "zz": True},
    {"latent": {}, "scale": "ssmax"},
]
"""Layers of which one call of flex_attention skips the other blocks."""


@pytest.mark.parametrize("others", SKIPPING, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [2, 11, 17])
def test_one_call_with_a_mask_of_blocks_equals_the_reference(
    others: dict[str, Any], is_causal: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = use_flex(monkeypatch, flex_by_formula, flex.weighted_sums)
    assert_same(make(choose(**others)), tokens(n), is_causal=is_causal)
    assert calls
    assert all(scores.blocks is not None for scores in calls)


@pytest.mark.parametrize(
    ("others", "arguments"),
    [
        ({"bias": "alibi"}, {"is_causal": True}),
        ({"similarity": "mixture"}, {"is_causal": True}),
        ({"compose": "static"}, {"is_causal": True}),
        ({"normaliser": "differential"}, {"is_causal": True}),
        ({}, {"attn_mask": torch.ones(11, 11, dtype=torch.bool).triu(-3)}),
    ],
    ids=["bias", "two keys", "composition", "two softmaxes", "mask"],
)
def test_other_calls_choose_from_their_logits(
    others: dict[str, Any], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean key of a block is not enough, or the choice is not that of one softmax."""
    calls = use_flex(monkeypatch, flex_by_formula, flex.weighted_sums)
    assert_same(make(choose(**others)), tokens(11), **arguments)
    assert not calls


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("n", "size"), [(4, 4), (9, 3), (15, 2), (16, 8)])
def test_a_tile_is_skipped_if_its_queries_chose_none_of_its_keys(
    n: int, size: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "TILE", 4)
    generator = torch.Generator().manual_seed(n)
    count = -(-n // size)
    is_chosen = torch.rand(2, 3, n, count, generator=generator) > 0.7
    is_chosen |= (torch.arange(n) // size).unsqueeze(-1) == torch.arange(count)
    mask = flex.mask_of_blocks(KeyBlocks(is_chosen, size), n, is_causal)
    visible = is_chosen.repeat_interleave(size, -1)[..., :n]
    if is_causal:
        visible = visible.tril()
    tiles = -(-n // 4)
    padded = torch.nn.functional.pad(visible, (0, 4 * tiles - n, 0, 4 * tiles - n))
    needed = padded.unflatten(3, (tiles, 4)).unflatten(2, (tiles, 4)).any(5).any(3)
    assert (mask.to_dense().bool() >= needed).all()
    if not is_causal:
        assert torch.equal(mask.to_dense().bool(), needed)
    places = [torch.arange(number) for number in visible.shape]
    indices = [place.view(-1, *[1] * (3 - axis)) for axis, place in enumerate(places)]
    assert torch.equal(mask.mask_mod(*indices), visible)


@pytest.mark.slow
def test_a_compiled_call_with_a_mask_of_blocks_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.compiler.reset()
    layer = make(choose())
    expected = {n: layer(tokens(n), is_causal=True) for n in (7, 9, 11)}
    calls = use_flex(monkeypatch, flex_of_torch, flex.weighted_sums)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for n, output in expected.items():
        torch.testing.assert_close(compiled(tokens(n), is_causal=True), output)
    assert not calls


@pytest.mark.slow
def test_a_compiled_layer_computes_the_same_for_two_lengths() -> None:
    torch.compiler.reset()
    layer = make(choose())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for n in (7, 9, 11):
        x = tokens(n)
        expected = layer(x, is_causal=True)
        computed = compiled(x, is_causal=True)
        torch.testing.assert_close(computed, expected)
        weights = list(layer.parameters())
        torch.testing.assert_close(
            torch.autograd.grad(computed.sum(), weights),
            torch.autograd.grad(expected.sum(), weights),
        )


def test_layers_without_logits_or_one_order_are_refused() -> None:
    with pytest.raises(ValueError, match="window: filter 'moba' needs the logits of all earlier"):
        choose(window=4)
    with pytest.raises(ValueError, match="filter: linear keys never form the logits"):
        choose(similarity="linear")
    layer = attn_layer(choose())(DIM, HEADS)
    with pytest.raises(ValueError, match="filter: 'moba' orders the tokens of one sequence"):
        layer(torch.zeros(1, 3, DIM), memory=torch.zeros(1, 4, DIM))
