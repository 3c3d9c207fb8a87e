"""Requests to SLURM and the interpretation of its answers, with a fake squeue."""

import os
from pathlib import Path
from typing import Literal

import pytest
from helpers import studies
from helpers.fake_squeue import install_squeue, write_batch
from helpers.runs import Recorder, make_body

from lit_attn.__main__ import main as lit_attn_main
from lit_attn.ablate.__main__ import main
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.slurm.commands import use_clean_environment
from lit_attn.ablate.slurm.follow import Follower, find_cause
from lit_attn.ablate.slurm.job import may_retry
from lit_attn.ablate.slurm.queue import NAME, describe_queues, find_tasks
from lit_attn.ablate.slurm.submit import make_parameters, require_resources
from lit_attn.cells.folder import create_attempt, read_exit
from lit_attn.cells.records import Exit, FailureClass
from lit_attn.config.slurm import Slurm, parse_minutes
from lit_attn.schema.errors import ConfigError

pytestmark = pytest.mark.process


def expand_study(path: Path, body: str = "") -> Matrix:
    return expand(studies.study(path, make_body("ok", "ok-2") + body), path / "runs")


def submit_study(path: Path) -> Matrix:
    """Return a study whose cells are the job array `aaaa`."""
    matrix = expand_study(path)
    write_batch(matrix, "aaaa")
    return matrix


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 90), ("0:30", 1), ("8:00:00", 480), ("1:00:01", 61), ("2-0", 2880), ("1-2:03", 1563),
     ("1-2:03:04", 1564)],
)  # fmt: skip
def test_times_are_parsed_as_sbatch_does(time: str, expected: int) -> None:
    assert parse_minutes(time) == expected


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ("{partion: gpu}", "partion: unknown key 'partion'; did you mean 'partition'?"),
        ("{time: soon}", "time: needs minutes, H:MM:SS or D-H:MM, not 'soon'"),
        ("{time: 0}", "time: needs minutes, H:MM:SS or D-H:MM, not '0'"),
        ("{mem: 32 GB}", "mem: needs a size as 32G or 500M, not '32 GB'"),
        ("{cpus: 0}", "cpus: input should be greater than 0, not 0"),
        ("{partition: a b}", "partition: needs a name without spaces, as for sbatch, not 'a b'"),
        (
            "{time: 2}",
            "time: '2' leaves no time to train: a cell saves its checkpoint 120 s before the limit,"
            " and a job takes about a minute to start; write 5 minutes or more",
        ),
        ("{sbatch: {wrap: x}}", "sbatch.wrap: the runner sets this option itself; leave it out"),
        ("{sbatch: {outp: x}}", "sbatch.outp: the runner sets this option itself; leave it out"),
        ("{sbatch: {partition: gpu}}", "sbatch.partition: write slurm.partition instead"),
        (
            "{sbatch: {C: fast}}",
            "sbatch.C: write a long option of sbatch without its dashes, as exclude",
        ),
        (
            "{sbatch: {exclusive: false}}",
            "sbatch.exclusive: leave the option out instead of writing false",
        ),
        ("{mem: 1G, sbatch: {mem: 0}}", "sbatch: 'mem' contradicts mem: 1G; leave one out"),
        (
            "{gpus: 2, sbatch: {gres: 'gpu:a100:2'}}",
            "sbatch: 'gres' contradicts gpus: 2; leave one out",
        ),
    ],
)  # fmt: skip
def test_a_wrong_resource_is_one_error_line(tmp_path: Path, resources: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_study(tmp_path, f"\nslurm: {resources}")
    assert str(caught.value) == f"{tmp_path / 'ablations.yaml'}:9: studies.tiny.slurm.{message}"


def test_a_cell_with_more_devices_than_its_job_has_gpus_is_one_error_line(tmp_path: Path) -> None:
    matrix = expand_study(tmp_path, "\nset: {training.devices: 4}\nslurm: {gpus: 2}")
    message = "tiny: training.devices: 4 exceeds the 2 GPUs of slurm.gpus"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        require_resources(matrix)
    require_resources(expand_study(tmp_path, "\nset: {training.devices: 2}\nslurm: {gpus: 2}"))


@pytest.mark.parametrize(
    ("devices", "slurm", "message"),
    [
        (2, "{nodes: 2, gpus: 1}", None),
        (4, "{nodes: 2}", None),
        (
            4,
            "{nodes: 2, gpus: 1}",
            "tiny: training.devices: 4 exceeds the 1 GPUs of slurm.gpus on 2 nodes",
        ),
        (
            4,
            "{nodes: 3}",
            "tiny: slurm.nodes: 3 nodes cannot share training.devices: 4 evenly;"
            " write a multiple of 3 devices",
        ),
    ],
)
def test_nodes_share_the_devices_of_a_cell_evenly(
    tmp_path: Path, devices: int, slurm: str, message: str | None
) -> None:
    body = f"\nset: {{training.devices: {devices}}}\nslurm: {slurm}"
    matrix = expand_study(tmp_path, body)
    if message is None:
        require_resources(matrix)
        return
    with pytest.raises(ConfigError) as caught:
        require_resources(matrix)
    assert str(caught.value) == message


def test_the_time_limit_of_a_job_of_several_nodes_warns_the_runner() -> None:
    """SLURM would warn the ranks alone; the runner is the batch script of the job."""
    parameters = make_parameters(Slurm(nodes=2, cpus=3, gpus=2), devices=4)
    assert (parameters["nodes"], parameters["ntasks_per_node"]) == (2, 2)
    assert (parameters["cpus_per_task"], parameters["gpus_per_node"]) == (3, 2)
    assert parameters["additional_parameters"] == {"requeue": True, "signal": "B:USR2@120"}
    alone = make_parameters(Slurm(cpus=3, gpus=4), devices=4)
    assert "ntasks_per_node" not in alone
    # One task of 12 CPUs starts the four processes.
    assert (alone["cpus_per_task"], alone["srun_args"][0]) == (12, "--cpus-per-task=12")


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([], False),
        (["killed"], True),
        (["killed"] * 3, True),
        (["killed"] * 4, False),
        (["killed", "killed", "timed-out", "killed", "killed"], True),
        (["timed-out"] * 2, False),
        (["error"], False),
        # Preemption and time limits are no failures of the cell.
        (["killed", "stopped", "stopped", "stopped", "killed"], True),
    ],
)
def test_a_cell_of_several_nodes_is_retried_as_often_as_on_one(
    tmp_path: Path, failures: list[FailureClass | Literal["stopped"]], expected: bool
) -> None:
    for failure in failures:
        is_stopped = failure == "stopped"
        end = Exit(
            failure="killed" if failure == "stopped" else failure,
            returncode=1,
            message="gone",
            is_stopped=is_stopped,
        )
        end.write(create_attempt(tmp_path) / "exit.json")
    assert may_retry(tmp_path) == expected


