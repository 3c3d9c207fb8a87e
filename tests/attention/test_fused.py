"""Attention with z or several keys by flash attention, one slice of the batch at a time.

Shapes as in lit_attn.attention.fused.
"""

import math
from collections.abc import Callable

import pytest
import torch
from helpers.attention_checks import DIM, assert_same, make, tokens
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lit_attn.attention import formed, fused
from lit_attn.attention.mixture import GaussianConfig
from lit_attn.attention.residual import SplitConfig
from lit_attn.attention.similarity import DotConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.bench import attention
from lit_attn.bench.measure import Step, measure_memory
from lit_attn.models.factory import count

SCALE = 0.3
several_keys = pytest.mark.parametrize("m", [1, 3])
with_z = pytest.mark.parametrize("joined", [False, True], ids=["", "zz"])
causal = pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])


def make_inputs(
    m: int,
    joined: bool,
    dtype: torch.dtype = torch.double,
    batch: int = 3,
    heads: int = 2,
    n: int = 37,
    device: str = "cpu",
) -> list[Tensor | None]:
    """Return q, k, z, v; the features are wider than the values and no multiple of 8."""
    generator = torch.Generator().manual_seed(m)
    sizes = [(n, 7), (m, n, 7), (n, 5), (n, 5)]
    tensors = [torch.randn(batch, heads, *size, generator=generator) for size in sizes]
    q, k, z, v = (x.to(device, dtype).requires_grad_() for x in tensors)
    return [q, k, z if joined else None, v]


def formula(
    q: Tensor, k: Tensor, z: Tensor | None, v: Tensor, is_causal: bool, scale: float
) -> Tensor:
    """Return the definition of `attend` with all logits in float64."""
    logits = torch.einsum("bhie,bhrje->bhirj", q.double(), k.double())
    if z is not None:
        logits = logits + (z.double() @ z.double().transpose(-1, -2)).unsqueeze(3)
    n = q.shape[2]
    if is_causal:
        future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(future.unsqueeze(1), -math.inf)
    weights = (scale * logits).flatten(3).softmax(-1).view_as(logits).sum(3)
    return weights @ v.double()


def assert_like_the_formula(parts: list[Tensor | None], is_causal: bool, limit: float = 5) -> None:
    """Compare value and gradients with the formula; `limit` is in multiples of eps."""
    q, _, _, v = parts
    assert q is not None
    assert v is not None
    wanted = [part for part in parts if part is not None]
    torch.manual_seed(0)
    direction = torch.randn(v.shape).to(v)
    out = fused.attend(*parts, is_causal, SCALE)
    plain = formula(*parts, is_causal, SCALE)
    assert out.dtype == v.dtype
    pairs = zip(
        [out, *torch.autograd.grad(out, wanted, direction)],
        [plain, *torch.autograd.grad(plain, wanted, direction.double())],
        strict=True,
    )
    for got, exact in pairs:
        error = (got.double() - exact).norm() / exact.norm()
        assert error < limit * torch.finfo(v.dtype).eps ** (1 if v.dtype != torch.double else 0.9)


@several_keys
@with_z
@causal
@pytest.mark.parametrize("dtype", [torch.double, torch.float, torch.bfloat16, torch.half])
def test_value_and_gradient(m: int, joined: bool, is_causal: bool, dtype: torch.dtype) -> None:
    assert_like_the_formula(make_inputs(m, joined, dtype), is_causal)


@several_keys
@causal
def test_logits_are_formed_without_a_kernel(m: int, is_causal: bool) -> None:
    """Torch has no kernel for these inputs."""
    with sdpa_kernel(SDPBackend.MATH):
        assert_like_the_formula(make_inputs(m, True), is_causal)
        assert_like_the_formula(make_inputs(m, True, torch.bfloat16), is_causal)


