"""Pages of results: numbers come from the evidence, and studies below their floors are marked."""

import csv
import functools
import re
from collections import defaultdict

import numpy as np
import pytest
import write_results
from count_floors import count_floors
from helpers.paths import ROOT
from scipy.stats import t as student

from lit_attn.attention.spec import PRESETS
from lit_attn.config.study import read_studies
from lit_attn.report.statistics.stats import joint_sign_flip

EVIDENCE = ROOT / "reports" / "evidence"
CONSTANTS = {
    "90": "accuracy of a solved probe",
    "95": "level of an interval",
    "360": "test images of the digits",
    "1,200": "training images of the digits",
    "0.6": "standard error of an accuracy of 97 % on 360 images, in points",
    "0.031": "smallest p of six seeds",
    "1": "gamma",
    "2": "version of differential attention",
    "12.5": "accuracy of a guess among eight values",
    "16": "length of the sequences that trained",
    "12": "bits of parity",
    "128": "length of the sequences that were evaluated",
    "317": "number of a change of another project",
    "0.5": "gamma",
    "512": "windows of the text's test split, and length of a sequence of order-and-length",
    "25": "accuracy of a guess among four values, in percent",
    "32": "length of a sequence of order-and-length over that of the training, and of eight pairs",
    "3": "a number of times the steps of the standard layer",
    "10": "a number of times the steps of the standard layer",
    "40": "steps of the warm-up of ability-or-steps",
    "15": "epochs of the scenes",
    "1.669": "loss of interpolated counts of four characters of Shakespeare",
    "1.706": "floor of characters of Shakespeare",
    "1.2": "passes over the characters of Shakespeare: 600 steps of 16 windows of 128",
    "41.02": "published by Wu et al.",
    "1.88": "published by nanoGPT",
    "1.905": "loss of nanoGPT's own code on all windows",
    "0.02": "margin of nanoGPT's replication",
    "240": "random windows of nanoGPT's loss",
    "2021": "a year",
    "2024": "a year",
    "2025": "a year",
    "2.15": "version of PyTorch",
    "0": "seeds that solve a probe",
    "35": "two standard deviations of recall-differential, in steps",
    "4,096": "strings of 12 bits",
    "19,200": "strings that a cell of parity trains on",
    "98.8": "share of the evaluated strings of parity that a cell trained on, in percent",
}
"""Numbers of the template that are not measured."""

OTHERS = {"window", "standard-8-heads", "delta-rule", "state-space"}
"""Rows of the table of probes that are no presets."""
UNTRIED_PRESETS = {"mla", "moba"}
"""Presets that are newer than the studies of probes."""

MARKED_PAGES = ("README.md", "LOG.md", "docs/results.md", "docs/history.md", "docs/claims.md")
LINK = re.compile(r"reports/evidence/([\w-]+)")
NAMED = re.compile(r"\b(below|above) (its|their) \[?floors?\b")
ENTRY = re.compile(r"\n(?=## )")


@pytest.mark.parametrize("name", write_results.PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page == write_results.write_page(name), "run the command that the page names"


@pytest.mark.parametrize("name", write_results.PAGES)
def test_the_template_has_no_measured_number(name: str) -> None:
    text = write_results.read_template(name)
    prose = re.sub(r"\{\{[^}]*\}\}|\]\([^)]*\)|`[^`]*`", "", text)
    numbers = set(re.findall(r"(?<![\w.-])\d(?:[\d,.]*\d)?(?!\w)", prose))
    assert numbers <= CONSTANTS.keys(), numbers - CONSTANTS.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gain text-tuned attentionx-half", "\u22120.065 [\u22120.085, \u22120.045] \\*"),
        ("gain scenes-tuned belief2 1 digits", "+12.2 [+6.9, +17.5]"),
        ("slower scenes-tuned belief2", "1.24"),
        ("change text-longer-tuned text-tuned xsa", "+0.058 [+0.043, +0.073]"),
        ("variants digits-tuned", "8"),
        ("edge text-mechanisms-tuned smallest", "37"),
        ("floor digits 1-nearest-neighbour 2 digits", "98.89"),
    ],
)
def test_a_placeholder_gives_the_number_of_the_evidence(text: str, expected: str) -> None:
    """The numbers were recomputed by hand from the files of the evidence."""
    assert write_results.PLACEHOLDER.sub(write_results.fill, "{{" + text + "}}") == expected


def test_a_star_of_the_page_passes_the_tests_of_its_table_and_over_studies() -> None:
    """p is recomputed from the values of every seed; all sealed studies share the level."""
    corrected = write_results.correct_over_studies()
    cases = [("text-tuned", "attentionx-half", True), ("scenes-tuned", "belief2", False)]
    for study, variant, is_starred in cases:
        with (EVIDENCE / study / "per_seed.csv").open() as file:
            rows = list(csv.DictReader(file))
        values = {(row["variant"], row["seed"]): float(row["value"]) for row in rows}
        names = list(dict.fromkeys(row["variant"] for row in rows if row["variant"] != "standard"))
        numbers = sorted({row["seed"] for row in rows}, key=int)
        differences = np.array(
            [[values[name, s] - values["standard", s] for s in numbers] for name in names]
        )
        p = joint_sign_flip(differences)[names.index(variant)]
        assert p <= 0.05
        assert corrected[study, variant] >= p
        assert write_results.has_star(study, variant) == is_starred
        assert (corrected[study, variant] <= 0.05) == is_starred


