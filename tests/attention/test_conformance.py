"""Values and gradients of the fast layer equal the reference's, for every registered part."""

import copy

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, HEADS, assert_same, make, tokens

from lit_attn.attention import dispatch, formed, reference
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.residual import SplitConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec

SPECS = attention_cases.all_specs()
LINEAR = [spec for spec in SPECS if isinstance(spec.similarity, LinearConfig)]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=attention_cases.label)
every_linear = pytest.mark.parametrize("spec", LINEAR, ids=attention_cases.label)
# Every choice of every part once, for what a part does whatever stands beside it.
CHOICES = attention_cases.covering_specs()
every_choice = pytest.mark.parametrize("spec", CHOICES, ids=attention_cases.label)
every_windowed = pytest.mark.parametrize(
    "spec", [s for s in CHOICES if attention_cases.takes_window(s)], ids=attention_cases.label
)
every_softmax = pytest.mark.parametrize(
    "spec", [spec for spec in CHOICES if spec not in LINEAR], ids=attention_cases.label
)


@every_spec
def test_value_and_gradient_equal_the_reference(spec: AttentionSpec) -> None:
    assert_same(make(spec), tokens(7))


@every_choice
def test_value_and_gradient_of_one_token_equal_the_reference(spec: AttentionSpec) -> None:
    assert_same(make(spec), tokens(1))


@every_spec
def test_a_causal_layer_equals_the_reference_and_ignores_later_tokens(spec: AttentionSpec) -> None:
    layer, x = make(spec), tokens(9)
    assert_same(layer, x, is_causal=True)
    changed = x.clone()
    changed[:, 5:] += 1.0
    torch.testing.assert_close(
        layer(x, is_causal=True)[:, :5], layer(changed, is_causal=True)[:, :5]
    )


@every_choice
def test_a_padded_layer_equals_the_reference_and_ignores_padding(spec: AttentionSpec) -> None:
    layer, x = make(spec), tokens(9)
    present = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    present[1, ..., 6:] = False
    assert_same(layer, x, attn_mask=present)
    changed = x.clone()
    changed[1, 6:] = 7.0
    torch.testing.assert_close(
        layer(x, attn_mask=present)[1, :6], layer(changed, attn_mask=present)[1, :6]
    )


@every_choice
def test_causal_and_padding_masks_combine(spec: AttentionSpec) -> None:
    """Padding is on the left, so that the first tokens attend to nothing."""
    layer, x = make(spec), tokens(9)
    absent = slice(0, 3)
    present = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    present[1, ..., absent] = False
    masks = {"attn_mask": present, "is_causal": True}
    assert_same(layer, x, **masks)
    layer.train()
    layer.attn_drop = 0.5
    if getattr(spec.similarity, "prior", None) == "m-step":
        # In training, pi are updated from all tokens.
        assert torch.isfinite(layer(x, **masks)).all()
        return
    changed = x.clone()
    changed[:, 5:] += 1.0
    changed[1, absent] = 7.0
    outs = []
    for t in (x, changed):
        torch.manual_seed(3)
        outs.append(layer(t, **masks)[:, :5][present[:, 0, 0, :5]])
    torch.testing.assert_close(*outs)


@every_softmax
def test_causal_and_pair_masks_combine(spec: AttentionSpec) -> None:
    """A boolean mask of all heads, and an additive one of each head."""
    generator = torch.Generator().manual_seed(4)
    mask = torch.randn(1, HEADS, 9, 9, dtype=torch.double, generator=generator)
    additive = mask.masked_fill(mask < -1, -torch.inf)
    assert_same(make(spec), tokens(9), attn_mask=additive, is_causal=True)
    assert_same(make(spec), tokens(9), attn_mask=mask[:, :1] > 0, is_causal=True)


@every_linear
def test_linear_keys_refuse_what_needs_logits(spec: AttentionSpec) -> None:
    with pytest.raises(ValueError, match="linear keys take a mask of present keys"):
        make(spec)(tokens(9), attn_mask=torch.zeros(9, 9))
    with pytest.raises(ValueError, match="linear keys never form the logits"):
        make(spec, lsa=True)(tokens(9))


