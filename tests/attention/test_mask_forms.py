"""All forms of one mask give the same values and gradients, for every preset and normaliser.

The reference in float64 is the judge. The forms are a boolean mask, and additive ones that hide
keys by -inf or by the lowest finite number, with and without finite biases.
"""

from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, HEADS, assert_same, make, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_attn.attention import dispatch, formed, reference
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.masks import HIDES_FROM, split_mask
from lit_attn.attention.network import number_layers
from lit_attn.attention.normaliser import NormaliserConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.training.diagnostics import LayerCall, split_calls

N = 7

SPECS = dict(PRESETS)
for kind in NormaliserConfig.family:
    for preset in ("standard", "mgk", "mgk-hard", "talking-heads"):
        spec = AttentionSpec.model_validate({"preset": preset, "normaliser": kind})
        if spec not in SPECS.values():
            SPECS[f"{preset}-{kind}"] = spec

# Every choice of these layers once.
CHOICES = attention_cases.covering(SPECS.values())
every_choice = pytest.mark.parametrize("name", [name for name in SPECS if SPECS[name] in CHOICES])
SOFTMAX = [n for n, s in SPECS.items() if s in CHOICES and s.similarity.has_logits]
every_softmax = pytest.mark.parametrize("name", SOFTMAX)


class Pattern(NamedTuple):
    """A mask as the pairs of tokens that it shows; is_causal adds the causal order."""

    shown: Tensor
    is_causal: bool
    window: int | None = None


def padding(absent: slice) -> Tensor:
    """Return (2, 1, 1, N), False for the `absent` tokens of the second sequence."""
    present = torch.ones(2, 1, 1, N, dtype=torch.bool)
    present[1, ..., absent] = False
    return present


def random_pairs(heads: int) -> Tensor:
    """Return (2, heads, N, N); query 2 of all heads and query 4 of one head see no key."""
    shown = torch.rand(2, heads, N, N, generator=torch.Generator().manual_seed(5)) > 0.4
    shown[:, :, 2] = False
    shown[:, 0, 4] = False
    return shown


LEFT, RIGHT = padding(slice(0, 3)), padding(slice(4, N))
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()

PADDED = {
    "left": Pattern(LEFT, False),
    "left, causal": Pattern(LEFT, True),
    "right": Pattern(RIGHT, False),
    "right, causal": Pattern(RIGHT, True),
    "no token": Pattern(torch.zeros(1, 1, 1, N, dtype=torch.bool), False),
}
PAIRS = {
    "left and causal in one mask": Pattern(LEFT & CAUSAL, False),
    "left, causal, window": Pattern(LEFT, True, 3),
    "right, window": Pattern(RIGHT, False, 2),
    "pairs": Pattern(random_pairs(1), False),
    "pairs of heads, causal": Pattern(random_pairs(HEADS), True),
}


def patterns_of(
    name: str, patterns: Iterable[Pattern] = (*PADDED.values(), *PAIRS.values())
) -> list[Pattern]:
    """Return the patterns that the layer `name` supports.

    Linear keys support padding only, and filters of the logits no windows.
    """
    supported = []
    for pattern in patterns:
        is_padding = any(pattern is one for one in PADDED.values())
        takes_pairs = SPECS[name].similarity.has_logits
        takes_windows = SPECS[name].filter.kind == "none"
        if (is_padding or takes_pairs) and (pattern.window is None or takes_windows):
            supported.append(pattern)
    return supported


def additive(shown: Tensor, hidden: float, dtype: torch.dtype = torch.double) -> Tensor:
    return torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, hidden)


def forms(shown: Tensor, dtype: torch.dtype = torch.double) -> list[Tensor]:
    """Return the mask as boolean, with -inf, and with the lowest numbers of precisions."""
    numbers = [-torch.inf, torch.finfo(dtype).min, torch.finfo(torch.float16).min]
    return [shown, *(additive(shown, number, dtype) for number in numbers)]


def layer_for(name: str, window: int | None) -> Attention:
    return make(SPECS[name].model_copy(update={"window": window}))


