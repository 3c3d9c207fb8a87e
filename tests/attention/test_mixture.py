"""Mixtures of Gaussian keys: identities, and variants of the paper and of its released code."""

import math
from typing import Any

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, HEADS, assert_same, make, tokens
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention import dispatch, formed, reference
from lit_attn.attention.diagnostics import query_likelihood
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.mixture import GaussianConfig, MixtureConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec

WIDTH = DIM // HEADS

MIXTURES = attention_cases.covering(
    spec
    for spec in attention_cases.all_specs()
    if isinstance(spec.similarity, MixtureConfig) and spec.compose.kind == "none"
)


class Unit(nn.Module):
    """Norm that scales keys to length one."""

    def forward(self, k: Tensor) -> Tensor:
        return F.normalize(k, dim=-1)


def mixture(seed: int = 0, **choices: Any) -> Attention:
    return make(AttentionSpec(similarity=MixtureConfig(**choices)), seed)


@pytest.mark.parametrize("spec", MIXTURES, ids=attention_cases.label)
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "additive"])
def test_the_paths_for_many_tokens_equal_the_reference(
    spec: AttentionSpec, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer sequences and GPUs take one kernel call for each key, or chunks if hard."""
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    monkeypatch.setattr(dispatch, "CHUNK", 4)
    monkeypatch.setattr(formed, "CHUNK", 4)
    present = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    present[1, ..., 6:] = False
    masks: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"is_causal": True},
        "padding": {"attn_mask": present},
        "additive": {"attn_mask": torch.randn(HEADS, 9, 9, dtype=torch.double)},
    }
    assert_same(make(spec), tokens(9), **masks[mask])


@pytest.mark.parametrize("assignment", ["soft", "hard"])
def test_equal_keys_equal_one_gaussian_key(assignment: str) -> None:
    mixed = mixture(source="shifted", assignment=assignment)
    one = make(AttentionSpec(similarity=GaussianConfig()))
    with torch.no_grad():
        mixed.similarity.shift.zero_()
    one.load_state_dict({k: v for k, v in mixed.state_dict().items() if "similarity" not in k})
    torch.testing.assert_close(mixed(tokens(7)), one(tokens(7)))


def test_keys_of_equal_length_make_the_gaussian_kernel_the_dot_product() -> None:
    """The two kernels differ by |k_j|^2, which is then constant (MGK eq. 3, 4)."""
    gaussian = make(AttentionSpec(similarity=GaussianConfig()))
    dot = make(PRESETS["standard"])
    x = tokens(7)
    dot.load_state_dict(gaussian.state_dict())
    assert not torch.allclose(gaussian(x), dot(x), rtol=1e-3)
    for layer in (gaussian, dot):
        layer.k_norm = Unit()
    torch.testing.assert_close(gaussian(x), dot(x))


def test_clamped_weights_are_relative_and_at_least_zero() -> None:
    """Only ratios of the weights count, and a key with a negative weight has no effect."""
    layer = mixture(prior="clamped")
    x = tokens(7)
    with torch.no_grad():
        layer.similarity.prior.fill_(0.5)
        out = layer(x)
        layer.similarity.prior.fill_(0.2)
        torch.testing.assert_close(layer(x), out)
        layer.similarity.prior[1] = -0.3
        one = make(AttentionSpec(similarity=GaussianConfig()))
        one.load_state_dict({k: v for k, v in layer.state_dict().items() if "similarity" not in k})
        torch.testing.assert_close(layer(x), one(x))


@pytest.mark.parametrize("prior", ["learned", "clamped", "m-step"])
@pytest.mark.parametrize("scope", ["head", "layer", "position"])
def test_weights_start_equal(prior: str, scope: str) -> None:
    """With pi_r = 1 / M, as published, every variant of pi equals the fixed one."""
    torch.manual_seed(0)
    layer, fixed = (
        attn_layer(AttentionSpec(similarity=MixtureConfig(keys=3, **choices)))(DIM, HEADS).eval()
        for choices in ({"prior": prior, "prior_scope": scope}, {"prior": "fixed"})
    )
    state = {k: v for k, v in layer.state_dict().items() if k != "similarity.prior"}
    fixed.load_state_dict(state)
    shape = {"head": (3, HEADS, 1), "layer": (3, 1, 1), "position": (3, HEADS, 256)}
    assert layer.similarity.prior.shape == shape[scope]
    x = tokens(7).float()
    torch.testing.assert_close(layer(x), fixed(x))


def test_offsets_start_as_published() -> None:
    torch.manual_seed(0)
    paper, released = (
        attn_layer(AttentionSpec(similarity=MixtureConfig(source="shifted", shift_init=init)))(
            1024, 2
        )
        for init in ("normal", "released")
    )
    assert paper.similarity.shift.std(dim=(1, 2)).tolist() == pytest.approx([1, 1], abs=0.1)
    assert (released.similarity.shift[0] == 0).all()
    assert released.similarity.shift[1].std().item() == pytest.approx(0.5, abs=0.05)


def test_padded_queries_have_no_responsibilities() -> None:
    """transformer-mgk sums the responsibilities over the pairs of tokens that both exist."""
    padded, alone = (mixture(prior="m-step").train() for _ in range(2))
    x = tokens(7)
    present = torch.tensor([True] * 5 + [False] * 2)
    padded(x, attn_mask=present.view(1, 1, 1, 7)).sum().backward()
    alone(x[:, :5]).sum().backward()
    assert (alone.similarity.prior != 0.5).all()
    torch.testing.assert_close(padded.similarity.prior, alone.similarity.prior)


@pytest.mark.parametrize("kernel", ["gaussian", "dot"])
def test_responsibilities_of_extreme_logits_are_numbers(kernel: str) -> None:
    """Logits of several thousands in float32, whose exponentials are 0 or not finite."""
    layer = mixture(prior="m-step", kernel=kernel).float().train()
    layer(300 * tokens(7).float()).sum().backward()
    prior = layer.similarity.prior
    assert ((prior >= 0) & (prior <= 1)).all()
    torch.testing.assert_close(prior.sum(0), torch.ones_like(prior[0]))


def test_a_position_without_attention_keeps_its_weights() -> None:
    """Without pairs there is no responsibility to average."""
    layer = mixture(prior="m-step", prior_scope="position", positions=8).train()
    present = torch.tensor([True] * 5 + [False] * 2)
    layer(tokens(7), attn_mask=present.view(1, 1, 1, 7)).sum().backward()
    prior = layer.similarity.prior
    assert (prior[..., 5:] == 0.5).all()
    assert (prior[..., :5] != 0.5).all()
    torch.testing.assert_close(prior.sum(0), torch.ones_like(prior[0]))


@pytest.mark.slow
def test_the_compiled_m_step_agrees() -> None:
    torch.compiler.reset()
    plain, other = (mixture(prior="m-step").float().train() for _ in range(2))
    compiled = torch.compile(other)
    for seed in range(2):
        x = tokens(9, seed=seed).float()
        outs = compiled(x), plain(x)
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
        for out in outs:
            out.sum().backward()
        assert (plain.similarity.prior != 0.5).all()
        torch.testing.assert_close(other.similarity.prior, plain.similarity.prior)


@pytest.mark.parametrize("few", [True, False], ids=["few tokens", "many tokens"])
def test_dropout_drops_a_pair_with_all_of_its_keys(
    few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unit vectors as values and an identity projection make the output equal the weights."""
    if not few:
        monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    layer = attn_layer("mgk")(4, 1, attn_head_dim=4, attn_drop=0.5, proj_bias=False).double()
    with torch.no_grad():
        layer.proj.weight.copy_(torch.eye(4))
        layer.qkv.weight[-4:] = torch.eye(4)
    x = torch.eye(4, dtype=torch.double).expand(64, 4, 4)
    weights, dropped = layer.eval()(x), layer.train()(x)
    zero = dropped == 0
    assert 0.4 < zero.double().mean() < 0.6
    torch.testing.assert_close(dropped[~zero], 2 * weights[~zero])


@pytest.mark.parametrize("source", ["projected", "shifted"])
def test_autocast_is_as_exact_as_half_precision(source: str) -> None:
    """|k|^2 / 2 of long keys must not be rounded to 8 bits."""
    errors = []
    for autocast in (True, False):
        layer = mixture(source=source)
        with torch.no_grad():
            if source == "shifted":
                layer.similarity.shift += 6
                layer.qkv.bias[:DIM] += 6  # queries near the keys, or the longest would win
            x = tokens(16)
            exact = reference.attention(layer, x)
            if autocast:
                with torch.autocast("cpu", torch.bfloat16):
                    half = layer.float()(x.float()).double()
            else:
                half = layer.bfloat16()(x.bfloat16()).double()
        errors.append((half - exact).norm() / exact.norm())
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize(("heads", "bias"), [(1, True), (2, True), (4, False)])
def test_parameters_of_the_layer(heads: int, bias: bool) -> None:
    """Parameters are W_K2 with and without a bias, offsets and pi (docs/setups.md)."""

    def count(**choices: Any) -> int:
        spec = AttentionSpec(similarity=MixtureConfig(**choices)) if choices else AttentionSpec()
        layer = attn_layer(spec)(64, heads, attn_head_dim=32, qkv_bias=bias)
        return sum(p.numel() for p in layer.parameters()) - plain

    plain, inner = 0, 32 * heads
    plain = count()
    assert plain == 4 * 64 * inner + 64 + 3 * inner * bias
    key = 64 * inner + inner * bias
    assert count(keys=2) == key + 2 * heads
    assert count(keys=3) == 2 * key + 3 * heads
    assert count(prior="clamped", prior_scope="layer") == key + 2
    assert count(prior="clamped", prior_scope="position") == key + 2 * heads * 256
    assert count(source="shifted", prior="clamped", prior_scope="layer") == 2 * inner + 2
    assert count(prior="m-step") == count(assignment="hard") == count(prior="fixed") == key


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"assignment": "hard", "prior": "m-step"}, "prior: has no effect with `assignment: hard`"),
        (
            {"assignment": "hard", "prior_scope": "layer"},
            "prior_scope: has no effect with `assignment: hard`",
        ),
        ({"shift_init": "released"}, "shift_init: projected keys have no offsets"),
        (
            {"prior": "fixed", "prior_scope": "position"},
            "prior_scope: has no effect with `prior: fixed`",
        ),
        ({"positions": 512}, "positions: has no effect without"),
    ],
)
def test_a_choice_without_effect_is_refused(choices: dict[str, object], reason: str) -> None:
    """Two cells that compute the same would look like a result."""
    with pytest.raises(ValueError, match=reason):
        MixtureConfig(**choices)


