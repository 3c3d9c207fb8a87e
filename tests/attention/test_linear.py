"""Linear attention: memory is linear in n; variants of the paper and of its released code."""

import math
from typing import Any

import pytest
import torch
from helpers.attention_checks import DIM, HEADS, assert_same, make, tokens
from pydantic import ValidationError
from torch import Tensor

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.linear import FEATURE_MAPS, LinearConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec


def layer_of(**choices: Any) -> Attention:
    return make(AttentionSpec(similarity=LinearConfig(**choices)))


def elu_features(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


@pytest.mark.parametrize("n", [63, 64, 65, 128, 150])
@pytest.mark.parametrize("name", ["linear", "mlk", "smlk"])
def test_chunks_give_the_result_of_the_full_sequence(name: str, n: int) -> None:
    assert_same(make(PRESETS[name]), tokens(n, batch=1), is_causal=True)


def count_saved_numbers(n: int, is_causal: bool) -> int:
    """Return how many numbers two keys of n tokens save for the backward pass."""
    layer = attn_layer("mlk")(DIM, HEADS)
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(torch.randn(1, n, DIM, requires_grad=True), is_causal=is_causal)
    assert out.shape == (1, n, DIM)
    return sum(storages.values())


@pytest.mark.parametrize("is_causal", [True, False])
def test_memory_is_linear_in_the_tokens(is_causal: bool) -> None:
    """Apart from a constant part (the weights), twice the tokens keep twice as much."""
    one, two, four = (count_saved_numbers(n, is_causal) for n in (1024, 2048, 4096))
    assert four - two == pytest.approx(2 * (two - one), rel=0.01)


def parts(layer: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, the two keys and v, each (B, H, n, D)."""
    inner = layer.num_heads * layer.head_dim
    q, k, v = layer.qkv(x).split(inner, dim=-1)
    split = (q, k, layer.similarity.more(x), v)
    return tuple(t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in split)  # type: ignore


def projected(layer: Attention, heads: Tensor) -> Tensor:
    return layer.proj(heads.transpose(1, 2).flatten(2))


def test_the_variant_of_the_released_lra_code() -> None:
    """Keys are mixed before phi, both features divided by n^(1/4), and there is one pair of pi."""
    layer = layer_of(
        keys=2, mixing="before", divide_by="root-length", prior="clamped", prior_scope="layer"
    )
    x = tokens(9)
    q, k1, k2, v = parts(layer, x)
    one, two = layer.similarity.prior.clamp(0, 1).flatten()
    root = 9**0.25
    features = elu_features(q) / root, elu_features(one * k1 + two * k2) / root
    heads = features[0] @ (features[1].transpose(-1, -2) @ v)
    torch.testing.assert_close(layer(x), projected(layer, heads))


def test_the_variant_of_the_released_language_model_code() -> None:
    """Each feature is divided by its sum; pi of every head and position, a running sum plus 1e-5,
    and 1 / sqrt(D)."""
    layer = layer_of(
        keys=2,
        features="sum-to-one",
        divide_by="scaled-sum",
        prior="clamped",
        prior_scope="position",
        positions=16,
    )
    x = tokens(9)
    q, k1, k2, v = parts(layer, x)
    q, k1, k2 = (elu_features(t) / elu_features(t).sum(-1, keepdim=True) for t in (q, k1, k2))
    prior = layer.similarity.prior.clamp(0, 1)[..., :9].unsqueeze(-1)
    k = prior[0] * k1 + prior[1] * k2
    heads = []
    for i in range(9):
        memory = sum(k[:, :, j, :, None] * v[:, :, j, None, :] for j in range(i + 1))
        total = sum(k[:, :, j] for j in range(i + 1))
        out = (q[:, :, i, None] @ memory).squeeze(-2)
        divisor = (q[:, :, i] * total).sum(-1, keepdim=True) + 1e-5
        heads.append(out / divisor / math.sqrt(DIM / HEADS))
    torch.testing.assert_close(layer(x, is_causal=True), projected(layer, torch.stack(heads, 2)))


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_sequence_of_padding_gets_zero(is_causal: bool) -> None:
    """0 / 0 gives zero, not NaN, in the gradient too."""
    layer, x = make(PRESETS["mlk"]), tokens(5).requires_grad_()
    present = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 5)
    out = layer(x, attn_mask=present, is_causal=is_causal)
    torch.testing.assert_close(out[1], layer.proj.bias.expand(5, DIM))
    out.square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert_same(layer, x.detach(), attn_mask=present, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_token_without_features_has_no_similarity(is_causal: bool) -> None:
    """phi of numbers below -37 is 0 in float64, and 0 / 0 would be NaN."""
    layer = layer_of(features="sum-to-one")
    x = tokens(6)
    with torch.no_grad():
        layer.qkv.bias[DIM : 2 * DIM] = -50.0
    assert_same(layer, x, is_causal=is_causal)
    inputs = x.clone().requires_grad_()
    out = layer(inputs, is_causal=is_causal)
    torch.testing.assert_close(out, layer.proj.bias.expand_as(out))
    assert torch.isfinite(torch.autograd.grad(out.sum(), inputs)[0]).all()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_sums_are_exact_under_autocast(is_causal: bool, dtype: torch.dtype) -> None:
    """Sums over 4096 values near 100 overflow float16; bfloat16 resolves one part in 256."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4096, 8, generator=generator) for _ in range(3))
    layer = attn_layer("linear")(16, 2)
    inputs = layer.inputs(torch.zeros(1, 4096, 16), None, is_causal, None)
    halves = [t.to(dtype) for t in (q, k.unsqueeze(2), (v + 100).transpose(1, 2))]
    names = ("q", "keys", "v")
    doubles = dict(zip(names, (t.double() for t in halves), strict=True))
    exact = layer.similarity.attend(inputs._replace(**doubles))
    with torch.autocast("cpu", dtype):
        half = layer.similarity.attend(inputs._replace(**dict(zip(names, halves, strict=True))))
    assert half.dtype == dtype
    assert (half.double() - exact).abs().max() < 100 * torch.finfo(dtype).eps


def test_linear_keys_add_the_expected_parameters() -> None:
    def count(name: str) -> int:
        return sum(p.numel() for p in attn_layer(name)(DIM, HEADS).parameters())

    plain = count("standard")
    assert count("linear") == plain
    assert count("mlk") == plain + DIM * DIM + 2 * HEADS
    assert count("smlk") == plain + 2 * DIM + 2 * HEADS


def test_taylor_features_give_the_second_order_series_of_the_exponential() -> None:
    q, k = torch.randn(2, 5, 8, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    phi = FEATURE_MAPS["taylor"]
    s = q @ k.T / math.sqrt(8)
    torch.testing.assert_close(phi(q) @ phi(k).T, 1 + s + s**2 / 2)


def test_dpfp_features_are_products_of_neighbours() -> None:
    """r = [1, 0, 3, 0, 2, 0] for t = [1, -2, 3]; each is multiplied by the one before it."""
    t = torch.tensor([1.0, -2.0, 3.0])
    assert FEATURE_MAPS["dpfp"](t).tolist() == [0, 0, 0, 0, 0, 0]
    t = torch.tensor([1.0, 2.0, -3.0])
    assert FEATURE_MAPS["dpfp"](t).tolist() == [3, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("phi", FEATURE_MAPS)
@pytest.mark.parametrize("divide_by", ["sum", "scaled-sum", "root-length"])
@pytest.mark.parametrize("n", [9, 70])
def test_every_feature_map_equals_the_reference(phi: str, divide_by: str, n: int) -> None:
    layer = layer_of(phi=phi, divide_by=divide_by, keys=2)
    assert_same(layer, tokens(n, batch=1), is_causal=True)
    assert_same(layer, tokens(n, batch=1))


@pytest.mark.parametrize("phi", FEATURE_MAPS)
def test_decoding_with_every_feature_map_equals_the_full_sequence(phi: str) -> None:
    layer = layer_of(phi=phi)
    x = tokens(7)
    cache = layer.new_cache()
    outs = [layer(x[:, i : i + 1], is_causal=True, cache=cache) for i in range(7)]
    torch.testing.assert_close(torch.cat(outs, 1), layer(x, is_causal=True))


@pytest.mark.parametrize("phi", ["softmax", "taylor"])
def test_sums_of_features_without_meaning_are_refused(phi: str) -> None:
    with pytest.raises(ValidationError, match=f"features: .*`phi: {phi}`"):
        LinearConfig(phi=phi, features="sum-to-one")
