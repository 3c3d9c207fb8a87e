"""Sigmoid and differential attention, compared with independent code from their papers."""

import math

import pytest
import torch
from helpers.attention_checks import DIM, HEADS, make, tokens
from torch import Tensor, nn

from lit_attn.attention import normaliser, reference, residual
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.normaliser import DifferentialConfig, OffsetSoftmaxConfig, SigmoidConfig
from lit_attn.attention.residual import ResidualConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec


def test_sigmoid_weights_equal_a_computation_by_hand() -> None:
    """Logits 0 with n = 4 keys: 1 / (1 + e^(log 4)) = 1 / 5; with n = 1: 1 / 2."""
    sigmoid = make(AttentionSpec(normaliser=SigmoidConfig())).normaliser
    logits = torch.zeros(1, 1, 4, 4, dtype=torch.double)
    torch.testing.assert_close(sigmoid(logits, None), torch.full_like(logits, 0.2))
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    first = sigmoid(logits, causal)[0, 0, 0]
    torch.testing.assert_close(first, torch.full_like(first, 0.5))


def test_offset_softmax_adds_to_the_sum_over_keys() -> None:
    """Two keys at distances 4 and 5 of sigma^2 = 1 / 2: e^-16 and e^-25 are below 1e-6."""
    offset = make(AttentionSpec(normaliser=OffsetSoftmaxConfig())).normaliser
    logits = torch.tensor([[[[-16.0, -25.0], [0.0, 0.0]]]], dtype=torch.double)
    far = math.exp(-16) + math.exp(-25) + 1e-6
    expected = [[math.exp(-16) / far, math.exp(-25) / far], [1 / 2.000001] * 2]
    torch.testing.assert_close(offset(logits, None)[0, 0], torch.tensor(expected).double())


@pytest.mark.parametrize("preset", ["mgk", "smgk", "gaussian"])
def test_offset_softmax_keeps_terms_that_softmax_ignores(preset: str) -> None:
    """|q_i|^2 shifts all logits of a query, and so its share of the offset."""
    offset = OffsetSoftmaxConfig(offset=0.5)
    layer, x = make(PRESETS[preset].model_copy(update={"normaliser": offset})), tokens(6)
    torch.testing.assert_close(layer(x), reference.attention(layer, x))


def test_differential_attention_equals_the_paper_with_half_as_many_heads() -> None:
    """The paper's code: a head has two queries and keys of width d and one value of width 2 d."""
    layer, x = make(AttentionSpec(normaliser=DifferentialConfig())), tokens(7)
    width, pairs = DIM // HEADS, HEADS // 2
    q, k, v = layer.qkv(x).chunk(3, dim=-1)
    q1_, q2_, k1_, k2_ = layer.normaliser.vectors
    lambda_full = torch.exp((q1_ * k1_).sum()) - torch.exp((q2_ * k2_).sum()) + 0.8
    q = q.view(2, 7, 2 * pairs, width).transpose(1, 2)
    k = k.view(2, 7, 2 * pairs, width).transpose(1, 2)
    v = v.view(2, 7, pairs, 2 * width).transpose(1, 2)
    a = torch.softmax(q @ k.transpose(-1, -2) * width**-0.5, dim=-1).view(2, pairs, 2, 7, 7)
    heads = (a[:, :, 0] - lambda_full * a[:, :, 1]) @ v
    heads = nn.functional.rms_norm(heads, (2 * width,), eps=1e-5) * (1 - 0.8)
    expected = layer.proj(heads.transpose(1, 2).reshape(2, 7, DIM))
    torch.testing.assert_close(layer(x), expected)


def test_the_vectors_of_lambda_start_near_zero() -> None:
    torch.manual_seed(0)
    layer = attn_layer({"normaliser": "differential"})(512, 2)
    assert layer.normaliser.vectors.std().item() == pytest.approx(0.1, rel=0.1)
    assert layer.normaliser.vectors.shape == (4, 256)


def test_impossible_combinations_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="needs an even number of heads, not 3"):
        attn_layer({"normaliser": "differential"})(DIM, 3)
    with pytest.raises(ValueError, match="normaliser: linear keys never form the logits"):
        AttentionSpec(similarity=LinearConfig(), normaliser=SigmoidConfig())


def test_sigmoid_attention_keeps_terms_that_softmax_ignores() -> None:
    """-|q|^2 / 2 is equal for all keys of a query: the softmax ignores it, the sigmoid does not."""
    plain, sigmoid = (
        make(AttentionSpec.model_validate({"similarity": "gaussian", "normaliser": kind}))
        for kind in ("softmax", "sigmoid")
    )
    q, keys = torch.randn(2, 1, HEADS, 5, DIM // HEADS, dtype=torch.double)
    widths = [
        layer.similarity.features(q, keys.unsqueeze(2))[0].shape[-1] for layer in (plain, sigmoid)
    ]
    assert widths[0] < widths[1]
    features = sigmoid.similarity.features(q, keys.unsqueeze(2))
    logits = torch.einsum("bhie,bhrje->bhij", *features) / math.sqrt(DIM // HEADS)
    distance = (q.unsqueeze(-2) - keys.unsqueeze(-3)).square().sum(-1)
    torch.testing.assert_close(logits, -distance / (2 * math.sqrt(DIM // HEADS)))


def test_a_module_without_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResidualConfig, "family", dict(ResidualConfig.family))

    class Unfinished(ResidualConfig, kind="unfinished"):
        is_module: bool = True

        def build(self, shape: object) -> object:
            return residual.Residual(self, shape) if self.is_module else "residual"

    with pytest.raises(ValueError, match="'unfinished': its module Residual needs a method `forw"):
        attn_layer(AttentionSpec(residual=Unfinished()))(DIM, HEADS)
    with pytest.raises(ValueError, match=r"must return a lit_attn.attention.residual.Residual, no"):
        attn_layer(AttentionSpec(residual=Unfinished(is_module=False)))(DIM, HEADS)


def test_the_base_normaliser_sums_keys_before_it_normalises() -> None:
    class Identity(normaliser.Normaliser):
        def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
            return logits

    logits = torch.randn(1, 2, 3, 2, 4, dtype=torch.double)
    weights = Identity(None, None).over_keys(logits, None)
    torch.testing.assert_close(weights, logits.exp().sum(3).log())


def test_the_softmax_sums_the_weights_of_the_keys_of_a_token() -> None:
    """This equals the softmax of the log-sum-exp of the token's logits."""
    logits = torch.randn(1, 2, 3, 2, 4, dtype=torch.double)
    weights = make(AttentionSpec()).normaliser.over_keys(logits, None)
    torch.testing.assert_close(weights, logits.logsumexp(3).softmax(-1))
