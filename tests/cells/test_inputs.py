"""Changes of plug-ins and data since a result, found without reading the data."""

import os
import shutil
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
from helpers import fake_cells, studies
from helpers.runs import make_body
from helpers.training_cells import digits_cell
from huggingface_hub import constants

from lit_attn.ablate import dry_run, status
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.cells.inputs import MAX_FILES, change_finder, collect_data, collect_inputs
from lit_attn.data.image_sets import Cifar100
from lit_attn.data.table_sets import TableText
from lit_attn.schema.plugins import FILE_HASHES, hash_source

RESULT = fake_cells.result(digits_cell())


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return a plug-in, which counts as imported, and data files of two folders."""
    names = {"part": "mine.py", "table": "table.csv", "image": "images/a/1.png"}
    paths = {name: tmp_path / "inputs" / path for name, path in names.items()}
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("value = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(FILE_HASHES, paths["part"].resolve(), hash_source(b"value = 1\n"))
    return paths


def collect(files: dict[str, Path]) -> dict[str, str]:
    return collect_inputs([files["part"]], [files["table"], files["image"].parents[1]])


def find_change(inputs: dict[str, str]) -> str:
    """Return why a result with these inputs is stale, or nothing."""
    return change_finder()(RESULT.model_copy(update={"inputs": inputs}))


def age(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def test_unchanged_inputs_have_no_change(files: dict[str, Path]) -> None:
    inputs = collect(files)
    folders = [files["image"].parents[0]]
    assert set(inputs) == {str(path) for path in (*files.values(), *folders)}
    assert find_change(inputs) == ""
    # Neither the time nor the comments of a plug-in count.
    files["part"].write_text("# comment\nvalue = 1\n")
    age(files["part"])
    # Locks and caches in a folder are no data.
    (files["image"].parent / ".images.lock").touch()
    assert find_change(inputs) == ""


@pytest.mark.parametrize("name", ["part", "table", "image"])
def test_a_changed_or_missing_input_is_named(files: dict[str, Path], name: str) -> None:
    inputs = collect(files)
    files[name].write_text("value = 2\n")
    age(files[name])
    change = "changed" if name == "part" else "another size or time"
    assert find_change(inputs) == f"{files[name]} has {change}"
    files[name].write_text("value = (\n")
    assert find_change(inputs) == f"{files[name]} has {change}"
    files[name].unlink()
    assert find_change(inputs) == f"{files[name]} is missing"


def test_modules_below_the_folder_of_a_plugin_or_the_working_directory_count(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of the user makes results stale; libraries in a virtual environment do not."""
    paths = [files["part"].parent / "blocks/norm.py", tmp_path / "package/deep/layer.py"]
    library = tmp_path / "venv/lib/site-packages/library.py"
    for number, path in enumerate((*paths, library)):
        path.parent.mkdir(parents=True)
        path.write_text("value = 1\n")
        module = types.ModuleType(f"module_{number}")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    inputs = collect(files)
    assert {*map(str, paths)} < set(inputs)
    assert str(library) not in inputs
    for path in paths:
        path.write_text("value = 2\n")
        assert find_change(inputs) == f"{path} has changed"
        path.write_text("value = 1\n")


def test_folders_that_this_machine_does_not_see_are_no_change(files: dict[str, Path]) -> None:
    inputs = collect(files)
    shutil.rmtree(files["image"].parents[1])
    assert find_change(inputs) == ""


def test_the_number_of_recorded_files_is_limited(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 1):
        (tmp_path / str(number)).touch()
    for number in range(MAX_FILES + 1):
        (tmp_path / "folders" / str(number)).mkdir(parents=True)
    inputs = collect_data([tmp_path])
    assert Counter(Path(name).is_dir() for name in inputs) == {False: MAX_FILES, True: MAX_FILES}


def test_added_files_and_folders_are_named(files: dict[str, Path]) -> None:
    inputs = collect(files)
    # The named folder may have the folders of other data sets.
    (files["image"].parents[1] / "b").mkdir()
    assert find_change(inputs) == ""
    folder = files["image"].parent
    for added in (folder / "2.png", folder / "c"):
        added.mkdir()
        assert find_change(inputs) == f"{folder} has other files"
        added.rmdir()
    (files["image"].parents[1] / "3.png").touch()
    assert find_change(collect(files)) == ""
    inputs = collect(files)
    (files["image"].parents[1] / "4.png").touch()
    assert find_change(inputs) == f"{files['image'].parents[1]} has other files"


