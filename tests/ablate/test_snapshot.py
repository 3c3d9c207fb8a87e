"""Snapshots of the code for jobs that wait in a queue (tests/slurm/test_snapshots.py runs jobs)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lit_attn
from lit_attn.ablate.snapshot import activation_lines, take_snapshot
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import locate_copy

PACKAGE = Path(lit_attn.__file__).parent


def write_parts(folder: Path) -> Path:
    """Write a plug-in with neighbours: a module, a package, data, a link and a cache."""
    (folder / "layers").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "__pycache__").mkdir()
    (folder / "mine.py").write_text("import neighbour\nfrom layers import inner\n")
    (folder / "neighbour.py").write_text("VALUE = 1\n")
    (folder / "layers" / "inner.py").write_text("VALUE = 2\n")
    (folder / "data" / "values.txt").write_text("3")
    (folder / "loop").symlink_to(folder)
    (folder / "broken.py").symlink_to(folder / "absent.py")
    return folder / "mine.py"


def test_equal_code_has_one_snapshot(tmp_path: Path) -> None:
    part = write_parts(tmp_path / "study")
    first = take_snapshot(tmp_path / "runs", [part])
    assert take_snapshot(tmp_path / "runs", [part]) == first
    (tmp_path / "study" / "layers" / "inner.py").write_text("VALUE = 20\n")
    second = take_snapshot(tmp_path / "runs", [part])
    assert second != first
    assert {path for path in (tmp_path / "runs" / ".code").iterdir() if path.is_dir()} == {
        first,
        second,
    }
    old, new = (
        locate_copy(part, snapshot).parent / "layers/inner.py" for snapshot in (first, second)
    )
    assert (old.read_text(), new.read_text()) == ("VALUE = 2\n", "VALUE = 20\n")


def test_a_snapshot_copies_code_and_links_data(tmp_path: Path) -> None:
    part = write_parts(tmp_path / "study")
    snapshot = take_snapshot(tmp_path / "runs", [part])
    copy = locate_copy(part, snapshot).parent
    links = {path.name for path in copy.iterdir() if path.is_symlink()}
    assert links == {"data", "loop", "broken.py"}
    assert {path.name for path in copy.iterdir()} - links == {"mine.py", "neighbour.py", "layers"}
    assert (copy / "data" / "values.txt").read_text() == "3"
    files = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file()}
    package = snapshot / "package" / "lit_attn"
    copied = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert copied == {path for path in files if "__pycache__" not in path.parts}


def test_python_imports_the_snapshot_before_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory has newer code of the package, the plug-in and its neighbour."""
    study = tmp_path / "study folder"
    part = write_parts(study)
    (study / "local.py").write_text("")
    snapshot = take_snapshot(tmp_path / "runs", [part])
    monkeypatch.chdir(study)
    lines = activation_lines(snapshot)
    (study / "lit_attn").mkdir()
    for path in (study / "lit_attn" / "__init__.py", part, study / "neighbour.py"):
        path.write_text("raise RuntimeError('newer code')")
    (study / "check.py").write_text(
        "import sys, lit_attn, local; from pathlib import Path\n"
        "from lit_attn.schema import plugins\n"
        f"part = Path({str(part)!r}); plugins.load_parts([part])\n"
        "modules = [lit_attn, sys.modules['mine'], sys.modules['neighbour'], local]\n"
        "print(*(module.__file__ for module in modules), part in plugins.FILE_HASHES, sep='\\n')"
    )
    script = "\n".join([*lines, f"{sys.executable} -m check"])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for search_path in ({}, {"PYTHONPATH": f"{study}:{PACKAGE.parent}"}):
        done = subprocess.run(
            ["bash", "-c", script],
            env=environment | search_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        copy = locate_copy(part, snapshot)
        assert done.stdout.splitlines() == [
            str(snapshot / "package" / "lit_attn" / "__init__.py"),
            str(copy),
            str(copy.with_name("neighbour.py")),
            str(study / "local.py"),
            "True",
        ]


def test_a_snapshot_that_cannot_be_written_is_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"^--launcher slurm: the code cannot be copied: .*runs"):
        take_snapshot(tmp_path / "runs", [])
