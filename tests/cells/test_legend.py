"""The record of the colours in a cell's pictures."""

from typing import Any

import pytest
from pydantic import ValidationError

from lit_attn.cells.legend import Legend

VALUES = {"weights": "trained", "classes": {"wall": [255, 0, 0]}, "shown": ["wall"]}


def test_a_legend_is_read() -> None:
    legend = Legend.model_validate(VALUES)
    assert legend.classes == {"wall": (255, 0, 0)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shown": ["tree"]}, "'tree' has no colour"),
        ({"classes": {"wall": [256, 0, 0]}}, r"wall: \[256, 0, 0\] is no colour"),
        ({"classes": {"wall": [-1, 0, 0]}}, r"wall: \[-1, 0, 0\] is no colour"),
        ({"weights": "best"}, "weights"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Legend.model_validate(VALUES | changes)
