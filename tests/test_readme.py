"""Every number of the README comes from the evidence or from the code."""

import math
import re
from datetime import datetime

import pytest
import write_results
from helpers.paths import ROOT
from helpers.shipped import shipped_matrix
from helpers.tables import read_table

from lit_attn.attention.spec import PRESETS

README = (ROOT / "README.md").read_text(encoding="utf-8")
EVIDENCE = ROOT / "reports" / "evidence"
CONSTANTS = {
    "3.11": "oldest Python",
    "95": "level of an interval",
}
CONSTANTS |= {"1.669": "loss of interpolated counts of four characters (docs/questions.md)"}
EFFECTS = ("xsa", "others", "zz", "no-ffn", "dcmha")
DEFAULT = "recall-product"
TEXT = ("shakespeare", "shakespeare-time")


def read_rows(path: str) -> list[dict[str, str]]:
    return read_table(EVIDENCE / path)


def read_effects() -> dict[str, dict[str, str]]:
    """Return the lines of the figure of the default study by effect."""
    return {row["effect"]: row for row in read_rows(f"{DEFAULT}/effects.csv")}


def count_minutes() -> int:
    """Return the minutes of one process for the default study, from all cells but the first seed.

    The cells of the first seed were trained before and after a pause.
    """
    rows = read_rows(f"{DEFAULT}/per_seed.csv")
    ends = [datetime.fromisoformat(row["finished"]) for row in rows if row["seed"] != "200"]
    per_cell = (max(ends) - min(ends)).total_seconds() / (len(ends) - 1)
    return round(per_cell * len(rows) / 60)


def count_presets() -> list[str]:
    """Return N of each row of the table of mechanisms that ends with `and N more`."""
    return re.findall(r"` and (\d+) more", README)


def list_numbers() -> set[str]:
    """Return what the evidence and the code say."""
    numbers = set(CONSTANTS) | set(count_presets())
    matrix = shipped_matrix(DEFAULT)
    numbers.add(str(len(matrix.jobs)))
    baseline = next(row for row in read_rows(f"{DEFAULT}/table.csv") if not row["difference"])
    numbers |= {f"{float(baseline[key]):.2f}" for key in ("mean", "sd")}
    numbers.add(read_rows(f"{DEFAULT}/per_seed.csv")[0]["steps"])
    effects = read_effects()
    for name in EFFECTS:
        keys = ("difference", "low", "high")
        numbers |= {f"{abs(float(effects[name][key])):.2f}" for key in keys}
        numbers.add(f"{float(effects[name]['p']):.3f}")
    numbers.add(str(len(effects)))
    for study in TEXT:
        for row in read_rows(f"{study}/table.csv"):
            keys = ("difference", "low", "high") if row["difference"] else ("mean",)
            numbers |= {f"{abs(float(row[key])):.3f}" for key in keys}
        numbers.add(read_rows(f"{study}/per_seed.csv")[0]["steps"])
    # The loss of guessing among the four values of a sequence, and the ends of all losses.
    numbers |= {f"{math.log(4):.2f}", "0", "1.8", str(count_minutes())}
    for end, device in (("smallest", "CPU"), ("largest", "CPU"), ("largest", "GPU")):
        numbers.add(write_results.parameters(end, device))
    return numbers


def test_every_number_is_known() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    prose = re.sub(r"^    .*$", "", prose, flags=re.MULTILINE)
    # .ci/check_versions.py compares these numbers with pyproject.toml and constraints.txt.
    prose = re.sub(r"^Supported versions: .*?\n\n", "", prose, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`", "", prose)
    numbers = re.findall(r"(?<![\w.])\d[\d,.]*\d|(?<![\w.])\d(?!\w)", prose)
    assert len(numbers) > 30
    assert set(numbers) - list_numbers() == set()


def test_the_effects_have_their_rows() -> None:
    effects = read_effects()
    rows = re.findall(r"^\| (?!change).* \| (.*\]) \| (.*) \|$", README, re.MULTILINE)
    assert len(rows) == len(EFFECTS)
    for (interval, p), name in zip(rows, EFFECTS, strict=True):
        numbers = re.findall(r"[+\u2212]?[\d.]+", interval)
        expected = [float(effects[name][key]) for key in ("difference", "low", "high")]
        shown = [float(number.replace("\u2212", "-")) for number in numbers]
        assert shown == pytest.approx(expected, abs=0.006), name
        assert float(p) == pytest.approx(float(effects[name]["p"]), abs=0.0006)


@pytest.mark.parametrize("study", TEXT)
def test_the_sentences_about_text_have_the_numbers_of_their_study(study: str) -> None:
    prose = " ".join(README.split())
    for row in read_rows(f"{study}/table.csv"):
        if row["difference"]:
            assert write_results.gain(study, row["variant"]) in prose, row["variant"]


def test_the_counts_in_words_hold() -> None:
    prose = " ".join(README.split())
    lines = read_effects().values()
    starred = [line for line in lines if float(line["p"]) <= 0.05]
    main = [line["effect"] for line in starred if line["kind"] == "main effect"]
    assert main == ["xsa", "no-ffn", "dcmha"]
    assert "Three of the five main effects pass the exact test" in prose
    assert {line["effect"] for line in starred} - set(main) == {
        "others and zz",
        "others and no-ffn",
        "zz and no-ffn",
        "no-ffn and dcmha",
    }
    assert "Four interactions have a star too" in prose
    losses = [float(row["value"]) for row in read_rows(f"{DEFAULT}/per_seed.csv")]
    assert min(losses) > 0
    assert max(losses) < 1.8
    done = [row for row in read_rows("cifar100-mechanisms/per_seed.csv") if row["value"]]
    assert f"{write_results.WORDS[len(done)]} short trainings ended" in README


def test_the_variants_that_recall_sooner_have_their_stars() -> None:
    (named,) = re.findall(r"guessing does not, (.*?) learn sooner", " ".join(README.split()))
    rows = read_rows("recall-mechanisms/table.csv")
    better = {r["variant"] for r in rows if r["significant"] == "True" and float(r["high"]) < 0}
    starred = {name for name in better if write_results.has_star("recall-mechanisms", name)}
    assert set(re.findall(r"`([\w-]+)`", named)) == starred


def test_the_standard_layer_solves_recall_in_four_seeds() -> None:
    rows = read_rows(f"{DEFAULT}/per_seed.csv")
    solved = [row["metric test/solved"] for row in rows if row["variant"] == "full,no-zz,ffn,plain"]
    assert sorted(solved) == 5 * ["0.0"] + 4 * ["1.0"]
    assert "four of its nine seeds" in " ".join(README.split())


def test_the_table_of_mechanisms_counts_every_preset() -> None:
    (table,) = re.findall(r"\| mechanism \| presets \| paper \|\n(.*?)\n\n", README, re.DOTALL)
    cells = [row.split(" | ")[1] for row in table.splitlines()[1:]]
    named = [name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)]
    assert set(named) <= set(PRESETS)
    further = sum(int(number) for number in count_presets())
    # The baseline needs no row.
    assert len(named) + further == len(PRESETS) - 1
