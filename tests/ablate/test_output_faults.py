"""Faults around a run: a lost TMPDIR, closed streams, a full disk of its log, an ASCII terminal."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from helpers import studies
from helpers.runs import (
    TIMEOUT,
    count_runs,
    list_holders,
    make_body,
    start_cli,
    wait_until,
)

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("retry_at_once")]


@pytest.mark.parametrize("name", ["tmp", "x" * 100])
def test_tmpdir_may_be_long_and_may_be_cleaned_during_a_run(tmp_path: Path, name: str) -> None:
    studies.write(tmp_path, make_body("gated", "ok"))
    folder = tmp_path / name
    folder.mkdir()
    environment = os.environ | {"TMPDIR": str(folder)}
    with start_cli(tmp_path, "--jobs", "1", "--seeds", "0,", environment=environment) as process:
        wait_until(lambda: list_holders(tmp_path))
        shutil.rmtree(folder)
        (tmp_path / "runs" / "tiny" / "go").touch()
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    assert count_runs(tmp_path) == {"gated/0": 1, "ok/0": 1}


def test_a_run_goes_on_without_a_reader_of_its_output(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("gated", "ok"))
    with start_cli(tmp_path, "--jobs", "1") as process:
        wait_until(lambda: list_holders(tmp_path))
        assert process.stdout is not None
        process.stdout.close()
        (tmp_path / "runs" / "tiny" / "go").touch()
        assert process.wait(TIMEOUT) == 0
    assert count_runs(tmp_path) == {"gated/0": 1, "gated/1": 1, "ok/0": 1, "ok/1": 1}


def test_a_run_goes_on_when_the_disk_of_its_log_is_full(tmp_path: Path, small_disk: Path) -> None:
    studies.write(tmp_path, make_body("gated", "ok"))
    with (small_disk / "log").open("w") as log, start_cli(tmp_path, stdout=log) as process:
        wait_until(lambda: list_holders(tmp_path))
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "ballast").write_bytes(bytes(2**21))
        with contextlib.suppress(OSError):
            while True:
                os.write(log.fileno(), bytes(100))
        (tmp_path / "runs" / "tiny" / "go").touch()
        process.wait(TIMEOUT)
    assert process.returncode == 0
    assert count_runs(tmp_path) == {"gated/0": 1, "gated/1": 1, "ok/0": 1, "ok/1": 1}


def test_an_ascii_terminal_gets_the_tables(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok"))
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    with start_cli(tmp_path, environment=environment) as process:
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    assert "the table of tiny: 1 \\xb1 0" in output
