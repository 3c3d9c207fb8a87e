"""Reader of the records of openai/parameter-golf, and the table of all seeds that they publish.

    python parameter_golf.py CHECKOUT COMMIT > parameter-golf.csv

`lit-attn judge CHECKOUT/records --reader parameter_golf.py:read` reads the same runs.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDS = "records"
COLUMNS = ("commit", "path", "seed", "val_bpb")

SCORE = re.compile(r"(post-ttt|slid).*(bpb|s64)|bpb.*slid|^val_bpb$", re.IGNORECASE)
"""Heading of the column of a README with the value that counts."""


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every seed of each record below a folder; the variant is the record's folder.

    A record has its seeds as a mapping in submission.json, or in the first table of its README
    whose first column is the seed. Records with one value alone are left out.
    """
    for file in sorted(path.rglob("submission.json")):
        source = file
        seeds = read_seeds(json.loads(file.read_text(encoding="utf-8")))
        readme = file.with_name("README.md")
        if not seeds and readme.exists():
            source = readme
            seeds = read_table(readme.read_text(encoding="utf-8"))
        if len(seeds) < 2:
            continue
        for seed, value in seeds.items():
            yield {
                "variant": file.parent.relative_to(path).as_posix(),
                "path": source.relative_to(path).as_posix(),
                "seed": seed,
                "val_bpb": value,
            }


def read_seeds(record: dict[str, Any]) -> dict[str, float]:
    """Return the values of the seeds in a submission.json, none if it has only a mean."""
    results = record.get("seed_results") or record.get("seeds")
    if not isinstance(results, dict):
        return {}
    return {seed: result["val_bpb"] for seed, result in results.items() if "val_bpb" in result}


def read_table(text: str) -> dict[str, float]:
    """Return the values of the first table of seeds in a README; rounded ones (~) are left out."""
    seeds: dict[str, float] = {}
    column = None
    for line in text.splitlines():
        cells = [cell.strip(" *") for cell in line.strip().strip("|").split("|")]
        if column is None:
            if cells[0].lower() == "seed":
                places = [place for place, name in enumerate(cells) if SCORE.search(name)]
                column = places[0] if places else None
        elif not line.startswith("|"):
            break
        elif cells[0].isdecimal() and re.fullmatch(r"\d\.\d{4,}", cells[column]):
            seeds[cells[0]] = float(cells[column])
    return seeds


def main(checkout: Path, commit: str) -> None:
    """Print the seeds of all records as CSV."""
    table = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for run in read(checkout / RECORDS):
        table.writerow({**run, "commit": commit, "path": f"{RECORDS}/{run['path']}"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
