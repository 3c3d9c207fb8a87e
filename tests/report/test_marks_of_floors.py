"""README, LOG and the pages of results mark every study whose baseline is below its floor."""

import functools
import re
from pathlib import Path

import pytest
import write_results
from helpers.paths import ROOT

from lit_attn.config.study import read_studies

EVIDENCE = ROOT / "reports" / "evidence"
PAGES = ("README.md", "LOG.md", "docs/results.md", "docs/history.md", "docs/claims.md")
LINK = re.compile(r"reports/evidence/([\w-]+)")
NAMED = re.compile(r"\b(below|above) (its|their) \[?floors?\b")
ENTRY = re.compile(r"\n(?=## )")


@functools.cache
def list_below() -> set[str]:
    """Return the studies and pages of papers with a baseline that is not better than its floor."""
    sources = read_studies(ROOT / "ablations.yaml")
    below = set()
    for study in {row["study"] for row in write_results.read_table("floors.csv")}:
        if not (EVIDENCE / study / "table.csv").exists():
            continue
        metric = sources[study].study.metric
        sign = -1.0 if metric is not None and metric.goal == "min" else 1.0
        rows = [row for row in write_results.read_table("floors.csv") if row["study"] == study]
        best = max(sign * float(row["value"]) for row in rows)
        baseline = write_results.read_table(f"{study}/table.csv")[0]
        if sign * float(baseline["mean"]) <= best:
            below.add(study)
    for page in EVIDENCE.glob("paper-*/index.md"):
        if "| **below** |" in page.read_text("utf-8"):
            below.add(page.parent.name)
    return below


def list_unmarked(text: str, below: set[str]) -> list[str]:
    """Return the headings of the entries that link such a study and do not name its floor.

    A page of a paper has several studies, so an entry can say that its study is above its floor.
    """
    unmarked = []
    for entry in ENTRY.split(text):
        is_below = not below.isdisjoint(LINK.findall(entry))
        if is_below and not NAMED.search(entry):
            unmarked.append(entry.splitlines()[0])
    return unmarked


def test_the_studies_below_their_floors_are_known() -> None:
    below = list_below()
    assert {"product", "digits-tuned", "text-mechanisms-tuned", "paper-mgk-small"} <= below
    assert below.isdisjoint({"scenes-tuned", "cifar100-tiny", "recall-product"})


@pytest.mark.parametrize("name", PAGES)
def test_every_entry_about_a_study_below_its_floor_says_so(name: str) -> None:
    text = Path(ROOT, name).read_text("utf-8")
    assert list_unmarked(text, list_below()) == []


def test_an_entry_without_the_mark_is_found() -> None:
    entry = "\n## A\n\n[table](reports/evidence/digits-tuned/table.md): better.\n\n## B\n\nbelow.\n"
    assert list_unmarked(entry, {"digits-tuned"}) == ["## A"]
    marked = entry.replace("better.", "better, *below its [floor](x)*.")
    assert list_unmarked(marked, {"digits-tuned"}) == []