def test_different_widths_prefer_the_wide_key_far_away() -> None:
    """MGK (7): with sigma_2^2 = 3 sigma_1^2 the second key's logit falls a third as fast."""
    layer = mixture(source="shifted", variance=(1, 3), prior="fixed", kernel="gaussian")
    with torch.no_grad():
        layer.similarity.shift.zero_()
    q = tokens(4).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    keys = torch.zeros(2, HEADS, 2, 4, WIDTH, dtype=torch.double)
    features, key_features = layer.similarity.features(q, keys)
    logits = torch.einsum("bhie,bhrje->bhrij", features, key_features) / math.sqrt(WIDTH)
    distance = -q.square().sum(-1) / (2 * math.sqrt(WIDTH))
    expected = torch.stack([distance, distance / 3], 2) + math.log(0.5)
    torch.testing.assert_close(logits[..., 0], expected)


def test_compiled_weights_equal_the_softmax() -> None:
    """Compiled, the softmax over all keys of all tokens is written out; rows can be masked."""
    plain = make(AttentionSpec()).normaliser.over_keys
    compiled = torch.compile(plain, backend="eager", fullgraph=True)
    logits = 5 * torch.randn(2, 3, 5, 2, 7, dtype=torch.double)
    logits[..., 1, :, :] = torch.finfo(torch.double).min
    logits[..., 2, :, 3:] = torch.finfo(torch.double).min
    results = []
    for weights in (plain, compiled):
        inputs = logits.clone().requires_grad_()
        out = weights(inputs, None)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("variance", [(1, 1), (1, 3)])
