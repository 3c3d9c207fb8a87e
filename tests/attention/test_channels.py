"""Gates, biases of pairs, scales, maps and normalisers: values that were computed by hand."""

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.attention_checks import DIM, HEADS, make, tokens
from torch import Tensor, nn

from lit_attn.attention.bias import list_slopes
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.masks import Masks
from lit_attn.attention.network import number_layers
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.schema.errors import ConfigError

N = 4


def build(chosen: Any) -> Attention:
    """Return a float64 layer with its initial parameters, without biases of its projections."""
    torch.manual_seed(0)
    layer: Attention = attn_layer(chosen)(DIM, HEADS, proj_bias=False).double().eval()
    return layer


def standard_like(layer: Attention) -> Attention:
    """Return the standard layer with the projections of `layer`."""
    standard = build("standard")
    standard.load_state_dict(
        {name: layer.state_dict()[name] for name in standard.state_dict()}, strict=True
    )
    return standard


def assert_standard(layer: Attention, factor: float = 1.0, **options: Any) -> None:
    x = tokens(N)
    torch.testing.assert_close(layer(x, **options), factor * standard_like(layer)(x, **options))


def weights_of(chosen: Any, logits: list[float]) -> list[float]:
    """Return the weights of one query with these logits, by the normaliser of a layer."""
    layer = build(chosen)
    row = torch.tensor(logits, dtype=torch.double).expand(1, HEADS, 1, len(logits))
    return layer.normaliser(row, None)[0, 0, 0].tolist()


@pytest.mark.parametrize("name", ["gated", "gated-heads"])
def test_a_gate_of_zeros_halves_the_output(name: str) -> None:
    layer = build({"preset": name, "gate": {"init": "zeros"}})
    assert_standard(layer, 0.5)
    assert_standard(build({"preset": name, "gate": {"init": "zeros", "factor": 2.0}}))


@pytest.mark.parametrize("kind", ["element", "head"])
def test_an_open_gate_is_the_standard_layer(kind: str) -> None:
    assert_standard(build({"gate": {"kind": kind, "bias": 40.0}}))


def test_a_gate_reads_the_first_columns() -> None:
    layer = make(AttentionSpec.model_validate({"gate": {"kind": "head", "columns": 3}}))
    assert layer.gate.linear.weight.shape == (HEADS, 3)
    x = tokens(N)
    project = layer.gate(x, nn.Identity())
    signal = torch.ones(2, N, DIM, dtype=torch.double)
    changed = x.clone()
    changed[..., 3:] = 7.0
    torch.testing.assert_close(project(signal), layer.gate(changed, nn.Identity())(signal))
    with pytest.raises(
        ValueError, match=f"gate: columns: 99 exceeds the width of the layer, {DIM}"
    ):
        build({"gate": {"kind": "head", "columns": 99}})


def test_gated_xsa_goes_from_the_standard_layer_to_xsa() -> None:
    layer = build("gated-xsa")
    assert_standard(layer)
    with torch.no_grad():
        layer.residual.strength.fill_(40.0)
    xsa = build("xsa")
    xsa.load_state_dict(standard_like(layer).state_dict())
    torch.testing.assert_close(layer(tokens(N)), xsa(tokens(N)))
    with pytest.raises(ConfigError, match="strength: `tanh` is learned by each head; set `scope"):
        attn_layer({"residual": {"kind": "perpendicular", "strength": "tanh"}})


@pytest.mark.parametrize(
    ("chosen", "logits", "expected"),
    [
        ("sink", [0.0, math.log(2)], [1 / 4, 1 / 2]),
        ({"normaliser": {"kind": "sink", "start": -40.0}}, [0.0, math.log(2)], [1 / 3, 2 / 3]),
        ("off-by-one", [0.0, math.log(2)], [1 / 4, 1 / 2]),
        ("softpick", [math.log(2), math.log(3), -math.log(2)], [2 / 7, 4 / 7, 0.0]),
        ("softpick", [-1.0, -2.0], [0.0, 0.0]),
        ("capped", [0.0, 1e6], [0.0, 1.0]),
        (
            {"normaliser": {"kind": "capped-softmax", "cap": 1.0}},
            [0.0, 1e6],
            [0.2689414, 0.7310586],
        ),
    ],
)
def test_weights_of_few_logits(chosen: Any, logits: list[float], expected: list[float]) -> None:
    assert weights_of(chosen, logits) == pytest.approx(expected, abs=1e-7)


