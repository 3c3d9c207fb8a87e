"""Temporary folders of killed processes are removed, and those of living ones are not."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import current_process, util
from pathlib import Path

import pytest
from helpers.runs import wait_until

from lit_attn.ablate import launch
from lit_attn.temporary import temporary_folder

HOLD = """
import os, sys
from lit_attn.ablate import launch
from lit_attn.temporary import temporary_folder
with temporary_folder() as folder:
    (folder / "rendezvous").touch()
    {fork}
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def hold(fork: str = "") -> "subprocess.Popen[str]":
    """Start a process that holds a folder until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD.format(fork=fork)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_folder(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


@pytest.fixture
def living() -> Iterator["subprocess.Popen[str]"]:
    with hold() as process:
        yield process


def test_a_folder_exists_as_long_as_it_is_used(tmp_path: Path) -> None:
    with temporary_folder() as folder:
        assert folder.parent == tmp_path
        (folder / "a").mkdir()
    with pytest.raises(ZeroDivisionError), temporary_folder():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_the_folder_of_a_killed_process_is_removed_by_the_next(
    living: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    used = read_folder(living)
    other = tmp_path / "lit_attn-temporary"
    other.mkdir()
    with temporary_folder() as folder:
        # That of a living process stays.
        assert sorted(tmp_path.iterdir()) == sorted([used, folder, other])
    living.kill()
    living.wait()
    assert (used / "rendezvous").exists()
    with temporary_folder() as folder:
        assert sorted(tmp_path.iterdir()) == sorted([folder, other])


@pytest.mark.process
def test_a_folder_belongs_to_forked_processes_too(tmp_path: Path) -> None:
    """The ranks of a cell use its folder until they notice that their parent was killed."""
    with hold("sys.stdout.flush() if os.fork() else os._exit(len(sys.stdin.read()))") as process:
        folder = read_folder(process)
        process.kill()
        process.wait()
        with temporary_folder():
            assert folder.exists()
        # The child ends with its input.
        process.communicate()

    def is_removed() -> bool:
        with temporary_folder():
            return not folder.exists()

    # Its output ends a moment before its lock.
    wait_until(is_removed)


def test_a_file_system_without_locks_has_folders_that_are_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary_folder() as used, temporary_folder():
        assert used.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_fork_that_drops_the_context_removes_nothing(tmp_path: Path) -> None:
    """The writer of a report is such a fork, and its parent goes on with the folder."""
    context = temporary_folder()
    folder = context.__enter__()
    pid = os.fork()
    if pid == 0:
        context.__exit__(None, None, None)
        os._exit(0)
    os.waitpid(pid, 0)
    assert folder.is_dir()
    context.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []


def choose_sockets(folder: Path, *, is_killed: bool) -> None:
    """Choose the folder of sockets in a new process, as a runner does, and end it."""
    pid = os.fork()
    if pid == 0:
        launch.SOCKET_FOLDER = str(folder)
        launch._choose_socket_folder.cache_clear()
        vars(util)["_finalizer_registry"].clear()
        vars(current_process())["_config"].pop("tempdir", None)
        launch._choose_socket_folder()
        Path(util.get_temp_dir(), "listener").touch()
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        vars(util)["_run_finalizers"]()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if is_killed else 0)


def test_the_sockets_of_a_killed_runner_are_removed_by_the_next_one(tmp_path: Path) -> None:
    choose_sockets(tmp_path, is_killed=True)
    assert list(tmp_path.glob("*/pymp-*/listener"))
    choose_sockets(tmp_path, is_killed=False)
    assert list(tmp_path.iterdir()) == []
