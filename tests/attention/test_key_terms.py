"""Terms of keys, sinks and differences of softmaxes are plain kernel calls in little memory."""

import math
from typing import Any

import pytest
import torch
from helpers.attention_checks import make, tokens
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_attn.attention import dispatch, reference
from lit_attn.attention.dispatch import Path
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.normaliser import Softmax
from lit_attn.attention.precision import rounded_terms
from lit_attn.attention.sink import attend_with_sink
from lit_attn.attention.spec import attention_spec
from lit_attn.checks.comparison import FLOAT32, Case, Shape, build_noisy_layer, check_layer

CAUSAL: list[Any] = ["alibi", "forgetting", "gaussian", "sink", "off-by-one", "differential"]
CAUSAL += [{"bias": "alibi", "normaliser": "sink"}, {"bias": "forgetting", "normaliser": "sink"}]
CAUSAL += [{"similarity": "gaussian", "normaliser": "sink"}, {"preset": "belief2", "bias": "alibi"}]
CAUSAL += [{"preset": "mgk", "bias": "forgetting"}, {"preset": "differential", "bias": "alibi"}]
NOT_CAUSAL: list[Any] = ["gaussian", "mgk", "smgk", "softmax-mgk", "sink", "off-by-one"]
NOT_CAUSAL += ["differential", {"preset": "mgk", "normaliser": "sink"}]
NOT_CAUSAL += [{"similarity": {"kind": "mixture", "variance": [1, 3]}}]
CASES = [(chosen, True) for chosen in CAUSAL] + [(chosen, False) for chosen in NOT_CAUSAL]
every_case = pytest.mark.parametrize(("chosen", "is_causal"), CASES, ids=str)