def test_softpick_of_large_logits_is_finite() -> None:
    row = torch.tensor([1e4, 9e3, -1e4], dtype=torch.float32, requires_grad=True)
    weights = build("softpick").normaliser(row.expand(1, HEADS, 1, 3), None)
    assert weights[0, 0, 0].tolist() == [1.0, 0.0, 0.0]
    weights.sum().backward()
    assert row.grad is not None
    assert row.grad.isfinite().all()


def test_the_lambda_of_differential_attention_grows_with_the_layer() -> None:
    layer_class = attn_layer("differential")
    network = nn.Sequential(*(layer_class(DIM, HEADS) for _ in range(12)))
    assert network[11].normaliser.lambda_init == pytest.approx(0.2)
    number_layers(network)
    values = [network[layer].normaliser.lambda_init for layer in (0, 1, 11)]
    assert values == pytest.approx([0.2, 0.3555, 0.7779], abs=1e-4)
    fixed = attn_layer({"normaliser": "differential"})(DIM, HEADS)
    number_layers(nn.Sequential(network[0], fixed))
    assert fixed.normaliser.lambda_init == 0.8


def test_open_forgetting_gates_are_the_standard_layer() -> None:
    assert_standard(build({"bias": {"kind": "forgetting", "start": 40.0}}), is_causal=True)


def test_forgetting_gates_of_one_half_halve_the_weights() -> None:
    layer = build("forgetting")
    with torch.no_grad():
        layer.qkv.weight.zero_()
        layer.bias.gate.weight.zero_()
    record = layer.record(tokens(3), is_causal=True)
    assert record.weights is not None
    assert record.weights[0, 0, 2].tolist() == pytest.approx([1 / 7, 2 / 7, 4 / 7])


def test_padding_does_not_forget() -> None:
    """Left padding changes nothing for the tokens after it."""
    layer = make(PRESETS["forgetting"])
    x = tokens(N)
    padded = torch.cat([torch.full_like(x[:, :2], 3.0), x], 1)
    shown = torch.tensor([False, False] + [True] * N).expand(2, 1, 1, -1)
    out = layer(padded, shown, is_causal=True)[:, 2:]
    torch.testing.assert_close(out, layer(x, is_causal=True))


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2.0**-k for k in range(1, 9)]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (1, [1 / 256]),
    ],
)
def test_slopes_of_alibi(heads: int, slopes: list[float]) -> None:
    assert list_slopes(heads) == slopes


def test_buckets_of_t5() -> None:
    lengths = torch.tensor([0, 1, 7, 8, 15, 16, 32, 64, 128, 999])
    find_buckets = build("t5").bias._find_buckets
    both = find_buckets(lengths, "both")
    assert both.tolist() == [0, 1, 7, 8, 9, 10, 12, 14, 15, 15]
    both_after = find_buckets(-lengths, "both")
    assert both_after[1:].tolist() == [17, 23, 24, 25, 26, 28, 30, 31, 31]
    assert find_buckets(lengths, "before")[4:].tolist() == [15, 16, 21, 26, 31, 31]
    assert find_buckets(-lengths, "before").tolist() == [0] * 10


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("direction", ["both", "before", "by-order"])
def test_the_buckets_of_t5_follow_the_order_of_the_call(direction: str, is_causal: bool) -> None:
    """In causal order the encoder's buckets of later keys would get no gradient."""
    chosen = direction
    if direction == "by-order":
        chosen = "before" if is_causal else "both"
    layers = []
    for name in (direction, chosen):
        torch.manual_seed(0)
        layers.append(build({"bias": {"kind": "t5", "direction": name}}))
    x = torch.randn(1, 40, layers[0].qkv.in_features).to(layers[0].qkv.weight)
    outputs = [layer(x, is_causal=is_causal) for layer in layers]
    assert torch.equal(outputs[0], outputs[1])
    if direction == "by-order" and is_causal:
        outputs[0].square().sum().backward()
        gradient = layers[0].bias.table.grad
        assert gradient is not None
        # Tokens are at most 39 apart, and the first 22 buckets have these distances.
        assert (gradient[:22] != 0).any(1).all()