def test_the_floors_of_the_digits_are_counted_again() -> None:
    counted = list(count_floors("digits"))
    recorded = [row for row in write_results.read_table("floors.csv") if row["study"] == "digits"]
    assert [row["rule"] for row in counted] == [row["rule"] for row in recorded]
    for ours, theirs in zip(counted, recorded, strict=True):
        assert float(ours["value"]) == pytest.approx(float(theirs["value"]), abs=0.3)


def count_seeds(study: str) -> int:
    """Return the number of seeds with a value of a committed study."""
    rows = write_results.read_table(f"{study}/per_seed.csv")
    return len({row["seed"] for row in rows if row["value"]})


def test_the_probes_that_mechanisms_do_not_solve_are_named() -> None:
    """The page says in words which rows of its long table differ."""
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (\d of 2.*) \|$", page, re.MULTILINE)
    solved = {name: [int(cell[0]) for cell in cells.split(" | ")] for name, cells in rows}
    assert solved.keys() - OTHERS == PRESETS.keys() - UNTRIED_PRESETS
    # Recall, induction, needles twice, copying; then parity.
    others = {name: seeds[:5] for name, seeds in solved.items() if seeds[:5] != [2] * 5}
    assert others.pop("window") == [0, 0, 0, 0, 0]
    assert others.pop("state-space") == [0, 2, 2, 2, 0]
    assert others.pop("delta-rule") == [2, 2, 2, 2, 0]
    assert others.pop("smlk") == [0, 0, 2, 2, 0]
    assert others.pop("linear") == others.pop("mlk") == [0, 1, 2, 2, 0]
    one_seed = {"softpick", "knocking-heads", "knocking-heads-mlp", "dcmha-projection", "dcmha-pre"}
    assert others == {name: [2, 1, 2, 2, 2] for name in one_seed}
    parity = {name: seeds[5] for name, seeds in solved.items()}
    assert parity["standard"] == 0
    assert parity["delta-rule"] == 1
    assert {name for name in parity if parity[name] == 2} == {"differential-2", "linear", "smlk"}
    assert sum(seeds == 1 for seeds in parity.values()) == 12


def test_no_positions_explain_the_gain_on_long_needles() -> None:
    """The page says that ALiBi and forgetting gates gain nothing over no positions."""
    for variant in ("alibi", "forgetting", "rotary"):
        row = write_results.find_row("claim-positions/table.csv", variant=variant)
        assert float(row["high"]) < 0
    length = write_results.find_row("claim-length/table.csv", variant="alibi")
    assert float(length["low"]) > 0


def compare_intervals(study: str) -> float:
    """Return the width of the paired interval over the unpaired one, the median over variants."""
    rows = write_results.read_table(f"{study}/per_seed.csv")
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["value"]:
            values[row["variant"]][row["seed"]] = float(row["value"])
    baseline = values.pop(rows[0]["variant"])
    ratios = []
    for by_seed in values.values():
        shared = sorted(by_seed.keys() & baseline.keys())
        ours = np.array([by_seed[seed] for seed in shared])
        theirs = np.array([baseline[seed] for seed in shared])
        count = len(shared)
        paired = (ours - theirs).std(ddof=1) * student.ppf(0.975, count - 1)
        unpaired = np.hypot(ours.std(ddof=1), theirs.std(ddof=1)) * student.ppf(
            0.975, 2 * count - 2
        )
        ratios.append(paired / unpaired)
    return float(np.median(ratios))


def test_the_page_of_simulations_says_what_pairing_gains() -> None:
    # Two seeds have no interval that is worth comparing, and one variant has no difference.
    studies = [path.parent.name for path in EVIDENCE.glob("*/table.csv")]
    studies = [study for study in studies if count_seeds(study) > 2]
    studies = [study for study in studies if write_results.variants(study) != "1"]
    medians = [compare_intervals(study) for study in studies]
    text = (ROOT / "docs" / "simulations.md").read_text(encoding="utf-8")
    words = " ".join(text.split())
    low, high = (f"{value:.2f}".removeprefix("0") for value in (min(medians), max(medians)))
    wider = sum(median > 1 for median in medians)
    assert f"In the {len(studies)} committed studies of three seeds or more" in words
    assert f"the paired interval is {low} to {high} times as wide" in words
    assert f"and wider in {wider} of them" in words


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


@pytest.mark.parametrize("name", MARKED_PAGES)
def test_every_entry_about_a_study_below_its_floor_says_so(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert list_unmarked(text, list_below()) == []


def test_an_entry_without_the_mark_is_found() -> None:
    entry = "\n## A\n\n[table](reports/evidence/digits-tuned/table.md): better.\n\n## B\n\nbelow.\n"
    assert list_unmarked(entry, {"digits-tuned"}) == ["## A"]
    marked = entry.replace("better.", "better, *below its [floor](x)*.")
    assert list_unmarked(marked, {"digits-tuned"}) == []