class LargestTensor(TorchDispatchMode):
    """Mode that keeps the number of elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 4)
        return out


def count_largest(chosen: Any, is_causal: bool, n: int) -> int:
    """Return the elements of the largest tensor of a forward and backward pass of n tokens."""
    with FakeTensorMode(), LargestTensor() as mode:
        layer = attn_layer(chosen)(32, 4)
        layer.set_depth(0)
        layer(torch.randn(1, n, 32), is_causal=is_causal).sum().backward()
    return mode.elements


@every_case
def test_no_tensor_of_all_pairs_of_8192_tokens_is_made(chosen: Any, is_causal: bool) -> None:
    """The largest tensors have all keys of all heads, with their columns."""
    half = count_largest(chosen, is_causal, 4096)
    full = count_largest(chosen, is_causal, 8192)
    assert full == pytest.approx(2 * half, rel=1e-3)
    assert full < 256 * 8192


def test_a_dense_bias_would_be_found() -> None:
    assert count_largest("t5", True, 1024) >= 4 * 1024**2


@every_case
def test_one_call_of_the_cpu_and_of_a_gpu(chosen: Any, is_causal: bool) -> None:
    """The path of a GPU is the plain call too, but for z z and for mixtures in causal order."""
    layer = make(attention_spec(chosen, "test"))
    properties = layer.similarity.describe_call(layer.inputs(tokens(9), None, is_causal, None))
    path = dispatch.choose_path(**{**properties, "device": "flex"})
    is_plain = not layer.spec.zz and (properties["keys"] == 1 or not is_causal)
    assert path is (Path.ONE_CALL if is_plain else Path.FLEX)


def make_qkv(n: int, m: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 3, n, 8), (2, 3, m, 8), (2, 3, m, width)]
    made = [torch.randn(size, dtype=torch.double, generator=generator) for size in sizes]
    return [tensor.requires_grad_() for tensor in made]


def attend_by_formula(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, hidden: Tensor | None, scale: float
) -> Tensor:
    logits = q @ k.mT * scale
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
    column = sink.expand(q.shape[:-1]).unsqueeze(-1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive"])
@pytest.mark.parametrize("width", [8, 5])
@pytest.mark.parametrize("size", [(3, 1), (2, 3, 7)], ids=["heads", "queries"])
def test_a_trainable_sink_has_the_values_and_gradients_of_its_formula(
    mask: str, width: int, size: tuple[int, ...]
) -> None:
    n, m = (7, 7) if mask == "causal" else (7, 9)
    q, k, v = make_qkv(n, m, width)
    sink = torch.linspace(-2, 3, math.prod(size), dtype=torch.double).view(size).requires_grad_()
    hidden = None
    arguments: dict[str, Any] = {"is_causal": mask == "causal", "scale": 0.4}
    if mask != "none":
        hidden = torch.ones(n, m, dtype=torch.bool).triu(1)
        # This query sees the sink alone.
        hidden[3] = mask != "causal" or hidden[3]
    if mask == "boolean":
        arguments["attn_mask"] = ~hidden
    if mask == "additive":
        arguments["attn_mask"] = torch.zeros(n, m).double().masked_fill(hidden, -math.inf)
    out = attend_with_sink(q, k, v, sink, **arguments)
    expected = attend_by_formula(q, k, v, sink, hidden, 0.4)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.double).view_as(out)
    inputs = [q, k, v, sink]
    for fast, plain in zip(
        torch.autograd.grad(out, inputs, direction),
        torch.autograd.grad(expected, inputs, direction),
        strict=True,
    ):
        torch.testing.assert_close(fast, plain, rtol=1e-11, atol=1e-12)


def test_the_default_scale_of_a_sink_is_that_of_torch() -> None:
    q, k, v = make_qkv(4, 4, 8)
    sink = torch.zeros(3, 1, dtype=torch.double)
    expected = attend_by_formula(q, k, v, sink, None, 8**-0.5)
    torch.testing.assert_close(attend_with_sink(q, k, v, sink), expected)


@pytest.mark.parametrize("chosen", ["alibi", "forgetting", {"bias": "alibi", "normaliser": "sink"}])
def test_large_biases_keep_their_precision_in_bfloat16(chosen: Any) -> None:
    """At 256 tokens a bias reaches 64 (ALiBi) or about 170 (gates)."""
    dtype = torch.bfloat16
    layer = make(attention_spec(chosen, "test"))
    x = tokens(256, batch=1)
    with torch.no_grad():
        exact = reference.attention(layer, x, is_causal=True)
        half = layer.to(dtype)(x.to(dtype), is_causal=True).double()
    assert (half - exact).norm() < 8 * torch.finfo(dtype).eps * exact.norm()


def test_float32_terms_survive_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each term has the bits of a bfloat16, so a product rounded to TF32 does not change it."""
    monkeypatch.setattr("lit_attn.attention.precision.multiplies_in_tf32", lambda x: True)
    x = torch.tensor([1234.5678, -3e-5, 4095.99], requires_grad=True)
    terms = rounded_terms(x, x)
    assert all(torch.equal(term, term.bfloat16().float()) for _, term in terms)
    total = sum(factor * term.double() for factor, term in terms)
    torch.testing.assert_close(total, x.double(), rtol=2**-23, atol=0)
    direction = torch.tensor([1 / 3, -1e-5, 700.1])
    combined = sum(factor * term for factor, term in terms)
    assert torch.equal(torch.autograd.grad(combined, x, direction)[0], direction)


@every_case
def test_float32_on_a_gpu_has_the_gradients_of_float32(
    chosen: Any, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terms of a key are rounded to bfloat16 there, and their gradients are not."""
    monkeypatch.setattr(
        "lit_attn.attention.precision.multiplies_in_tf32", lambda x: x.dtype == torch.float32
    )
    layer = build_noisy_layer(attn_layer(attention_spec(chosen, "test")), 16, 2)
    case = Case(FLOAT32, is_causal, Shape(2, 17, 16, 2))
    checked = check_layer(str(chosen), "one call", layer, case, torch.device("cpu"))
    assert checked.failure == ""


def test_a_subclass_with_its_own_weights_is_no_softmax() -> None:
    class Squared(Softmax):
        def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
            return logits.softmax(-1).square()

    assert Softmax.softmaxes == 1
    assert Squared.softmaxes == 0