def test_resources_do_not_change_identities(tmp_path: Path) -> None:
    one = [job.identity for job in expand_study(tmp_path).jobs]
    assert one == [job.identity for job in expand_study(tmp_path, "\nslurm: {gpus: 8}").jobs]


def test_the_active_or_newest_job_of_a_cell_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = submit_study(tmp_path)
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
    tasks = sorted(find_tasks([matrix.folder]).values())
    states = [(task.id, task.state) for task in tasks]
    assert states == [("7_2", "RUNNING"), ("8_0", "PENDING"), ("9_1", "FAILED")]
    assert [task.is_over for task in tasks] == [False, False, True]


def test_cancelled_jobs_that_did_not_start_are_not_the_job_of_the_first_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM lists them together as one job without an index, as recorded with version 22.05."""
    matrix = submit_study(tmp_path)
    install_squeue(
        tmp_path, monkeypatch, f"0|3_0|COMPLETED|{NAME}aaaa", f"N/A|3|CANCELLED|{NAME}aaaa"
    )
    tasks = find_tasks([matrix.folder])
    assert [(task.id, task.state) for task in tasks.values()] == [("3_0", "COMPLETED")]


def test_no_cell_ends_while_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = submit_study(tmp_path)
    install_squeue(tmp_path, monkeypatch, code=1)
    display = Recorder()
    follower = Follower([matrix], display)
    follower.unfinished = list(matrix.jobs)
    for _ in range(3):
        follower.poll()
    assert follower.unfinished == matrix.jobs
    assert display.events == ["SLURM does not answer: squeue: exit code 1"]
    # A job that SLURM has forgotten is given up only the second time: its result may come late.
    install_squeue(tmp_path, monkeypatch)
    follower.poll()
    assert follower.unfinished == matrix.jobs
    follower.poll()
    assert follower.unfinished == []
    assert {outcome.failure for outcome in follower.summary.failed} == {"killed"}


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
    follower = Follower([matrix], Recorder())
    follower.unfinished = [job]
    follower.poll()
    follower.poll()
    ended = read_exit(begun)
    assert ended is not None
    assert (ended.failure, ended.message) == (failure, f"its job ended: {state}")


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


def test_each_reason_for_which_jobs_wait_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = submit_study(tmp_path)
    down = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority parts"
    install_squeue(
        tmp_path, monkeypatch,
        f"0|7_0|PENDING|{NAME}aaaa|PartitionTimeLimit",
        f"1|7_1|PENDING|{NAME}aaaa|PartitionTimeLimit",
        f"2|7_2|PENDING|{NAME}aaaa|{down}",
        # SLURM has not tried to start this job yet.
        f"3|7_3|PENDING|{NAME}aaaa|None",
    )  # fmt: skip
    display = Recorder()
    follower = Follower([matrix], display)
    follower.unfinished = list(matrix.jobs)
    follower.poll()
    follower.poll()
    expected = [
        "waiting  2 jobs in SLURM's queue: PartitionTimeLimit"
        " (slurm.time exceeds the limit of the partition)",
        f"waiting  1 job in SLURM's queue: {down} (wait, or choose other nodes)",
    ]
    assert display.events == expected
    assert describe_queues([matrix.folder]) == {matrix.folder: expected}
    # The reason of a job that runs is that of its wait, which is over.
    install_squeue(tmp_path, monkeypatch, f"0|7_0|RUNNING|{NAME}aaaa|Resources")
    assert describe_queues([matrix.folder]) == {matrix.folder: []}
    install_squeue(tmp_path, monkeypatch, code=1)
    lines = describe_queues([matrix.folder])[matrix.folder]
    assert lines == ["SLURM does not answer: squeue: exit code 1"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_queues([matrix.folder]) == {}


def test_status_repeats_for_what_jobs_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = submit_study(tmp_path)
    matrix.write_plan()
    install_squeue(tmp_path, monkeypatch, f"0|7_0|PENDING|{NAME}aaaa|Priority")
    assert lit_attn_main(["status", str(tmp_path / "runs")]) == 0
    assert "  waiting  1 job in SLURM's queue: Priority\n" in capsys.readouterr().out


def test_commands_ignore_the_allocation_around_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside `salloc`, and with a filter of squeue in the environment, a job is found."""
    matrix = submit_study(tmp_path)
    install_squeue(tmp_path, monkeypatch, f"0|7_0|RUNNING|{NAME}aaaa|None")
    command = tmp_path / "bin" / "squeue"
    script = command.read_text()
    refusal = '[ -z "$SLURM_MEM_PER_CPU$SQUEUE_PARTITION" ] && [ -n "$SLURM_CONF" ] || exit 1'
    command.write_text(script.replace("#!/bin/sh\n", f"#!/bin/sh\n{refusal}\n"))
    monkeypatch.setenv("SLURM_CONF", "slurm.conf")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    assert len(find_tasks([matrix.folder])) == 1
    with use_clean_environment():
        assert "SLURM_MEM_PER_CPU" not in os.environ
    assert os.environ["SLURM_MEM_PER_CPU"] == "100"


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (
            "/var/spool/slurmd/job00003/slurm_script: line 12: python: command not found\n"
            "srun: error: node0: task 0: Exited with exit code 127\n"
            "srun: launch/slurm: _task_finish: Received task exit notification\n",
            "/var/spool/slurmd/job00003/slurm_script: line 12: python: command not found",
        ),
        (
            "srun: fatal: SLURM_MEM_PER_CPU and SLURM_MEM_PER_NODE are mutually exclusive.\n",
            "srun: fatal: SLURM_MEM_PER_CPU and SLURM_MEM_PER_NODE are mutually exclusive.",
        ),
        (
            "slurmstepd-node0: error: execve(): /no/python: No such file or directory\n"
            "srun: error: node0: task 0: Exited with exit code 2\n",
            "slurmstepd-node0: error: execve(): /no/python: No such file or directory",
        ),
        (
            "ModuleNotFoundError: No module named 'submitit'\n"
            "srun: error: node0: task 0: Exited with exit code 1\n"
            "slurmstepd: error: *** STEP 3.0 ON node0 CANCELLED AT 2026-11-26T05:05:50 ***\n",
            "ModuleNotFoundError: No module named 'submitit'",
        ),
        ("", "its output is empty"),
    ],
)
def test_the_message_of_a_dead_job_is_its_cause(output: str, cause: str) -> None:
    assert find_cause(output) == cause


def test_a_job_of_another_array_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder `.slurm` may have been copied, and squeue then lists more cells than it has."""
    study = studies.study(tmp_path, "baseline: a\ncells: {a: {}, b: {attention: mgk}}")
    matrix = expand(study, tmp_path / "runs")
    write_batch(matrix, "aaaa")
    install_squeue(
        tmp_path,
        monkeypatch,
        f"9|7_9|PENDING|{NAME}aaaa|Resources",
        f"0|7_0|PENDING|{NAME}aaaa|QOSMaxWallDurationPerJobLimit",
    )
    assert list(find_tasks([matrix.folder])) == [matrix.jobs[0].folder]
    ((line,),) = describe_queues([matrix.folder]).values()
    assert line.endswith("QOSMaxWallDurationPerJobLimit (slurm.time exceeds the limit of the QOS)")
