"""Columns of the result table: their definitions and the keys that a study can name."""

from lit_attn.cells.columns import COLUMN_KEYS
from lit_attn.report.columns import COLUMNS


def test_a_study_can_name_every_printed_column() -> None:
    assert tuple(column.key for column in COLUMNS if column.heading) == COLUMN_KEYS
