"""Submits what is missing, one job array for each study, through submitit."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lit_attn.ablate.plan import Job, Matrix
from lit_attn.ablate.slurm.job import SlurmCell
from lit_attn.ablate.slurm.queue import NAME, Batch, Place, find
from lit_attn.cells.folder import list_attempts
from lit_attn.config.slurm import Slurm
from lit_attn.config.source import Mapping
from lit_attn.schema.errors import ConfigError, explain

LARGEST = 1000
"""Jobs of one array; SLURM's own limit is 1001 unless a site has changed it."""
WARNING = 120
"""Seconds before its time is up that a job is told to save."""


def resources(matrix: Matrix, changes: Mapping) -> Slurm:
    """A study's `slurm:` under `changes`, which are the command line's; ConfigError if invalid."""
    given = matrix.source.study.slurm.model_dump(exclude_unset=True)
    try:
        slurm = Slurm.model_validate({**given, **changes})
    except ValidationError as error:
        raise explain(error, "--slurm") from error
    devices = {job.cell.experiment.training.devices for job in matrix.jobs}
    wrong = max(devices)
    if slurm.gpus is not None and slurm.gpus * slurm.nodes < wrong:
        raise ConfigError(
            f"{matrix.source.name}: training.devices: {wrong}, and slurm asks for "
            f"{slurm.gpus * slurm.nodes} GPUs"
        )
    if slurm.nodes > 1 and (len(devices) > 1 or wrong % slurm.nodes):
        numbers = ", ".join(map(str, sorted(devices)))
        raise ConfigError(
            f"{matrix.source.name}: slurm.nodes: {slurm.nodes} nodes cannot share "
            f"training.devices: {numbers} evenly"
        )
    return slurm


def submit_missing(
    matrices: Sequence[Matrix],
    missing: Sequence[Job],
    wanted: dict[Path, Slurm],
    make: Callable[[Job], SlurmCell],
    at_once: int | None,
) -> int:
    """Submit those of `missing` that nobody runs and no job is there for; how many that were.

    `wanted` are each study's resources, by its folder; at most `at_once` cells of it run together.
    """
    try:
        tasks = find(matrices)
    except OSError as error:
        raise ConfigError(f"--launcher slurm: {error}") from error
    queued = {folder for folder, task in tasks.items() if not task.is_over}
    todo = [job for job in missing if job.folder not in queued and job.state() != "running"]
    for matrix in matrices:
        own = [job for job in todo if job.cell.study == matrix.name]
        for start in range(0, len(own), LARGEST):
            part = own[start : start + LARGEST]
            _submit(matrix.folder, part, wanted[matrix.folder], make, at_once)
    return len(todo)


def _submit(
    study: Path,
    jobs: Sequence[Job],
    slurm: Slurm,
    make: Callable[[Job], SlurmCell],
    at_once: int | None,
) -> None:
    """Raises ConfigError where submitit is missing or SLURM refuses."""
    try:
        from submitit.core.utils import FailedJobError
        from submitit.slurm.slurm import SlurmExecutor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--launcher slurm: needs {error.name}, which is not installed: "
            "pip install 'lit_attn[slurm]'"
        ) from error
    token = secrets.token_hex(4)
    folder = study / ".slurm" / token
    for job in jobs:
        job.cell.write(job.folder / "config.yaml")
    # Before the jobs are there: whoever is killed in between must find them again.
    places = [
        Place(folder=job.cell.folder, attempts=len(list_attempts(job.folder))) for job in jobs
    ]
    Batch(cells=places).write(folder / "batch.json")
    try:
        executor = SlurmExecutor(folder, max_num_timeout=slurm.timeouts)
        executor.update_parameters(
            job_name=NAME + token,
            array_parallelism=min(at_once or len(jobs), len(jobs)),
            signal_delay_s=WARNING,
            # What sbatch is told of cores srun does not inherit since SLURM 22.05.
            srun_args=[f"--cpus-per-task={slurm.cpus}", "--kill-on-bad-exit=1"],
            ntasks_per_node=jobs[0].cell.experiment.training.devices // slurm.nodes
            if slurm.nodes > 1
            else 1,
            **_parameters(slurm),
        )
        with executor.batch():
            for job in jobs:
                executor.submit(make(job))
    except (FailedJobError, RuntimeError) as error:
        said = [line for line in str(error).splitlines() if line.strip()]
        raise ConfigError(f"--launcher slurm: {said[-1] if said else error}") from error


def _parameters(slurm: Slurm) -> dict[str, Any]:
    """In the words of submitit's SLURM executor."""
    said = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "nodes": slurm.nodes,
        "gpus_per_node": slurm.gpus,
        "cpus_per_task": slurm.cpus,
        "mem": slurm.mem,
        "time": slurm.minutes,
        "setup": list(slurm.setup) or None,
    }
    return {name: value for name, value in said.items() if value is not None}
