"""At most one process holds a cell's lock, and a dead process holds none."""

import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.commands import run_new_python
from helpers.runs import TIMEOUT, wait_until

from lit_attn.cells import lock
from lit_attn.cells.lock import (
    CellLocked,
    LockError,
    LockHolder,
    current_process,
    hold_lock,
    read_holder,
    release_lock,
    remove_stale,
    require_locks,
)

HOLD = (
    "import sys, time; from pathlib import Path; from lit_attn.cells import lock\n"
    "lock.HEARTBEAT = 0.05\n"
    "with lock.hold_lock(Path(sys.argv[1])): print('locked', flush=True); time.sleep(1000)"
)


def write_lock(folder: Path, **changes: object) -> None:
    """Write a lock that names this process, except for `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder):
        holder = read_holder(folder)
    assert holder is not None
    (folder / "lock").write_text(holder.model_copy(update=changes).model_dump_json())


@contextlib.contextmanager
def other_process(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lock of `folder`."""
    process = subprocess.Popen(
        [*command, sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT", 0.05)
    monkeypatch.setattr(lock, "STALE_AFTER", 1.0)


def test_a_lock_has_one_holder_at_a_time(tmp_path: Path) -> None:
    with hold_lock(tmp_path):
        holder = read_holder(tmp_path)
        assert holder is not None
        assert (holder.pid, holder.host) == (os.getpid(), socket.gethostname())
        message = f"process {os.getpid()} on {socket.gethostname()} runs this cell"
        with pytest.raises(CellLocked, match=message), hold_lock(tmp_path):
            pass
        assert read_holder(tmp_path) == holder
    assert read_holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        with pytest.raises(CellLocked), hold_lock(tmp_path):
            pass
        process.kill()
        # The process is a zombie, because nobody has waited for it.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with hold_lock(tmp_path):
            assert read_holder(tmp_path) is not None


def test_a_lock_with_a_keeper_outlasts_its_holder(tmp_path: Path) -> None:
    keeper = current_process()
    with hold_lock(tmp_path, keeper):
        pass
    with pytest.raises(CellLocked), hold_lock(tmp_path):
        pass
    release_lock(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with hold_lock(tmp_path, keeper.model_copy(update={"started": "1"})):
        pass
    # This process is not the keeper.
    release_lock(tmp_path)
    assert read_holder(tmp_path) is not None


def test_a_dead_holder_with_a_live_keeper_keeps_the_lock(tmp_path: Path) -> None:
    write_lock(tmp_path, started="1", keeper=current_process())
    with pytest.raises(CellLocked), hold_lock(tmp_path):
        pass
    dead_keeper = current_process().model_copy(update={"started": "1"})
    write_lock(tmp_path / "both", started="1", keeper=dead_keeper)
    assert read_holder(tmp_path / "both") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"started": "1"},  # the pid is another process's now
        {"pid": 2**22 + 1},  # beyond any pid
    ],
)
def test_a_lock_of_a_dead_process_is_stale(tmp_path: Path, changes: dict[str, object]) -> None:
    write_lock(tmp_path, **changes)
    assert read_holder(tmp_path) is None
    with hold_lock(tmp_path):
        holder = read_holder(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()


def test_an_unreadable_lock_is_stale(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("{")
    with hold_lock(tmp_path):
        assert read_holder(tmp_path) is not None


@pytest.mark.process
@pytest.mark.parametrize(
    "changes",
    [
        {"host": "elsewhere", "pid": 1},
        {"namespace": "pid:[1]", "pid": 1},
        {"boot": "before", "pid": 1},
    ],
)
@pytest.mark.usefixtures("fast")
def test_a_holder_elsewhere_is_dead_once_its_heartbeat_stops(
    tmp_path: Path, changes: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    """The holder is on another machine, in another container or in an earlier boot of this machine.

    Times of files are ignored.
    """
    write_lock(tmp_path, **changes)
    os.utime(tmp_path / "lock", (0, 0))
    assert read_holder(tmp_path) is not None
    started = time.monotonic()
    with hold_lock(tmp_path):
        assert time.monotonic() - started > lock.STALE_AFTER
        holder = read_holder(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()
    assert capsys.readouterr().err.count("waiting for a heartbeat of process 1 on ") == 1


@pytest.mark.parametrize(
    ("clock", "machine"),
    [
        *((clock, {"host": "elsewhere"}) for clock in (-10_000, 0, 10_000)),
        # A copy of this virtual machine has the same host name and another boot.
        (0, {"boot": "of the copy"}),
    ],
)
def test_a_holder_elsewhere_lives_while_its_heartbeat_changes(
    tmp_path: Path, clock: int, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder's clock may be hours behind or ahead."""
    write_lock(tmp_path, pid=1, **machine)
    start = time.time() + clock
    now = 0.0

    def sleep(seconds: float) -> None:
        """Advance this process's clock, and write the heartbeats of the other machine."""
        nonlocal now
        now += seconds
        beat = start + now // lock.HEARTBEAT
        os.utime(tmp_path / "lock", (beat, beat))

    monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with pytest.raises(CellLocked), hold_lock(tmp_path):
        pass
    while now < 2 * lock.STALE_AFTER:
        assert read_holder(tmp_path) is not None
        sleep(lock.HEARTBEAT / 4)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a PID namespace")
@pytest.mark.usefixtures("fast")
def test_a_container_with_this_host_name_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in another PID namespace has a pid that means another process outside."""
    # The next heartbeat may come late.
    monkeypatch.setattr(lock, "STALE_AFTER", 100.0)
    probe = subprocess.run(["unshare", "--pid", "--fork", "true"], check=False)
    if probe.returncode:
        pytest.skip("unshare is not allowed")
    unshare = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with other_process(tmp_path, *unshare):
        holder = read_holder(tmp_path)
        assert holder is not None
        assert holder.pid < 100
        with pytest.raises(CellLocked), hold_lock(tmp_path):
            pass


def test_a_heartbeat_changes_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT", 0.01)
    with hold_lock(tmp_path):
        path = tmp_path / "lock"
        os.utime(path, (0, 0))
        wait_until(lambda: path.stat().st_mtime > 0)


def test_a_process_whose_lock_was_taken_ends(tmp_path: Path) -> None:
    """The process was frozen for so long that another process took its cell."""
    with other_process(tmp_path) as process:
        other = tmp_path / "other"
        other.write_text((tmp_path / "lock").read_text())
        other.replace(tmp_path / "lock")
        assert process.wait(TIMEOUT) == lock.BUSY


def test_a_process_whose_lock_was_taken_ends_also_if_the_inode_is_used_again(
    tmp_path: Path,
) -> None:
    with other_process(tmp_path) as process:
        path = tmp_path / "lock"
        holder = LockHolder.model_validate_json(path.read_text())
        # On ext4 the new file has the inode of the removed one.
        path.write_text(holder.model_copy(update={"host": "elsewhere"}).model_dump_json())
        assert process.wait(TIMEOUT) == lock.BUSY
        assert "elsewhere" in path.read_text()


def test_a_process_does_not_remove_a_lock_that_another_one_has_taken(tmp_path: Path) -> None:
    """The other process has replaced the file, for example after this process was frozen."""
    with hold_lock(tmp_path, is_beating=False):
        (tmp_path / "other").write_text("lock of another process")
        (tmp_path / "other").rename(tmp_path / "lock")
    assert (tmp_path / "lock").read_text() == "lock of another process"


def test_one_of_many_takes_over_a_stale_lock(tmp_path: Path) -> None:
    """The others must not mistake the new lock for the stale one."""
    start = threading.Barrier(4)
    inside: list[int] = []
    most: list[int] = []

    def take(folder: Path) -> None:
        start.wait()
        with contextlib.suppress(CellLocked), hold_lock(folder):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.001)
            inside.pop()

    for attempt in range(20):
        folder = tmp_path / str(attempt)
        write_lock(folder, started="1")
        threads = [threading.Thread(target=take, args=(folder,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(most) >= 20
    assert set(most) == {1}


def test_a_live_lock_is_not_removed(tmp_path: Path) -> None:
    write_lock(tmp_path)
    remove_stale(tmp_path)
    assert isinstance(read_holder(tmp_path), LockHolder)


def test_a_lock_that_is_no_file_is_one_line(tmp_path: Path) -> None:
    """A FIFO must not block, and the target of a link is not read."""
    os.mkfifo(tmp_path / "lock")
    assert read_holder(tmp_path) is None
    with pytest.raises(LockError, match=r"/lock: is not a regular file\. Delete it\."):
        hold_lock(tmp_path).__enter__()
    (tmp_path / "lock").unlink()
    write_lock(tmp_path / "other")
    (tmp_path / "lock").symlink_to(tmp_path / "other" / "lock")
    assert read_holder(tmp_path) is None
    with pytest.raises(LockError, match="/lock: cannot be read: Too many levels of symbolic links"):
        hold_lock(tmp_path).__enter__()


AS_OTHER_USER = (
    "import os, sys; from pathlib import Path; from lit_attn.cells import lock\n"
    "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    "lock.HEARTBEAT, lock.STALE_AFTER = 0.05, 0.5\n"
    "folder = Path(sys.argv[1])\n"
    "print(lock.read_holder(folder))\n"
    "try:\n"
    "    with lock.hold_lock(folder): print('locked')\n"
    "except (lock.LockError, lock.CellLocked) as error: print(error)\n"
)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(
    ("mode", "holder", "outcome"),
    [
        (0o600, "a process of another user", "/lock: cannot be read: Permission denied"),
        (0o644, "None", "/lock: is stale and cannot be removed: "),
    ],
)
def test_a_stale_lock_of_another_user_is_one_line(mode: int, holder: str, outcome: str) -> None:
    # A folder that another user can reach, which the test's own is not.
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o1777)
        write_lock(root, started="1")
        (root / "lock").chmod(mode)
        done = run_new_python(root, "-c", AS_OTHER_USER, name)
    first, *others = done.stdout.splitlines()
    assert first == holder, done.stderr
    assert len(others) == 1
    assert outcome in others[0]


@pytest.mark.parametrize("call", ["link", "flock"])
def test_a_file_system_without_locks_is_one_line(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    out = tmp_path / "new" / "runs"
    require_locks(out)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(*{"link": (os, "link"), "flock": (fcntl, "flock")}[call], refuse)
    with pytest.raises(LockError, match=f"--out {out}: its file system does not support "):
        require_locks(out)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_temporary_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system may have room for the name of a file and not for its content."""
    write_text = Path.write_text

    def fill(path: Path, content: str) -> int:
        write_text(path, "")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(OSError, match="No space left"), hold_lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_lock_that_was_removed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell that holds the lock removes the temporary files of killed processes."""
    link = os.link
    calls = []

    def remove_first(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 1:
            source.unlink()
        link(source, target)

    monkeypatch.setattr(os, "link", remove_first)
    with hold_lock(tmp_path):
        assert read_holder(tmp_path) is not None
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []
