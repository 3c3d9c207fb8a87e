"""The mistake that the check before the first cell finds."""

from typing import Any

from lit_attn.config.cell import Cell
from lit_attn.training.first_step import find_mistake


def find_message(cell: Cell, **options: Any) -> str:
    """Return the message about the mistake in a cell, which must be one line."""
    mistake = find_mistake([cell.model_dump(mode="json", by_alias=True)], **options)
    assert mistake is not None
    assert "\n" not in mistake.message
    return mistake.message
