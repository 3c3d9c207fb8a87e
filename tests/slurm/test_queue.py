"""What is asked of SLURM, and what its answers mean, without a SLURM."""

import stat
from pathlib import Path

import pytest
from helpers import studies
from helpers.runs import names

from lit_attn.ablate.__main__ import main
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.slurm import follow, queue
from lit_attn.ablate.slurm.queue import NAME, Batch, Place, find
from lit_attn.ablate.slurm.submit import resources
from lit_attn.cells.folder import create_attempt, read_exit
from lit_attn.cells.records import Exit
from lit_attn.config.slurm import Slurm, minutes
from lit_attn.config.source import Mapping, Where
from lit_attn.schema.errors import ConfigError


def matrix(path: Path, body: str = "") -> Matrix:
    return expand(studies.study(path, names("ok", "ok-2") + body), path / "runs")


def batch(of: Matrix, token: str, attempts: int = 0) -> None:
    cells = [Place(folder=job.cell.folder, attempts=attempts) for job in of.jobs]
    Batch(cells=cells).write(of.folder / ".slurm" / token / "batch.json")


def answer(path: Path, monkeypatch: pytest.MonkeyPatch, *rows: str, code: int = 0) -> None:
    """A `squeue` that knows `rows`: index|id|state|name."""
    command = path / "bin" / "squeue"
    command.parent.mkdir(exist_ok=True)
    text = "\n".join(rows)
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 90), ("0:30", 1), ("8:00:00", 480), ("1:00:01", 61), ("2-0", 2880), ("1-2:03", 1563),
     ("1-2:03:04", 1564)],
)  # fmt: skip
def test_times_are_those_of_sbatch(time: str, expected: int) -> None:
    assert minutes(time) == expected
    assert Slurm(time=time).minutes == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{partion: gpu}", "partion: unknown key 'partion'; did you mean 'partition'?"),
        ("{time: soon}", "time: needs minutes, H:MM:SS or D-H:MM, not 'soon'"),
        ("{time: 0}", "time: needs minutes, H:MM:SS or D-H:MM, not '0'"),
        ("{mem: 32 GB}", "mem: needs a size as 32G or 500M, not '32 GB'"),
        ("{cpus: 0}", "cpus: input should be greater than 0, not 0"),
        ("{partition: a b}", "partition: needs a name as sbatch takes it, without spaces"),
    ],
)  # fmt: skip
def test_resources_are_checked_before_anything_runs(
    tmp_path: Path, given: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        matrix(tmp_path, f"\nslurm: {given}")
    assert str(caught.value) == f"{tmp_path / 'ablations.yaml'}:9: studies.tiny.slurm.{message}"


def test_the_command_line_changes_what_a_study_asks_for(tmp_path: Path) -> None:
    asked = matrix(tmp_path, "\nslurm: {partition: gpu, gpus: 2, time: 90}")
    changes = Mapping(Where("--slurm"))
    changes.put("time", "2:00:00", Where("--slurm"))
    assert resources(asked, changes) == Slurm(partition="gpu", gpus=2, time="2:00:00")
    changes.put("cpu", 4, Where("--slurm"))
    with pytest.raises(ConfigError, match=r"^--slurm: cpu: unknown key.*'cpus'"):
        resources(asked, changes)


def test_what_slurm_gets_is_outside_identity(tmp_path: Path) -> None:
    one = [job.identity for job in matrix(tmp_path).jobs]
    assert one == [job.identity for job in matrix(tmp_path, "\nslurm: {gpus: 8}").jobs]


def test_jobs_are_found_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = matrix(tmp_path)
    batch(asked, "aaaa")
    batch(asked, "bbbb")
    (asked.folder / ".slurm" / "torn").mkdir()
    (asked.folder / ".slurm" / "torn" / "batch.json").write_text("{")
    answer(
        tmp_path, monkeypatch,
        f"0|7_0|FAILED|{NAME}aaaa",
        f"0|8_0|PENDING|{NAME}bbbb",
        f"1|9_1|FAILED|{NAME}bbbb",
        f"1|7_1|COMPLETED|{NAME}aaaa",
        f"2|7_2|RUNNING|{NAME}aaaa",
        f"2|9_2|FAILED|{NAME}bbbb",
        f"0|5_0|RUNNING|{NAME}torn",
        "N/A|6|RUNNING|some|body else's",
    )  # fmt: skip
    found = {folder.name: (task.id, task.state) for folder, task in find([asked]).items()}
    assert list(found.values()) == [("8_0", "PENDING"), ("9_1", "FAILED"), ("7_2", "RUNNING")]
    assert [task.is_over for task in find([asked]).values()] == [False, True, False]


def test_every_state_of_slurm_is_one_of_three() -> None:
    assert not queue.PENDING & queue.RUNNING
    assert not (queue.PENDING | queue.RUNNING) & queue.ENDS.keys()


def test_while_slurm_does_not_answer_nothing_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = matrix(tmp_path)
    batch(asked, "aaaa")
    answer(tmp_path, monkeypatch, code=1)
    said: list[str] = []
    follower = follow.Follower([asked], Saying(said))
    follower.left = list(asked.jobs)
    for _ in range(3):
        follower._look()
    assert follower.left == asked.jobs
    assert said == ["SLURM does not answer: squeue: exit code 1"]
    # A job that SLURM has forgotten is given up only the second time: its result may come late.
    answer(tmp_path, monkeypatch)
    follower._look()
    assert follower.left == asked.jobs
    follower._look()
    assert follower.left == []
    assert {outcome.failure for outcome in follower.summary.failed} == {"killed"}


class Saying:
    """A display that keeps what it is told."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def open(self) -> None: ...

    def close(self) -> None: ...

    def update(self, snapshot: object) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(
    ("state", "failure"),
    [("TIMEOUT", "timed-out"), ("OUT_OF_MEMORY", "out-of-memory"), ("NODE_FAIL", "killed"),
     ("FAILED", "killed")],
)  # fmt: skip
def test_an_attempt_without_an_end_has_the_one_that_slurm_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, failure: str
) -> None:
    asked = matrix(tmp_path)
    job = asked.jobs[0]
    before = Exit(failure="error", returncode=1, message="long ago", finished="")
    before.write(create_attempt(job.folder) / "exit.json")
    begun = create_attempt(job.folder)
    batch(asked, "aaaa", attempts=1)
    answer(tmp_path, monkeypatch, f"0|7_0|{state}|{NAME}aaaa")
    follower = follow.Follower([asked], Saying([]))
    follower.left = [job]
    follower._look()
    follower._look()
    ended = read_exit(begun)
    assert ended is not None
    assert (ended.failure, ended.message) == (failure, f"its job ended: {state}")


def test_without_slurm_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = studies.write(tmp_path, names("ok"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([str(path), "--launcher", "slurm"]) == 2
    assert capsys.readouterr().err.startswith("--launcher slurm: ")
    assert main([str(path), "--slurm", "gpus=1"]) == 2
    assert capsys.readouterr().err == "--slurm: needs --launcher slurm\n"
    assert main([str(path), "--cancel"]) == 2
    assert capsys.readouterr().err == "--cancel: needs --launcher slurm\n"
