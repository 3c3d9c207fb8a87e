"""Record of the floors of a study: what rules without attention reach on its data."""

from pydantic import FiniteFloat

from lit_attn.cells.records import Record

FLOORS_FILE = "floors.json"
"""Name of the record in the folder of a study."""


class FloorValues(Record):
    """Values of one rule on one split, by metrics without the name of the split."""

    rule: str
    split: str
    values: dict[str, FiniteFloat]
    conditions: str


class Floors(Record):
    """Floors of the baseline's data.

    `data` is the fingerprint of these data, and `inputs` the hash of the configuration on which the
    floors depend (`Cell.floor_inputs`); records of older versions have none.
    """

    data: str
    inputs: str = ""
    floors: list[FloorValues]
