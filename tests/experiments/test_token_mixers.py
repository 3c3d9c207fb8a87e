"""Tests of the example layers of docs/mixers.md: chunks against the recurrence, and caches."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.paths import EXPERIMENTS
from torch import Tensor

from lit_attn.models.factory import count_flops
from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "token_mixers" / "token_mixers.py"])

from token_mixers import GatedDeltaRule, StateSpace  # noqa: E402

DIM, HEADS, TOKENS = 12, 3, 75

DeltaNet = partial(GatedDeltaRule, most_beta=2.0, decays=False)
every_layer = pytest.mark.parametrize("layer_class", [GatedDeltaRule, DeltaNet, StateSpace])


def layer_of(layer_class: Any) -> Any:
    torch.manual_seed(0)
    return layer_class(DIM, HEADS).double()


def tokens() -> Tensor:
    return torch.randn(2, TOKENS, DIM, dtype=torch.double, requires_grad=True)


@every_layer
def test_chunks_compute_the_recurrence_in_value_and_gradient(layer_class: Any) -> None:
    layer = layer_of(layer_class)
    x = tokens()
    output = layer(x)
    expected = layer.reference(x)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    direction = torch.randn_like(output)
    inputs = [x, *layer.parameters()]
    gradients = torch.autograd.grad(output, inputs, direction)
    expected_gradients = torch.autograd.grad(expected, inputs, direction)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-8, atol=1e-9)


@every_layer
def test_a_cache_continues_the_sequence(layer_class: Any) -> None:
    layer = layer_of(layer_class)
    x = tokens()
    cache = layer.new_cache()
    parts = [layer(x[:, start:stop], cache=cache) for start, stop in pairwise([0, 40, 41, 75])]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=1e-9, atol=1e-10)


@every_layer
def test_strong_decays_stay_finite(layer_class: Any) -> None:
    """exp(-g) of a chunk would overflow; ratios of decays do not."""
    layer = layer_class(DIM, HEADS)
    x = (100 * torch.randn(1, 64, DIM)).requires_grad_()
    output = layer(x)
    output.sum().backward()
    assert output.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_delta_rule_replaces_the_value_of_a_repeated_key() -> None:
    """With beta = 1 and no decay, the state has the last value of each key."""
    layer = layer_of(GatedDeltaRule)
    key = torch.zeros(1, 1, 2, DIM // HEADS, dtype=torch.double)
    key[..., 0] = 1
    values = torch.randn(1, 1, 2, DIM // HEADS, dtype=torch.double)
    ones = torch.ones(1, 1, 2).double()
    zeros = torch.zeros(1, 1, 2).double()
    empty = torch.zeros(1, 1, DIM // HEADS, DIM // HEADS, dtype=torch.double)
    output, _ = layer.step(empty, key, key, values, ones, zeros)
    torch.testing.assert_close(output, values)


def test_a_beta_of_two_tracks_parity() -> None:
    """S becomes (1 - 2 k k^T) S, so each one among the bits changes the sign of the state."""
    layer = GatedDeltaRule(DIM, HEADS, most_beta=2.0).double()
    key = torch.zeros(1, 1, 5, DIM // HEADS, dtype=torch.double)
    key[..., 0] = 1
    bits = torch.tensor([[[1.0, 1, 0, 1, 0]]]).double()
    state = torch.zeros(1, 1, DIM // HEADS, DIM // HEADS, dtype=torch.double)
    state[..., 0, 0] = 1
    zeros = torch.zeros_like(bits)
    output, _ = layer.step(state, key, key, torch.zeros_like(key), 2 * bits, zeros)
    assert output[0, 0, :, 0].tolist() == [-1, 1, 1, -1, -1]
    beta = layer.project(100 * torch.randn(1, 50, DIM).double())[3]
    assert beta.max() > 1.9
    with pytest.raises(ValueError, match="most_beta: 3 is neither 1 nor 2"):
        GatedDeltaRule(DIM, HEADS, most_beta=3)


def test_declared_flops_are_at_least_those_that_torch_counts() -> None:
    layer = GatedDeltaRule(DIM, HEADS).to("meta").requires_grad_(False)
    counted = count_flops(layer, (torch.empty(1, 64, DIM, device="meta"),))
    assert counted < layer.flops(64) < 1.3 * counted
