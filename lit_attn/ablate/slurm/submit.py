"""Submission of the missing cells of studies as job arrays."""

import contextlib
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_attn.ablate import snapshot as code
from lit_attn.ablate.job import Job
from lit_attn.ablate.plan import Matrix
from lit_attn.ablate.slurm import limits
from lit_attn.ablate.slurm.commands import use_clean_environment
from lit_attn.ablate.slurm.job import SlurmCell
from lit_attn.ablate.slurm.limits import Cluster
from lit_attn.ablate.slurm.queue import BATCH, NAME, find_tasks, list_jobs
from lit_attn.cells import folder
from lit_attn.config.slurm import WARNING, Slurm
from lit_attn.extras import require
from lit_attn.files import one_at_a_time, write_atomic
from lit_attn.schema.errors import ConfigError

MakeCell = Callable[[Job, int], SlurmCell]
"""Function that returns what a job runs, from the cell and the number of nodes."""
MAX_ARRAY = 1000  # Jobs of one array, if the cluster allows as many.


@dataclass(frozen=True)
class Array:
    """Cells of a study that are submitted as one job array; all train on `devices` devices."""

    matrix: Matrix
    devices: int
    jobs: list[Job]


def require_resources(matrix: Matrix) -> None:
    """Raise ConfigError if the `slurm:` section of a study does not suffice for its cells."""
    slurm = matrix.source.study.slurm
    numbers = sorted({variant.experiment.training.devices for variant in matrix.written})
    for devices in numbers:
        if devices % slurm.nodes:
            raise ConfigError(
                f"{matrix.source.name}: slurm.nodes: {slurm.nodes} nodes cannot share"
                f" training.devices: {devices} evenly; write a multiple of {slurm.nodes} devices"
            )
    if slurm.gpus is None or numbers[-1] <= slurm.gpus * slurm.nodes:
        return
    gpus = f"the {slurm.gpus} GPUs of slurm.gpus"
    if slurm.nodes > 1:
        gpus += f" on {slurm.nodes} nodes"
    raise ConfigError(f"{matrix.source.name}: training.devices: {numbers[-1]} exceeds {gpus}")


def submit_missing(
    matrices: list[Matrix],
    missing: list[Job],
    make_cell: MakeCell,
    at_once: int | None,
) -> int:
    """Submit the `missing` cells that are not running and have no job. Return their number.

    At most `at_once` cells of a study run at once. Raises ConfigError if submitit is missing, if a
    job exceeds a limit of the cluster, or if SLURM does not answer or refuses.
    """
    try:
        tasks = find_tasks({matrix.folder for matrix in matrices})
        queued = {folder: task.id for folder, task in tasks.items() if not task.is_over}
        jobs = [job for job in missing if job.folder not in queued and job.state() != "running"]
        if not jobs:
            return 0
        cluster = limits.read_cluster()
    except OSError as error:
        raise ConfigError(f"--launcher slurm: {error}") from error
    arrays: list[Array] = []
    for matrix in matrices:
        study_jobs = [job for job in jobs if job.study == matrix.name]
        arrays += _split(matrix, study_jobs, min(MAX_ARRAY, cluster.max_array))
    for array in arrays:
        slurm = array.matrix.source.study.slurm
        where = array.matrix.source.name
        limits.check(where, slurm, array.devices, len(array.jobs), cluster)
    out = matrices[0].folder.parent
    with one_at_a_time(out / code.STORE, "code"):
        parts: list[Path] = []
        for matrix in matrices:
            parts += matrix.source.parts
        snapshot = code.take_snapshot(out, parts)
        _submit_all(arrays, make_cell, at_once, snapshot, cluster)
        # If SLURM or the disk does not answer, the next submission removes them.
        with contextlib.suppress(OSError):
            queue = {job.name.removeprefix(NAME) for job in list_jobs()}
            code.remove_unneeded(out, queue, cluster.name)
    return len(jobs)


def _split(matrix: Matrix, jobs: list[Job], most: int) -> Iterator[Array]:
    """Yield the arrays of a study: at most `most` jobs, which all need equal resources."""
    by_devices: dict[int, list[Job]] = {}
    for job in jobs:
        by_devices.setdefault(job.processes, []).append(job)
    for devices, group in by_devices.items():
        for start in range(0, len(group), most):
            yield Array(matrix, devices, group[start : start + most])


def _submit_all(
    arrays: list[Array],
    make_cell: MakeCell,
    at_once: int | None,
    snapshot: Path,
    cluster: Cluster,
) -> None:
    """Submit the arrays. With `at_once`, an array of a study waits for the one before it.

    SLURM limits the jobs that run at once within an array only.
    """
    previous: dict[str, str] = {}
    submitted = 0
    for array in arrays:
        name = array.matrix.name
        after = previous.get(name) if at_once is not None else None
        try:
            array_id = _submit(array, make_cell, at_once, after, snapshot, cluster)
        except ConfigError as error:
            if not submitted:
                raise
            raise ConfigError(f"{error} (after {submitted} jobs, which are in the queue)") from None
        previous[name] = array_id
        submitted += len(array.jobs)


def _submit(
    array: Array,
    make_cell: MakeCell,
    at_once: int | None,
    after: str | None,
    snapshot: Path,
    cluster: Cluster,
) -> str:
    """Submit one array, which runs the code of `snapshot`, and return its id.

    `after` is the id of an array that ends first.
    """
    require("submitit", "--launcher slurm", "slurm")
    from submitit.core.utils import FailedJobError
    from submitit.slurm.slurm import SlurmExecutor

    slurm = array.matrix.source.study.slurm
    token = secrets.token_hex(4)
    batch = array.matrix.folder / ".slurm" / token
    for job in array.jobs:
        job.write_config()
    # Written before the submission, so that a later command finds the jobs even if this one dies.
    cells = [(job.path, len(folder.list_attempts(job.folder))) for job in array.jobs]
    write_atomic(batch / code.RECORD, f"{snapshot.name}\n{cluster.name}")
    write_atomic(batch / "batch.json", BATCH.dump_json(cells))
    parameters = make_parameters(slurm, array.devices)
    parameters["setup"] = [*slurm.setup, *code.activation_lines(snapshot)]
    if after is not None:
        parameters["dependency"] = f"afterany:{after}"
    try:
        with use_clean_environment():
            executor = SlurmExecutor(batch, max_num_timeout=slurm.timeouts, python=_python(slurm))
            executor.update_parameters(
                job_name=NAME + token,
                array_parallelism=min(at_once or len(array.jobs), len(array.jobs)),
                signal_delay_s=WARNING,
                **parameters,
            )
            submissions = []
            with executor.batch():
                for job in array.jobs:
                    moved = replace(job, folder=job.folder.resolve())
                    submissions.append(executor.submit(make_cell(moved, slurm.nodes)))
    except (FailedJobError, RuntimeError) as error:
        raise ConfigError(f"--launcher slurm: {_find_refusal(str(error))}") from error
    job_id: str = submissions[0].job_id
    return job_id.partition("_")[0]


def make_parameters(slurm: Slurm, devices: int) -> dict[str, Any]:
    """Return the parameters of submitit for cells on `devices` devices."""
    # On one node, one task starts all processes of a cell.
    cpus = slurm.cpus * devices if slurm.nodes == 1 else slurm.cpus
    parameters = slurm.model_dump(include={"partition", "account", "qos", "constraint", "mem"})
    parameters |= {"gpus_per_node": slurm.gpus, "cpus_per_task": cpus, "time": slurm.minutes}
    parameters["srun_args"] = [
        # Since SLURM 22.05, srun does not inherit sbatch's number of cores.
        f"--cpus-per-task={cpus}",
        # Some clusters set SBATCH_EXPORT=NONE, with which srun would drop the variables of `setup`.
        "--export=ALL",
    ]
    # Some clusters set JobRequeue=0. A cell at its time limit would not be queued again.
    options: dict[str, Any] = {"requeue": True, **slurm.sbatch}
    if slurm.nodes > 1:
        parameters |= {"nodes": slurm.nodes, "ntasks_per_node": devices // slurm.nodes}
        # The runner is the batch script itself, and starts each process of a cell as a task.
        parameters["use_srun"] = False
        options["signal"] = f"B:USR2@{WARNING}"
    parameters["additional_parameters"] = options
    # Without a value, the cluster's default applies.
    return {name: value for name, value in parameters.items() if value is not None}


def _python(slurm: Slurm) -> str:
    """Return the shell's words that start Python in a job.

    SLURM signals only the batch script before the time limit of a job of several nodes, so Python
    replaces the script's shell.
    """
    python = shlex.quote(sys.executable)
    return python if slurm.nodes == 1 else f"exec {python}"


def _find_refusal(output: str) -> str:
    """Return the line of an error of submitit that says why sbatch has refused a job."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    refusals = [line for line in lines if line.startswith("sbatch: ")]
    return (refusals or lines)[-1]
