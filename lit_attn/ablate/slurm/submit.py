"""Submission of missing cells through submitit, one job array per study."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lit_attn.ablate.plan import Job, Matrix
from lit_attn.ablate.slurm.job import SlurmCell
from lit_attn.ablate.slurm.queue import NAME, Batch, BatchCell, find_tasks
from lit_attn.cells.folder import list_attempts
from lit_attn.config.slurm import Slurm
from lit_attn.config.source import Mapping
from lit_attn.schema.errors import ConfigError, explain

MAX_ARRAY = 1000
"""Jobs of one array; SLURM's default limit is 1001."""
WARNING = 120
"""Seconds before the time limit at which a job is told to write a checkpoint."""


def merge_resources(matrix: Matrix, changes: Mapping) -> Slurm:
    """Return a study's `slurm:` section with `changes` from the command line.

    Raises ConfigError if a value is wrong or the GPUs do not suffice for a cell.
    """
    written = matrix.source.study.slurm.model_dump(exclude_unset=True)
    try:
        slurm = Slurm.model_validate({**written, **changes})
    except ValidationError as error:
        raise explain(error, "--slurm") from error
    devices = {job.cell.experiment.training.devices for job in matrix.jobs}
    largest = max(devices)
    if slurm.gpus is not None and slurm.gpus * slurm.nodes < largest:
        raise ConfigError(
            f"{matrix.source.name}: training.devices: {largest} exceeds the "
            f"{slurm.gpus * slurm.nodes} GPUs of slurm.gpus x slurm.nodes"
        )
    if slurm.nodes > 1 and (len(devices) > 1 or largest % slurm.nodes):
        numbers = ", ".join(map(str, sorted(devices)))
        raise ConfigError(
            f"{matrix.source.name}: slurm.nodes: training.devices ({numbers}) must be one multiple "
            f"of {slurm.nodes} nodes"
        )
    return slurm


def submit_missing(
    matrices: Sequence[Matrix],
    missing: Sequence[Job],
    resources: dict[Path, Slurm],
    make: Callable[[Job], SlurmCell],
    at_once: int | None,
) -> int:
    """Submit the `missing` cells that are not running and have no job. Return their number.

    `resources` are those of each study, by its folder. At most `at_once` cells of a study run at
    once. Raises ConfigError if SLURM does not answer or refuses.
    """
    try:
        tasks = find_tasks(matrices)
    except OSError as error:
        raise ConfigError(f"--launcher slurm: {error}") from error
    queued = {folder for folder, task in tasks.items() if not task.is_over}
    jobs = [job for job in missing if job.folder not in queued and job.state() != "running"]
    for matrix in matrices:
        study_jobs = [job for job in jobs if job.cell.study == matrix.name]
        for start in range(0, len(study_jobs), MAX_ARRAY):
            array = study_jobs[start : start + MAX_ARRAY]
            _submit(matrix.folder, array, resources[matrix.folder], make, at_once)
    return len(jobs)


def _submit(
    study: Path,
    jobs: Sequence[Job],
    slurm: Slurm,
    make: Callable[[Job], SlurmCell],
    at_once: int | None,
) -> None:
    """Submit one array. Raises ConfigError if submitit is missing or SLURM refuses."""
    try:
        from submitit.core.utils import FailedJobError
        from submitit.slurm.slurm import SlurmExecutor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--launcher slurm: {error.name} is not installed; run pip install 'lit_attn[slurm]'"
        ) from error
    token = secrets.token_hex(4)
    folder = study / ".slurm" / token
    for job in jobs:
        job.cell.write(job.folder / "config.yaml")
    # Written before the submission, so that a later command finds the jobs even if this one dies.
    cells = [
        BatchCell(folder=job.cell.folder, attempts=len(list_attempts(job.folder))) for job in jobs
    ]
    Batch(cells=cells).write(folder / "batch.json")
    devices = jobs[0].cell.experiment.training.devices
    try:
        executor = SlurmExecutor(folder, max_num_timeout=slurm.timeouts)
        executor.update_parameters(
            job_name=NAME + token,
            array_parallelism=min(at_once or len(jobs), len(jobs)),
            signal_delay_s=WARNING,
            # Since SLURM 22.05, srun does not inherit sbatch's number of cores.
            srun_args=[f"--cpus-per-task={slurm.cpus}", "--kill-on-bad-exit=1"],
            ntasks_per_node=devices // slurm.nodes if slurm.nodes > 1 else 1,
            **_parameters(slurm),
        )
        with executor.batch():
            for job in jobs:
                executor.submit(make(job))
    except (FailedJobError, RuntimeError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ConfigError(f"--launcher slurm: {lines[-1] if lines else error}") from error


def _parameters(slurm: Slurm) -> dict[str, Any]:
    """Return the resources under their names in submitit."""
    values = {
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
    return {name: value for name, value in values.items() if value is not None}
