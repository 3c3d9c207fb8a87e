"""The command `python -m lit_attn.report`: its options, its errors, and what it reads."""

import io
from collections import Counter
from pathlib import Path

import pytest
from helpers.fake_study import report, write_study

from lit_attn.cells import records
from lit_attn.report import write_reports
from lit_attn.report.__main__ import main
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.schema.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_rendering")


def test_bad_input_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="contains no study"):
        write_reports(tmp_path, tmp_path / "reports")
    with pytest.raises(ConfigError, match=r"nowhere: this folder does not exist; correct the path"):
        write_reports(tmp_path / "nowhere", tmp_path / "reports")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file: is a file; write the folder of the runs"):
        write_reports(tmp_path / "file", tmp_path / "reports")
    write_study(tmp_path / "runs")
    out = ["--reports", str(tmp_path / "reports")]
    assert main([str(tmp_path / "runs"), "--study", "fak", *out]) == 2
    assert "has no study 'fak'; did you mean 'fake'?" in capsys.readouterr().err
    (tmp_path / "runs" / "fake" / "plan.json").write_text("{}")
    assert main([str(tmp_path / "runs"), *out]) == 2
    assert "is not a plan" in capsys.readouterr().err


def test_the_command_line_reports_every_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "runs")
    write_study(tmp_path / "runs", name="other")
    assert main([str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]) == 0
    assert "fake/table.html" in capsys.readouterr().out
    assert "other/table.html" in (tmp_path / "reports" / "index.html").read_text()


@pytest.mark.process
def test_a_row_reads_the_cells_of_its_variant_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the time of a report grows with the square of the number of variants."""
    reads = []
    original = StudyRecord.measurements

    def measurements(study: StudyRecord, name: str, variant: str | None = None) -> list[object]:
        reads.append(variant)
        return original(study, name, variant)

    monkeypatch.setattr(StudyRecord, "measurements", measurements)
    counts = []
    for number in (5, 25):
        names = {"standard": 0.0} | {f"v{i}": 0.01 * i for i in range(number)}
        write_study(tmp_path / str(number), variants=names, seeds=2)
        reads.clear()
        write_reports(tmp_path / str(number), tmp_path / "reports")
        counts.append(reads.count(None))
    assert counts[0] == counts[1]


@pytest.mark.process
def test_studies_can_be_named_by_one_option_or_by_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        write_study(tmp_path / "runs", name=name)
    arguments = [str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]
    for words in (["--study", "a", "c"], ["--study", "a", "--study", "c"]):
        assert main([*arguments, *words]) == 0
        printed = capsys.readouterr().out
        assert [name for name in ("a", "b", "c") if f"{name}/table.html" in printed] == ["a", "c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a folder of runs, --csv FILE or --paper NAME"),
        (["runs", "--csv", "a.csv"], "give a folder of runs, --csv FILE or --paper NAME"),
        (["--csv", "a.csv", "--across", "a"], "--across needs a folder of runs"),
        (["runs", "--baseline", "a"], "--baseline needs --csv"),
        (["runs", "--small"], "--small needs --paper"),
        (["runs", "--small-data"], "--small-data needs --paper"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_every_record_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_study(tmp_path / "runs", seeds=3)
    reads: Counter[str] = Counter()
    read = records.open_at_once

    def count(path: Path) -> io.FileIO:
        reads[str(path)] += path.name == "result.json"
        return read(path)

    monkeypatch.setattr(records, "open_at_once", count)
    report(tmp_path)
    assert sorted(reads.values(), reverse=True)[:10] == [1] * 9 + [0]
