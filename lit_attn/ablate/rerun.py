"""`python -m lit_attn.ablate rerun stale|failed|CELL FILE`: run cells again from their first step.

The folders of the chosen cells are renamed to `aside-<number>-<seed>-<identity>`, which neither
status nor reports read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from lit_attn.ablate.plan import Job, Matrix
from lit_attn.cells.folder import read_result
from lit_attn.cells.lock import CellLocked, hold_lock
from lit_attn.cells.records import FailureClass
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError, suggest

USAGE = "rerun: write rerun stale, rerun failed or rerun STUDY/VARIANT/SEED, then the file"


def select_cells(matrices: list[Matrix], choice: str) -> list[Job]:
    """Return the stale cells, the failed cells, or the one cell that `choice` names.

    A result is stale if the code, the parts or the data have changed since. Raises ConfigError for
    an unknown cell, and if the data of a result cannot be read.
    """
    jobs = [job for matrix in matrices for job in matrix.jobs]
    if choice == "stale":
        return list(_find_stale(jobs))
    if choice == "failed":
        return [job for job in jobs if job.state() in get_args(FailureClass)]
    named = [job for job in jobs if choice == job.name or Path(choice) == job.folder]
    if not named:
        choices = ["stale", "failed", *(job.name for job in jobs)]
        raise ConfigError(f"rerun: no cell '{choice}'{suggest(choice, choices)}")
    return named


def set_aside(job: Job) -> None:
    """Rename the folder of a cell, and write its config.yaml to a new one.

    A SLURM job that waits for its turn finds the config.yaml there. Raises ConfigError if the cell
    is running, and OSError.
    """
    if not job.folder.exists():
        return
    number = 1
    while (aside := job.folder.with_name(f"aside-{number}-{job.folder.name}")).exists():
        number += 1
    try:
        with hold_lock(job.folder):
            job.folder.rename(aside)
        (aside / "lock").unlink(missing_ok=True)
        job.cell.write(job.folder / "config.yaml")
    except CellLocked as error:
        raise ConfigError(f"rerun: {job.name} is running; stop it first") from error


def _find_stale(jobs: list[Job]) -> Iterator[Job]:
    """Yield the cells whose results were computed with other code, parts or data."""
    # Imported here, because it hashes the package.
    from lit_attn.training.provenance import code_hash

    data_hashes: dict[str, str] = {}
    for job in jobs:
        result = read_result(job.folder, job.identity)
        if result is None:
            continue
        is_stale = result.code != code_hash(job.cell.parts)
        if not is_stale:
            # Loading the data takes long, so cells with the same data share the hash.
            data = job.cell.experiment.data.model_dump_json()
            if data not in data_hashes:
                data_hashes[data] = _hash_data(job.cell)
            is_stale = result.data != data_hashes[data]
        if is_stale:
            yield job


def _hash_data(cell: Cell) -> str:
    import torch

    return str(cell.experiment.data.build(cell.seed, torch.device("cpu")).fingerprint())