@pytest.mark.parametrize(
    ("batch", "heads", "limit", "axis", "lengths"),
    [
        (4, 2, 10**9, 0, [4]),
        (4, 2, 14300, 0, [1] * 4),
        (5, 2, 28500, 0, [2, 2, 1]),
        (1, 6, 14200, 1, [1] * 6),
        (1, 6, 28500, 1, [4, 2]),
        (2, 2, 1, 0, [1, 1]),
    ],
)
def test_slices_of_batch_or_heads_give_the_same_result(
    batch: int,
    heads: int,
    limit: int,
    axis: int,
    lengths: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slices go along the batch, or along the heads of a small batch; a head takes 7.1 KB."""
    monkeypatch.setattr(fused, "SLICE", limit)
    q, k, z, v = make_inputs(2, True, batch=batch, heads=heads)
    assert q is not None
    along, cuts = fused._slices(q, k, z)
    assert (along, [cut[-1].stop - cut[-1].start for cut in cuts]) == (axis, lengths)
    assert_like_the_formula([q, k, z, v], True)
    assert_like_the_formula([q, k, None, v], False)


@pytest.mark.slow
@with_z
def test_the_operators_pass_torchs_checks(joined: bool) -> None:
    """The checks cover schema, fake tensors, autograd registration and tracing by AOTAutograd."""
    parts = make_inputs(2, joined)
    torch.library.opcheck(fused._attend, (*parts, True, SCALE))
    detached = [None if part is None else part.detach() for part in parts]
    summed = fused._attend(*detached, True, SCALE)
    backward = (torch.randn_like(summed[0]), *detached, *summed, True, SCALE)
    torch.library.opcheck(fused._attend_backward, backward)


@pytest.mark.parametrize("zz", [False, True])
@pytest.mark.parametrize("name", ["mgk", "smgk", "mgk-soft-e", "softmax-smgk"])
@causal
def test_presets_agree_with_the_reference_on_this_path(
    name: str, zz: bool, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 384 tokens on a CPU, and all on a GPU, take this path."""
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    layer = make(PRESETS[name].model_copy(update={"zz": zz}))
    assert_same(layer, tokens(9), is_causal=is_causal)


@pytest.mark.parametrize("similarity", [DotConfig(), GaussianConfig()])
@causal
def test_z_combines_with_every_similarity_of_one_key(
    similarity: DotConfig | GaussianConfig, is_causal: bool
) -> None:
    layer = make(AttentionSpec(similarity=similarity, zz=True))
    assert_same(layer, tokens(9), is_causal=is_causal)


def test_masks_and_dropout_take_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator supports neither."""
    monkeypatch.setattr(fused, "attend", lambda *a: pytest.fail("not for this"))
    layer = make(PRESETS["belief2"])
    hidden = torch.ones(9, 9, dtype=torch.bool).tril(3)
    assert_same(layer, tokens(9), attn_mask=hidden)
    layer.train().attn_drop = 0.5
    layer(tokens(9))
    lsa = make(AttentionSpec(zz=True), lsa=True)
    assert_same(lsa, tokens(9))


@pytest.mark.parametrize("name", ["belief2", "mgk"])
def test_no_joined_tensor_is_kept_for_the_backward_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The widest tensor that is kept is as wide as the inputs."""
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    layer, saved = make(PRESETS[name]), []
    inputs = []
    call = fused._attend

    def note(*arguments: Tensor) -> tuple[Tensor, ...]:
        inputs.extend(arguments[:4])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: (saved.append(x), x)[1], lambda x: x
        ):
            return call(*arguments)

    monkeypatch.setattr(fused, "_attend", note)
    layer(tokens(64), is_causal=True)
    handed = {x.untyped_storage().data_ptr() for x in inputs if x is not None}
    new = [x for x in saved if x.untyped_storage().data_ptr() not in handed]
    assert len(saved) > len(new)
    # The output, the log-sum-exps and the two values of disabled dropout.
    assert sum(x.numel() for x in new) == 2 * 64 * (DIM + layer.num_heads)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "limit"), [("eager", 1.15), ("compiled", 1.25)])
def test_the_peak_memory_of_belief2_is_near_the_standard_blocks(mode: str, limit: float) -> None:
    """The baseline is timm's block with as many parameters; allocations are deterministic.

    [q|z] and [k|z] are joined for a few samples of the batch at a time.
    """
    torch.compiler.reset()
    shape = attention.Shape(batch=64)
    x = torch.randn(shape.batch, shape.tokens, shape.dim)
    standard = attention.build_block(attention.BASELINE, shape, attention.FFN_RATIO * shape.dim)
    width = attention.match_width("belief2", shape, count(standard))
    belief2 = attention.build_block("belief2", shape, width)
    peaks = []
    for block in (standard, belief2):
        step = Step(block, x, False, mode)
        step()
        peaks.append(measure_memory(step, "cpu").peak)
    assert peaks[1] <= limit * peaks[0]