def test_the_inputs_of_data_are_their_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Cifar100(root=tmp_path).input_paths() == [tmp_path]
    files = {"train": tmp_path / "train.csv", "test": tmp_path / "test.csv"}
    table = TableText.model_validate({"name": "mine", "tokenizer": "bytes"} | files)
    assert table.input_paths() == list(files.values())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    record = tmp_path / "datasets--me--mine" / "refs" / "main"
    table = TableText.model_validate({"name": "mine", "tokenizer": "bytes", "hub": "me/mine"})
    assert table.input_paths() == [record]
    table = TableText.model_validate({"name": "mine", "tokenizer": "bytes", "hub": str(tmp_path)})
    assert table.input_paths() == [tmp_path]


def test_a_new_revision_of_a_data_set_of_the_hub_is_a_change(tmp_path: Path) -> None:
    record = tmp_path / "refs" / "main"
    unknown = collect_data([record])
    assert unknown == {str(record): ""}
    record.parent.mkdir()
    record.write_text("a" * 40)
    inputs = collect_data([record])
    assert [find_change(inputs), find_change(unknown)] == ["", ""]
    record.write_text("b" * 40)
    age(record)
    assert find_change(inputs) == f"{record} has another size or time"
    assert find_change(unknown) == ""


def test_status_names_data_that_it_does_not_check(tmp_path: Path, files: dict[str, Path]) -> None:
    matrix = expand_with_results(tmp_path, files)
    job = matrix.jobs[0]
    result = fake_cells.result(job.cell).model_copy(update={"inputs": {"/hub/refs/main": ""}})
    result.write(job.folder / "result.json")
    ((plan, place),) = status.read_plans(tmp_path / "runs")
    text = status.describe(plan, status.read_cells(plan, place))
    assert "  unchecked /hub/refs/main: absent when cells ran\n" in text


def test_the_hash_of_a_plug_in_is_that_of_its_import(files: dict[str, Path]) -> None:
    """A SLURM job imports a copy, and the file may have changed since."""
    files["part"].write_text("value = 3\n")
    assert find_change(collect(files)) == f"{files['part']} has changed"


def test_a_module_that_a_plug_in_imports_from_its_folder_counts(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a SLURM job the plug-in and its neighbour are copies in another folder."""
    neighbour = files["part"].with_name("mine_network.py")
    for folder in (neighbour.parent, tmp_path / "copies"):
        folder.mkdir(exist_ok=True)
        for path in (files["part"], neighbour):
            module = types.ModuleType(path.stem)
            module.__file__ = str(folder / path.name)
            Path(module.__file__).write_text("value = 1\n")
            monkeypatch.setitem(sys.modules, path.stem, module)
        inputs = collect(files)
        assert find_change(inputs) == ""
        neighbour.write_text("value = 2\n")
        assert find_change(inputs) == f"{neighbour} has changed"
        neighbour.write_text("value = 1\n")


def expand_with_results(path: Path, files: dict[str, Path]) -> Matrix:
    """Return a study of two variants with results; only those of seed 0 have these inputs."""
    source = studies.study(path, make_body("ok", "ok-2"))
    matrix = expand(source, path / "runs")
    matrix.write_plan()
    for job in matrix.jobs:
        inputs = {} if job.seed else collect(files)
        result = fake_cells.result(job.cell).model_copy(update={"inputs": inputs})
        result.write(job.folder / "result.json")
    return matrix


def test_status_and_dry_run_name_stale_cells(
    tmp_path: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = expand_with_results(tmp_path, files)
    files["part"].write_text("value = 2\n")
    ((plan, place),) = status.read_plans(tmp_path / "runs")
    text = status.describe(plan, status.read_cells(plan, place))
    reason = f"{files['part']} has changed"
    assert f"  stale    ok/0: {reason}\n  stale    ok-2/0: {reason}\n" in text
    assert "  2 stale cells; see `lit-attn rerun stale`\n" in text
    dry_run.print_cells([matrix], with_costs=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if " seed " in line]
    assert [line.endswith(f"done, stale: {reason}") for line in lines] == [True, True, False, False]


def test_a_folder_may_have_names_that_are_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "1.png").touch()
    before = collect_data([tmp_path])[str(tmp_path)]
    (tmp_path / "caf\udce9.txt").touch()
    after = collect_data([tmp_path])[str(tmp_path)]
    assert before.startswith("names ")
    assert after.startswith("names ")
    assert before != after
