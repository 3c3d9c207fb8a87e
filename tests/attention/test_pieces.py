"""Weights that compiled code forms in pieces have the values and gradients of uncompiled ones."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lit_attn.attention import formed
from lit_attn.attention.layer import Attention, attn_layer

B, N, DIM, HEADS = 6, 7, 24, 4

# PyTorch's compiler ignores this warning, and pytest makes it an error again.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


class Pieces(NamedTuple):
    """Function that compiles a layer, and the size and autocast of every piece it computes."""

    compile: Callable[..., Any]
    sizes: list[int]
    autocast: list[bool]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Pieces:
    """Return torch.compile, with pieces of two sequences."""
    torch.compiler.reset()
    torch.manual_seed(0)
    original = torch.compile
    made = Pieces(partial(original, backend="eager"), [], [])
    monkeypatch.setattr(formed, "PIECE", 2 * HEADS * N * N * 8 // torch.get_num_threads())

    def compile_piece(attend: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
        compiled = original(attend, backend="eager", **options)

        def call(part: formed.Formed, *arguments: object) -> Tensor:
            made.sizes.append(len(part.q))
            made.autocast.append(torch.is_autocast_enabled("cpu"))
            return compiled(part, *arguments)

        return call

    monkeypatch.setattr(torch, "compile", compile_piece)
    return made


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
    "dcmha": "dcmha",
    "with a learned matrix": "dcmha-all",
    "of queries": "dcmha-query",
    "learned vectors of the normaliser": {"normaliser": "differential"},
    "largest logit of two keys": "smgk-hard",
}


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_values_and_gradients_are_those_of_the_whole_batch(
    pieces: Pieces, name: str, is_causal: bool
) -> None:
    layer = layer_with(CHOICES[name])
    x = torch.randn(B, N, DIM, dtype=torch.double, requires_grad=True)
    inputs = [x, *layer.parameters()]
    expected = results(layer, inputs, is_causal=is_causal)
    torch.testing.assert_close(
        results(pieces.compile(layer), inputs, is_causal=is_causal), expected
    )
    # Three pieces in the forward and three in the backward pass.
    assert pieces.sizes == [2] * 6


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(N, N), (1, HEADS, N, N), (B, 1, 1, N)], ids=str)
def test_a_learned_mask_gets_its_gradient(pieces: Pieces, shape: tuple[int, ...]) -> None:
    layer = layer_with("dcmha")
    mask = torch.randn(shape, dtype=torch.double, requires_grad=True)
    x = torch.randn(B, N, DIM, dtype=torch.double, requires_grad=True)
    expected = results(layer, [x, mask], attn_mask=mask)
    got = results(pieces.compile(layer), [x, mask], attn_mask=mask)
    torch.testing.assert_close(got, expected)
    assert pieces.sizes == [2] * 6


@pytest.mark.slow
def test_the_backward_pass_drops_the_same_weights(pieces: Pieces) -> None:
    layer = layer_with("dcmha")
    layer.attn_drop = 0.5
    call = pieces.compile(layer)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return call(x)[:, :2]

    x = torch.randn(B, N, DIM, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(seeded, x, fast_mode=True)
    before = torch.get_rng_state()
    seeded(x).sum().backward()
    # The numbers that follow a step do not depend on how often its weights were formed.
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    with torch.no_grad():
        seeded(x)
    assert torch.equal(torch.get_rng_state(), after)
    assert set(pieces.sizes) == {2}


@pytest.mark.slow
def test_the_backward_pass_is_under_autocast_like_the_forward_pass(pieces: Pieces) -> None:
    layer, x = layer_with("dcmha").float(), torch.randn(3 * B, N, DIM, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = pieces.compile(layer)(x)
    # As in training, the backward pass is called outside of autocast.
    out.float().square().sum().backward()
    assert pieces.sizes == [8, 8, 1, 1] * 2
    assert pieces.autocast == [True] * 8


@pytest.mark.slow
def test_a_batch_in_evaluation_and_a_single_sequence(pieces: Pieces) -> None:
    """The last pieces are single sequences; a batch of one is a part of the graph."""
    layer = layer_with("dcmha").eval()
    for batch in (5, 1):
        x = torch.randn(batch, N, DIM, dtype=torch.double)
        with torch.no_grad():
            torch.testing.assert_close(pieces.compile(layer)(x), layer(x))
    assert pieces.sizes == [2, 2, 1]
