"""The M-step takes place once per training step, whatever repeats or divides its forward passes."""

import copy
from collections.abc import Callable

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import make, tokens
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.attention.statistics import end_step, leave_steps_to_loop

STEPS = 3
COUNTING = [spec for spec in PRESETS.values() if spec.similarity.counts_queries]
COUNTING += [
    AttentionSpec.model_validate({"similarity": {"kind": "mixture", "prior": "m-step", **choices}})
    for choices in (
        {"prior_scope": "layer"},
        {"prior_scope": "position", "positions": 9},
        {"kernel": "dot", "keys": 3},
        {"variance": "learned"},
    )
]


def train(layer: Attention, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Train for some steps; return the gradients of all steps and the state at the end."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = tokens(6, seed=step).requires_grad_()
        call(x).square().mean().backward()
        values += [x.grad, *(parameter.grad for parameter in layer.parameters())]
        values = [None if value is None else value.clone() for value in values]
        optimizer.step()
    return [value for value in values if value is not None] + [*layer.state_dict().values()]


# A reentrant checkpoint differs in when it repeats a call, which matters to statistics.
@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("spec", [PRESETS["dcmha"], *COUNTING], ids=attention_cases.label)
def test_activation_checkpointing_changes_nothing(spec: AttentionSpec, reentrant: bool) -> None:
    plain = make(spec).train()
    recomputed = copy.deepcopy(plain)
    expected = train(plain, plain)
    results = train(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=reentrant))
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-12, atol=1e-14)
    if spec.similarity.counts_queries:
        start = make(spec).similarity.prior
        assert not torch.allclose(plain.similarity.prior, start, rtol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_a_layer_that_is_called_twice_in_a_step_uses_one_prior(reentrant: bool) -> None:
    """Both calls use the prior of the step's start, also when they are repeated."""
    states = []
    for is_checkpointed in (False, True):
        layer = make(PRESETS["mgk-soft-e"]).train()

        def call(x: Tensor, layer: Attention = layer, repeats: bool = is_checkpointed) -> Tensor:
            return checkpoint(layer, x, use_reentrant=reentrant) if repeats else layer(x)

        if reentrant:
            # Every repetition is a backward pass of its own, so the loop ends the step.
            leave_steps_to_loop(layer)
        x = tokens(6).requires_grad_()
        (call(x).sum() + call(x.flip(0) + 1).square().sum()).backward()
        end_step(layer)
        states.append([*layer.state_dict().values(), *(p.grad for p in layer.parameters())])
    for plain, repeated in zip(*states, strict=True):
        torch.testing.assert_close(plain, repeated, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scope", ["head", "layer", "position"])
def test_micro_batches_have_the_prior_of_their_batch(scope: str) -> None:
    """The training loop ends the step, and padding makes the micro-batches unequal."""
    similarity = {"kind": "mixture", "prior": "m-step", "prior_scope": scope}
    if scope == "position":
        similarity["positions"] = 9
    spec = AttentionSpec.model_validate({"similarity": similarity})
    complete = make(spec).train()
    divided = make(spec).train()
    x = tokens(6, batch=4)
    present = torch.ones(4, 1, 1, 6, dtype=torch.bool)
    present[0, ..., 2:] = False
    complete(x, attn_mask=present).sum().backward()
    leave_steps_to_loop(divided)
    before = divided.similarity.prior.clone()
    for rows in (slice(0, 1), slice(1, 4)):
        divided(x[rows], attn_mask=present[rows]).sum().backward()
        assert torch.equal(divided.similarity.prior, before)
    end_step(divided)
    torch.testing.assert_close(divided.similarity.prior, complete.similarity.prior)
    assert not torch.allclose(complete.similarity.prior, before)
    after = divided.similarity.prior.clone()
    end_step(divided)
    assert torch.equal(divided.similarity.prior, after)


def test_the_statistics_of_processes_are_summed() -> None:
    layer = make(PRESETS["mgk-soft-e"]).train()
    single = make(PRESETS["mgk-soft-e"]).train()
    single(tokens(6, batch=4)).sum().backward()
    other = make(PRESETS["mgk-soft-e"]).train()
    for part in (layer, other):
        leave_steps_to_loop(part)
    x = tokens(6, batch=4)
    layer(x[:1]).sum().backward()
    other(x[1:]).sum().backward()
    sums = other.similarity.sums
    end_step(layer, lambda tensor: tensor.add_(sums))
    torch.testing.assert_close(layer.similarity.prior, single.similarity.prior)


def test_evaluation_and_calls_without_a_gradient_leave_the_prior() -> None:
    layer = make(PRESETS["mgk-soft-e"])
    before = layer.similarity.prior.clone()
    layer(tokens(6)).sum().backward()
    assert torch.equal(layer.similarity.prior, before)
    assert layer.similarity.sums is None
