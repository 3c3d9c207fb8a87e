"""Ranks on several nodes: what srun reports, nodes that are lost, and variables of the ranks.

tests/slurm/test_nodes.py runs cells on the nodes of a real SLURM.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fake_squeue import install_command
from helpers.runs import wait_until

from lit_attn.cells import nodes
from lit_attn.cells.failure import LOST_NODE, describe_end, quote_rank_log
from lit_attn.cells.folder import read_log_tail
from lit_attn.cells.launched import RENDEZVOUS, enter_slurm_task, is_started_by_torchrun
from lit_attn.cells.nodes import read_task_end
from lit_attn.training.process_group import Ranks, read_ranks

KILLED_RANK = """\
srun: error: node1: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=2.0
slurmstepd-node0: error: *** STEP 2.0 ON node0 CANCELLED AT 2026-11-26T05:23:09 ***
srun: error: node0: task 0: Terminated
srun: Force Terminated StepId=2.0
"""


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("srun: error: node1: task 1: Exited with exit code 3", ("node1", 1, 3)),
        ("srun: error: gpu-07: tasks 2-3,7: Exited with exit code 1\n", ("gpu-07", 2, 1)),
        ("srun: error: node1: task 1: Killed", ("node1", 1, -9)),
        ("srun: error: node0: task 1: Segmentation fault", ("node0", 1, -11)),
        ("srun: error: node0: task 1: Aborted (core dumped)", ("node0", 1, -6)),
        ("srun: error: node0: task 4: Out Of Memory", ("node0", 4, -9)),
        ("srun: launch/slurm: _step_signal: Terminating StepId=1.0", None),
        ("srun: error: Node failure on node1", None),
        ("slurmstepd-node0: error: *** STEP 1.0 ON node0 CANCELLED ***", None),
    ],
)
def test_the_end_of_a_rank_is_read_from_srun(line: str, end: tuple[str, int, int] | None) -> None:
    assert read_task_end(line) == end


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    """Restore the handlers of the signals that a cell passes on to its ranks."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGABRT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_on_nodes(attempt: Path) -> int:
    return nodes.run_on_nodes(2, 2, ["a:b", "cell", str(attempt), "{}"], attempt, lambda: None)


def test_the_rank_that_failed_first_is_named_with_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install_command(tmp_path, monkeypatch, "srun", f"echo '{KILLED_RANK}' >&2; exit 143")
    (tmp_path / "log.rank1.txt").write_text("step 3\n")
    assert run_on_nodes(tmp_path) == 128 + signal.SIGKILL
    end = describe_end(137, capfd.readouterr().err)
    assert (end.failure, end.rank) == ("killed", 1)
    assert end.message == "ended by SIGKILL (rank 1 on node1)"


def test_the_node_is_part_of_the_message_of_an_exception() -> None:
    log = quote_rank_log(3, 1, "Traceback\nValueError: mine", "node2")
    end = describe_end(1, f"all is well\n{log}\n")
    assert (end.failure, end.rank) == ("error", 3)
    assert end.message == "[rank3]: ValueError: mine (rank 3 on node2)"


def test_a_node_that_srun_waits_for_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 lost its connection, and nothing is known about the rank on the other node."""
    script = "echo 'srun: error: node0: task 0: Exited with exit code 1' >&2; exec sleep 1000"
    install_command(tmp_path, monkeypatch, "srun", script)
    (tmp_path / "node0.alive").write_text("node0")
    (tmp_path / "node1.alive").write_text("node1")
    monkeypatch.setattr(nodes, "SETTLE", 0.5)
    assert run_on_nodes(tmp_path) == LOST_NODE
    end = describe_end(LOST_NODE, capfd.readouterr().err)
    assert end.failure == "killed"
    assert end.message.startswith("node node1 is lost: srun waited for it for 0 s after the end of")
    assert not list(tmp_path.glob("*.alive"))


def test_a_silent_node_is_lost_while_another_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a power cut no connection is closed, and no rank ends."""
    loop = f"while :; do touch {tmp_path}/node0.alive; sleep 0.05; done"
    install_command(tmp_path, monkeypatch, "srun", loop)
    (tmp_path / "node0.alive").write_text("node0")
    (tmp_path / "node1.alive").write_text("node1")
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    monkeypatch.setattr(nodes, "SILENCE", 1.0)
    assert run_on_nodes(tmp_path) == LOST_NODE
    message = describe_end(LOST_NODE, capfd.readouterr().err).message
    assert message == "node node1 is lost: it has not answered for 1 s"


