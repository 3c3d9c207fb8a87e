"""Files that change while a study runs: the package, plug-ins, and modules beside plug-ins."""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import studies
from helpers.commands import Command, start_with_pipe
from helpers.holding import hold_at
from helpers.paths import ROOT
from helpers.runs import is_held, start_interpreter, wait_until

from lit_attn.cells.inputs import add_changes, change_finder, collect_modules
from lit_attn.cells.records import Result
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.sources import FILE_HASHES, hash_source, is_user_code

NET = """
from torch import nn

import beside


class Net(nn.Module):
    def __init__(self, classes, attention):
        super().__init__()
        self.attention = attention(8, 2)
        self.linear = nn.Linear(64, classes)

    def forward(self, images):
        if not images.is_meta:
            import late
            images = images * late.SCALE
        return self.linear(self.attention(images[:, 0]).flatten(1)) * beside.SCALE
"""
BODY = """
baseline: a
match: none
parts: [net.py]
set: {model: {kind: module, import: "net:Net"}}
cells: {a: {}, b: {optimizer.lr: 1e-2}}
"""
EXPERIMENT = studies.EXPERIMENT.replace("  epochs: 2", "  epochs: 1\n  accelerator: cpu")


@contextlib.contextmanager
def held_study(folder: Path, package: Path) -> Iterator[subprocess.Popen[str] | Command]:
    """Start a study with the package in `package`, and wait until its first cell is training."""
    process: subprocess.Popen[str] | Command
    studies.write(folder, BODY, EXPERIMENT)
    (folder / "net.py").write_text(NET)
    for name in ("beside", "late"):
        (folder / f"{name}.py").write_text("SCALE = 1.0\n")
    hold_at(folder, 3)
    words = ("-m", "helpers.holding", "ablations.yaml", "--jobs", "1")
    environment = os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{ROOT / 'tests'}"}
    if package == ROOT:
        process = start_with_pipe(folder, words, environment, is_leader=True)
    else:
        # A fork would have imported the package of the tests.
        process = start_interpreter(folder, words, environment)
    try:
        cells = folder / "runs" / "tiny"
        wait_until(lambda: any(map(is_held, cells.glob("*/*"))) or process.poll() is not None)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


def finish(folder: Path, process: subprocess.Popen[str] | Command) -> str:
    """Let all cells continue, and return the output of the run, which has to succeed."""
    (folder / "hold").unlink()
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output


def read_results(folder: Path) -> dict[str, Result]:
    """Return the results by variant and seed."""
    paths = (folder / "runs" / "tiny").glob("*/*/result.json")
    results = [Result.model_validate_json(path.read_bytes()) for path in paths]
    return {f"{result.variant}/{result.seed}": result for result in results}


@pytest.mark.process
def test_a_study_ends_with_the_package_with_which_it_began(tmp_path: Path) -> None:
    """While the first cell trains, another commit is checked out, in which nothing works.

    The cells after the first import further modules, and the runner imports the report.
    """
    package = tmp_path / "package"
    copy = package / "lit_attn"
    shutil.copytree(ROOT / "lit_attn", copy, ignore=shutil.ignore_patterns("__pycache__"))
    with held_study(tmp_path, package) as process:
        for path in copy.rglob("*.*"):
            if path.suffix == ".py":
                path.write_text("raise RuntimeError('the file of another commit')\n")
            elif path.suffix in (".yaml", ".html", ".css", ".mplstyle"):
                path.write_text("other: commit\n")
        shutil.rmtree(copy / "models")
        (copy / "report" / "tables" / "columns.py").unlink()
        (copy / "report" / "assets" / "columns.yaml").unlink()
        finish(tmp_path, process)
    results = read_results(tmp_path)
    assert len(results) == 4
    (code,) = {result.code for result in results.values()}
    assert "+" not in code
    table = (tmp_path / "reports" / "tiny" / "table.md").read_text()
    assert "†" not in table
    assert "| b |" in table.replace("**", "")


@pytest.mark.process
def test_changes_beside_a_plugin_are_recorded_and_marked(tmp_path: Path) -> None:
    """The plug-in itself stays the same; one module is imported with it, one by the training."""
    with held_study(tmp_path, ROOT) as process:
        for name in ("beside", "late"):
            (tmp_path / f"{name}.py").write_text("SCALE = 2.0\n")
        finish(tmp_path, process)
    results = read_results(tmp_path)
    assert len({result.code for result in results.values()}) == 1
    for name in ("beside", "late"):
        path = str(tmp_path / f"{name}.py")
        stamps = {cell: result.inputs[path] for cell, result in results.items()}
        new = hash_source(b"SCALE = 2.0\n").hex()
        assert stamps == dict.fromkeys(stamps, new) | {"a/0": hash_source(b"SCALE = 1.0\n").hex()}
    assert change_finder()(results["a/0"]) == f"{tmp_path / 'beside.py'} has changed"
    assert change_finder()(results["b/1"]) == ""
    table = (tmp_path / "reports" / "tiny" / "table.md").read_text()
    for name in ("beside", "late"):
        assert f"{name}.py differs between runs" in table
    assert "†" in table
    assert str(tmp_path) not in table


@pytest.mark.process
def test_the_recorded_hash_is_that_of_the_executed_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second version has the size of the first, and Python takes old bytecode for current."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "a_part_with_bytecode.py"
    beside = tmp_path / "beside_with_bytecode.py"
    path.write_text(f"import {beside.stem}\nX = {beside.stem}.X\n")
    for number in (1, 2):
        beside.write_text(f"X = {number}\n")
        os.utime(beside, ns=(10**18, 10**18))
        load_parts([path])
        assert number == sys.modules[path.stem].X
        # Neither the stamp nor the hash changes with the file.
        beside.write_text("X = 3\n")
        expected = hash_source(f"X = {number}\n".encode())
        assert FILE_HASHES[beside.resolve()] == expected
        assert collect_modules([path])[str(beside)] == expected.hex()
        for name in (path.stem, beside.stem):
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()


def test_a_part_that_another_part_imports_has_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "first_of_two.py"
    second = tmp_path / "second_of_two.py"
    first.write_text("import second_of_two\n")
    second.write_text("X = 1\n")
    load_parts([first, second])
    assert set(collect_modules([first, second])) == {str(first), str(second)}
    for path in (first, second):
        monkeypatch.delitem(sys.modules, path.stem)


def test_user_code_is_what_is_in_no_library() -> None:
    assert is_user_code(Path("/usr/src/app/net.py"))
    assert is_user_code(Path(__file__))
    assert not is_user_code(Path(json.__file__))
    assert not is_user_code(Path(pytest.__file__))
    assert not is_user_code(ROOT / "lit_attn" / "models" / "vit.py")


def test_a_data_file_that_changes_during_the_training_makes_the_result_stale(
    tmp_path: Path,
) -> None:
    before = {"a.png": "10 1", "b.png": "10 1", "c.png": "", "d": "names 1"}
    after = {"a.png": "10 1", "b.png": "12 5", "c.png": "10 1", "d": "names 2"}
    assert add_changes(before, after) == before | {"b.png": "10 1+12 5"}