@pytest.mark.parametrize("choice", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
@several_keys
@with_z
def test_gpu_kernels_are_called_as_they_are_declared(
    choice: str, m: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors check names, orders, dtypes and shapes, not values."""
    monkeypatch.setattr(fused, "choose_kernel", lambda *a: getattr(SDPBackend, choice))
    with FakeTensorMode(), torch.no_grad():
        sizes = [(2, 3, 40, 24), (2, 3, m, 40, 24), (2, 3, 40, 16), (2, 3, 40, 16)]
        tensors = [torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
        q, k, z, v = tensors
        parts = (q, k, z if joined else None, v)
        for lines in (fused._attend, fused._attend._init_fn):
            out, *rest = lines(*parts, True, SCALE)
            assert (out.shape, out.dtype, out.device.type) == (v.shape, v.dtype, "cuda")
        for lines in (fused._attend_backward, fused._attend_backward._init_fn):
            grads = lines(out, *parts, out, *rest, True, SCALE)
            wanted = (q, k, v, z)[: len(grads)]
            assert [(g.shape, g.dtype) for g in grads] == [(w.shape, w.dtype) for w in wanted]
            assert len(grads) == 3 + joined


@pytest.mark.parametrize("limited", [("flash",), ("flash", "efficient"), ()])
def test_limits_that_hold_in_training_are_respected(
    limited: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated card refuses kernels if an input requires a gradient; both passes ask the same.

    Torch answers so for flash attention and head widths above 192 on consumer cards.
    """

    def can_use(kernel: str) -> Callable[..., bool]:
        def answer(parameters: tuple[Tensor, ...]) -> bool:
            needs_grad = any(x.requires_grad for x in parameters) and torch.is_grad_enabled()
            return not (needs_grad and kernel in limited)

        return answer

    monkeypatch.setattr(fused.cuda, "SDPAParams", lambda q, k, v, *_: (q, k, v))
    for kernel in ("flash", "efficient"):
        monkeypatch.setattr(fused.cuda, f"can_use_{kernel}_attention", can_use(kernel))
    names = [name for name in ("flash", "efficient", "math") if name not in limited]
    expected = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }[names[0]]
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 256, device="cuda", dtype=torch.float16)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                assert fused.choose_kernel(q, q, True) == expected
    assert not q.requires_grad


def test_a_kernel_is_chosen_for_inference_tensors() -> None:
    layer = make(PRESETS["belief2"])
    x = tokens(9)
    expected = layer(x, is_causal=True)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x, is_causal=True), expected.detach())


@pytest.mark.gpu
@several_keys
@with_z
@causal
@pytest.mark.parametrize("dtype", [torch.double, torch.float, torch.bfloat16, torch.half])
def test_gpu_kernels_agree_with_the_definition(
    m: int, joined: bool, is_causal: bool, dtype: torch.dtype
) -> None:
    # The efficient kernel in float32 is off by up to 5.6 eps on an H100.
    assert_like_the_formula(make_inputs(m, joined, dtype, device="cuda"), is_causal, limit=10)


@pytest.mark.gpu
def test_memory_on_a_gpu_is_near_the_standard_blocks() -> None:
    """Memory that is kept and peak memory are compared with timm's block, as on a CPU."""
    shape = attention.Shape(batch=64)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device="cuda")
    standard = attention.build_block(attention.BASELINE, shape, attention.FFN_RATIO * shape.dim)
    width = attention.match_width("belief2", shape, count(standard))
    held_bytes = []
    for block in (standard, attention.build_block("belief2", shape, width)):
        step = Step(block.cuda(), x, False)
        step()
        held_bytes.append(measure_memory(step, "cuda").held)
    assert held_bytes[1] <= 1.2 * held_bytes[0]


def test_the_compiled_split_part_recomputes_its_two_terms() -> None:
    """Value and gradient of the recomputed terms equal those of the stored ones."""
    layer = make(AttentionSpec(residual=SplitConfig(activation="gelu")))
    x = tokens(9).requires_grad_()
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager")):
        out = call(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    torch.compiler.reset()
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("name", ["belief2", "mgk"])
def test_flash_attention_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes call it; without a kernel the result is the same."""
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        make(PRESETS[name]).float()(tokens(65).float()).sum().backward()
    ran = {event.key for event in profile.key_averages()}
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert {flash, flash + "_backward"} <= ran
    assert "aten::bmm" not in ran


def test_one_key_gives_torchs_result() -> None:
    q, k, _, v = make_inputs(1, False)
    assert q is not None
    assert k is not None
    assert v is not None
    out = fused.attend(q, k, None, v, False, SCALE)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k.squeeze(2), v, scale=SCALE))
