"""The record of a floor, which data modules return and the report reads."""

from typing import NamedTuple


class Floor(NamedTuple):
    """Values that a rule without attention reaches on a split, by metrics such as "accuracy".

    `rule` names the rule in a few words of a table's row, `conditions` what it was fitted on.
    """

    rule: str
    values: dict[str, float]
    conditions: str
