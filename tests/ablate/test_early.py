"""First tables of a study, which are written while its other cells run."""

import io
from pathlib import Path

import pytest
from helpers import fake_cells, studies
from helpers.runs import make_body

from lit_attn.ablate.display import Display
from lit_attn.ablate.early import EarlyTables
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import make_slots

pytestmark = pytest.mark.process


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    """A study of two variants with two seeds, without results."""
    path = studies.study(tmp_path, make_body("ok", "ok-2"))
    matrix = expand(path, tmp_path / "runs")
    matrix.write_plan()
    return matrix


def run(cells: list[Job], early: EarlyTables) -> list[str]:
    """Run fake cells one after another and return the events of the display about tables."""
    output = io.StringIO()
    launcher = Launcher(fake_cells.TARGET)
    runner = Runner(launcher, make_slots(1), Display(output), observe=early.update)
    runner.run(cells)
    # The state of the run follows each event.
    lines = [line.partition("  [")[0] for line in output.getvalue().splitlines()]
    return [line for line in lines if line.startswith("tables")]


def make_early(matrix: Matrix) -> EarlyTables:
    folders = [job.folder for job in matrix.jobs]
    return EarlyTables(matrix.folder.parent, matrix.folder.parents[1] / "reports", folders)


def test_tables_are_written_once_when_every_variant_has_a_result(matrix: Matrix) -> None:
    reports = matrix.folder.parents[1] / "reports" / "tiny"
    first_seed = [job for job in matrix.jobs if job.seed == 0]
    assert [job.variant for job in first_seed] == ["ok", "ok-2"]
    early = make_early(matrix)
    assert run(first_seed[:1], early) == []
    assert not reports.exists()
    third = next(job for job in matrix.jobs if job.seed == 1)
    (line,) = run([first_seed[1], third], early)
    assert line == f"tables   first ones, 2 cells to come: {reports / 'table.html'}"
    rows = (reports / "table.csv").read_text().splitlines()
    assert len(rows) == 3
    assert (reports.parent / "index.html").exists()


def test_a_study_without_missing_cells_gets_its_last_tables_alone(matrix: Matrix) -> None:
    single = [job for job in matrix.jobs if job.variant == "ok"]
    others = [job for job in matrix.jobs if job.variant == "ok-2"]
    assert run(single, make_early(matrix)) == []
    early = make_early(matrix)
    (line,) = run(others, early)
    assert "1 cell to come" in line


def test_tables_of_an_earlier_run_are_not_the_first_ones(matrix: Matrix) -> None:
    run([job for job in matrix.jobs if job.seed == 0], make_early(matrix))
    early = make_early(matrix)
    assert run([job for job in matrix.jobs if job.seed == 1], early) == []


def test_tables_that_cannot_be_written_do_not_stop_the_cells(matrix: Matrix) -> None:
    reports = matrix.folder.parents[1] / "reports"
    reports.write_text("a file in the place of the folder")
    error = run(list(matrix.jobs), make_early(matrix))[0]
    assert error.startswith("tables   first ones of tiny not written: ")
    assert str(reports) in error
    assert all(job.state() == "done" for job in matrix.jobs)
    assert reports.read_text() == "a file in the place of the folder"


def test_results_of_another_runner_count(matrix: Matrix) -> None:
    """Each of two runners on the same folder trains one of the variants."""
    ok, other = [job for job in matrix.jobs if job.seed == 0]
    early = make_early(matrix)
    assert run([ok], early) == []
    run([other], make_early(matrix))
    third = next(job for job in matrix.jobs if job.seed == 1)
    (line,) = run([third], early)
    assert "1 cell to come" in line


def test_trials_of_a_search_begin_no_tables(tmp_path: Path) -> None:
    """The plan has their cells besides those of the variants."""
    tune = "\ntune: {optimizer.weight_decay: [0.1, 0.2], select: val/loss, seeds: [100]}"
    source = studies.study(tmp_path, make_body("ok", "ok-2") + tune)
    matrix = expand(source, tmp_path / "runs")
    matrix.write_plan()
    assert len(matrix.trials) == 4
    assert run(matrix.trials, make_early(matrix)) == []


def test_an_unexpected_error_is_one_line(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in the report does not end a run, and is not silent."""

    def break_report(*arguments: object) -> None:
        raise TypeError("a mistake\nin the report")

    monkeypatch.setattr("lit_attn.ablate.early.write_reports", break_report)
    first_seed = [job for job in matrix.jobs if job.seed == 0]
    (error,) = run(first_seed, make_early(matrix))
    expected = "first ones of tiny not written: this is a mistake of lit_attn (TypeError: a mistake"
    assert error.startswith(f"tables   {expected} in the report, ")
    assert "its traceback is in " in error


def test_a_run_of_some_seeds_needs_no_first_tables(matrix: Matrix) -> None:
    """After its last cell it writes its tables, though the plan has more seeds."""
    jobs = [job for job in matrix.jobs if job.seed == 0]
    folders = [job.folder for job in jobs]
    early = EarlyTables(matrix.folder.parent, matrix.folder.parents[1] / "reports", folders)
    assert run(jobs, early) == []
