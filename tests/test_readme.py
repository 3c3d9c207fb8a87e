"""Every number of the README comes from the evidence or from the code."""

import csv
import re
from datetime import datetime

import pytest
import write_results
from helpers.paths import ROOT
from helpers.shipped import shipped_matrix

from lit_attn.attention.spec import PRESETS

README = (ROOT / "README.md").read_text(encoding="utf-8")
EVIDENCE = ROOT / "reports" / "evidence"
CONSTANTS = {
    "3.11": "oldest Python",
    "95": "level of an interval",
}
CONSTANTS |= {"57": "families of transformers (tests/models)"}
EFFECTS = ("perpendicular", "zz", "no-ffn", "dcmha")
DEFAULT = "recall-product"


def read_rows(path: str) -> list[dict[str, str]]:
    with (EVIDENCE / path).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def count_presets() -> list[str]:
    """Return N of each row of the table of mechanisms that ends with `and N more`."""
    return re.findall(r"` and (\d+) more", README)


def list_numbers() -> set[str]:
    """Return what the evidence and the code say."""
    numbers = set(CONSTANTS) | set(count_presets())
    matrix = shipped_matrix(DEFAULT)
    numbers.add(str(len(matrix.jobs)))
    baseline = next(row for row in read_rows(f"{DEFAULT}/table.csv") if not row["difference"])
    numbers |= {f"{float(baseline[key]):.1f}" for key in ("mean", "sd")}
    numbers.add(read_rows(f"{DEFAULT}/per_seed.csv")[0]["steps"])
    effects = write_results.read_solvable_effects(DEFAULT)
    for name in EFFECTS:
        effect, p = effects[name]
        numbers |= {f"{abs(float(value)):.1f}" for value in effect.values()}
        numbers.add(f"{p:.3f}")
    numbers.add(str(len(read_rows(f"{DEFAULT}/effects.csv"))))
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
    effects = write_results.read_solvable_effects(DEFAULT)
    assert set(effects) == set(EFFECTS)
    rows = re.findall(r"^\| (?!change).* \| (.*\]) \| (.*) \|$", README, re.MULTILINE)
    assert len(rows) == len(EFFECTS)
    for (interval, p), name in zip(rows, EFFECTS, strict=True):
        numbers = re.findall(r"[+\u2212]?[\d.]+", interval)
        effect, exact_p = effects[name]
        expected = [float(effect[key]) for key in ("difference", "low", "high")]
        shown = [float(number.replace("\u2212", "-")) for number in numbers]
        assert shown == pytest.approx(expected, abs=0.06), name
        assert float(p) == pytest.approx(exact_p, abs=0.0006)


def test_the_counts_in_words_hold() -> None:
    effects = write_results.read_solvable_effects(DEFAULT)
    passing = [name for name in EFFECTS if effects[name][1] <= 0.05]
    assert passing == ["perpendicular", "no-ffn", "dcmha"]
    number = write_results.WORDS[len(passing)].capitalize()
    assert f"{number} effects pass the exact test" in " ".join(README.split())
    lines = read_rows(f"{DEFAULT}/effects.csv")
    starred = write_results.WORDS[sum(float(line["p"]) <= 0.05 for line in lines)].capitalize()
    assert f"{starred} of the {len(lines)} lines of the picture" in " ".join(README.split())
    done = [row for row in read_rows("cifar100-mechanisms/per_seed.csv") if row["value"]]
    assert f"{write_results.WORDS[len(done)]} short trainings ended" in README


def test_the_variants_that_recall_sooner_have_their_stars() -> None:
    (named,) = re.findall(r"guessing does not, (.*?) learn sooner", " ".join(README.split()))
    rows = read_rows("recall-mechanisms/table.csv")
    better = {r["variant"] for r in rows if r["significant"] == "True" and float(r["high"]) < 0}
    starred = {name for name in better if write_results.has_star("recall-mechanisms", name)}
    assert set(re.findall(r"`([\w-]+)`", named)) == starred


def test_layers_that_pass_on_v_alone_solve_recall_in_no_seed() -> None:
    """Check the levels that the table of effects leaves out."""
    rows = read_rows(f"{DEFAULT}/per_seed.csv")
    solved = {"never": set(), "once": set()}
    for row in rows:
        residual = row["variant"].split(",")[0]
        solved["once" if row["metric test/solved"] == "1.0" else "never"].add(residual)
    assert solved["never"] - solved["once"] == write_results.CEILING[DEFAULT]


def test_the_standard_layer_does_not_solve_recall_in_one_seed() -> None:
    rows = read_rows(f"{DEFAULT}/per_seed.csv")
    solved = [row["metric test/solved"] for row in rows if row["variant"] == "full,no-zz,ffn,plain"]
    assert sorted(solved) == ["0.0"] + 5 * ["1.0"]
    assert "one of its six seeds, which does not" in " ".join(README.split())


def test_the_default_study_takes_about_seven_minutes() -> None:
    """The first two seeds were trained while nothing else ran; other programs slowed the rest."""
    rows = read_rows(f"{DEFAULT}/per_seed.csv")
    ends = [datetime.fromisoformat(row["finished"]) for row in rows if row["seed"] in ("0", "1")]
    per_cell = (max(ends) - min(ends)).total_seconds() / (len(ends) - 1)
    assert "about seven minutes" in README
    assert 6 < per_cell * len(rows) / 60 < 8


def test_the_table_of_mechanisms_counts_every_preset() -> None:
    (table,) = re.findall(r"\| mechanism \| presets \| paper \|\n(.*?)\n\n", README, re.DOTALL)
    cells = [row.split(" | ")[1] for row in table.splitlines()[1:]]
    named = [name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)]
    assert set(named) <= set(PRESETS)
    further = sum(int(number) for number in count_presets())
    # The baseline needs no row.
    assert len(named) + further == len(PRESETS) - 1
