"""Half precision: `attention_precision: float32`, and the range of float16."""

import copy
from typing import Any

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, HEADS, make, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_attn.attention.call import Inputs
from lit_attn.attention.layer import Attention
from lit_attn.attention.precision import COARSE, rounded_terms
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.models.language import SequenceClassifier, SequenceClassifierConfig


def double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


# Without `in_float32` for comparison: the sums are that of the format, so the test can fail.
EXACT = [(name, True) for name in PRESETS]
EXACT += [
    (name, False) for name in ("standard", "belief2", "mgk-soft-e", "smgk-hard", "dcmha", "mlk")
]


@pytest.mark.parametrize(("name", "in_float32"), EXACT)
def test_sums_are_as_exact_as_float32(name: str, in_float32: bool) -> None:
    layer, calls = make(PRESETS[name]).float(), []
    layer.in_float32 = in_float32
    attend = layer.similarity.attend

    def recorded(inputs: Inputs) -> Tensor:
        calls.append((inputs, attend(inputs)))
        return calls[-1][1]

    layer.similarity.attend = recorded
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(tokens(9).float())
        record = layer.record(tokens(9).float())
    del layer.similarity.attend
    inputs, heads = calls[0]
    exact = copy.deepcopy(layer).double()
    doubled = Inputs(*map(double, inputs))._replace(
        composers=exact.composers, normaliser=exact.normaliser, filter=exact.filter
    )
    expected = exact.similarity.attend(doubled._replace(memory=doubled.x))
    is_exact = (heads - expected).norm() < 1e-5 * expected.norm()
    # Linear keys are summed in float32 anyway, and rounded afterwards.
    assert is_exact == in_float32
    if in_float32:
        finished = layer._finish(heads)
        # The factors of a pair of queries are computed in half precision, as a gate is.
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            finished = layer.pair(tokens(9).float(), finished).transpose(1, 2)
        torch.testing.assert_close(record.heads, finished, rtol=1e-4, atol=1e-5)


def test_a_classifier_passes_its_precision_to_every_layer() -> None:
    for precision in ("autocast", "float32"):
        chosen = {"dim": 8, "depth": 2, "heads": 2, "ffn": {"width": 8}, "classifier_width": 4}
        config = SequenceClassifierConfig(attention_precision=precision, **chosen)
        network = SequenceClassifier(config, 5, 6, 3)
        layers = [module for module in network.modules() if isinstance(module, Attention)]
        assert [layer.in_float32 for layer in layers] == [precision == "float32"] * 2


LOGITS = [spec for spec in attention_cases.covering_specs() if spec.similarity.has_logits]


def with_large_keys(spec: AttentionSpec, norm: float, lsa: bool = False) -> Attention:
    """Return a layer whose keys have about this norm; all other numbers are small."""
    layer = make(spec, lsa=lsa)
    shared = layer.key_heads * layer.head_dim
    keys = layer.qkv.weight[layer.num_heads * layer.head_dim :][:shared]
    factor = norm / (layer.head_dim**0.5 * keys.norm(dim=1).mean())
    with torch.no_grad():
        keys *= factor
        more = layer.similarity.extra_key_weights()
        if more is not None:
            more *= factor
    return layer


# Local self-attention has a temperature and no logits of the own key, once for each similarity.
LARGE = [pytest.param(spec, False, id=attention_cases.label(spec)) for spec in LOGITS]
LARGE += [
    pytest.param(PRESETS[name], True, id=f"{name}-lsa")
    for name in ("standard", "gaussian", "mgk-soft-e", "smgk-hard", "belief2", "dcmha")
]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "lsa"), LARGE)
def test_keys_of_any_norm_stay_finite_in_float16(spec: AttentionSpec, lsa: bool) -> None:
    """From a norm of 362 on, |k|^2 / 2 overflows float16; the standard layer stays finite."""
    for norm in (400.0, 5000.0):
        for is_autocast in (False, True):
            layer = with_large_keys(spec, norm, lsa).train()
            layer = layer.float() if is_autocast else layer.half()
            x = tokens(9).to(layer.qkv.weight.dtype).requires_grad_()
            with torch.autocast("cpu", torch.float16, enabled=is_autocast):
                out = layer(x, is_causal=True)
            # A small loss: gradients of such keys are large.
            gradient = torch.autograd.grad(1e-4 * out.float().sum(), x)[0]
            with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=is_autocast):
                cache = layer.eval().new_cache()
                decoded = [layer(t, is_causal=True, cache=cache) for t in x.split([6, 1, 1, 1], 1)]
            for tensor in (out, gradient, *decoded, *layer.buffers()):
                assert tensor.isfinite().all()


@pytest.mark.parametrize("name", ["gaussian", "mgk", "smgk-hard", "mgk-soft-e"])
@pytest.mark.parametrize("norm", [300.0, 2000.0])
def test_large_keys_are_exact_in_float16(name: str, norm: float) -> None:
    """The heads are those of the same float16 queries, keys and values in float64."""
    layer = with_large_keys(PRESETS[name], norm).half()
    inputs = layer.inputs(tokens(9).half(), None, True, None)
    # Queries near the keys, so that |k|^2 cancels and no key takes all of the weight.
    noise = torch.randn(2, HEADS, 9, DIM // HEADS, generator=torch.Generator().manual_seed(0))
    inputs = inputs._replace(q=inputs.keys[:, :, 0] + noise.half())
    half = layer.similarity.attend(inputs)
    exact = copy.deepcopy(layer).double()
    doubled = Inputs(*map(double, inputs))._replace(
        composers=exact.composers, normaliser=exact.normaliser, filter=exact.filter
    )
    expected = exact.similarity.attend(doubled._replace(memory=doubled.x))
    # Logits are sums of numbers near |k|^2 in float32.
    tolerance = 4 * torch.finfo(torch.float16).eps + norm**2 * torch.finfo(torch.float32).eps
    assert (half.double() - expected).norm() < tolerance * expected.norm()


@settings(max_examples=50, deadline=None)
@given(st.floats(-6.5e7, 6.5e7), st.sampled_from([torch.float16, torch.bfloat16]))
def test_rounded_terms_have_the_sum_that_they_represent(number: float, dtype: torch.dtype) -> None:
    x = torch.tensor([number], requires_grad=True)
    terms = rounded_terms(x, torch.zeros(1, dtype=dtype))
    total = sum(factor * term.double() for factor, term in terms)
    bound = 0.3 * torch.finfo(dtype).eps ** 2 * abs(number) + 2**-24
    if dtype == torch.bfloat16:
        # Three terms have all bits of a float32.
        bound = 2**-24 * abs(number) + 2**-126
    assert abs(total.item() - x.item()) <= bound
    # A kernel adds the products of a term and its factor, so the term's gradient has the factor.
    last_terms = [term for factor, term in terms if factor == 1.0]
    factors = [factor for factor, _ in terms]
    assert factors == ([COARSE, 1.0, 1.0] if dtype == torch.float16 else [1.0, 1.0, 1.0])
    gradient = torch.autograd.grad(sum(term.float() for term in last_terms), x)[0]
    assert gradient.item() == 1.0
