"""A batch of 0, and sequences of 0 tokens, have an empty output."""

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, make

from lit_attn.attention import formed
from lit_attn.attention.rotary import rotary
from lit_attn.attention.spec import AttentionSpec

SHAPES = [(0, 9), (0, 0), (2, 0)]


@pytest.mark.parametrize("spec", attention_cases.covering_specs(), ids=attention_cases.label)
def test_an_empty_input_has_an_empty_output_and_gradient(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the paths of many tokens, which divide them into chunks."""
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    monkeypatch.setattr(formed, "CHUNK", 4)
    layer = make(spec).train()
    for shape in SHAPES:
        for is_causal in (False, True):
            x = torch.randn(*shape, DIM, dtype=torch.double, requires_grad=True)
            turn = rotary(torch.arange(shape[1]), DIM // layer.num_heads)
            out = layer(x, is_causal=is_causal, rotary=turn)
            assert (out.shape, out.dtype) == (x.shape, x.dtype)
            out.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape


@pytest.mark.parametrize("spec", attention_cases.covering_specs(), ids=attention_cases.label)
def test_an_empty_batch_of_cross_attention_has_an_empty_output(spec: AttentionSpec) -> None:
    if spec.find_cross_problem():
        pytest.skip("the layer has no cross-attention")
    x = torch.randn(0, 3, DIM, dtype=torch.double)
    memory = torch.randn(0, 5, DIM, dtype=torch.double)
    assert make(spec)(x, memory=memory).shape == x.shape


def test_an_empty_batch_changes_no_prior() -> None:
    layer = make(AttentionSpec.model_validate("mgk-soft-e")).train()
    before = layer.similarity.prior.clone()
    layer(torch.randn(0, 3, DIM, dtype=torch.double, requires_grad=True)).sum().backward()
    assert torch.equal(layer.similarity.prior, before)
