"""Comparison of attention layers with their formulas before the first cell on a GPU."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import wrong_paths
from helpers.paths import EXPERIMENTS
from helpers.training_cells import digits_cell, text_cell

from lit_attn.attention import dispatch
from lit_attn.attention.residual import FullConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.checks import layers
from lit_attn.checks.layers import AttentionCall, compare_call, find_calls, without_foreign_parts
from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.config.source import load
from lit_attn.training import first_step
from lit_attn.training.first_step import Mistake, find_mistake

CPU = torch.device("cpu")

WRONG = {
    "value": (wrong_paths.with_wrong_value, "the value is off by"),
    "gradient": (wrong_paths.with_wrong_gradient, "the gradient is off by"),
    "NaN": (wrong_paths.with_nan, "the value is not a number"),
    "exception": (wrong_paths.with_exception, "RuntimeError: out of resource: shared memory"),
}


@pytest.fixture(autouse=True)
def compared_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stand for a GPU on which nothing was compared, and make no step."""
    monkeypatch.setattr(layers, "needs_comparison", lambda device: True)
    monkeypatch.setattr(first_step, "make_step", lambda *arguments: None)
    compare_call.cache_clear()


def check(*cells: Cell) -> Mistake | None:
    """Check `cells`, each of which would make a step."""
    written = [cell.model_dump(mode="json") for cell in cells]
    return find_mistake(written, untried=range(len(cells)))


def cell_with(attention: str, **training: object) -> Cell:
    return digits_cell(model={"attention": attention}, training=training)


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_layer_refuses_its_variant_in_one_line(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, reason = WRONG[kind]
    monkeypatch.setattr(dispatch, "_merged_calls", wrong(dispatch._merged_calls))
    mistake = check(cell_with("standard"), cell_with("belief2"))
    assert mistake is not None
    assert mistake.number == 1
    assert mistake.message.startswith(
        "model: attention: on this device the layer disagrees with its formula: belief2, float32, "
    )
    assert reason in mistake.message
    assert "doctor` compares every layer" in mistake.message
    assert "\n" not in mistake.message


def test_each_kind_of_layer_is_compared_once_in_the_precision_of_its_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = Mock(side_effect=layers.check_layer)
    monkeypatch.setattr(layers, "check_layer", compared)
    every_second = {"layers": [{"every": 2, "use": "xsa"}]}
    mistake = check(
        cell_with("standard"),
        cell_with("standard", clip=1),
        cell_with("standard", precision="bf16"),
        text_cell(model={"attention": every_second, "depth": 4}),
    )
    assert mistake is None
    cases: list[Any] = [(call.args[0], call.args[3]) for call in compared.call_args_list]
    comparisons = [(name, case.precision.name, case.is_causal) for name, case in cases]
    assert comparisons == [
        ("standard", "float32", False),
        ("standard", "bf16", False),
        ("standard", "float32", True),
        ("xsa", "float32", True),
    ]


def test_a_part_of_a_user_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PRESETS["belief2"]
    assert without_foreign_parts(spec) == spec
    monkeypatch.setattr(type(spec.residual), "__module__", "own_parts")
    assert without_foreign_parts(spec) == spec.model_copy(update={"residual": FullConfig()})


def test_the_calls_of_gpt2_are_one_short_call() -> None:
    written = load(EXPERIMENTS / "gpt2" / "openwebtext.yaml")
    experiment = Experiment.model_validate(written)
    (call,) = find_calls(experiment.model, experiment.data)
    assert call == AttentionCall(AttentionSpec(), 12, 64, 33, True, False, False, False)


@pytest.mark.parametrize("preset", ["belief2", "mgk", "linear", "dcmha"])
def test_padding_and_cross_attention_are_compared_too(preset: str) -> None:
    plain = AttentionCall(PRESETS[preset], 4, 16, 33, True, False, False, False)
    calls = [plain, plain._replace(is_causal=False, has_mask=True)]
    if not plain.spec.find_cross_problem():
        calls.append(plain._replace(is_causal=False, is_cross=True))
    for call in calls:
        assert compare_call(call, "fp32", CPU) == ""
