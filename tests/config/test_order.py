"""Causal order in the identity of experiments whose bias depends on it."""

from typing import Any

import pytest
from helpers.paths import ROOT

from lit_attn.config.experiment import Experiment
from lit_attn.schema.yaml_text import parse_plain


def identity(name: str, attention: Any) -> dict[str, Any]:
    """Return the identity of a shipped experiment with another mechanism."""
    written = parse_plain((ROOT / "experiments" / f"{name}.yaml").read_text(), "text")
    written["model"]["attention"] = attention
    return Experiment.model_validate(written).identity()


def test_only_causal_experiments_name_the_order() -> None:
    """Earlier versions had the buckets of an encoder in causal order."""
    assert identity("python_text_gpt", "t5")["order"] == "causal"
    assert identity("python_text_gpt", {"layers": [{"last": 1, "use": "t5"}]})["order"] == "causal"
    assert "order" not in identity("python_text_gpt", "alibi")
    assert "order" not in identity("digits_vit", "t5")


@pytest.mark.parametrize("name", ["python_text_gpt", "digits_vit"])
def test_a_written_direction_keeps_its_identity(name: str) -> None:
    written = {"bias": {"kind": "t5", "direction": "both"}}
    both = identity(name, written)
    assert "order" not in both
    assert both["model"]["attention"] == {"bias": {"kind": "t5"}}
    before = identity(name, {"bias": {"kind": "t5", "direction": "before"}})
    assert "order" not in before
    assert before["model"]["attention"] == {"bias": {"kind": "t5", "direction": "before"}}
