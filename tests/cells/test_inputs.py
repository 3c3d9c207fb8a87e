"""Changes of plug-ins and data since a result, found without reading the data."""

import os
from pathlib import Path
from typing import Any

import pytest
from helpers import fake_cells, studies
from helpers.runs import make_body

from lit_attn.ablate import dry_run, status
from lit_attn.ablate.plan import Job, Matrix, expand
from lit_attn.cells.inputs import MAX_FILES, Inputs, find_stale
from lit_attn.cells.records import Result
from lit_attn.schema.plugins import FILE_HASHES, hash_source


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return a plug-in, which counts as imported, and data files of two folders."""
    names = {"part": "mine.py", "table": "table.csv", "image": "images/a/1.png"}
    paths = {name: tmp_path / "inputs" / path for name, path in names.items()}
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("value = 1\n")
    monkeypatch.setitem(FILE_HASHES, paths["part"].resolve(), hash_source(b"value = 1\n"))
    return paths


def collect(files: dict[str, Path]) -> Inputs:
    data: dict[str, Any] = {
        "kind": "x",
        "file": files["table"],
        "parts": [{"root": files["image"].parents[1]}],
    }
    return Inputs.collect([files["part"]], data)


def age(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def test_unchanged_inputs_have_no_change(files: dict[str, Path]) -> None:
    inputs = collect(files)
    assert set(inputs.data) == {str(files["table"]), str(files["image"])}
    assert inputs.find_change() == ""
    # Neither the time nor the comments of a plug-in count.
    files["part"].write_text("# comment\nvalue = 1\n")
    age(files["part"])
    assert inputs.find_change() == ""


@pytest.mark.parametrize("name", ["part", "table", "image"])
def test_a_changed_or_missing_input_is_named(files: dict[str, Path], name: str) -> None:
    inputs = collect(files)
    files[name].write_text("value = 2\n")
    age(files[name])
    assert inputs.find_change() == f"{files[name]} has changed"
    files[name].write_text("value = (\n")
    assert inputs.find_change() == f"{files[name]} has changed"
    files[name].unlink()
    assert inputs.find_change() == f"{files[name]} is missing"


def test_folders_that_this_machine_does_not_see_are_no_change(files: dict[str, Path]) -> None:
    inputs = collect(files)
    files["image"].unlink()
    files["image"].parent.rmdir()
    assert inputs.find_change() == ""


def test_the_number_of_recorded_files_is_limited(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 1):
        (tmp_path / str(number)).touch()
    assert len(Inputs.collect([], {"root": tmp_path}).data) == MAX_FILES


def test_the_hash_of_a_plug_in_is_that_of_its_import(files: dict[str, Path]) -> None:
    """A SLURM job imports a copy, and the file may have changed since."""
    files["part"].write_text("value = 3\n")
    assert collect(files).find_change() == f"{files['part']} has changed"


def write_result(job: Job, data: str = "a") -> Result:
    result = fake_cells.result(job.cell).model_copy(update={"data": data})
    result.write(job.folder / "result.json")
    return result


def expand_with_results(path: Path, files: dict[str, Path]) -> Matrix:
    """Return a study of two variants with results; only those of seed 0 have these inputs."""
    source = studies.study(path, make_body("ok", "ok-2"))
    matrix = expand(source, path / "runs")
    matrix.write_plan()
    for job in matrix.jobs:
        result = write_result(job, data=str(job.cell.seed))
        if job.cell.seed == 0:
            collect(files).write_for(job.folder, result)
    return matrix


def test_stale_cells_are_those_whose_inputs_have_changed(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    matrix = expand_with_results(tmp_path, files)
    cells = [(job.folder, Result.read(job.folder / "result.json")) for job in matrix.jobs]
    assert find_stale(cells) == {}
    files["table"].write_text("value = 2, 3\n")
    reason = f"{files['table']} has changed"
    expected = {job.folder: reason for job in matrix.jobs if job.cell.seed == 0}
    assert len(expected) == 2
    assert find_stale([*cells, (tmp_path / "a" / "b", None)]) == expected
    for record in (matrix.folder / ".inputs").iterdir():
        record.write_text("{")
    assert find_stale(cells) == {}


def test_inputs_are_written_for_cells_of_studies_only(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    (job, *_) = expand(studies.study(tmp_path, make_body("ok")), tmp_path / "runs").jobs
    collect(files).write_for(job.folder, write_result(job))
    assert list((tmp_path / "runs").rglob(".inputs")) == []


def test_status_and_dry_run_name_stale_cells(
    tmp_path: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = expand_with_results(tmp_path, files)
    files["part"].write_text("value = 2\n")
    ((plan, place),) = status.read_plans(tmp_path / "runs")
    text = status.describe(plan, status.read_cells(plan, place))
    reason = f"{files['part']} has changed"
    assert f"  stale    ok/0: {reason}\n  stale    ok-2/0: {reason}\n" in text
    assert "  2 stale cells; `rerun stale FILE` checks and repeats them\n" in text
    dry_run.print_cells([matrix], with_costs=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if " seed " in line]
    assert [line.endswith(f"done, stale: {reason}") for line in lines] == [True, True, False, False]
