"""One holder per cell; the dead hold nothing."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lit_attn.cells import lock
from lit_attn.cells.lock import (
    STALE_AFTER,
    CellLocked,
    LockHolder,
    current_process,
    hold_lock,
    read_holder,
    release_lock,
)


def other(path: Path, **changes: object) -> None:
    """Write a lock that names this very process, save for `changes`."""
    path.mkdir(parents=True, exist_ok=True)
    with hold_lock(path):
        me = read_holder(path)
    assert me is not None
    (path / "lock").write_text(me.model_copy(update=changes).model_dump_json())


def test_held_once_and_let_go(tmp_path: Path) -> None:
    with hold_lock(tmp_path):
        found = read_holder(tmp_path)
        assert found is not None
        assert (found.pid, found.host) == (os.getpid(), socket.gethostname())
        with pytest.raises(CellLocked), hold_lock(tmp_path):
            pass
        assert read_holder(tmp_path) == found
    assert read_holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from lit_attn.cells.lock import hold_lock\n"
        "with hold_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(1000)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(CellLocked), hold_lock(tmp_path):
        pass
    process.kill()
    # Also while it is a zombie that nobody has collected.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with hold_lock(tmp_path):
        assert read_holder(tmp_path) is not None
    process.wait()
    process.stdout.close()


def test_a_kept_lock_outlasts_its_holder(tmp_path: Path) -> None:
    keeper = current_process()
    with hold_lock(tmp_path, keeper):
        pass
    with pytest.raises(CellLocked), hold_lock(tmp_path):
        pass
    release_lock(tmp_path)
    assert list(tmp_path.iterdir()) == []
    # Another's is left alone.
    with hold_lock(tmp_path, keeper.model_copy(update={"started": "1"})):
        pass
    release_lock(tmp_path)
    assert read_holder(tmp_path) is not None


def test_the_lock_of_a_dead_process_is_its_living_keepers(tmp_path: Path) -> None:
    other(tmp_path, started="1", keeper=current_process())
    with pytest.raises(CellLocked), hold_lock(tmp_path):
        pass
    dead = current_process().model_copy(update={"started": "1"})
    other(tmp_path / "both", started="1", keeper=dead)
    assert read_holder(tmp_path / "both") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"started": "1"},  # the pid is another process's now
        {"boot": "before"},  # the machine was restarted
        {"pid": 2**22 + 1},  # beyond any pid
    ],
)
def test_stale(tmp_path: Path, changes: dict[str, object]) -> None:
    other(tmp_path, **changes)
    assert read_holder(tmp_path) is None
    with hold_lock(tmp_path):
        found = read_holder(tmp_path)
        assert found is not None
        assert found.pid == os.getpid()


def test_garbage_is_stale(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("{")
    with hold_lock(tmp_path):
        assert read_holder(tmp_path) is not None


def test_another_host_lives_while_its_heart_beats(tmp_path: Path) -> None:
    other(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(CellLocked), hold_lock(tmp_path):
        pass
    old = time.time() - STALE_AFTER - 1
    os.utime(tmp_path / "lock", (old, old))
    with hold_lock(tmp_path):
        found = read_holder(tmp_path)
        assert found is not None
        assert found.host == socket.gethostname()


def test_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT", 0.01)
    with hold_lock(tmp_path):
        path = tmp_path / "lock"
        os.utime(path, (0, 0))
        for _ in range(1000):
            if path.stat().st_mtime > 0:
                break
            time.sleep(0.01)
        assert path.stat().st_mtime > 0


def test_one_of_many_takes_over_a_stale_lock(tmp_path: Path) -> None:
    """The taker's own lock must never be taken for the stale one by the others."""
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
        other(folder, started="1")
        threads = [threading.Thread(target=take, args=(folder,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(most) >= 20
    assert set(most) == {1}


def test_a_lock_replaced_between_look_and_removal_stays(tmp_path: Path) -> None:
    other(tmp_path)
    lock._remove_stale(tmp_path / "lock")
    assert isinstance(read_holder(tmp_path), LockHolder)
