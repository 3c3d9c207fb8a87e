"""Small studies with `design`, whose results are invented."""

from collections.abc import Mapping
from pathlib import Path

from helpers import fake_cells, studies
from lit_attn.ablate.job import Job
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.cells.folder import create_attempt
from lit_attn.cells.records import Exit, FailureClass
from lit_attn.config.study import read_studies
from lit_attn.schema.yaml_text import Mapping as Tree

DESIGN = "{screen: 2, keep: 2, confirm: 3}"
NAMES = ("base", "a", "b", "c", "d")


def write(
    folder: Path, design: str = DESIGN, names: tuple[str, ...] = NAMES, more: str = ""
) -> Path:
    """Write a study whose variants differ in the learning rate; the first name is the baseline."""
    rates = [f"  {name}: {{optimizer.lr: {rate + 1}e-3}}" for rate, name in enumerate(names)]
    cells = "\n".join(rates)
    body = f"baseline: {names[0]}\ndesign: {design}\ncells:\n{cells}\n{more}"
    path = studies.write(folder, body)
    path.write_text(path.read_text().replace("    seeds: 2\n", ""))
    return path


def read(folder: Path, changes: Tree | None = None) -> Matrix:
    """Return the cells of the study in `folder`, with results in `folder`/runs."""
    return expand(read_studies(folder / "ablations.yaml")["tiny"], folder / "runs", changes)


def finish(job: Job, value: float, test: float = 0.5) -> None:
    """Write a result whose validation accuracy is `value`."""
    metrics = {"val/accuracy": value, "val/loss": 1 - value, "test/accuracy": test}
    fake_cells.result(job.cell, metrics).write(job.folder / "result.json")


def fail(job: Job, failure: FailureClass) -> None:
    """Write the end of an attempt without a result."""
    attempt = create_attempt(job.folder)
    Exit(failure=failure, returncode=1, message="x").write(attempt / "exit.json")


def finish_screening(folder: Path, values: Mapping[str, float | None], test: float = 0.5) -> Matrix:
    """Write the end of every cell of the screening; return the cells that follow from them.

    The two seeds of a variant differ from its value by a hundredth. Those without a value diverge.
    """
    matrix = read(folder)
    for job in matrix.screening_jobs:
        value = values[job.variant]
        if value is None:
            fail(job, "diverged")
        else:
            finish(job, value + 0.01 * (-1) ** job.seed, test)
    matrix = read(folder)
    matrix.write_plan()
    return matrix


def kept(matrix: Matrix) -> list[str] | None:
    """Return the variants that the screening keeps, None before it has ended."""
    assert matrix.screening is not None
    return matrix.screening.kept
