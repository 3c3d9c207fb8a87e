"""Tables that commands have written."""

import csv
from pathlib import Path


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by the names of the columns."""
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))
