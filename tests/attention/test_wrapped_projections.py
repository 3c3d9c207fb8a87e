"""A layer calls its Linears, so pruning, weight norms and rounded weights have their effect."""

from collections.abc import Callable

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, make, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from lit_attn.attention import reference
from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import PRESETS, AttentionSpec


class RoundedLinear(nn.Linear):
    """Linear layer that computes with its weight rounded to one decimal."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.round(decimals=1), self.bias)


def round_weight(linear: nn.Linear) -> None:
    linear.__class__ = RoundedLinear


def scale_output(linear: nn.Linear) -> None:
    linear.register_forward_hook(lambda module, arguments, out: 1.5 * out)


def scale_input(linear: nn.Linear) -> None:
    linear.register_forward_pre_hook(lambda module, arguments: (0.5 * arguments[0],))


def replace_call(linear: nn.Linear) -> None:
    """Change the instance, as some packages for adapters do."""
    original = linear.forward
    linear.forward = lambda x: 2 * original(x)  # type: ignore[method-assign]


def change_length(linear: nn.Linear) -> None:
    """Separate the lengths of the weight's rows from their directions, and change the lengths."""
    with torch.no_grad():
        weight_norm(linear).weight_g.mul_(1.5)


def change_parametrised_length(linear: nn.Linear) -> None:
    with torch.no_grad():
        parametrizations.weight_norm(linear).parametrizations.weight.original0.mul_(1.5)


WRAPPERS: dict[str, Callable[[nn.Linear], object]] = {
    "pruned": lambda linear: prune.random_unstructured(linear, "weight", 0.5),
    "spectral norm": spectral_norm,
    "parametrised spectral norm": parametrizations.spectral_norm,
    "weight norm": change_length,
    "parametrised weight norm": change_parametrised_length,
    "rounded": round_weight,
    "hook of the output": scale_output,
    "hook of the input": scale_input,
    "replaced call": replace_call,
}

# Every way to change a Linear with the most common layers, and one way with every part that may
# have a Linear: whoever reads a weight instead of calling its module computes without the hook.
CASES = [(PRESETS[name], wrapper) for name in ("standard", "mgk", "dcmha") for wrapper in WRAPPERS]
CASES += [(chosen, "hook of the output") for chosen in attention_cases.covering_specs()]


def label(value: AttentionSpec | str) -> str:
    return value if isinstance(value, str) else attention_cases.label(value)


every_case = pytest.mark.parametrize(("spec", "wrapper"), CASES, ids=label)

# PyTorch deprecates the older weight norm, which models still use.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def wrap(layer: Attention, wrapper: str) -> Attention:
    """Wrap every Linear of `layer` and return it."""
    for module in list(layer.modules()):
        if type(module) is nn.Linear:
            WRAPPERS[wrapper](module)
    return layer.eval()


@every_case
def test_wrapped_projections_equal_the_reference(spec: AttentionSpec, wrapper: str) -> None:
    plain = make(spec)
    layer = wrap(make(spec), wrapper)
    x = tokens(7)
    with torch.no_grad():
        out = layer(x)
        torch.testing.assert_close(out, reference.attention(layer, x))
        assert not torch.allclose(out, plain(x), rtol=1e-3)


@pytest.mark.parametrize(
    ("spec", "wrapper"), [case for case in CASES if not case[0].find_cross_problem()], ids=label
)
def test_wrapped_projections_of_a_memory_equal_the_reference(
    spec: AttentionSpec, wrapper: str
) -> None:
    layer = wrap(make(spec), wrapper)
    x = tokens(7)
    memory = torch.randn(2, 5, DIM, dtype=torch.double)
    with torch.no_grad():
        expected = reference.attention(layer, x, memory=memory)
        torch.testing.assert_close(layer(x, memory=memory), expected)


def test_the_projections_of_a_composition_are_wrapped_one_by_one() -> None:
    """Only one of the joined products changes."""
    layer = make(PRESETS["dcmha"])
    x = tokens(7)
    before = layer(x)
    scale_output(layer.composers["post"].sides["key"].gate)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), reference.attention(layer, x))
        assert not torch.allclose(layer(x), before)
