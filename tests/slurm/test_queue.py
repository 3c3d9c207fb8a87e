"""Requests to SLURM and the interpretation of its answers, with a fake squeue."""

import stat
from pathlib import Path

import pytest
from helpers import studies
from helpers.runs import make_body

from lit_attn.ablate import slurm
from lit_attn.ablate.__main__ import main
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.slurm import BATCH, NAME, find_tasks, require_resources
from lit_attn.cells.folder import create_attempt, read_exit
from lit_attn.cells.records import Exit
from lit_attn.config.slurm import Slurm, parse_minutes
from lit_attn.files import write_atomic
from lit_attn.schema.errors import ConfigError


def expand_study(path: Path, body: str = "") -> Matrix:
    return expand(studies.study(path, make_body("ok", "ok-2") + body), path / "runs")


def write_batch(matrix: Matrix, token: str, attempts: int = 0) -> None:
    cells = [(job.cell.folder, attempts) for job in matrix.jobs]
    write_atomic(matrix.folder / ".slurm" / token / "batch.json", BATCH.dump_json(cells))


def install_squeue(path: Path, monkeypatch: pytest.MonkeyPatch, *rows: str, code: int = 0) -> None:
    """Put a `squeue` on PATH that prints `rows`: index|id|state|name."""
    command = path / "bin" / "squeue"
    command.parent.mkdir(exist_ok=True)
    text = "\n".join(rows)
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")


@pytest.mark.process
@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 90), ("0:30", 1), ("8:00:00", 480), ("1:00:01", 61), ("2-0", 2880), ("1-2:03", 1563),
     ("1-2:03:04", 1564)],
)  # fmt: skip
def test_times_are_parsed_as_sbatch_does(time: str, expected: int) -> None:
    assert parse_minutes(time) == expected
    assert Slurm(time=time).minutes == expected


@pytest.mark.process
@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ("{partion: gpu}", "partion: unknown key 'partion'; did you mean 'partition'?"),
        ("{time: soon}", "time: needs minutes, H:MM:SS or D-H:MM, not 'soon'"),
        ("{time: 0}", "time: needs minutes, H:MM:SS or D-H:MM, not '0'"),
        ("{mem: 32 GB}", "mem: needs a size as 32G or 500M, not '32 GB'"),
        ("{cpus: 0}", "cpus: input should be greater than 0, not 0"),
        ("{partition: a b}", "partition: needs a name without spaces, as for sbatch, not 'a b'"),
    ],
)  # fmt: skip
def test_a_wrong_resource_is_one_error_line(tmp_path: Path, resources: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_study(tmp_path, f"\nslurm: {resources}")
    assert str(caught.value) == f"{tmp_path / 'ablations.yaml'}:9: studies.tiny.slurm.{message}"


@pytest.mark.process
def test_a_cell_with_more_devices_than_its_job_has_gpus_is_one_error_line(tmp_path: Path) -> None:
    matrix = expand_study(tmp_path, "\nset: {training.devices: 4}\nslurm: {gpus: 2}")
    message = "tiny: training.devices: 4 exceeds the 2 GPUs of slurm.gpus"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        require_resources(matrix)
    require_resources(expand_study(tmp_path, "\nset: {training.devices: 2}\nslurm: {gpus: 2}"))


@pytest.mark.process
def test_resources_do_not_change_identities(tmp_path: Path) -> None:
    one = [job.identity for job in expand_study(tmp_path).jobs]
    assert one == [job.identity for job in expand_study(tmp_path, "\nslurm: {gpus: 8}").jobs]


@pytest.mark.process
def test_the_active_or_newest_job_of_a_cell_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = expand_study(tmp_path)
    write_batch(matrix, "aaaa")
    write_batch(matrix, "bbbb")
    (matrix.folder / ".slurm" / "torn").mkdir()
    (matrix.folder / ".slurm" / "torn" / "batch.json").write_text("{")
    install_squeue(
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
    states = {folder.name: (task.id, task.state) for folder, task in find_tasks([matrix]).items()}
    assert sorted(states.values()) == [("7_2", "RUNNING"), ("8_0", "PENDING"), ("9_1", "FAILED")]
    tasks = sorted(find_tasks([matrix]).values())
    assert [task.is_over for task in tasks] == [False, False, True]


@pytest.mark.process
def test_no_cell_ends_while_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = expand_study(tmp_path)
    write_batch(matrix, "aaaa")
    install_squeue(tmp_path, monkeypatch, code=1)
    events: list[str] = []
    follower = slurm.Follower([matrix], Recorder(events))
    follower.unfinished = list(matrix.jobs)
    for _ in range(3):
        follower.poll()
    assert follower.unfinished == matrix.jobs
    assert events == ["SLURM does not answer: squeue: exit code 1"]
    # A job that SLURM has forgotten is given up only the second time: its result may come late.
    install_squeue(tmp_path, monkeypatch)
    follower.poll()
    assert follower.unfinished == matrix.jobs
    follower.poll()
    assert follower.unfinished == []
    assert {outcome.failure for outcome in follower.summary.failed} == {"killed"}


class Recorder:
    """Display that keeps the events."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def close(self) -> None: ...

    def update(self, snapshot: object) -> None: ...

    def add_event(self, text: str) -> None:
        self.events.append(text)


@pytest.mark.process
@pytest.mark.parametrize(
    ("state", "failure"),
    [("TIMEOUT", "timed-out"), ("OUT_OF_MEMORY", "out-of-memory"), ("NODE_FAIL", "killed"),
     ("FAILED", "killed")],
)  # fmt: skip
def test_slurm_gives_the_failure_class_of_an_attempt_without_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, failure: str
) -> None:
    matrix = expand_study(tmp_path)
    job = matrix.jobs[0]
    before = Exit(failure="error", returncode=1, message="long ago", finished="")
    before.write(create_attempt(job.folder) / "exit.json")
    begun = create_attempt(job.folder)
    write_batch(matrix, "aaaa", attempts=1)
    install_squeue(tmp_path, monkeypatch, f"0|7_0|{state}|{NAME}aaaa")
    follower = slurm.Follower([matrix], Recorder([]))
    follower.unfinished = [job]
    follower.poll()
    follower.poll()
    ended = read_exit(begun)
    assert ended is not None
    assert (ended.failure, ended.message) == (failure, f"its job ended: {state}")


@pytest.mark.process
def test_a_missing_slurm_is_one_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = studies.write(tmp_path, make_body("ok"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([str(path), "--launcher", "slurm"]) == 2
    assert capsys.readouterr().err.startswith("--launcher slurm: ")
    assert main([str(path), "--cancel"]) == 2
    assert capsys.readouterr().err == "--cancel: needs --launcher slurm\n"
