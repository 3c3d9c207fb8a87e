"""Floors of committed studies: what rules without attention reach on the same test split.

    python docs/generators/count_floors.py [STUDY ...]

writes the rows of the named studies (default: all) in reports/evidence/floors.csv with the
package's own floors (lit_attn/floors), for the data of seed 0 and the steps of the baseline.
CIFAR-100 and Multi30k are read from the folders that their experiments name. The text differs
between versions of Python, so the command ends if the hash of the data is not that of the records.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import torch

from lit_attn.ablate.plan import expand
from lit_attn.config.study import StudySource, read_studies

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "reports" / "evidence"
TEXTS = ("text", "text-tuned", "text-longer-tuned", "text-mechanisms-tuned", "text-bf16")
DIGITS = ("product", "digits", "mechanisms", "digits-tuned", "mechanisms-tuned")
SCENES = "scenes-tuned"
CIFAR = "cifar100-tiny"
MULTI30K = "multi30k"
STUDIES = (*TEXTS, *DIGITS, SCENES, CIFAR, MULTI30K)
HEADINGS = ("study", "rule", "value", "conditions", "data")


ONE_CELL = """\
studies:
  multi30k:
    title: One cell
    experiment: experiments/multi30k.yaml
    seeds: 1
    cells: {standard: {}}
    baseline: standard
    metric: {name: test/averaged-bleu}
"""
"""Study of the only cell of Multi30k in the evidence."""


def read_study(name: str) -> StudySource:
    """Return a committed study."""
    path = ROOT / "ablations.yaml"
    texts = {path: ONE_CELL} if name == MULTI30K else {}
    return read_studies(path, texts)[name]


def count_floors(study: str) -> Iterator[dict[str, str]]:
    """Yield the row of each rule for a committed study, its value in printed units."""
    with (EVIDENCE / study / "per_seed.csv").open(encoding="utf-8") as file:
        recorded = next(csv.DictReader(file))
    baseline = expand(read_study(study), Path("runs")).written[0]
    data = baseline.experiment.data.build(0, torch.device("cpu"))
    if data.fingerprint() != recorded["data"]:
        raise SystemExit(f"{study}: the data of this machine are not those of the records")
    metric = baseline.metric
    name = metric.name.removeprefix("test/").removeprefix("averaged-")
    for floor in data.floors("test", int(recorded["steps"])):
        value = metric.scale * floor.values[name]
        texts = (study, floor.rule, f"{value:.6g}", floor.conditions, recorded["data"])
        yield dict(zip(HEADINGS, texts, strict=True))


def main() -> None:
    """Write the floors of some studies, and keep the rows of the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"{', '.join(STUDIES)}")
    chosen = parser.parse_args().studies or STUDIES
    path = EVIDENCE / "floors.csv"
    with path.open(encoding="utf-8") as file:
        kept = list(csv.DictReader(file))
    rows = []
    for study in STUDIES:
        if study in chosen:
            rows += list(count_floors(study))
        else:
            rows += [row for row in kept if row["study"] == study]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, HEADINGS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