def attended_heads(layer: Attention, x: Tensor, mask: Tensor, is_causal: bool) -> Tensor:
    """Return the heads (B, H, n, D) before the residual part, without the norm of a filter."""
    inputs = layer.inputs(x, mask, is_causal, None)
    return layer.pair(x, layer.normaliser.finish(layer.similarity.attend(inputs)))


def sees_no_key(pattern: Pattern) -> Tensor:
    """Return (2, HEADS, N), True for queries without a visible key."""
    order = reference.may_attend(N, pattern.window, False, pattern.is_causal)
    visible = (pattern.shown & order).expand(2, HEADS, N, N)
    return ~visible.any(-1)


@every_choice
def test_every_form_equals_the_reference(name: str) -> None:
    """The reference has the same value for all forms, so the forms agree with each other."""
    for pattern in patterns_of(name):
        layer = layer_for(name, pattern.window)
        x = tokens(N)
        expected = reference.attention(layer, x, pattern.shown, pattern.is_causal)
        for mask in forms(pattern.shown)[1:]:
            torch.testing.assert_close(layer(x, mask, pattern.is_causal), expected)
        assert_same(layer, x, attn_mask=pattern.shown, is_causal=pattern.is_causal)
        lowest = additive(pattern.shown, torch.finfo(torch.double).min)
        assert_same(layer, x, attn_mask=lowest, is_causal=pattern.is_causal)


@every_softmax
def test_finite_biases_equal_the_reference(name: str) -> None:
    """The gradient of a learned bias is zero where it hides a key."""
    generator = torch.Generator().manual_seed(6)
    bias = 2 * torch.randn(2, HEADS, N, N, dtype=torch.double, generator=generator)
    tried = (PADDED["left, causal"], PAIRS["pairs"], PAIRS["left, causal, window"])
    for pattern in patterns_of(name, tried):
        layer = layer_for(name, pattern.window)
        x = tokens(N)
        gradients = []
        for hidden in (-torch.inf, -1e9):
            mask = bias.masked_fill(~pattern.shown, hidden).requires_grad_()
            assert_same(layer, x, attn_mask=mask, is_causal=pattern.is_causal)
            out = layer(x, mask, pattern.is_causal)
            gradients += torch.autograd.grad(out.square().sum(), mask)
        expected = reference.attention(layer, x, mask, pattern.is_causal)
        gradients += torch.autograd.grad(expected.square().sum(), mask)
        for gradient in gradients:
            torch.testing.assert_close(gradient, gradients[-1])
            assert not gradient[~pattern.shown.expand_as(gradient)].any()


@every_choice
def test_a_mask_of_one_axis_is_one_of_the_keys(name: str) -> None:
    shown = torch.arange(N) > 1
    layer = layer_for(name, None)
    x = tokens(N)
    for mask in forms(shown):
        expected = layer(x, mask[None, None, None])
        torch.testing.assert_close(layer(x, mask), expected)


@every_choice
def test_forms_agree_in_half_precision(name: str) -> None:
    """Forms differ by less than rounding; queries without keys are zero, their gradients finite."""
    dtype = torch.float16
    for pattern in patterns_of(name):
        layer = layer_for(name, pattern.window).to(dtype)
        x = tokens(N).to(dtype).requires_grad_()
        empty = sees_no_key(pattern)
        values = []
        gradients = []
        for mask in forms(pattern.shown, dtype)[:3]:
            heads = attended_heads(layer, x, mask, pattern.is_causal)
            assert not heads[empty].any()
            values.append(heads)
            gradients += torch.autograd.grad(heads.float().square().mean(), x)
        for value, gradient in zip(values, gradients, strict=True):
            assert gradient.isfinite().all()
            for one, other in ((value, values[0]), (gradient, gradients[0])):
                error = (one.double() - other.double()).norm()
                assert error <= 4 * torch.finfo(dtype).eps * other.double().norm()


