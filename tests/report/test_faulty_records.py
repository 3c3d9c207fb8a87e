"""One unreadable file never prevents the rest of a report."""

from pathlib import Path

import pandas as pd
import pytest
from helpers.fake_study import write_study

from lit_attn.cells.records import Metric
from lit_attn.cells.rows import read_metrics
from lit_attn.report import write_reports
from lit_attn.report.__main__ import main
from lit_attn.report.pages import index_page
from lit_attn.report.pages.index_page import make_index_page
from lit_attn.report.pages.write import to_csv

pytestmark = pytest.mark.usefixtures("no_rendering")


def test_an_unreadable_plan_skips_only_its_study(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_study(tmp_path / "runs")
    write_study(tmp_path / "runs", name="torn")
    (tmp_path / "runs" / "torn" / "plan.json").write_text("{")
    arguments = [str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]
    assert main(arguments) == 1
    assert (tmp_path / "reports" / "fake" / "table.md").exists()
    (warning,) = caplog.messages
    assert "torn/plan.json: is not a plan" in warning
    assert "skipped" in warning


def test_torn_arrays_of_a_cell_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    for cell in study.glob("v1/*"):
        (cell / "diagnostics.csv").write_text("step,layer,head,name,value\n8,1,,norm-mh,2.5\n")
        (cell / "attention.npz").write_bytes(b"PK\x03\x04 torn")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert (folder / "norms.svg").exists()
    assert not (folder / "ranks.svg").exists()
    assert [message.count("skipped") for message in caplog.messages] == [1, 1]


@pytest.mark.parametrize("name", ["metrics.csv", "diagnostics.csv"])
def test_a_csv_file_that_cannot_be_read_is_one_warning(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    path = next(study.glob("v1/0-*")) / name
    path.unlink(missing_ok=True)
    path.mkdir()
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert pd.read_csv(folder / "table.csv")["n"].tolist() == [2, 2, 2]
    (warning,) = caplog.messages
    assert f"{path}: unreadable and skipped" in warning


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content"),
    [("seals.json", '{"entries": []}'), ("tuning.json", "{"), ("step_times.json", "{")],
)
def test_a_side_record_that_cannot_be_read_leaves_the_table(
    tmp_path: Path, name: str, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    (study / name).write_text(content)
    arguments = [str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]
    assert main(arguments) == 0
    page = (tmp_path / "reports" / "fake" / "table.html").read_text()
    assert page.count(f"Warning: {name} cannot be read") == 1
    assert ("the stars are not corrected for looks" in page) == (name == "seals.json")
    (warning,) = caplog.messages
    assert f"fake/{name}: unreadable and skipped" in warning
    assert "\n" not in warning


def test_a_path_that_no_file_can_have_is_a_damaged_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_study(tmp_path / "runs")
    plan = write_study(tmp_path / "runs", name="torn") / "plan.json"
    plan.write_text(plan.read_text().replace('"path": "v0/0-', '"path": "v0/\\u00000-'))
    assert "\\u0000" in plan.read_text()
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert folder.name == "fake"
    assert "torn/plan.json: is not a plan" in caplog.text


def test_a_cell_that_cannot_be_read_is_unreadable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    plan = study / "plan.json"
    plan.write_text(plan.read_text().replace('"path": "v1/0-', f'"path": "v1/{"a" * 300}/0-'))
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert "1/2, 1 unreadable" in (folder / "table.md").read_text()
    assert "File name too long" in caplog.text


def test_a_line_with_an_enormous_field_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(f"step,epoch,name,value\n1,0,{'x' * 200_000},1\n2,1,loss,0.5\n")
    assert [row.value for row in read_metrics(path)] == [0.5]


def test_a_foreign_folder_is_left_out_of_the_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_study(tmp_path / "runs")
    foreign = tmp_path / "reports" / "coverage"
    foreign.mkdir(parents=True)
    (foreign / "table.html").write_text("<title>Coverage</title>")
    write_reports(tmp_path / "runs", tmp_path / "reports")
    index = (tmp_path / "reports" / "index.html").read_text()
    assert "fake/table.html" in index
    assert "coverage" not in index
    assert "is not a report" in caplog.text


def test_a_table_that_lacks_columns_is_left_out_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A KeyError in the index is a mistake of lit_attn, and not told as a foreign folder."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "table.html").write_text("")
    (folder / "table.csv").write_text("variant,n\na,1\n")
    make_index_page(tmp_path)
    assert "left out of the index: table.csv has no column planned, mean" in caplog.text
    monkeypatch.setattr(index_page, "_require_columns", lambda frame: None)
    with pytest.raises(KeyError, match="p_adjusted"):
        make_index_page(tmp_path)


def test_a_scale_is_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        Metric.model_validate_json('{"scale": 1e400}')


@pytest.mark.parametrize("name", ["=1+1", "+a", "-a", "@a", "\t=a"])
def test_no_text_cell_of_a_csv_file_starts_a_formula(name: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"variant": [name, "plain"], "difference": [-1.5, 2.0], name: ["a", None]})
    (tmp_path / "a.csv").write_text(to_csv(frame))
    cells = pd.read_csv(tmp_path / "a.csv")
    assert cells["variant"].tolist() == [f"'{name}", "plain"]
    assert cells["difference"].tolist() == [-1.5, 2.0]
    assert cells.columns[-1] == f"'{name}"