def test_a_cache_has_the_order_of_a_call_that_has_it_in_its_mask() -> None:
    layer = build("t5").eval()
    x = torch.randn(1, 20, layer.qkv.in_features).to(layer.qkv.weight)
    order = torch.ones(20, 20, dtype=torch.bool).tril()
    with torch.no_grad():
        cached = layer(x, order, cache=layer.new_cache())
        torch.testing.assert_close(cached, layer(x, is_causal=True))


def test_ssmax_multiplies_by_the_logarithm_of_the_visible_keys() -> None:
    layer = build({"scale": {"kind": "ssmax", "start": 1.0}})
    factor = layer.scale(Masks(None, None, True, None, False), 3, 3, torch.device("cpu"))
    assert factor[0, :, 0].tolist() == pytest.approx([0.0, math.log(2), math.log(3)])
    # Two keys with the logits 0 and 1 have the weights 1 / 3 and 2 / 3.
    logits = math.log(2) * torch.tensor([0.0, 1.0])
    assert logits.softmax(0).tolist() == pytest.approx([1 / 3, 2 / 3])


@pytest.mark.parametrize("n", [1, 3, 6])
def test_visible_keys_are_counted_as_masks_show_them(n: int) -> None:
    shown = torch.ones(2, 1, n, 6, dtype=torch.bool)
    shown[1, ..., :2] = False
    choices = itertools.product([True, False], [None, 1, 3], [True, False], [None, shown])
    for is_causal, window, without_self, visibility in choices:
        masks = Masks(visibility, None, is_causal, window, without_self, offset=6 - n)
        visible = masks.chunk(slice(0, n), slice(0, 6), 6, torch.device("cpu"))
        if visible is None:
            visible = torch.ones(n, 6, dtype=torch.bool)
        expected: Tensor = visible.expand(*visible.shape[:-1], 6).sum(-1, keepdim=True)
        count = masks.count_visible(n, 6, torch.device("cpu"))
        assert torch.equal(count.expand_as(expected), expected.clamp_min(1))


