"""Sums over the heads give the values and gradients of products with each token's matrix."""

import pytest
import torch

from lit_attn.attention import compose
from lit_attn.attention.compose import QueryKeyComposeConfig
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.spec import AttentionSpec


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("choices", [{}, {"gate": False}, {"rank": 3}], ids=str)
@pytest.mark.parametrize("adds_identity", [False, True])
def test_value_and_gradient_equal_the_products(
    side: str, choices: dict[str, object], adds_identity: bool
) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(compose=QueryKeyComposeConfig(**choices))
    composer = attn_layer(spec)(20, 5).double().composers["pre"]
    with torch.no_grad():
        for parameter in composer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 7, 20, dtype=torch.double, requires_grad=True)
    a = torch.randn(2, 5, 7, 7, dtype=torch.double, requires_grad=True)
    axis = {"query": -1, "key": -2}[side]
    token = {"query": "c", "key": "m"}[side]
    results = []
    for compute, place in ((compose._map, token), (compose._low_rank, axis)):
        out = compute(a, composer.maps(x)[side], place, adds_identity)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append((out, *torch.autograd.grad((out * weights).sum(), (a, x))))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.slow
def test_compiled_code_forms_no_matrix_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, x = attn_layer("dcmha")(48, 12), torch.randn(2, 9, 48)
    expected = layer(x)
    calls = []
    original = compose._low_rank
    monkeypatch.setattr(compose, "_low_rank", lambda *args: calls.append(1) or original(*args))
    out = torch.compile(layer, backend="eager", fullgraph=True)(x)
    # Queries and keys, before and after the softmax.
    assert calls == [1] * 4
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