def test_learned_variances_equal_fixed_ones_and_get_gradients(variance: tuple[int, int]) -> None:
    plain, learned = mixture(variance=variance), mixture(variance="learned")
    learned.load_state_dict(plain.state_dict(), strict=False)
    assert attn_layer("mgk")(DIM, HEADS).similarity.fixed_variances == (1, 1)
    with torch.no_grad():
        learned.similarity.log_variance.copy_(torch.tensor(variance).log())
    x = tokens(7)
    out = learned(x)
    torch.testing.assert_close(out, plain(x), rtol=1e-6, atol=1e-7)
    out.square().sum().backward()
    assert (learned.similarity.log_variance.grad != 0).all()


def test_variances_of_heads_equal_those_of_a_layer_in_each_head() -> None:
    """Each head of the layer has the weights that the head has with its variances alone."""
    of_layer = mixture(variance="learned")
    of_heads = mixture(variance="learned", variance_scope="head")
    assert of_heads.similarity.log_variance.shape == (HEADS, 2)
    assert of_heads.no_weight_decay() - of_layer.no_weight_decay() == {"similarity.log_variance"}
    variances = torch.rand(HEADS, 2, dtype=torch.double)
    weights = of_layer.state_dict()
    of_heads.load_state_dict(weights | {"similarity.log_variance": variances})
    x = tokens(7)
    record = of_heads.record(x)
    likelihood = query_likelihood(of_heads, record)
    for head in range(HEADS):
        of_layer.load_state_dict(weights | {"similarity.log_variance": variances[head]})
        one = of_layer.record(x)
        torch.testing.assert_close(record.weights[:, head], one.weights[:, head])
        torch.testing.assert_close(likelihood[:, head], query_likelihood(of_layer, one)[:, head])


def test_variances_of_heads_need_learned_variances() -> None:
    with pytest.raises(ValidationError, match="variance_scope: has no effect without"):
        MixtureConfig(variance_scope="head")
    with pytest.raises(ValidationError, match="variance_scope: has no effect without"):
        MixtureConfig(variance=(1, 3), variance_scope="head")