@pytest.mark.parametrize("name", ["knocking-heads", "knocking-heads-mlp"])
def test_maps_start_as_the_identity(name: str) -> None:
    assert_standard(build(name))


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"similarity": "linear", "scale": "ssmax"}, "scale: linear keys never form the logits"),
        ({"similarity": "linear", "bias": "alibi"}, "bias: linear keys never form the logits"),
        ({"similarity": "linear", "filter": "selective"}, "filter: linear keys never form the log"),
        ({"residual": "value", "filter": "selective"}, "filter: 'selective' has no effect"),
        ({"filter": "selective", "window": 4}, "window: filter 'selective' needs the logits of"),
        ({"filter": {"kind": "multi-token", "keys": 4}}, "filter: keys: 4 keys have no middle"),
        (
            {"filter": {"kind": "multi-token", "head_maps": False, "group": 2}},
            "filter: group: needs maps of the weights; remove it",
        ),
        (
            {"filter": {"kind": "multi-token", "norm": False, "rescale": "depth"}},
            "filter: rescale: multiplies the norm; write `norm: true` or remove it",
        ),
        ({"pair": "difference", "normaliser": "differential"}, "both subtract heads; remove one"),
        ({"residual": "value", "pair": "difference"}, "pair: 'difference' has no effect"),
        ({"residual": "value", "bias": "t5"}, "bias: 't5' has no effect"),
        ({"residual": "value", "scale": "ssmax"}, "scale: 'ssmax' has no effect"),
        ({"bias": {"kind": "t5", "buckets": 6}}, "bias.buckets: "),
    ],
)
def test_choices_without_a_meaning_are_refused(choice: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        attn_layer(choice)


def test_votes_of_the_first_head_lower_later_logits() -> None:
    """With logits of 1 the last of 4 queries sees one vote against the second token."""
    layer = build("selective")
    logits = torch.ones(1, HEADS, 4, 4, dtype=torch.double)
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    masks = Masks(None, None, True, None, False)
    filtered = layer.filter(logits.masked_fill(~visible, -1e300), visible, masks, None)
    for head in range(HEADS):
        assert filtered[0, head, 3].tolist() == [1, 0, 1, 1]
        assert filtered[0, head, 2, :3].tolist() == [1, 1, 1]
    assert filtered[0, 0, 3].softmax(0).tolist() == pytest.approx(
        [0.2969, 0.1092, 0.2969, 0.2969], abs=1e-4
    )


def test_padding_does_not_vote_and_the_first_token_after_it_is_kept() -> None:
    for name in ("selective", "multi-token"):
        layer = make(PRESETS[name])
        x = tokens(N)
        padded = torch.cat([torch.full_like(x[:, :2], 3.0), x], 1)
        shown = torch.tensor([False, False] + [True] * N).expand(2, 1, 1, -1)
        out = layer(padded, shown, is_causal=True)[:, 2:]
        torch.testing.assert_close(out, layer(x, is_causal=True))


def test_multi_token_attention_starts_with_the_weights_of_the_standard_layer() -> None:
    layer = build("multi-token")
    x = tokens(9)
    weights = layer.record(x, is_causal=True).weights
    standard = standard_like(layer).record(x, is_causal=True).weights
    assert weights is not None
    assert standard is not None
    torch.testing.assert_close(weights, standard)


def test_the_norm_of_multi_token_attention_can_shrink_with_depth() -> None:
    chosen = {"filter": {"kind": "multi-token", "rescale": "depth", "gate": False}}
    network = nn.Sequential(*(build(chosen) for _ in range(2)))
    number_layers(network)
    assert [layer.filter.factor for layer in network] == pytest.approx([0.8, 0.6445], abs=1e-4)
    heads = torch.randn(1, HEADS, 3, 6, dtype=torch.double)
    squares = network[0].filter.finish(heads).square().mean(-1)
    torch.testing.assert_close(squares, torch.full_like(squares, 0.64), rtol=1e-3, atol=0)


TOY_TASK = {
    "filter": {
        "kind": "multi-token",
        "queries": 2,
        "keys": 9,
        "weights": False,
        "head_maps": False,
        "norm": False,
        "gate": False,
    }
}
"""The layer with which its authors trained their toy task."""


def attend_with_kernels(
    q: Tensor, k: Tensor, v: Tensor, kernels: Tensor, head: int, row: int
) -> Tensor:
    """Return the sum of values of one query: a 2 x 9 kernel over the logits, then a softmax."""
    logits = []
    for key in range(row + 1):
        total = q.new_zeros(())
        for u in (0, 1):
            for w in range(9):
                other_query, other_key = row - 1 + u, key - 4 + w
                if 0 <= other_key <= other_query:
                    logit = q[head, other_query] @ k[head, other_key] / math.sqrt(q.shape[-1])
                    total = total + kernels[head, u, w] * logit
        logits.append(total)
    return torch.stack(logits).softmax(0) @ v[head, : row + 1]


def test_the_layer_of_the_toy_task_is_a_kernel_over_logits_alone() -> None:
    layer = build(TOY_TASK)
    assert [name for name, _ in layer.filter.named_parameters()] == ["logit_kernel"]
    # It starts as the standard layer.
    assert_standard(layer, is_causal=True)
    kernels = layer.filter.logit_kernel
    assert kernels.shape == (HEADS, 2, 9)
    with torch.no_grad():
        kernels.copy_(torch.randn(kernels.shape))
    x = tokens(7)[:1]
    q, k, v = layer.qkv(x)[0].unflatten(-1, (3, HEADS, -1)).movedim(0, 2).unbind(0)
    rows = []
    for row in range(7):
        heads = [attend_with_kernels(q, k, v, kernels, head, row) for head in range(HEADS)]
        rows.append(torch.cat(heads))
    expected = layer.proj(torch.stack(rows))
    output = layer(x, is_causal=True)[0]
    torch.testing.assert_close(output, expected)
    chosen = torch.randn_like(output)
    parameters = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(output, parameters, chosen),
        torch.autograd.grad(expected, parameters, chosen),
    )


def test_groups_of_heads_must_divide_them() -> None:
    with pytest.raises(ValueError, match=r"filter\.group: groups of 3 heads do not divide"):
        build({"filter": {"kind": "multi-token", "group": 3}})


def test_equal_queries_with_a_factor_of_one_half_halve_the_output() -> None:
    layer = build("differential-2")
    assert layer.query_heads == 2 * HEADS
    with torch.no_grad():
        layer.pair.projection.weight.copy_(layer.qkv.weight[:DIM])
        layer.pair.factor.weight.zero_()
    assert_standard(layer, 0.5)
    record = layer.record(tokens(N))
    assert record.weights is not None
    assert record.weights.shape == (2, HEADS, N, N)
    torch.testing.assert_close(record.weights.sum(-1), torch.full((2, HEADS, N), 0.5).double())
