"""Layers with the keys and values of an earlier layer (`kv_from: previous`)."""

import copy
from typing import Any

import pytest
import timm
import torch
from helpers.attention_checks import DIM, HEADS, tokens
from helpers.layer_chain import Chain, gradients
from helpers.training_cells import text_cell

from lit_attn.attention import reference
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.rotary import rotary
from lit_attn.attention.shared_keys import KeysValues, SharedKeys
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models import factory
from lit_attn.models.language import GPT, GPTConfig
from lit_attn.replace import replace_attention
from lit_attn.schema.errors import ConfigError
from lit_attn.training.diagnostics import record_calls, split_calls

SHARED: dict[str, Any] = {"kv_from": "previous"}
PARTS = [
    {},
    {"residual": "perpendicular", "gate": "head", "zz": "like-k"},
    {"residual": "value"},
    {"residual": "split", "kv_heads": 2, "zz": True},
    {"similarity": "gaussian", "window": 3},
    {"compose": "query", "normaliser": "sink"},
    {"bias": "forgetting", "pair": "difference", "kv_heads": 1},
    {"filter": "selective", "scale": "ssmax", "convolution": {"kind": "short", "on": "output"}},
    {"normaliser": "differential"},
]


def make_layer(choices: Any, number: int = 1) -> Attention:
    """Return a float64 layer with nonzero parameters that is not the first one."""
    torch.manual_seed(number)
    layer = attn_layer(choices)(DIM, HEADS, qkv_bias=True).double().eval()
    layer.set_depth(number)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def make_chain(*choices: Any) -> Chain:
    """Return a chain of `make_layer`'s layers."""
    return Chain([make_layer(chosen, number) for number, chosen in enumerate(choices)])


def test_queries_without_an_effect_are_named_as_unused() -> None:
    """The projection of such a layer has rows of q alone."""
    assert not make_layer(SHARED).leaves_parameters_unused
    assert make_layer({**SHARED, "residual": "value"}).leaves_parameters_unused


def draw_keys_values(key_heads: int, n: int) -> KeysValues:
    generator = torch.Generator().manual_seed(5)
    width = DIM // HEADS
    shape = (2, key_heads, n, width)
    keys = torch.randn(shape, dtype=torch.double, generator=generator).unsqueeze(2)
    values = torch.randn(shape, dtype=torch.double, generator=generator)
    return KeysValues(keys.requires_grad_(), values.requires_grad_())


@pytest.mark.parametrize("others", PARTS, ids=str)
@pytest.mark.parametrize(
    ("mask", "is_causal"), [("none", True), ("padding", False), ("additive", True)]
)
def test_a_layer_with_shared_keys_equals_the_reference(
    others: dict[str, Any], mask: str, is_causal: bool
) -> None:
    layer = make_layer({**SHARED, **others})
    n = 7
    shared = draw_keys_values(others.get("kv_heads", HEADS), n)
    layer.shared_keys = SharedKeys()
    layer.shared_keys.write(*shared)
    x = tokens(n).requires_grad_()
    arguments: dict[str, Any] = {"is_causal": is_causal, "rotary": rotary(torch.arange(n), 6)}
    generator = torch.Generator().manual_seed(6)
    if mask == "padding":
        present = torch.ones(2, 1, 1, n, dtype=torch.bool)
        present[1, ..., 5:] = False
        arguments["attn_mask"] = present
    elif mask == "additive":
        arguments["attn_mask"] = torch.randn(1, HEADS, n, n, dtype=x.dtype, generator=generator)
    weights = torch.randn(x.shape, dtype=x.dtype, generator=generator)
    inputs = [x, *shared, *layer.parameters()]
    results = []
    for out in (
        layer(x, **arguments),
        reference.attention(layer, x, **arguments, keys_values=shared),
    ):
        computed = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)
        results.append([out, *computed])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-10)


