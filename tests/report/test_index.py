"""Index of a report folder: families of hypotheses, and the numbers of every study."""

import re
import shutil
from pathlib import Path

import pytest
from helpers.fake_study import make_seal, write_study

from lit_attn.cells.decisions import Seals
from lit_attn.cells.records import Origin
from lit_attn.report import write_reports
from lit_attn.report.__main__ import main
from lit_attn.report.pages.index_page import make_index_page

pytestmark = pytest.mark.usefixtures("no_rendering")

HEADINGS = ["title", "differs", "largest", "baseline", "n", "done", "corrected"]


def add_study(
    runs: Path, name: str, file: str = "a.yaml", first_identity: str = "", seeds: int = 6
) -> Path:
    """Write the records of a sealed study of `file`; with six seeds its variant has p = 1/32."""
    folder = write_study(runs, name=name, seeds=seeds, variants={"standard": 0.0, "ours": 0.02})
    if first_identity:
        for path in (folder / "plan.json", *folder.glob("*/*/result.json")):
            text = path.read_text()
            path.write_text(re.sub('"identity": "0', f'"identity": "{first_identity}', text))
    time = f"2026-01-01T00:00:0{first_identity or 0}+00:00"
    entry = make_seal(time=time, seeds=list(range(seeds)))
    Seals(entries=[entry]).write(folder / "seals.json")
    Origin(file=f"../../{file}").write(folder / "origin.json")
    return folder


def read_index(reports: Path) -> dict[str, dict[str, str]]:
    """Return the cells of the index by study and column."""
    page = (reports / "index.html").read_text()
    studies = {}
    for name, row in re.findall(r'<a href="([^"/]*)/table.html">(.*?)</tr>', page):
        cells = re.findall("<td[^>]*>(.*?)</td>", row)
        studies[name] = dict(zip(HEADINGS, cells, strict=True))
    return studies


def test_the_index_shows_numbers(tmp_path: Path) -> None:
    add_study(tmp_path / "runs", "one")
    write_reports(tmp_path / "runs", tmp_path / "reports")
    row = read_index(tmp_path / "reports")["one"]
    assert re.fullmatch(r"standard 7\d\.\d\d ± 0\.\d\d", row["baseline"])
    assert re.fullmatch(r"ours \+\d\.\d\d \[\+\d\.\d\d, \+\d\.\d\d\]", row["largest"])
    assert row["differs"] == row["largest"]
    assert row["corrected"] == "the 1 study of a.yaml"
    assert row["done"] == "12 / 12"


@pytest.mark.parametrize("reported", [["one"], ["one", "two"]])
def test_a_sealed_study_of_the_file_counts_with_or_without_a_report(
    tmp_path: Path, reported: list[str]
) -> None:
    add_study(tmp_path / "runs", "one")
    add_study(tmp_path / "runs", "two", first_identity="1")
    write_reports(tmp_path / "runs", tmp_path / "reports", reported)
    row = read_index(tmp_path / "reports")["one"]
    assert row["corrected"] == "the 2 studies of a.yaml"
    # Holm's p is 2 / 32.
    assert row["differs"] == "none"


def test_a_study_with_too_few_seeds_for_a_star_is_no_hypothesis(tmp_path: Path) -> None:
    """Five seeds have a p of at least 1/16, so they test nothing and cost the others nothing."""
    add_study(tmp_path / "runs", "one")
    add_study(tmp_path / "runs", "few", first_identity="1", seeds=5)
    write_reports(tmp_path / "runs", tmp_path / "reports")
    index = read_index(tmp_path / "reports")
    assert index["one"]["corrected"] == "the 1 study of a.yaml"
    assert index["one"]["differs"].startswith("ours")
    assert index["few"]["corrected"] == "no verdict: too few seeds for a star"
    assert index["few"]["differs"] == "—"


def test_leftovers_are_no_hypotheses(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    reports = tmp_path / "reports"
    add_study(runs, "one")
    add_study(runs, "one@training.max_steps=20", first_identity="1")
    add_study(runs, "gone", first_identity="2")
    add_study(runs, "other", file="b.yaml", first_identity="3")
    (add_study(runs, "unsealed", first_identity="4") / "seals.json").unlink()
    (add_study(runs, "torn", first_identity="5") / "seals.json").write_text("{")
    write_reports(runs, reports)
    shutil.rmtree(runs / "gone")
    (reports / "index.html").write_text(make_index_page(reports))
    index = read_index(reports)
    assert index["one"]["corrected"] == "the 1 study of a.yaml"
    assert index["one"]["differs"].startswith("ours")
    assert index["other"]["corrected"] == "the 1 study of b.yaml"
    assert index["unsealed"]["corrected"] == "its own study alone"
    assert index["torn"]["corrected"] == "no verdict: its seals.json cannot be read"
    assert index["one@training.max_steps=20"]["corrected"] == "no verdict: a trial"
    assert index["gone"]["corrected"] == "no verdict: its records are gone"
    assert index["gone"]["differs"] == index["one@training.max_steps=20"]["differs"] == "—"


def test_a_second_metric_of_the_same_cells_is_no_hypothesis(tmp_path: Path) -> None:
    add_study(tmp_path / "runs", "b-first")
    add_study(tmp_path / "runs", "a-second", first_identity="1")
    add_study(tmp_path / "runs", "second")
    write_reports(tmp_path / "runs", tmp_path / "reports")
    index = read_index(tmp_path / "reports")
    assert index["second"]["corrected"] == "no verdict: a second metric of the cells of b-first"
    assert index["b-first"]["corrected"] == "the 2 studies of a.yaml"


def test_a_copy_of_a_table_removes_no_finding(tmp_path: Path) -> None:
    rows = ["variant,seed,score"]
    for seed in range(8):
        rows += [f"base,{seed},{seed}", f"ours,{seed},{seed + 3 + seed / 100}"]
    reports = tmp_path / "reports"
    for name in ("r3", "r4"):
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(rows) + "\n")
        words = ["--csv", str(path), "--metric", "score:max", "--pairs", "seed"]
        assert main([*words, "--baseline", "base", "--reports", str(reports)]) == 0
    index = read_index(reports)
    assert index["r3"]["differs"] == index["r4"]["differs"]
    assert index["r3"]["differs"].startswith("ours +3.04")
