"""Floors of the studies of a run, computed once for the data and steps of each baseline."""

from collections.abc import Iterable

from lit_attn import train
from lit_attn.ablate.display import write_line
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import Matrix
from lit_attn.cells.floors import FLOORS_FILE, Floors
from lit_attn.cells.folder import read_result
from lit_attn.files import one_at_a_time

FLOORS_LOG = "floors.log"
"""Output of a computation of floors that failed."""

LIMIT = 600.0
"""Most seconds that the floors of one study may take."""


def write_floors(matrices: Iterable[Matrix], launcher: Launcher) -> None:
    """Write the floors of each study whose baseline has a result, and no record for its data.

    A record for other data or another number of steps is removed first. A study without floors is
    told in one line, and keeps its tables.
    """
    if launcher.module != train.__name__:
        # Cells of another program do not train on the data of their configuration.
        return
    for matrix in matrices:
        # Another runner in the same folder may have begun; its floors are used.
        with one_at_a_time(matrix.folder, "floors"):
            _write_floors_of(matrix, launcher)


def _write_floors_of(matrix: Matrix, launcher: Launcher) -> None:
    """Write the floors of one study unless its record has them."""
    job = _find_job_without_floors(matrix)
    if job is None:
        return
    write_line(f"{matrix.name}: computing the floors of its data")
    # Tables would show these floors if the new ones cannot be computed.
    (matrix.folder / FLOORS_FILE).unlink(missing_ok=True)
    log = matrix.folder / FLOORS_LOG
    log.unlink(missing_ok=True)
    arguments = (job.folder, matrix.folder / FLOORS_FILE, log)
    process = launcher.context.Process(target=train.write_floors, args=arguments)
    process.start()
    process.join(LIMIT)
    if process.exitcode is None:
        process.kill()
        process.join()
        write_line(
            f"warning: {matrix.name}: its floors took more than {LIMIT:.0f} s and were stopped"
        )
    elif process.exitcode == 0:
        # The cells have told the warnings of the data.
        log.unlink(missing_ok=True)
    else:
        write_line(
            f"warning: {matrix.name}: its floors could not be computed; the reason is in {log}"
        )


def _find_job_without_floors(matrix: Matrix) -> Job | None:
    """Return the first finished cell of the baseline if the record has no floors for it."""
    record = Floors.read_valid(matrix.folder / FLOORS_FILE)
    for job in matrix.jobs:
        if job.variant != matrix.source.study.baseline:
            continue
        result = read_result(job.folder, job.identity)
        if result is None:
            continue
        if record is not None and record.data == result.data:
            return None if record.inputs == job.cell.floor_inputs else job
        return job
    return None
