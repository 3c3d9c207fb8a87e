"""Floors of committed studies: what rules without attention reach on the same test split.

    python docs/generators/count_floors.py

writes reports/evidence/floors.csv with the package's own floors (lit_attn/floors), for the data of
seed 0 and the steps of the baseline. The text differs between versions of Python, so the command
ends if the hash of the data is not that of the records.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

import torch

from lit_attn.ablate.plan import expand
from lit_attn.config.study import read_studies

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "reports" / "evidence"
TEXTS = ("text", "text-tuned", "text-longer-tuned", "text-mechanisms-tuned", "text-bf16")
DIGITS = ("product", "digits", "mechanisms", "digits-tuned", "mechanisms-tuned")
HEADINGS = ("study", "rule", "value", "conditions", "data")


def count_floors(study: str) -> Iterator[dict[str, str]]:
    """Yield the row of each rule for a committed study, its value in printed units."""
    with (EVIDENCE / study / "per_seed.csv").open(encoding="utf-8") as file:
        recorded = next(csv.DictReader(file))
    baseline = expand(read_studies(ROOT / "ablations.yaml")[study], Path("runs")).written[0]
    data = baseline.experiment.data.build(0, torch.device("cpu"))
    if data.fingerprint() != recorded["data"]:
        raise SystemExit(f"{study}: this Python's text is not that of the records")
    metric = baseline.metric
    for floor in data.floors("test", int(recorded["steps"])):
        value = metric.scale * floor.values[metric.name.removeprefix("test/")]
        texts = (study, floor.rule, f"{value:.6g}", floor.conditions, recorded["data"])
        yield dict(zip(HEADINGS, texts, strict=True))


def main() -> None:
    """Write the floors of all studies."""
    rows = [row for study in (*TEXTS, *DIGITS) for row in count_floors(study)]
    with (EVIDENCE / "floors.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, HEADINGS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