@every_choice
def test_queries_without_keys_are_zero_on_every_path(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are formed in chunks of 4 queries, and windows take one call for each chunk.

    Additive masks are tested with dropout on weights, which changes the path of several keys.
    """
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    monkeypatch.setattr(formed, "CHUNK", 4)
    monkeypatch.setattr(dispatch, "CHUNK", 4)
    for pattern in patterns_of(name):
        layer = layer_for(name, pattern.window).train()
        for dropout, mask in ((0.0, pattern.shown), (0.5, additive(pattern.shown, -torch.inf))):
            layer.attn_drop = dropout
            x = tokens(N).requires_grad_()
            heads = attended_heads(layer, x, mask, pattern.is_causal)
            assert not heads[sees_no_key(pattern)].any()
            wanted = [x, *layer.parameters()]
            for gradient in torch.autograd.grad(heads.sum(), wanted, allow_unused=True):
                assert gradient is None or gradient.isfinite().all()


@every_softmax
def test_every_form_decodes_with_a_cache(name: str) -> None:
    """A prompt with padding on the left, then single tokens: as the sequence without a cache."""
    takes_window = SPECS[name].filter.kind == "none"
    layer = layer_for(name, 3 if takes_window else None)
    x = tokens(N)
    with torch.no_grad():
        expected = layer(x, LEFT, is_causal=True)
        for mask in forms(LEFT):
            cache = layer.new_cache()
            outputs = []
            for start, stop in ((0, 2), (2, 4), (4, 5), (5, 6), (6, 7)):
                columns = mask[..., start - cache.length : stop]
                outputs.append(layer(x[:, start:stop], columns, is_causal=True, cache=cache))
            torch.testing.assert_close(torch.cat(outputs, 1), expected)


@every_choice
def test_every_form_masks_a_memory(name: str) -> None:
    """In cross-attention one memory is empty: its queries get zero."""
    layer = make(SPECS[name])
    if layer.cross_problem:
        pytest.skip(layer.cross_problem)
    x = tokens(3)
    memory = tokens(N)
    shown = torch.ones(2, 1, 1, N, dtype=torch.bool)
    shown[0, ..., 5:] = False
    shown[1] = False
    expected = reference.attention(layer, x, shown, memory=memory)
    for mask in forms(shown):
        torch.testing.assert_close(layer(x, mask, memory=memory), expected)
    torch.testing.assert_close(expected[1], layer.proj.bias.expand(3, DIM))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["mgk-soft-e", "smgk-soft-e"])
def test_every_form_gives_the_same_m_step(name: str, is_causal: bool) -> None:
    """Padding does not count, also if the causal order is part of the mask."""
    present = LEFT[1:]
    x = tokens(N)[1:]
    pairs = present & CAUSAL if is_causal else present.expand(1, 1, N, N)
    calls = [(x, mask, is_causal) for mask in forms(present)]
    calls += [(x, mask, False) for mask in forms(pairs)]
    expected = make(SPECS[name]).train()
    expected(x[:, 3:], is_causal=is_causal)
    for inputs, mask, has_order in calls:
        layer = make(SPECS[name]).train()
        layer(inputs, mask, is_causal=has_order)
        torch.testing.assert_close(layer.similarity.prior, expected.similarity.prior)


@pytest.mark.parametrize("name", ["talking-heads", "mgk-hard", "standard-differential", "mgk"])
def test_large_biases_are_added_in_float32(name: str) -> None:
    """In bfloat16, a logit of less than 1 would vanish beside a bias of -300."""
    dtype = torch.bfloat16
    layer = make(SPECS[name])
    x = tokens(N).to(dtype)
    bias = torch.full((N, N), -300.0, dtype=dtype)
    expected = reference.attention(layer, x.double(), bias.double())
    out = layer.to(dtype)(x, bias).double()
    assert (out - expected).norm() < 30 * torch.finfo(dtype).eps * expected.norm()


@st.composite
def mixed_masks(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw an additive mask that hides by different numbers, and the pairs that it shows."""
    dtype = draw(st.sampled_from([torch.double, torch.float32, torch.bfloat16, torch.float16]))
    shape = draw(st.sampled_from([(N, N), (1, N), (2, 1, N, N), (HEADS, N, N), (2, HEADS, 1, N)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    lowest = [torch.finfo(t).min for t in (torch.float16, torch.bfloat16, dtype)]
    hiding = torch.tensor([-torch.inf, -1e9, HIDES_FROM, *lowest], dtype=torch.double).to(dtype)
    share = draw(st.sampled_from([0.0, 0.5, 1.0]))
    shown = torch.rand(shape, generator=generator) > share
    bias = torch.randn(shape, generator=generator).to(dtype)
    numbers = hiding[torch.randint(len(hiding), shape, generator=generator)]
    return torch.where(shown, bias, numbers), shown


MIXED = ["standard", "mgk", "belief2", "dcmha-post", "sigmoid", "mgk-offset-softmax"]
MIXED += ["mgk-hard-sigmoid", "standard-differential", "talking-heads-offset-softmax"]


@settings(max_examples=30, deadline=None)
@given(mixed_masks(), st.sampled_from(MIXED), st.booleans())
def test_a_mask_can_hide_keys_by_different_numbers(
    mixed: tuple[Tensor, Tensor], name: str, is_causal: bool
) -> None:
    mask, shown = mixed
    visibility, bias = split_mask(mask)
    assert torch.equal(visibility, shown)
    assert bias.isfinite().all()
    assert_same(make(SPECS[name]), tokens(N), attn_mask=mask, is_causal=is_causal)


def test_numbers_above_the_limit_are_biases() -> None:
    """-1e4 is a bias; the lowest number of float16 hides even after a bias of 1,000 is added."""
    mask = torch.tensor([[0.0, -1e4, -3e4, torch.finfo(torch.float16).min + 1000]])
    visibility, bias = split_mask(mask)
    assert visibility.tolist() == [[True, True, True, False]]
    assert bias.tolist() == [[0.0, -1e4, -3e4, 0.0]]
    assert split_mask(None) == (None, None)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_float32_bias_is_right_beside_float64(is_causal: bool) -> None:
    """From 16 tokens on, a CPU reads a mask in float32 beside float64 as other numbers."""
    layer = make(PRESETS["standard"])
    bias = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    assert_same(layer, tokens(16), attn_mask=bias, is_causal=is_causal)


def test_a_mask_of_integers_is_refused() -> None:
    """The mask of a tokenizer, 1 for a token and 0 for padding, is neither boolean nor additive."""
    with pytest.raises(ValueError, match=r"attn_mask: torch\.int64 is neither boolean nor"):
        make(PRESETS["standard"])(tokens(N), attn_mask=torch.ones(N, N, dtype=torch.long))


@pytest.mark.parametrize("name", ["linear", "mlk", "smlk"])
def test_linear_keys_refuse_biases_and_pairs(name: str) -> None:
    layer = make(PRESETS[name])
    x = tokens(N)
    for mask in (torch.ones(1, N, dtype=torch.double), additive(LEFT & CAUSAL, -torch.inf)):
        with pytest.raises(ValueError, match="linear keys take a mask of present keys"):
            layer(x, mask)


def test_diagnostics_leave_out_what_an_additive_mask_hides() -> None:
    layer = make(PRESETS["standard"])
    for mask in forms(LEFT, torch.float32):
        call = LayerCall({"x": tokens(N), "attn_mask": mask}, tokens(N))
        attended = torch.cat([present for _, present in split_calls(layer, [call])])
        assert torch.equal(attended, LEFT[:, 0, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_choice
def test_queries_without_keys_are_zero_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    for pattern in patterns_of(name):
        layer = attn_layer(SPECS[name].model_copy(update={"window": pattern.window}))(64, HEADS)
        number_layers(layer)
        layer = layer.to("cuda", dtype)
        for mask in forms(pattern.shown, dtype):
            x = torch.randn(2, N, 64).to("cuda", dtype).requires_grad_()
            heads = attended_heads(layer, x, mask.cuda(), pattern.is_causal)
            assert not heads[sees_no_key(pattern).cuda()].any()
            assert torch.autograd.grad(heads.float().sum(), x)[0].isfinite().all()
