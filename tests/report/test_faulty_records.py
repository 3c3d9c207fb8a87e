"""One unreadable file never prevents the rest of a report."""

from pathlib import Path

import pandas as pd
import pytest
from helpers.fake_study import write_study

from lit_attn.cells.records import Metric, read_metrics
from lit_attn.report import write_reports
from lit_attn.report.__main__ import main
from lit_attn.report.write import to_csv


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


def test_torn_arrays_and_pictures_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    for cell in study.glob("v1/*"):
        (cell / "diagnostics.csv").write_text("step,layer,head,name,value\n8,1,,norm-mh,2.5\n")
        (cell / "attention.npz").write_bytes(b"PK\x03\x04 torn")
        (cell / "pictures").mkdir()
        (cell / "pictures" / "0.png").write_bytes(b"\x89PNG torn")
        (cell / "pictures" / "legend.json").write_text("{")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert (folder / "norms.svg").exists()
    assert not (folder / "ranks.svg").exists()
    assert not (folder / "pictures.svg").exists()
    assert [message.count("skipped") for message in caplog.messages] == [1, 1, 1]


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
