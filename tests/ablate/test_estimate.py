"""`--dry-run --estimate`: timings of a few steps, and the hours computed from them."""

from pathlib import Path

import pytest
from helpers import designs, studies
from helpers.commands import run_python

from lit_attn.ablate.__main__ import main
from lit_attn.ablate.display import Display, LiveDisplay
from lit_attn.ablate.dry_run import format_hours, print_estimate
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.slots import Slots
from lit_attn.cells.records import Result, Timing

BODY = """\
baseline: plain
cells:
  plain: {}
  # Fails only in training.
  broken: {optimizer.lr: 1e+30, schedule.warmup: 0}
"""
TWO = "baseline: a\ncells: {a: {}, b: {optimizer.lr: 1}, c: {optimizer.lr: 2, training.devices: 2}}"


def timing(seconds: float) -> Timing:
    return Timing(
        startup=10.0,
        step_time=0.5,
        steps=round(2 * (seconds - 10 - 6)),
        evaluation_time=3.0,
        evaluations=2,
    )


def matrix(path: Path, body: str) -> Matrix:
    return expand(studies.study(path, body), path / "runs")


def test_hours_follow_from_timings_and_devices(tmp_path: Path) -> None:
    measured = matrix(tmp_path, TWO)
    assert timing(1800).seconds == 1800
    kinds = {job.variant: job.cell.kind for job in measured.jobs}
    timings = {kinds["a"]: timing(1800), kinds["c"]: timing(3600)}
    cores = Slots([None] * 4)
    # Two seeds each: half an hour on one core, and one hour on two cores. Four cores are busy.
    assert format_hours(measured, timings, cores) == (
        "tiny: 6 cells to run, 4 of them measured: 5.00 core hours, 1.25 hours with 4 at once"
    )


def test_the_hours_of_a_screening_name_those_of_the_confirmation(tmp_path: Path) -> None:
    designs.write(tmp_path)
    screened = designs.read(tmp_path)
    timings = {}
    for place, variant in enumerate(designs.NAMES):
        (kind,) = {j.cell.kind for j in screened.screening_jobs if j.variant == variant}
        timings[kind] = timing(1800 + 900 * place)
    cores = Slots([None] * 4)
    # Ten cells of an hour in the mean, and nine fresh ones.
    assert format_hours(screened, timings, cores) == (
        "tiny: 10 cells to run, 10 of them measured: 10.00 core hours, 2.50 hours with 4 at once;"
        " after the screening 9 cells: about 9.00 core hours"
    )
    confirmed = designs.finish_screening(tmp_path, dict.fromkeys(designs.NAMES, 0.5))
    assert "after" not in format_hours(confirmed, timings, cores)


def test_finished_cells_cost_nothing(tmp_path: Path) -> None:
    from helpers.fake_cells import result

    measured = matrix(tmp_path, TWO)
    timings = {job.cell.kind: timing(1800) for job in measured.jobs}
    for job in measured.jobs:
        result(job.cell).write(job.folder / "result.json")
    gpus = Slots(["0"] * 2)
    assert format_hours(measured, timings, gpus) == (
        "tiny: 0 cells to run, 0 of them measured: 0.00 GPU hours, 0.00 hours with 1 at once"
    )


@pytest.mark.process
def test_each_model_is_timed_once(tmp_path: Path) -> None:
    """Seeds share one timing, and the estimate leaves no files."""
    studies.write(tmp_path, BODY)
    words = ("-m", "lit_attn.ablate", "ablations.yaml", "--dry-run", "--estimate")
    done = run_python(tmp_path, *words)
    assert done.returncode == 1
    assert done.stdout.startswith("tiny: 4 cells to run, 2 of them measured: 0.0")
    assert done.stderr.count("done ") == 1
    assert done.stderr.count("diverged") == 1
    assert not (tmp_path / "runs").exists()


def test_an_estimate_shows_a_live_table_on_a_terminal_and_lines_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    displays: list[object] = []

    class Recorder:
        def __init__(self, launcher: object, slots: object, display: object) -> None:
            displays.append(type(display))

        def run(self, jobs: object) -> None: ...

    monkeypatch.setattr("lit_attn.ablate.dry_run.Runner", Recorder)
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        assert not print_estimate([matrix(tmp_path, BODY)], 1)
    assert displays == [Display, LiveDisplay]


def test_an_estimate_needs_enough_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.write(tmp_path, TWO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main(["ablations.yaml", "--dry-run", "--estimate"]) == 2
    assert "training.devices: 2 exceeds the 1 GPUs" in capsys.readouterr().err


@pytest.mark.process
def test_a_timing_predicts_the_whole_cell(tmp_path: Path) -> None:
    """The estimate includes epochs, evaluations and batches beyond the timed steps."""
    from helpers.training_cells import digits_cell, folder_of

    from lit_attn.train import time_cell

    training = {"epochs": 7, "evaluate_every": 3}
    cell = digits_cell(data={"batch_size": 100, "eval_batch_size": 100}, training=training)
    folder = folder_of(cell, tmp_path)
    time_cell(folder)
    measured = Timing.model_validate_json((folder / "timing.json").read_bytes())
    assert (measured.steps, measured.evaluations) == (7 * 12, 3)
    result = Result.model_validate_json((folder / "result.json").read_bytes())
    assert result.steps == 15
    # Splits of 237 and 360 images are 3 and 4 batches; two of each were evaluated.
    assert result.evaluation_time is not None
    assert measured.evaluation_time == pytest.approx(result.evaluation_time.median * 7 / 4)
