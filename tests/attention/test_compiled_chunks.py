"""Weights that compiled code forms in chunks have the values and gradients of uncompiled ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_attn.attention import formed
from lit_attn.attention.layer import Attention, attn_layer

B, N, DIM, HEADS = 2, 7, 12, 2


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of chunks that were requested; a chunk has at most four queries."""
    torch.compiler.reset()
    torch.manual_seed(0)
    requested: list[int] = []
    original = formed.in_chunks

    def in_chunks(n: int, size: int) -> list[slice]:
        requested.append(size)
        return original(n, size)

    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    monkeypatch.setattr(formed, "CHUNK", 4)
    monkeypatch.setattr(formed, "FEW_BYTES", 1)
    monkeypatch.setattr(formed, "in_chunks", in_chunks)
    return requested


def compiled(layer: Attention, backend: str = "eager") -> Callable[..., Any]:
    return torch.compile(layer, backend=backend, fullgraph=True)


def layer_with(choices: object) -> Attention:
    layer = attn_layer(choices)(DIM, HEADS).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def results(call: Callable[..., Tensor], inputs: list[Tensor], **options: object) -> list[Tensor]:
    out = call(inputs[0], **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)]


CHOICES = {
    "maps of tokens and a learned matrix": ("dcmha-all", True),
    # Without composition, differential is two plain calls.
    "learned vectors of the normaliser": (
        {"normaliser": "differential", "compose": "static"},
        False,
    ),
    "largest logit of two keys": ("smgk-hard", True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOICES)
def test_values_and_gradients_are_those_of_uncompiled_code(sizes: list[int], name: str) -> None:
    choices, is_causal = CHOICES[name]
    layer = layer_with(choices)
    x = torch.randn(B, N, DIM, dtype=torch.double, requires_grad=True)
    inputs = [x, *layer.parameters()]
    expected = results(layer, inputs, is_causal=is_causal)
    sizes.clear()
    torch.testing.assert_close(results(compiled(layer), inputs, is_causal=is_causal), expected)
    assert sizes == [4]


@pytest.mark.slow
def test_a_learned_mask_gets_its_gradient() -> None:
    layer = layer_with("talking-heads")
    mask = torch.randn(1, HEADS, N, N, dtype=torch.double, requires_grad=True)
    x = torch.randn(B, N, DIM, dtype=torch.double, requires_grad=True)
    expected = results(layer, [x, mask], attn_mask=mask)
    torch.testing.assert_close(results(compiled(layer), [x, mask], attn_mask=mask), expected)


@pytest.mark.slow
def test_the_backward_pass_drops_the_same_weights() -> None:
    layer = layer_with("talking-heads")
    layer.attn_drop = 0.5
    # In eager code each repetition of a backward pass would draw new numbers.
    call = compiled(layer, "aot_eager")

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return call(x)[:, :2]

    x = torch.randn(B, N, DIM, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(seeded, x, fast_mode=True)


@pytest.mark.slow
def test_the_backward_pass_is_under_autocast_like_the_forward_pass() -> None:
    layer = layer_with("talking-heads").float()
    x = torch.randn(B, N, DIM, requires_grad=True)
    gradients = []
    for call in (layer, compiled(layer)):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x)
        # The backward pass is called outside of autocast, as in training.
        gradients += torch.autograd.grad(out.float().square().sum(), x)
    error = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert error < 0.05
