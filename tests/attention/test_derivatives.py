"""Derivatives of every part, at every length, are right or raise an error."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, make
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import lit_attn
from lit_attn.attention import dispatch, formed, reference
from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import PRESETS, AttentionSpec

SPECS = attention_cases.covering_specs()

# PyTorch compiles some of its forward derivatives with a function that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")

every_spec = pytest.mark.parametrize("spec", SPECS, ids=attention_cases.label)


@pytest.fixture
def length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the paths of few tokens, and those of more than 384 tokens.

    PyTorch's own kernels have no second derivatives, but its formulas have.
    """
    if request.param == "long":
        monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
        monkeypatch.setattr(formed, "CHUNK", 4)
    with sdpa_kernel(SDPBackend.MATH):
        yield


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 5, DIM, dtype=torch.double, generator=generator)


def penalty(compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of a gradient's norm; the outer gradient of a sum is constant."""
    x = tokens().requires_grad_()
    (gradient,) = torch.autograd.grad(compute(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    return second


def slope(compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the derivative of `compute` along a direction, in forward mode."""
    x = tokens()
    with forward_ad.dual_level():
        out = compute(forward_ad.make_dual(x, x.flip(1)))
        tangent = forward_ad.unpack_dual(out).tangent
        return torch.zeros_like(out) if tangent is None else tangent


def slope_of_functions(compute: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.func.jvp(compute, (tokens(),), (tokens().flip(1),))[1]


def batched_slope(compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the derivative through a transform that hides the tangent."""
    batched = torch.func.vmap(compute)
    return torch.func.jvp(batched, (tokens()[None],), (tokens().flip(1)[None],))[1][0]


@pytest.mark.slow
@pytest.mark.usefixtures("length")
@every_spec
@pytest.mark.parametrize(
    ("derive", "length"),
    [(penalty, "short"), (penalty, "long"), (slope, "long"), (batched_slope, "short")],
    indirect=["length"],
)
def test_derivatives_are_those_of_the_formula_or_an_error(
    spec: AttentionSpec, derive: Callable[[Callable[[Tensor], Tensor]], Tensor]
) -> None:
    layer = make(spec)
    try:
        derivative = derive(layer)
    except (RuntimeError, NotImplementedError):
        return
    if derive is batched_slope:
        derive = slope_of_functions
    expected = derive(lambda x: reference.attention(layer, x))
    torch.testing.assert_close(derivative, expected, rtol=1e-7, atol=1e-8)


def layer_of_operator(operator: str, monkeypatch: pytest.MonkeyPatch) -> Attention:
    """Return a layer that computes with `operator`."""
    if operator == "attend":
        return make(PRESETS["belief2"])
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 0)
    monkeypatch.setattr(formed, "CHUNK", 4)
    return make(PRESETS["dcmha"])


def path_of(layer: Attention) -> str:
    """Return the name of the path of a layer, or `sums` for a similarity without logits."""
    properties = layer.similarity.describe_call(layer.inputs(tokens(), None, False, None))
    return "sums" if properties is None else dispatch.choose_path(**properties).name


@pytest.mark.parametrize("name", PRESETS)
def test_the_path_of_a_preset_has_second_derivatives_as_the_message_says(name: str) -> None:
    layer = make(PRESETS[name])
    path = path_of(layer)
    with sdpa_kernel(SDPBackend.MATH):
        if path == "MERGED":
            with pytest.raises(RuntimeError, match="has no second derivatives"):
                penalty(layer)
            return
        assert path in ("ONE_CALL", "FORMED", "sums")
        second = penalty(layer)
    torch.testing.assert_close(second, penalty(lambda x: reference.attention(layer, x)))


@pytest.mark.parametrize("operator", ["attend", "in turn"])
def test_an_operator_names_the_missing_derivative(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of_operator(operator, monkeypatch)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        penalty(layer)
    for derive in (slope, slope_of_functions, batched_slope):
        with pytest.raises(RuntimeError, match="no derivatives in forward mode"):
            derive(layer)


@pytest.mark.parametrize("operator", ["attend", "in turn"])
def test_a_gradient_with_a_graph_is_the_gradient(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the second derivative is missing, not the first one with `create_graph=True`."""
    layer = layer_of_operator(operator, monkeypatch)
    gradients = []
    for create_graph in (False, True):
        x = tokens().requires_grad_()
        out = layer(x).square().sum()
        gradients.append(
            torch.autograd.grad(out, [x, *layer.parameters()], create_graph=create_graph)
        )
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_constant_in_forward_mode_is_no_error() -> None:
    """Attention may be called while something else is derived."""
    layer = make(PRESETS["belief2"])
    x = tokens()
    with forward_ad.dual_level(), torch.no_grad():
        torch.testing.assert_close(layer(x), reference.attention(layer, x))


def test_every_operator_with_its_own_gradient_is_tested_here() -> None:
    """A new operator needs the errors of its missing derivatives, and tests in this file."""
    pattern = re.compile(r"class (\w+)\((?:torch\.)?autograd\.Function\)|custom_op\(\"(.*?)\"")
    operators = set()
    for path in Path(lit_attn.__file__).parent.rglob("*.py"):
        for groups in pattern.findall(path.read_text()):
            operators.update(groups)
    operators.discard("")
    kernels = {"lit_attn::attend", "lit_attn::attend_backward"}
    # The losses are tested in tests/models/test_token_loss.py, and the last one is a constant.
    others = {"ChunkedLosses", "lit_attn::one_unless_repeated"}
    assert operators == {"_InTurn", "_FirstOnly", *kernels, *others}
