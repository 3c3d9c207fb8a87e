"""Cross-attention: keys and values come from a memory, for every part that has a meaning there."""

from itertools import pairwise

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import HEADS, make, tokens
from torch import Tensor

from lit_attn.attention import dispatch, formed, mixture, reference
from lit_attn.attention.layer import Attention
from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.mixture import MixtureConfig
from lit_attn.attention.rotary import rotary
from lit_attn.attention.spec import PRESETS, AttentionSpec

SPECS = [spec for spec in attention_cases.all_specs() if not spec.find_cross_problem()]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=attention_cases.label)
# Every choice of every part once, for what a part does whatever stands beside it.
CHOICES = attention_cases.covering(SPECS)
every_choice = pytest.mark.parametrize("spec", CHOICES, ids=attention_cases.label)
SOFTMAX = [spec for spec in CHOICES if not isinstance(spec.similarity, LinearConfig)]
every_softmax = pytest.mark.parametrize("spec", SOFTMAX, ids=attention_cases.label)


def padding(m: int) -> Tensor:
    """Return a mask (2, 1, 1, m) that hides the last two tokens of the second memory."""
    present = torch.ones(2, 1, 1, m, dtype=torch.bool)
    present[1, ..., m - 2 :] = False
    return present


def assert_equals_reference(layer: Attention, x: Tensor, memory: Tensor, **masks: Tensor) -> None:
    """Check values and the gradients of x, of the memory and of all parameters."""
    results = []
    factor = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    parameters = dict(layer.named_parameters())
    for compute in (layer, lambda *a, **k: reference.attention(layer, *a, **k)):
        inputs = [x.clone().requires_grad_(), memory.clone().requires_grad_()]
        out = compute(inputs[0], memory=inputs[1], **masks)
        wanted = [*inputs, *parameters.values()]
        gradients = torch.autograd.grad((out * factor).sum(), wanted, allow_unused=True)
        results.append([out, *gradients])
    for name, fast, plain in zip(["out", "x", "memory", *parameters], *results, strict=True):
        assert (fast is None) == (plain is None), name
        if fast is not None:
            torch.testing.assert_close(
                fast, plain, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


@every_spec
def test_value_and_gradient_equal_the_reference(spec: AttentionSpec) -> None:
    assert_equals_reference(make(spec), tokens(7), tokens(12, seed=3))


@every_choice
@pytest.mark.parametrize(("n", "m"), [(1, 5), (5, 1)])
def test_other_lengths_equal_the_reference(spec: AttentionSpec, n: int, m: int) -> None:
    assert_equals_reference(make(spec), tokens(n), tokens(m, seed=3))


@every_choice
def test_a_padded_memory_equals_the_reference(spec: AttentionSpec) -> None:
    layer, x, memory = make(spec), tokens(3), tokens(8, seed=3)
    assert_equals_reference(layer, x, memory, attn_mask=padding(8))
    changed = memory.clone()
    changed[1, 6:] = 7.0
    torch.testing.assert_close(
        layer(x, attn_mask=padding(8), memory=memory),
        layer(x, attn_mask=padding(8), memory=changed),
    )


@every_softmax
def test_an_additive_mask_equals_the_reference(spec: AttentionSpec) -> None:
    bias = torch.randn(1, HEADS, 5, 8, dtype=torch.double)
    assert_equals_reference(make(spec), tokens(5), tokens(8, seed=3), attn_mask=bias)


@pytest.mark.slow
@every_choice
def test_many_queries_and_keys_equal_the_reference(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are formed in chunks of queries, and softmax mixtures are merged kernel calls."""
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 2)
    monkeypatch.setattr(dispatch, "CHUNK", 3)
    monkeypatch.setattr(formed, "CHUNK", 3)
    assert_equals_reference(make(spec), tokens(7), tokens(5, seed=3))
    assert_equals_reference(make(spec), tokens(5), tokens(7, seed=3), attn_mask=padding(7))


@every_choice
def test_shared_keys_and_values_equal_the_reference(spec: AttentionSpec) -> None:
    layer = make(spec.model_copy(update={"kv_heads": 2}))
    assert_equals_reference(layer, tokens(4), tokens(6, seed=3), attn_mask=padding(6))


@pytest.mark.slow
@every_choice
def test_a_cache_keeps_the_keys_and_values_of_the_memory(spec: AttentionSpec) -> None:
    layer = make(spec.model_copy(update={"kv_heads": 2}))
    x, memory = tokens(9), tokens(6, seed=3)
    mask, cache, outputs = padding(6), layer.new_cache(), []
    with torch.no_grad():
        expected = layer(x, attn_mask=mask, memory=memory)
        for start, stop in pairwise([0, 1, 2, 5, 6, 9]):
            rest = memory if start == 0 else memory[:, :0]
            part = x[:, start:stop]
            outputs.append(layer(part, attn_mask=mask, cache=cache, memory=rest))
            assert cache.position == 6
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-10, atol=1e-11)


@every_choice
def test_the_memory_of_the_same_tokens_gives_self_attention(spec: AttentionSpec) -> None:
    layer, x = make(spec), tokens(6)
    torch.testing.assert_close(layer(x, memory=x.clone()), layer(x))


def test_presets_that_use_the_own_token_are_refused() -> None:
    refused = [name for name, spec in PRESETS.items() if spec.find_cross_problem()]
    own_values = {"belief", "belief-star", "xsa", "attentionx", "belief2", "gated-xsa"}
    positions = {"forgetting", "alibi", "t5"}
    first_values = {"value-residual", "value-residual-learned"}
    filters = {"selective", "multi-token", "moba"}
    assert set(refused) == own_values | positions | first_values | filters | {"mla"}


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"residual": "value"}, "residual: 'value' uses the value of the query's own token"),
        ({"zz": True}, "zz: relates two tokens of one sequence"),
        ({"window": 3}, "window: is a distance within one sequence"),
    ],
)
def test_the_error_says_the_reason_and_what_to_write(choice: dict, reason: str) -> None:
    spec = AttentionSpec.model_validate(choice)
    message = f"{reason}, which cross-attention does not have; set `cross_attention`"
    assert spec.find_cross_problem().startswith(message)
    with pytest.raises(ValueError, match=message):
        make(spec)(tokens(3), memory=tokens(4))


def test_cross_attention_compiles_to_one_graph() -> None:
    layer, x, memory = make(PRESETS["dcmha"]), tokens(3), tokens(4)
    mask = torch.tensor([True, True, True, False]).view(1, 1, 1, 4)
    explained = torch._dynamo.explain(layer)(x, attn_mask=mask, memory=memory)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_positions_of_one_sequence_are_refused() -> None:
    layer, x, memory = make(AttentionSpec()), tokens(3), tokens(4)
    for options in ({"is_causal": True}, {"rotary": rotary(torch.arange(3), 6)}):
        with pytest.raises(ValueError, match="takes no order"):
            layer(x, memory=memory, **options)
    with pytest.raises(ValueError, match="no local self-attention"):
        make(AttentionSpec(), lsa=True)(x, memory=memory)


@pytest.mark.parametrize("n", [5, 8])
def test_the_m_step_counts_the_present_keys_of_all_queries(n: int) -> None:
    """A padding mask hides keys of the memory; it says nothing about the queries."""
    layer = make(AttentionSpec(similarity=MixtureConfig(prior="m-step")))
    x, memory = tokens(n), tokens(8, seed=3)
    q, keys, _ = reference.project(layer, x, None, memory)
    terms = torch.stack(
        [
            -mixture.measure_distances(q, key) / (2 * layer.head_dim**0.5)
            + layer.spec.similarity.reference_log_prior(layer.similarity, r, 8).unsqueeze(-2)
            for r, key in enumerate(keys)
        ]
    )
    counted = padding(8).expand(2, HEADS, n, 8)
    share = terms.exp() / (terms.exp().sum(0) + 1e-6) * counted
    expected = share.sum((1, 3, 4)) / (counted.sum((0, 2, 3)) + 1e-6)
    expected[-1] = 1 - expected[:-1].sum(0)
    layer.train()(x, padding(8), memory=memory).sum().backward()
    torch.testing.assert_close(layer.similarity.prior[..., 0], expected)
