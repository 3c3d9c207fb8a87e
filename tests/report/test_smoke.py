"""Reports and verdicts of smoke runs, whose values mean nothing."""

import re
from pathlib import Path

import pytest
from helpers.answers import read_answer
from helpers.fake_study import read, report, rows, write_study

from lit_attn.__main__ import main
from lit_attn.cells.floors import FLOORS_FILE, Floors, FloorValues
from lit_attn.cells.records import Metric

pytestmark = pytest.mark.usefixtures("no_rendering")

MARK = "smoke run: every cell has trained for one step"
NAME = "fake@smoke"
# With eight seeds "residual=others" has a star, and the factors have effects.
VARIANTS = {
    "residual=full,zz=without": 0.0,
    "residual=others,zz=without": 0.05,
    "residual=full,zz=with": -0.05,
    "residual=others,zz=with": 0.001,
}
CLAIM = re.compile(r"better|worse|equivalent|undecided|\bstars?\b|\bp [<≤]|\| p \||>p<|±|0\.7")


def write(root: Path, is_smoke: bool = True) -> Path:
    """Write a study with effects and a floor above its baseline; return the folder of its cells."""
    folder = write_study(
        root, name=NAME, variants=VARIANTS, seeds=8, family="scaled", is_smoke=is_smoke
    )
    values = {"accuracy": 0.9}
    floor = FloorValues(rule="a rule", split="test", conditions="fitted", values=values)
    Floors(data="d", floors=[floor]).write(folder / FLOORS_FILE)
    return folder


def test_no_file_of_a_smoke_run_has_a_value_or_a_verdict(tmp_path: Path) -> None:
    write(tmp_path / "runs")
    folder = report(tmp_path, NAME)
    for name in ("table.md", "table.full.md", "table.tex", "table.html", "table.txt"):
        text = (folder / name).read_text("utf-8")
        assert MARK in " ".join(text.split())
        # The first part of a page has its style, the last one its script.
        body = text.partition("<body>")[2].partition("<script>")[0] or text
        assert not CLAIM.search(body)
        assert " ".join(body.split()).count("smoke run") == 1
    table = rows(folder)
    assert table["n"].tolist() == [8] * 4
    assert table["parameters"].tolist() == [3_375_076] * 4
    assert not table["significant"].any()
    for column in ("mean", "sd", "difference", "low", "p_adjusted", "verdict", "step_time"):
        assert table[column].isna().all()
    kinds = {path.suffix for path in folder.iterdir()}
    assert kinds == {".csv", ".html", ".json", ".md", ".tex", ".txt"}
    assert not (folder / "effects.csv").exists()
    index = (tmp_path / "reports" / "index.html").read_text("utf-8")
    row = index[index.index(f'"{NAME}/table.html"') :].partition("</tr>")[0]
    assert "no verdict" in row
    assert "0.7" not in row


def test_a_full_run_with_the_same_records_has_values_and_verdicts(tmp_path: Path) -> None:
    write(tmp_path / "runs", is_smoke=False)
    folder = report(tmp_path, NAME)
    text = (folder / "table.md").read_text("utf-8")
    assert MARK not in text
    assert CLAIM.search(text)
    assert rows(folder)["significant"].any()
    assert (folder / "seeds.svg").exists()


def test_a_smoke_run_of_times_until_an_event_counts_no_events(tmp_path: Path) -> None:
    metric = Metric(
        name="test/steps", label="steps", goal="min", scale=1, event="solved", pairs="log-rank"
    )
    write_study(tmp_path / "runs", NAME, metric=metric, is_smoke=True)
    folder = report(tmp_path, NAME)
    assert rows(folder)["reached"].isna().all()
    text = (folder / "table.full.md").read_text("utf-8")
    assert "solved" not in text
    assert "not reached" not in text


def test_judge_gives_no_verdict_about_a_smoke_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    for options in ([], ["--all"], ["--stream"], ["--budget", "40"]):
        # Exit code 0 would say that every verdict is decided.
        assert main(["judge", "--runs", str(tmp_path), *options]) == 1
        output = capsys.readouterr().out
        assert MARK in " ".join(output.split())
        assert "Next: Run the study without --smoke." in output
        assert not CLAIM.search(output)
    assert main(["judge", "--runs", str(tmp_path), "--json"]) == 1
    (study,) = read_answer(capsys.readouterr().out)["studies"]
    assert study["is_smoke"]
    assert study["variants"] == []
    assert study["baseline_values"]["mean"] is None
    assert study["next"]["kind"] == "run"


def test_a_cell_of_a_smoke_run_that_is_missing_or_has_failed_is_still_named(tmp_path: Path) -> None:
    failures = {("belief", 0): "out-of-memory"}
    write_study(tmp_path / "runs", NAME, failures=failures, skip=(("belief2", 1),), is_smoke=True)
    table = rows(report(tmp_path, NAME))
    assert table["missing"].fillna("").tolist() == ["", "1 out-of-memory", "1 missing"]
    assert table["failed"].tolist() == [0, 1, 0]


def test_records_of_a_smoke_run_have_sizes_and_no_values(tmp_path: Path) -> None:
    study = read(tmp_path, is_smoke=True)
    assert study.finished_cells() == []
    assert study.values("belief") == {}
    assert study.measurements("parameters", "belief") == [3_375_076] * 5
    assert study.measurements("step_time") == []
