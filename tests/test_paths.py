"""Paths that no file system accepts, in every command: one line on stderr, and exit code 2."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import studies
from helpers.runs import make_body

from lit_attn.__main__ import main
from lit_attn.schema.errors import command

LONG = "n" * 300  # Linux accepts names of 255 bytes.

COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "run": lambda path: ["run", f"{path}.yaml", "--dry-run"],
    "run --out": lambda path: ["run", "ablations.yaml", "--out", path],
    "run --out --dry-run": lambda path: ["run", "ablations.yaml", "--dry-run", "--out", path],
    "run --reports": lambda path: ["run", "ablations.yaml", "--reports", path],
    "rerun": lambda path: ["rerun", path, "ablations.yaml"],
    "rerun file": lambda path: ["rerun", "stale", f"{path}.yaml"],
    "seal": lambda path: ["seal", f"{path}.yaml"],
    "status": lambda path: ["status", path],
    "judge": lambda path: ["judge", path],
    "judge --runs": lambda path: ["judge", "--runs", path],
    "logs": lambda path: ["logs", path],
    "report": lambda path: ["report", path],
    "report --out": lambda path: ["report", "runs", "--out", path],
    "train": lambda path: ["train", path],
    "generate": lambda path: ["generate", path],
    "export": lambda path: ["export", "hub", path, "there"],
    "prepare": lambda path: ["prepare", "shakespeare", "--out", path],
    "init": lambda path: ["init", path],
    "paper": lambda path: ["run", "--paper", path],
    "unknown": lambda path: [path],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a study, a file, and a link to itself."""
    studies.write(tmp_path, make_body("a"))
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", [LONG, f"{LONG}/x", f"x/{LONG}", "loop", "loop/x", "file/x"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_that_cannot_exist_gets_one_line(
    name: str, path: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    try:
        code = main(COMMANDS[name](path))
    except SystemExit as error:
        code = error.code
    output = capsys.readouterr()
    if name == "run --out --dry-run" and code == 0:
        # Without the folder above it, the path is only a folder that does not exist yet.
        return
    assert code == 2, output
    lines = output.err.splitlines()
    assert len(lines) == 1, output.err
    assert "Traceback" not in output.err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "number",
    [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.ESTALE],
)
def test_an_error_of_the_file_system_gets_one_line(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    @command
    def fail() -> int:
        raise OSError(number, os.strerror(number), "some/file")

    assert fail() == 2
    assert capsys.readouterr().err == f"some/file: {os.strerror(number)}\n"