def test_layers_share_the_keys_of_the_nearest_layer_before_that_has_its_own() -> None:
    chain = make_chain({}, SHARED, SHARED, {}, SHARED)
    x = tokens(5)
    turns = rotary(torch.arange(5), DIM // HEADS)
    expected = x
    for layer in chain.layers:
        if not layer.spec.shares_keys:
            _, keys, values = reference.project(layer, expected, turns)
            shared = KeysValues(keys[0].unsqueeze(2), values)
        expected = expected + reference.attention(
            layer, expected, rotary=turns, is_causal=True, keys_values=shared
        )
    torch.testing.assert_close(chain(x, is_causal=True, rotary=turns), expected)


def test_a_layer_with_shared_keys_projects_queries_alone() -> None:
    standard, shared = make_layer({"kv_heads": 2}), make_layer({**SHARED, "kv_heads": 2})
    rows = 2 * 2 * DIM // HEADS
    assert standard.qkv.out_features - shared.qkv.out_features == rows
    assert shared.qkv.out_features == DIM


@pytest.mark.parametrize("others", PARTS, ids=str)
def test_decoding_in_pieces_gives_the_output_of_the_sequence(others: dict[str, Any]) -> None:
    """Only layers with keys of their own store keys and values."""
    chain = make_chain(others, {**SHARED, **others}, others, {**SHARED, **others})
    x, n = tokens(12), 12
    turns = rotary(torch.arange(n), DIM // HEADS)
    caches = [layer.new_cache() for layer in chain.layers]
    outputs = []
    with torch.no_grad():
        expected = chain(x, is_causal=True, rotary=turns)
        for start, stop in [(0, 5), (5, 6), (6, 9), (9, 10), (10, 11), (11, 12)]:
            piece = x[:, start:stop]
            angles = rotary(torch.arange(start, stop), DIM // HEADS)
            for layer, cache in zip(chain.layers, caches, strict=True):
                piece = piece + layer(piece, is_causal=True, rotary=angles, cache=cache)
            outputs.append(piece)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-10, atol=1e-11)
    for layer, cache in zip(chain.layers, caches, strict=True):
        stored = {"keys", "values"} & set(cache.buffers)
        assert stored == (set() if layer.spec.shares_keys else {"keys", "values"})


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    chain = make_chain({}, SHARED, {}, SHARED)
    x = tokens(4)
    expected = gradients(chain, x)
    chain.is_checkpointed = True
    for _ in range(2):
        torch.testing.assert_close(gradients(chain, x), expected)
    total = chain(x).sum() + chain(tokens(6)).sum()
    with pytest.raises(RuntimeError, match=r"kv_from: .* call backward after each forward pass"):
        total.backward()


def test_gradients_pass_gradcheck() -> None:
    chain = make_chain({}, SHARED)
    x = tokens(3, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(chain, (x,), fast_mode=True)


def test_copies_have_an_empty_channel_of_their_own() -> None:
    chain = make_chain({}, SHARED)
    x = tokens(4)
    out = chain(x)
    copied = copy.deepcopy(chain)
    first, last = copied.layers
    assert first.shared_keys is last.shared_keys
    assert first.shared_keys is not chain.layers[0].shared_keys
    with pytest.raises(RuntimeError, match=r"kv_from: .* call the complete network"):
        last(x)
    torch.testing.assert_close(copied(x), out)


@pytest.mark.slow
def test_a_compiled_network_computes_the_same_for_two_lengths() -> None:
    torch.compiler.reset()
    chain = make_chain(
        {}, SHARED, {"kv_heads": 2, "zz": True}, {"kv_heads": 2, "zz": True, **SHARED}
    )
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    for n in (4, 7, 9):
        x = tokens(n)
        torch.testing.assert_close(compiled(x, is_causal=True), chain(x, is_causal=True))
        expected = gradients(chain, x)
        computed = torch.autograd.grad(compiled(x).square().sum(), list(chain.parameters()))
        torch.testing.assert_close(list(computed), expected)


def test_a_language_model_decodes_with_half_of_the_cache() -> None:
    model = GPTConfig(
        dim=24,
        depth=4,
        heads=4,
        ffn=None,
        positions="rotary",
        attention={"layers": {"every": 2, "use": SHARED}},
    )
    network = GPT(model, vocabulary=11, context=16).double().eval()
    ids = torch.randint(11, (2, 9))
    caches = network.trunk.new_caches()
    with torch.no_grad():
        expected = network.trunk(ids)
        parts = [network.trunk(part, caches=caches) for part in ids.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    stored = [sum(tensor.numel() for tensor in cache.tensors()) for cache in caches]
    assert stored == [2 * 9 * 2 * 24, 0] * 2


def test_diagnostics_record_the_weights_of_such_layers() -> None:
    """The copy of a layer that is recorded has no channel to the layer before it."""
    model = GPTConfig(
        dim=24, depth=2, heads=4, ffn=None, attention={"layers": {"every": 2, "use": SHARED}}
    )
    network = GPT(model, vocabulary=11, context=16).double().eval()
    layers = [block.attn for block in network.trunk.blocks]
    _, (call,) = record_calls(network.trunk, layers, (torch.randint(11, (2, 5)),))
    (part, _), *_ = split_calls(layers[1], [call])
    record = copy.deepcopy(layers[1]).record(**part.arguments)
    shared = layers[0].shared_keys.read()
    expected = reference.attention(
        layers[1], part.arguments["x"], is_causal=True, keys_values=shared
    )
    output = layers[1].output(part.arguments["x"], record.heads, record.values, record.inputs.masks)
    torch.testing.assert_close(output, expected)


def test_the_flops_of_equal_layers_with_shared_keys_are_counted() -> None:
    """A layer that passes its keys on is computed, although an equal one is known."""
    two = {"layers": ["standard", "standard", {"kv_from": "previous"}]}
    flops = []
    for attention in (two, {}):
        model = GPTConfig(dim=24, depth=3, heads=4, ffn=None, attention=attention)
        network = GPT(model, vocabulary=11, context=8, device="meta")
        sample = torch.zeros(1, 8, dtype=torch.long, device="meta")
        flops.append(factory.count_flops(network, (sample,)))
    # The last layer has no product for keys and values.
    assert flops[1] - flops[0] == 2 * 8 * 24 * 2 * 24


def test_a_layer_without_a_connection_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"call lit_attn\.attention\.network\.number_layers"):
        make_layer(SHARED)(tokens(3))


def test_a_layer_of_merged_tokens_is_refused() -> None:
    """Keys of more tokens would be taken for those of cached tokens."""
    chain = make_chain({}, SHARED)
    x = tokens(6)
    chain.layers[0](x)
    with pytest.raises(
        RuntimeError, match=r"kv_from: this layer attends to 3 tokens, and .* of 6;"
    ):
        chain.layers[1](x[:, :3])


def test_the_widths_of_ffns_match_the_parameters_that_shared_keys_save() -> None:
    """`match: parameters` gives the projections that a layer lacks to its FFN."""
    data = text_cell().experiment.data
    sizes: dict[str, Any] = {"dim": 24, "depth": 2, "heads": 4, "ffn": {"width": 32}}
    standard = GPTConfig.model_validate(sizes)
    sharing = {"layers": {"every": 2, "use": SHARED}}
    shared = GPTConfig.model_validate({**sizes, "attention": sharing})
    counts = {}
    for name, model in (("standard", standard), ("shared", shared)):
        counts[name] = factory.count(factory.build(model, data, "meta"))
    assert counts["standard"] - counts["shared"] == 2 * 24 * 24
    matched = factory.resolve(shared, standard, data)
    # Each unit of both FFNs has a row and a column of 24 numbers.
    assert matched.ffn is not None
    assert matched.ffn.width == 32 + 24 * 24 // (2 * 24)
    assert factory.count(factory.build(matched, data, "meta")) == counts["standard"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([SHARED, {}], "layer 1 has `kv_from: previous`, and no layer before it has keys"),
        (
            [{"kind": "module", "import": "torch.nn:Identity"}, SHARED],
            "layer 2 .* is of `kind: module` and has no keys",
        ),
        (["mgk", SHARED], "similarity 'mixture' of the layer before it computes further keys"),
        ([{"kv_heads": 2}, SHARED], "the layer before it has another `kv_heads`; set the same"),
        ([{"window": 2}, SHARED], "the layer before it has another `window`; set the same"),
    ],
    ids=str,
)
def test_layers_that_cannot_share_are_refused(layers: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"layers: .*{message}"):
        AttentionSpec.model_validate({"layers": layers}).by_layer(2)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"similarity": "linear"}, "similarity 'linear' computes further keys"),
        ({"similarity": "mixture"}, "similarity 'mixture' computes further keys"),
        ({"transform": "mlp"}, "transform 'mlp' maps k and v"),
        ({"values": "first"}, "values 'first' mixes values of the layer itself"),
        ({"convolution": "short"}, "convolution 'short' is of q, k or v"),
    ],
    ids=str,
)
def test_parts_that_need_keys_of_the_layer_are_refused(
    others: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec.model_validate({**SHARED, **others})


def test_models_refuse_other_positions_and_values_of_such_layers() -> None:
    sizes: dict[str, Any] = {
        "dim": 24,
        "depth": 2,
        "heads": 4,
        "ffn": None,
        "positions": "rotary",
        "attention": {"layers": {"last": 1, "use": SHARED}},
    }
    with pytest.raises(ValueError, match=r"rotations: layer 2 has the keys of layer 1"):
        GPTConfig(**sizes, rotations=["model", "none"])
    with pytest.raises(ValueError, match="the layer before it has another `window`"):
        GPTConfig(**sizes, windows=[2, None])
    with pytest.raises(
        ValueError, match="value_embeddings: layer 2 has `kv_from: previous` and no"
    ):
        GPTConfig(**sizes, value_embeddings={"every": 1})


def test_other_networks_refuse_shared_keys() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    with pytest.raises(ConfigError, match="kv_from: 'previous' needs the layer before"):
        replace_attention(model, {"layers": {"last": 1, "use": SHARED}})
    problem = AttentionSpec.model_validate(SHARED).find_cross_problem()
    assert problem.startswith("kv_from: 'previous' reads keys")