def test_no_node_is_lost_while_all_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk that does not answer for a while is not the fault of a node."""
    install_command(tmp_path, monkeypatch, "srun", "sleep 1")
    for node in ("node0", "node1"):
        (tmp_path / f"{node}.alive").write_text(node)
    monkeypatch.setattr(nodes, "BEAT", 0.05)
    monkeypatch.setattr(nodes, "SILENCE", 0.3)
    assert run_on_nodes(tmp_path) == 0


def test_srun_that_cannot_start_the_ranks_is_a_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    error = "srun: error: Task launch for StepId=7.0 failed on node node1: Communication failure"
    install_command(tmp_path, monkeypatch, "srun", f"echo '{error}' >&2; exit 1")
    assert run_on_nodes(tmp_path) == LOST_NODE
    end = describe_end(LOST_NODE, capfd.readouterr().err)
    assert (end.failure, end.message) == ("killed", f"srun could not run the ranks: {error}")


def test_signals_reach_the_ranks_through_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM becomes SIGUSR2, which srun passes on; SIGABRT becomes SIGUSR1."""
    script = (
        f"trap 'echo USR1 >> {tmp_path}/signals' USR1\n"
        f"trap 'echo USR2 >> {tmp_path}/signals; exit 0' USR2\n"
        f"touch {tmp_path}/ready\n"
        "while :; do sleep 0.02; done\n"
    )
    install_command(tmp_path, monkeypatch, "srun", script)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from lit_attn.cells.nodes import run_on_nodes\n"
        "sys.exit(run_on_nodes(2, 2, [], Path(sys.argv[1]), lambda: None))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as process:
        wait_until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGABRT)
        wait_until((tmp_path / "signals").exists)
        process.terminate()
    assert process.returncode == 0
    assert (tmp_path / "signals").read_text().split() == ["USR1", "USR2"]


def test_a_task_of_srun_has_the_variables_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, "99")
    monkeypatch.delenv(RENDEZVOUS, raising=False)
    assert read_ranks() == Ranks(0, 1, 0, 1)
    monkeypatch.setenv(RENDEZVOUS, "/somewhere")
    task = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
    step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "3"}
    for name, value in (task | step).items():
        monkeypatch.setenv(name, value)
    assert enter_slurm_task() == 5
    ranks = read_ranks()
    assert (ranks, ranks.nodes) == (Ranks(5, 6, 1, 2), 3)
    assert (os.environ["GROUP_RANK"], os.environ["NODE_RANK"]) == ("2", "2")


def test_one_process_of_torchrun_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "here"}
    for name, value in (variables | {"MASTER_PORT": "1", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    assert not is_started_by_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_started_by_torchrun()
    monkeypatch.delenv("MASTER_PORT")
    assert not is_started_by_torchrun()


def test_a_heartbeat_changes_its_file_and_ends_with_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "BEAT", 0.02)
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    path = tmp_path / "node3.alive"
    with nodes._beat(path):
        assert path.read_text() == "node7"
        first = path.stat().st_mtime_ns
        wait_until(lambda: path.stat().st_mtime_ns != first)
    assert not path.exists()
    time.sleep(0.1)
    assert not path.exists()


def test_a_rank_without_a_log_is_named_all_the_same(tmp_path: Path) -> None:
    assert read_log_tail(tmp_path, 1) == ""
    end = describe_end(137, quote_rank_log(1, -9, "", "node1"))
    assert end.message == "ended by SIGKILL (rank 1 on node1)"
