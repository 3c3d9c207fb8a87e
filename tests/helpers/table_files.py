"""Tables of rows in the formats that are read."""

import csv
import json
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as CSV, JSON, JSON lines or Parquet, by the ending of `path`."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    else:
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(path)
    return path
