"""The unrolled composition gives the values and gradients of the matrix products."""

import pytest
import torch

from lit_attn.attention import compose
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.parts import QueryKeyComposeConfig
from lit_attn.attention.spec import AttentionSpec


@pytest.mark.parametrize("side", ["query", "key", "query+key"])
@pytest.mark.parametrize(
    "choices", [{}, {"gate": False}, {"projection": False}, {"rank": 3}], ids=str
)
def test_value_and_gradient_equal_the_products(side: str, choices: dict[str, object]) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(compose=QueryKeyComposeConfig(**choices))
    composer = attn_layer(spec)(20, 5).double().composers["pre"]
    with torch.no_grad():
        for parameter in composer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 7, 20, dtype=torch.double, requires_grad=True)
    a = torch.randn(2, 5, 4, 7, dtype=torch.double, requires_grad=True)
    results = []
    for is_unrolled in (False, True):
        maps = {name: value for name, value in composer.maps(x).items() if name in side.split("+")}
        query, key = maps.get("query"), maps.get("key")
        if query is not None:
            query = query._make(None if part is None else part[:, 2:6] for part in query)
        out = (composer._unrolled if is_unrolled else composer)(a, query, key)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append((out, *torch.autograd.grad((out * weights).sum(), (a, x))))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.slow
def test_the_compiled_composition_is_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, x = attn_layer("dcmha")(48, 12), torch.randn(2, 9, 48)
    expected = layer(x)
    calls = []
    original = compose.HeadMaps._unrolled
    monkeypatch.setattr(
        compose.HeadMaps, "_unrolled", lambda *args: calls.append(1) or original(*args)
    )
    out = torch.compile(layer, backend="aot_eager")(x)
    assert calls
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
