"""Values of a network's first layer that later layers mix with their own (value residual)."""

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from helpers.attention_checks import DIM, HEADS, make, tokens
from helpers.layer_chain import Chain, gradients
from torch import Tensor

from lit_attn.attention import reference
from lit_attn.attention.first_values import FirstValues
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.network import connect_first_values, number_layers
from lit_attn.attention.spec import AttentionSpec

FIXED: dict[str, Any] = {"values": {"kind": "first", "first": 0.3, "layer": 0.8}}
LEARNED: dict[str, Any] = {"values": {"kind": "first", "learned": True}}


def make_later(choices: Any, first: Tensor) -> Attention:
    """Return a float64 layer that is not the first one and reads the values `first`."""
    torch.manual_seed(0)
    layer = attn_layer(choices)(DIM, HEADS, qkv_bias=True).double().eval()
    layer.set_depth(1)
    channel = FirstValues()
    channel.write(first)
    layer.first_values = channel
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def make_chain(*choices: Any) -> Chain:
    """Return a chain of new layers in float64."""
    torch.manual_seed(0)
    return Chain([attn_layer(chosen)(DIM, HEADS).double() for chosen in choices])


@pytest.mark.parametrize("choices", [FIXED, LEARNED], ids=["fixed", "learned"])
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"residual": "perpendicular", "gate": "head"},
        {"residual": "value"},
        {"residual": "split", "kv_heads": 2, "zz": True},
        {"similarity": "mixture", "window": 3},
        {"similarity": "linear", "transform": "mlp"},
        {"compose": "query", "normaliser": "sink"},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_later_layer_equals_the_reference(
    choices: dict[str, Any], others: dict[str, Any], is_causal: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    key_heads = others.get("kv_heads", HEADS)
    shape = (2, 7, key_heads, DIM // HEADS)
    first = torch.randn(shape, dtype=torch.double, generator=generator, requires_grad=True)
    layer = make_later({**choices, **others}, first)
    x = tokens(7).requires_grad_()
    present = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    present[1, ..., 5:] = False
    masks = {"attn_mask": present, "is_causal": is_causal}
    weights = torch.randn(x.shape, dtype=x.dtype, generator=generator)
    inputs = [x, first, *layer.parameters()]
    results = []
    for out in (layer(x, **masks), reference.attention(layer, x, **masks, first_values=first)):
        computed = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)
        results.append([out, *computed])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-10)


def test_gradients_pass_gradcheck() -> None:
    first = torch.randn(1, 3, HEADS, DIM // HEADS, dtype=torch.double, requires_grad=True)
    layer = make_later(LEARNED, first)

    def compute(x: Tensor, first: Tensor) -> Tensor:
        channel = FirstValues()
        channel.write(first)
        layer.first_values = channel
        return layer(x)

    x = tokens(3, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(compute, (x, first), fast_mode=True)


def test_later_layers_of_a_network_read_the_values_of_the_first() -> None:
    chain = make_chain(FIXED, "standard", FIXED)
    x = tokens(5)
    first, middle, last = chain.layers
    values = first.qkv(x).chunk(3, -1)[2].unflatten(-1, (HEADS, -1))
    expected = x + reference.attention(first, x)
    expected = expected + reference.attention(middle, expected)
    expected = expected + reference.attention(last, expected, first_values=values)
    torch.testing.assert_close(chain(x), expected)


@pytest.mark.parametrize("factors", [{"first": 0.0, "layer": 1.0}, {"first": 0.5, "layer": 0.5}])
def test_a_network_without_foreign_values_is_the_standard_one(factors: dict[str, float]) -> None:
    """With the factors 0 and 1 any network, and with all factors a network of one layer."""
    chosen = {"values": {"kind": "first", **factors}}
    depth = 3 if factors["first"] == 0 else 1
    chain = make_chain(*[chosen] * depth)
    standard = make_chain(*["standard"] * depth)
    standard.load_state_dict(chain.state_dict())
    torch.testing.assert_close(chain(tokens(4)), standard(tokens(4)))


def test_the_first_layer_has_no_learned_factors() -> None:
    chain = make_chain(LEARNED, LEARNED)
    assert [name for name, _ in chain.named_parameters() if "values" in name] == [
        "layers.1.values.factors"
    ]
    assert chain.layers[1].values.factors.tolist() == [0.5, 0.5]
    chain(tokens(4)).sum().backward()
    assert all(parameter.grad is not None for parameter in chain.parameters())


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    chain = make_chain(LEARNED, LEARNED, FIXED)
    x = tokens(4)
    expected = gradients(chain, x)
    chain.is_checkpointed = True
    for _ in range(2):
        torch.testing.assert_close(gradients(chain, x), expected)


def test_two_passes_before_a_checkpointed_backward_pass_are_refused() -> None:
    """The layers of the first pass would be computed again with the values of the second."""
    chain = make_chain(FIXED, FIXED)
    total = chain(tokens(4)).sum() + chain(tokens(6)).sum()
    total.backward()
    chain.is_checkpointed = True
    total = chain(tokens(4)).sum() + chain(tokens(6)).sum()
    with pytest.raises(RuntimeError, match="call backward after each forward pass"):
        total.backward()


def test_copies_share_one_new_channel_without_values() -> None:
    chain = make_chain(FIXED, FIXED)
    x = tokens(4)
    out = chain(x)
    for copied in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        first, last = copied.layers
        assert first.first_values is last.first_values
        assert first.first_values is not chain.layers[0].first_values
        with pytest.raises(RuntimeError, match="call the complete network"):
            last(x)
        torch.testing.assert_close(copied(x), out)


@pytest.mark.slow
def test_a_compiled_network_computes_the_same() -> None:
    torch.compiler.reset()
    chain = make_chain(LEARNED, LEARNED, FIXED)
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    x = tokens(4)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), chain(x))
    expected = gradients(chain, x)
    computed = torch.autograd.grad(compiled(x).square().sum(), list(chain.parameters()))
    torch.testing.assert_close(list(computed), expected)


