"""`attention_precision: float32`: under autocast, only the projections have half precision."""

import copy
from typing import Any

import pytest
import torch
from helpers.attention_checks import make, tokens
from torch import Tensor

from lit_attn.attention.dispatch import Inputs
from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import PRESETS
from lit_attn.config.models.language import SequenceClassifierConfig
from lit_attn.models.language import SequenceClassifier


def double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("in_float32", [True, False])
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
        composers=exact.composers, normaliser=exact.normaliser
    )
    expected = exact.similarity.attend(doubled._replace(memory=doubled.x))
    is_exact = (heads - expected).norm() < 1e-5 * expected.norm()
    # Linear keys are summed in float32 anyway, and rounded afterwards.
    assert is_exact == in_float32
    if in_float32:
        finished = layer.normaliser.finish(heads).transpose(1, 2)
        torch.testing.assert_close(record.heads, finished, rtol=1e-4, atol=1e-5)


def test_a_classifier_passes_its_precision_to_every_layer() -> None:
    for precision in ("autocast", "float32"):
        chosen = {"dim": 8, "depth": 2, "heads": 2, "ffn": {"width": 8}, "classifier_width": 4}
        config = SequenceClassifierConfig(attention_precision=precision, **chosen)
        network = SequenceClassifier(config, 5, 6, 3)
        layers = [module for module in network.modules() if isinstance(module, Attention)]
        assert [layer.in_float32 for layer in layers] == [precision == "float32"] * 2
