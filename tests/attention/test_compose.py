"""The unrolled composition gives the values and gradients of the matrix products."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from lit_attn.attention import compose, formed
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


# PyTorch's compiler ignores this warning, and pytest makes it an error again.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_chunks_and_layers_share_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that is compiled for 19 tokens computes 43 tokens and another layer too."""
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    monkeypatch.setattr(formed, "CHUNK", 4)
    counter, original = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", partial(original, backend=counter))
    torch.compiler.reset()
    torch.manual_seed(0)
    counts = []
    for n in (19, 43, 43):
        layer, x = attn_layer("dcmha")(24, 4).double(), torch.randn(2, n, 24, dtype=torch.double)
        results = []
        for call in (layer, original(layer, backend="eager")):
            y = x.clone().requires_grad_()
            out = call(y, is_causal=True)
            results.append((out, *torch.autograd.grad(out.square().sum(), [y, layer.qkv.weight])))
        torch.testing.assert_close(results[1], results[0])
        counts.append(counter.frame_count)
    # One for the forward and one for the backward pass. The chunks are 5 of 19 tokens and 11 of 43.
    assert counts == [2, 2, 2]
