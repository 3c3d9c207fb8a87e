"""Two files with one study name: the folder of the study belongs to one of them."""

import os
import shutil
from pathlib import Path

import pytest
from helpers import studies
from helpers.fake_study import write_study
from helpers.runs import make_body, run_cli

from lit_attn.ablate import origin
from lit_attn.ablate.__main__ import main
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.cells.records import Origin
from lit_attn.config.study import read_studies
from lit_attn.report import write_reports
from lit_attn.schema.errors import ConfigError


def write(folder: Path, name: str, *variants: str) -> Path:
    """Write a file of the study `tiny`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    return studies.write(folder, make_body(*(variants or ("ok",)))).rename(folder / name)


def matrix(file: Path, out: Path) -> Matrix:
    return expand(read_studies(file)["tiny"], out)


def refused(file: Path, out: Path) -> str:
    """Return the error that the plan of a file's study raises, or an empty text."""
    try:
        matrix(file, out).write_plan()
    except ConfigError as error:
        return str(error)
    return ""


def test_another_file_with_the_same_study_name_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path, "a.yaml")
    second = write(tmp_path, "b.yaml", "ok", "ok-2")
    out = tmp_path / "runs"
    assert refused(first, out) == ""
    plan = (out / "tiny" / "plan.json").read_bytes()
    message = refused(second, out)
    assert f"{out / 'tiny'}: belongs to the study 'tiny' of {first}, and {second} has" in message
    assert "--out" in message
    assert f"delete {out / 'tiny' / 'origin.json'}" in message
    assert (out / "tiny" / "plan.json").read_bytes() == plan
    assert refused(first, out) == ""
    # Another folder of runs is the remedy.
    assert refused(second, tmp_path / "other") == ""


def test_a_copy_is_another_file(tmp_path: Path) -> None:
    first = write(tmp_path, "a.yaml")
    refused(first, tmp_path / "runs")
    copied = Path(shutil.copy(first, tmp_path / "b.yaml"))
    assert "has a study of the same name" in refused(copied, tmp_path / "runs")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_the_same_file(link: object, tmp_path: Path) -> None:
    first = write(tmp_path, "a.yaml")
    refused(first, tmp_path / "runs")
    assert callable(link)
    link(first, tmp_path / "b.yaml")
    assert refused(tmp_path / "b.yaml", tmp_path / "runs") == ""


def test_a_moved_file_keeps_its_folder_and_says_so(tmp_path: Path) -> None:
    first = write(tmp_path, "a.yaml")
    out = tmp_path / "runs"
    refused(first, out)
    moved = first.rename(tmp_path / "b.yaml")
    source = read_studies(moved)["tiny"]
    text = f"{out / 'tiny'}: {first} no longer has this study; it belongs to {moved} now"
    assert origin.require_origin(source, out / "tiny") == text
    assert refused(moved, out) == ""
    assert origin.require_origin(source, out / "tiny") == ""
    assert origin.find_file(out / "tiny") == moved


def test_a_study_that_moved_to_another_file_keeps_its_folder(tmp_path: Path) -> None:
    first = write(tmp_path, "a.yaml")
    refused(first, tmp_path / "runs")
    second = Path(shutil.copy(first, tmp_path / "b.yaml"))
    first.write_text(first.read_text().replace("tiny:", "another:"))
    assert refused(second, tmp_path / "runs") == ""
    # A file that cannot be read might still have the study.
    refused(second, tmp_path / "runs")
    second.write_text("studies: [")
    third = write(tmp_path, "c.yaml")
    assert "has a study of the same name" in refused(third, tmp_path / "runs")


def test_a_project_that_is_moved_or_copied_as_a_whole_is_the_same(tmp_path: Path) -> None:
    project = tmp_path / "here"
    refused(write(project, "a.yaml"), project / "runs")
    copied = Path(shutil.copytree(project, tmp_path / "there"))
    assert (
        origin.require_origin(read_studies(copied / "a.yaml")["tiny"], copied / "runs/tiny") == ""
    )
    assert refused(copied / "a.yaml", copied / "runs") == ""
    assert str(tmp_path) not in (copied / "runs" / "tiny" / "origin.json").read_text()


def test_studies_of_the_installed_package_are_known_by_their_place_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("old", "new"):
        monkeypatch.setattr(origin, "SHIPPED", tmp_path / version)
        assert refused(write(tmp_path / version, "a.yaml"), tmp_path / "runs") == ""
    record = Origin.read(tmp_path / "runs" / "tiny" / "origin.json")
    assert record == Origin(file="installed:a.yaml")


def test_a_folder_without_a_record_is_claimed(tmp_path: Path) -> None:
    first = write(tmp_path, "a.yaml")
    second = write(tmp_path, "b.yaml")
    refused(first, tmp_path / "runs")
    (tmp_path / "runs" / "tiny" / "origin.json").unlink()
    assert refused(second, tmp_path / "runs") == ""
    assert "belongs to" in refused(first, tmp_path / "runs")


def test_a_folder_with_a_damaged_record_belongs_to_no_other_file(tmp_path: Path) -> None:
    first = write(tmp_path, "a.yaml")
    second = write(tmp_path, "b.yaml", "ok", "ok-2")
    refused(first, tmp_path / "runs")
    record = tmp_path / "runs" / "tiny" / "origin.json"
    record.write_text("{")
    assert refused(second, tmp_path / "runs").startswith(f"{record}: cannot be read; move it away")
    assert record.read_text() == "{"


@pytest.mark.slow
def test_the_command_refuses_another_file_before_anything_runs(tmp_path: Path) -> None:
    first = tmp_path / "a"
    second = tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        studies.write(folder, make_body("ok"))
    shared = ("--out", str(tmp_path / "shared"), "--reports", str(tmp_path / "reports"))
    assert run_cli(first, *shared)[0] == 0
    for words in (["--dry-run"], [], ["--seeds", "7,"]):
        code, output = run_cli(second, *shared, *words)
        assert code == 2
        assert output.count("\n") == 1
        assert "belongs to the study 'tiny' of" in output
    # Without its record the folder belongs to the other file, and the first one is refused.
    (tmp_path / "shared" / "tiny" / "origin.json").unlink()
    assert run_cli(second, *shared)[0] == 0
    assert "belongs to the study 'tiny' of" in run_cli(first, *shared)[1]
    log = tmp_path / "shared" / "tiny" / "ran.txt"
    assert sorted(log.read_text().split()) == ["ok/0", "ok/1"]


def test_the_command_says_that_a_file_was_renamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path, "a.yaml")
    refused(first, tmp_path / "shared")
    moved = first.rename(tmp_path / "b.yaml")
    assert main([str(moved), "--out", str(tmp_path / "shared"), "--dry-run"]) == 0
    assert f"{first} no longer has this study; it belongs to" in capsys.readouterr().out


@pytest.mark.slow
def test_reports_of_another_folder_are_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        write_study(tmp_path / name)
    reports = tmp_path / "reports"
    write_reports(tmp_path / "one", reports)
    write_reports(tmp_path / "one", reports)
    assert not caplog.records
    write_reports(tmp_path / "two", reports)
    (record,) = caplog.records
    text = f"{reports / 'fake'}: replaces the tables of {tmp_path / 'one' / 'fake'} by those of"
    assert record.getMessage().startswith(text)
    caplog.clear()
    shutil.rmtree(tmp_path / "two")
    write_reports(tmp_path / "one", reports)
    assert not caplog.records