@pytest.mark.slow
@every_windowed
@pytest.mark.parametrize(("mask", "is_causal"), [("padding", True), ("additive", False)])
def test_chunks_in_a_window_equal_the_reference(
    spec: AttentionSpec, is_causal: bool, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk is shorter than the others, and the window is wider than it."""
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    monkeypatch.setattr(dispatch, "CHUNK", 4)
    monkeypatch.setattr(formed, "CHUNK", 4)
    masks: dict[str, object] = {"is_causal": is_causal}
    if mask == "padding":
        masks["attn_mask"] = torch.ones(2, 1, 1, 14, dtype=torch.bool)
        masks["attn_mask"][1, ..., :5] = False
    if mask == "additive":
        masks["attn_mask"] = torch.randn(1, HEADS, 14, 14, dtype=torch.double)
    assert_same(make(spec.model_copy(update={"window": 3})), tokens(14), **masks)


@every_softmax
def test_local_self_attention_equals_the_reference(spec: AttentionSpec) -> None:
    assert_same(make(spec, lsa=True), tokens(9))


@every_choice
def test_zero_values_give_no_nan(spec: AttentionSpec) -> None:
    """alpha is 0 / 0 if V is zero; its lower bound makes it zero, in the gradient too."""
    layer = make(spec)
    with torch.no_grad():
        layer.qkv.weight[2 * DIM :] = 0
        layer.qkv.bias[2 * DIM :] = 0
    x = tokens(5).requires_grad_()
    out = layer(x)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(x.grad).all()
    assert_same(layer, tokens(5))


@every_choice
def test_half_precision_is_near_rounding(spec: AttentionSpec) -> None:
    """The relative error of the output is near the rounding error of the finer format.

    The next test has the other limit of float16, and that of bfloat16 is the range of float32.
    """
    dtype = torch.float16
    layer = make(spec)
    x = tokens(16)
    with torch.no_grad():
        exact = reference.attention(layer, x)
        half = layer.to(dtype)(x.to(dtype)).double()
    error = (half - exact).norm() / exact.norm()
    assert error < 30 * torch.finfo(dtype).eps


@every_choice
def test_large_values_stay_finite_in_half_precision(spec: AttentionSpec) -> None:
    """<V, V> of large values would overflow float16."""
    layer = make(spec)
    with torch.no_grad():
        layer.qkv.weight[2 * DIM :] *= 100
        layer = layer.half()
        assert torch.isfinite(layer(tokens(5).half())).all()


@every_choice
def test_uninitialised_memory_is_never_read(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory is filled with NaN; the output and the gradients stay finite."""
    layer, x = make(spec), tokens(7)
    expected = layer(x)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(out, expected)
    assert torch.isfinite(inputs.grad).all()


@every_choice
def test_gradients_pass_gradcheck(spec: AttentionSpec) -> None:
    layer = make(spec)
    x = tokens(3, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: layer(t), (x,), atol=1e-6, fast_mode=True)


# test_shapes.py has the other presets, whose graphs it does not compile to machine code.
COMPILED_SPECS = {name: PRESETS[name] for name in ("belief2", "dcmha")}
COMPILED_SPECS["learned-phi"] = AttentionSpec(residual=SplitConfig(scope="both", phi_scope="head"))


# PyTorch 2.15 uses a function of its own that it has deprecated.
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED_SPECS)
def test_the_compiled_layer_is_one_graph_and_equals_the_reference(name: str) -> None:
    torch.compiler.reset()
    layer = make(COMPILED_SPECS[name])
    layer.compile(fullgraph=True)
    assert_same(layer, tokens(9))


def assert_agrees_on_a_gpu(spec: AttentionSpec, dtype: torch.dtype) -> None:
    layer, x = make(spec), tokens(65)
    exact = reference.attention(layer, x)
    got = layer.to("cuda", dtype)(x.to("cuda", dtype)).cpu().double()
    assert (got - exact).norm() / exact.norm() < 30 * torch.finfo(dtype).eps


@pytest.mark.gpu
@every_spec
def test_the_layer_on_a_gpu_agrees(spec: AttentionSpec) -> None:
    assert_agrees_on_a_gpu(spec, torch.float32)


@pytest.mark.gpu
@every_choice
def test_the_layer_on_a_gpu_agrees_in_half_precision(spec: AttentionSpec) -> None:
    assert_agrees_on_a_gpu(spec, torch.bfloat16)


@pytest.mark.parametrize("name", PRESETS)
def test_layers_run_on_the_meta_device(name: str) -> None:
    layer = make(PRESETS[name]).float().to("meta")
    assert layer(torch.empty(2, 9, DIM, device="meta")).shape == (2, 9, DIM)


@pytest.mark.gpu
def test_uncompiled_layers_of_several_mechanisms_share_a_process() -> None:
    """Each call is compiled by flex_attention, whose sizes may change from one to the next."""
    torch.compiler.reset()
    names = ("belief2", "gaussian", "mgk", "mgk-hard", "off-by-one")
    for n in (33, 40, 65):
        for name in names:
            for is_causal in (True, False):
                layer = attn_layer(name)(64, 4).eval()
                x = torch.randn(2, n, 64)
                expected = reference.attention(
                    copy.deepcopy(layer).double(), x.double(), is_causal=is_causal
                )
                got = layer.cuda()(x.cuda(), is_causal=is_causal).cpu().double()
                error = (got - expected).norm() / expected.norm()
                assert error < 30 * torch.finfo(torch.float32).eps
