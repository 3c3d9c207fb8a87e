"""Cells of several processes: the first failed rank, its message, and the end of all processes."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import fake_cells, studies
from helpers.runs import (
    TIMEOUT,
    count_runs,
    expire_hangs,
    is_alive,
    list_holders,
    make_body,
    run,
    start_cli,
    wait_until,
)

from lit_attn.ablate import runner
from lit_attn.ablate.display import Display
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import expand
from lit_attn.ablate.slots import make_slots
from lit_attn.cells import folder
from lit_attn.cells.failure import (
    classify_failure,
    describe_end,
    describe_failure,
    first_failed_rank,
    is_echo,
    quote_rank_log,
)
from lit_attn.cells.records import Exit

SET = "set: {training.devices: 2}\n"


pytestmark = pytest.mark.usefixtures("retry_at_once")


def jobs(path: Path, *variants: str) -> list[Job]:
    body = SET + make_body(*variants)
    return expand(studies.study(path, body), path / "runs", seeds=(0,)).jobs


def last_exit(job: Job) -> Exit:
    exit_record = folder.read_exit(folder.list_attempts(job.folder)[-1])
    assert exit_record is not None
    return exit_record


def rank_pids(path: Path) -> list[int]:
    return [int(file.read_text()) for file in (path / "runs").glob("*/*/*/rank1")]


def test_every_rank_runs_and_one_result_is_written(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "ok", "ok-2")
    summary, _ = run(cells)
    assert summary.failed == []
    assert count_runs(tmp_path) == {"ok/0": 1, "ok-2/0": 1}
    logs = [folder.read_log_tail(folder.list_attempts(cell.folder)[-1], 1) for cell in cells]
    assert all(log.startswith("rank 1 of 2 in ") for log in logs)
    # A meeting place of its own, so that no two cells can meet; nothing of it is left.
    places = [Path(log.split(" in ")[1].strip()) for log in logs]
    assert len(set(places)) == 2
    assert not any(place.parent.exists() for place in places)


@pytest.mark.process
@pytest.mark.parametrize(
    ("variant", "failure", "message"),
    [
        ("rankcrash", "error", "[rank1]: ValueError: this rank alone"),
        ("rankkilled", "killed", "ended by SIGKILL"),
        ("rankpreempted", "killed", "stopped by SIGTERM"),
    ],
)
def test_the_first_failed_rank_is_named(
    variant: str, failure: str, message: str, tmp_path: Path
) -> None:
    """Rank 0 ends first, but only because the other rank failed."""
    (job,) = jobs(tmp_path, variant)
    run([job])
    ended = last_exit(job)
    assert (ended.failure, ended.message.removeprefix("[rank1]: ")) == (
        failure,
        message.removeprefix("[rank1]: "),
    )
    if variant != "rankpreempted":
        assert ended.rank == 1
        log = folder.read_log_tail(folder.list_attempts(job.folder)[-1])
        assert "rank 1 was the first to fail" in log
        assert ("Traceback" in log.split("first to fail")[1]) == (variant == "rankcrash")
    assert not is_alive(int((job.folder / "rank1").read_text()))


@pytest.mark.process
@pytest.mark.parametrize("victim", ["rank 1", "rank 0", "the leader", "the runner"])
def test_kill_9_of_any_process_leaves_none(victim: str, tmp_path: Path) -> None:
    studies.write(tmp_path, SET + make_body("rankhang"))
    with start_cli(tmp_path, "--seeds", "0,") as process:
        wait_until(lambda: len(list((tmp_path / "runs").glob("*/*/*/child*.pid"))) == 2)
        (leader,) = list_holders(tmp_path)
        (other,) = rank_pids(tmp_path)
        (first,) = [pid for pid in children(leader) if pid != other]
        everyone = [leader, first, other]
        chosen = {"rank 1": other, "rank 0": first, "the leader": leader}.get(victim, process.pid)
        os.kill(chosen, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, everyone)))
        exits = (tmp_path / "runs").glob
        wait_until(lambda: victim == "the runner" or list(exits("*/*/*/attempts/1/exit.json")))
    if victim != "the runner":
        (exit_file,) = exits("*/*/*/attempts/1/exit.json")
        ended = Exit.model_validate_json(exit_file.read_text())
        assert (ended.failure, ended.rank) == ("killed", 1 if victim == "rank 1" else 0)


def run_code(folder: Path, code: str) -> int:
    """Run the code with this folder in a process that has imported ranks; return its exit code."""
    imports = (
        "import os, signal, sys, time; from pathlib import Path; from lit_attn.cells import ranks"
    )
    start = f"{imports}\nfolder = Path(sys.argv[1])\n"
    command = [sys.executable, "-c", start + code, str(folder)]
    return subprocess.run(command, check=False, timeout=TIMEOUT).returncode


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_a_hang_leaves_every_ranks_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expire_hangs(monkeypatch, 600.0, "child.pid", "child1.pid")
    (job,) = jobs(tmp_path, "rankhang")
    summary = runner.Runner(
        Launcher(fake_cells.TARGET), make_slots(None), Display(io.StringIO()), 600.0
    ).run([job])
    assert [outcome.failure for outcome in summary.failed] == ["timed-out"]
    first, *_ = folder.list_attempts(job.folder)
    for rank in (0, 1):
        assert "in _hang" in folder.read_log_tail(first, rank)
    assert not is_alive(int((job.folder / "rank1").read_text()))


def test_sigterm_reaches_every_rank_and_is_no_failure(tmp_path: Path) -> None:
    studies.write(tmp_path, SET + make_body("rankhang"))
    with start_cli(tmp_path, "--seeds", "0,") as process:
        wait_until(lambda: len(list((tmp_path / "runs").glob("*/*/*/child*.pid"))) == 2)
        process.terminate()
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 143
    assert "stopped  tiny/rankhang/0" in output
    assert not any(map(is_alive, rank_pids(tmp_path)))


def test_too_many_devices_are_reported_before_anything_runs(tmp_path: Path) -> None:
    studies.write(tmp_path, "set: {training.devices: 64, data.batch_size: 64}\n" + make_body("ok"))
    environment = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "0,1"}
    with start_cli(tmp_path, environment=environment) as process:
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    assert output == "tiny: variant 'ok': training.devices: 64 exceeds the 2 GPUs of this machine\n"
    assert not (tmp_path / "runs").exists()


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    code = (
        "def body(): (folder / str(os.getpid())).touch(), time.sleep(1000)\n"
        "def end():\n"
        "    while len(list(folder.iterdir())) < 2: time.sleep(0.01)\n"
        "    if folder.name == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    sys.exit(3)\n"
        "ranks.run_ranks(2, body, None, end)\n"
    )
    for how, returncode in (("kill", -signal.SIGKILL), ("leave", 3)):
        (tmp_path / how).mkdir()
        assert run_code(tmp_path / how, code) == returncode
        pids = [int(path.name) for path in (tmp_path / how).iterdir()]
        wait_until(lambda pids=pids: not any(map(is_alive, pids)))


def test_ranks_that_end_by_a_signal_have_failed(tmp_path: Path) -> None:
    code = (
        "def body(): os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(ranks.run_ranks(2, body, None, lambda: None))\n"
    )
    assert run_code(tmp_path, code) == 143


def test_sigterm_during_the_start_of_a_rank_reaches_it(tmp_path: Path) -> None:
    """The signal to the parent arrives before the parent has a handler for it."""
    code = (
        "ready = folder / 'ready'\n"
        "def body():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))\n"
        "    ready.touch()\n"
        "    time.sleep(1000)\n"
        "def start_heartbeat():\n"
        "    while not ready.exists(): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(ranks.run_ranks(1, body, None, start_heartbeat))\n"
    )
    assert run_code(tmp_path, code) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_start_of_a_cell_ends_it(number: signal.Signals) -> None:
    """The fork server itself blocks these signals."""
    code = (
        "import os, sys\n"
        "from lit_attn.cells import fork_server, process\n"
        "number = int(sys.argv[1])\n"
        "os.kill(os.getpid(), number)\n"
        "cell = os.fork()\n"
        "if not cell:\n"
        "    os.kill(os.getpid(), number)\n"
        "    process.restore_signals()\n"
        "    os._exit(0)\n"
        "_, status = os.waitpid(cell, 0)\n"
        "print(os.waitstatus_to_exitcode(status))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(int(number))], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{-number}\n")


def test_a_rank_that_had_to_be_killed_did_not_fail_first(tmp_path: Path) -> None:
    """One rank lost its connection, and the other waits for ever."""
    code = (
        "def body():\n"
        "    if os.environ['LOCAL_RANK'] == '0': raise RuntimeError('Connection closed by peer')\n"
        "    time.sleep(1000)\n"
        "ranks.SETTLE = 0.1\n"
        "sys.exit(ranks.run_ranks(2, body, folder, lambda: None))\n"
    )
    assert run_code(tmp_path, code) == 1
    assert "Connection closed by peer" in folder.read_log_tail(tmp_path)


def test_failures_of_ranks_are_classified_from_the_log() -> None:
    echo = "RuntimeError: [x.cc:81] Connection closed by peer [127.0.0.1]:30"
    assert is_echo(1, f"Traceback\n{echo}")
    assert not is_echo(1, "ValueError: mine")
    assert not is_echo(-9, "")
    log = f"{echo}\n{quote_rank_log(2, -9, 'all is well')}\n"
    assert (first_failed_rank(log), first_failed_rank(echo)) == (2, 0)
    assert (classify_failure(137, log), describe_failure(137, log)) == (
        "killed",
        "ended by SIGKILL",
    )
    log = f"{echo}\n{quote_rank_log(1, 1, 'torch.OutOfMemoryError: CUDA out of memory')}\n"
    assert classify_failure(1, log) == "out-of-memory"
    assert describe_failure(1, log) == "[rank1]: torch.OutOfMemoryError: CUDA out of memory"


@pytest.mark.process
@pytest.mark.parametrize(("call", "early"), [("sys.exit()", 0), ("os._exit(0)", 1)])
def test_a_rank_that_exits_early_with_0_failed_first(call: str, early: int, tmp_path: Path) -> None:
    """The other rank would wait for it, or blame it for a lost connection."""
    code = (
        "def body():\n"
        f"    if os.environ['LOCAL_RANK'] == '{early}': print('leaving', flush=True); {call}\n"
        "    time.sleep(1000)\n"
        "ranks.SETTLE = 0.1\n"
        "ranks.redirect_output(folder / 'log.txt')\n"
        "sys.exit(ranks.run_ranks(2, body, folder, lambda: None))\n"
    )
    end = describe_end(run_code(tmp_path, code), folder.read_log_tail(tmp_path))
    assert (end.failure, end.rank) == ("error", early)
    assert end.message.startswith("exit code 0 without a result; its log ends: ")
    assert end.message.endswith("leaving")


def test_a_rank_may_end_long_before_another_one(tmp_path: Path) -> None:
    """Rank 0 writes the weights while the other ranks have nothing to do any more."""
    code = (
        "def body():\n"
        "    if os.environ['LOCAL_RANK'] == '0': time.sleep(0.5)\n"
        "ranks.SETTLE = 0.1\n"
        "sys.exit(ranks.run_ranks(2, body, None, lambda: None))\n"
    )
    assert run_code(tmp_path, code) == 0


def test_a_cell_that_exits_with_the_code_of_a_lost_server_has_failed(
    tmp_path: Path,
) -> None:
    (job,) = expand(studies.study(tmp_path, make_body("minusone")), tmp_path / "r", seeds=(0,)).jobs
    summary, _ = run([job])
    assert [outcome.failure for outcome in summary.failed] == ["error"]