def test_a_layer_without_a_number_is_refused() -> None:
    """Otherwise each layer of a network would silently be a first one."""
    layer = attn_layer("value-residual")(DIM, HEADS)
    with pytest.raises(RuntimeError, match=r"call lit_attn\.attention\.network\.number_layers"):
        layer(torch.randn(1, 3, DIM))


def test_a_timm_model_is_connected_by_one_call() -> None:
    """The second layer's own values get no gradient if only those of the first layer count."""
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    chosen = attn_layer({"values": {"kind": "first", "first": 1.0, "layer": 0.0}})
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=chosen, num_classes=3, **sizes)
    number_layers(model)
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    first, second = (block.attn.qkv.weight.grad.chunk(3)[2] for block in model.blocks)
    assert first.abs().max() > 0
    assert second.abs().max() == 0


def test_first_layers_without_fitting_values_are_refused() -> None:
    mixer = {"kind": "module", "import": "torch.nn:Identity"}
    spec = AttentionSpec.model_validate({"layers": [mixer, "value-residual"]})
    with pytest.raises(ValueError, match="layers: layer 2 mixes its values with those of the fir"):
        spec.by_layer(2)
    grouped = {"preset": "value-residual", "kv_heads": 2}
    spec = AttentionSpec.model_validate({"layers": ["standard", grouped]})
    with pytest.raises(ValueError, match="set the same `kv_heads` for both"):
        spec.by_layer(2)
    narrow = attn_layer("value-residual")(DIM, HEADS, attn_head_dim=3)
    with pytest.raises(ValueError, match="values: a layer has 4 key heads of width 3, and the fir"):
        connect_first_values([make(AttentionSpec()), narrow])


def test_a_layer_of_merged_tokens_is_refused() -> None:
    """A later layer of fewer tokens has no values of the first layer to mix."""
    chain = make_chain("standard", FIXED)
    x = tokens(6)
    chain.layers[0](x)
    message = (
        r"values: this layer has values of shape \(2, 3, 4, 6\), and the first .* \(2, 6, 4, 6\)"
    )
    with pytest.raises(RuntimeError, match=message):
        chain.layers[1](x.unflatten(1, (3, 2)).mean(2))


def test_cross_attention_has_no_first_layer() -> None:
    problem = AttentionSpec.model_validate("value-residual").find_cross_problem()
    assert problem.startswith("values: 'first' reads the values of the first layer of one sequence")
