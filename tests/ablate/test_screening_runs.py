"""Runs and answers of studies with `design`: both stages, interrupts, failures, renamed studies."""

import signal
from pathlib import Path

import pytest
from helpers import designs, studies
from helpers.answers import read_answer
from helpers.commands import run_python
from helpers.runs import TIMEOUT, start_cli, wait_until
from helpers.study_runs import kill_study, read_metrics, run_study

from lit_attn import Study
from lit_attn.__main__ import main
from lit_attn.report.statistics import designs as report_designs

VALUES = {"base": 0.5, "a": 0.4, "b": 0.6, "c": 0.45, "d": 0.7}
NAMED = ("base", "a-weak", "b-good", "c-dull", "d-good")


def run(folder: Path, *words: str) -> str:
    done = run_python(folder, "-m", "helpers.fake_cells", "ablations.yaml", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def list_runs(folder: Path, study: str = "tiny") -> list[str]:
    """Return the cells in the order in which they have started."""
    return (folder / "runs" / study / "ran.txt").read_text().split()


@pytest.mark.process
def test_a_run_screens_and_then_confirms_and_a_cut_run_continues(tmp_path: Path) -> None:
    designs.write(tmp_path, names=NAMED)
    output = run(tmp_path, "--jobs", "1", "--limit", "4")
    assert "screening: 4 cells to run" in output
    assert "need a result of every seed before variants are chosen" in output
    status = run_python(tmp_path, "-m", "lit_attn", "status")
    assert "screening  not ended; then base and the best 2 x 3 fresh seeds = 9 cells" in (
        status.stdout
    )
    output = run(tmp_path, "--jobs", "1")
    assert "screening: 6 cells to run" in output
    assert "9 cells: 0 done, 9 to run" in output
    expected = [f"{name}/{seed}" for seed in (0, 1) for name in NAMED]
    fresh = (1000, 1001, 1002)
    expected += [f"{name}/{seed}" for seed in fresh for name in ("base", "b-good", "d-good")]
    assert list_runs(tmp_path) == expected
    output = run(tmp_path)
    assert "9 cells: 9 done, 0 to run" in output
    assert list_runs(tmp_path) == expected
    status = run_python(tmp_path, "-m", "lit_attn", "status")
    assert "19 done" in status.stdout
    assert "screening  kept b-good, d-good, confirmed with 3 fresh seeds" in status.stdout


@pytest.mark.process
def test_an_interrupt_ends_the_screening_and_the_same_command_continues(tmp_path: Path) -> None:
    designs.write(tmp_path, names=("base", "gated-weak", "gated-good", "gated-dull"))
    study = tmp_path / "runs/tiny"
    with start_cli(tmp_path, "--jobs", "1") as process:
        wait_until(lambda: any(study.glob("gated-weak/*/progress.json")))
        process.send_signal(signal.SIGINT)
        wait_until(lambda: process.poll() is not None or not (study / "go").touch())
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, output
    assert list_runs(tmp_path) == ["base/0", "gated-weak/0"]
    assert designs.kept(designs.read(tmp_path)) is None
    run(tmp_path)
    assert designs.kept(designs.read(tmp_path)) == ["gated-good", "gated-dull"]
    # No cell has run twice.
    assert len(set(list_runs(tmp_path))) == len(list_runs(tmp_path)) == 8 + 9


@pytest.mark.process
def test_a_screening_with_a_failed_cell_ends_with_exit_code_1(tmp_path: Path) -> None:
    designs.write(tmp_path, names=("base", "a-weak", "crash-good", "c-dull"))
    done = run_python(tmp_path, "-m", "helpers.fake_cells", "ablations.yaml")
    assert done.returncode == 1
    assert "screening: crash-good need" in done.stdout
    assert not any(line.endswith("/1000") for line in list_runs(tmp_path))


@pytest.mark.process
def test_a_failed_cell_that_is_run_again_leaves_the_choice_to_the_next_run(tmp_path: Path) -> None:
    names = ("base", "a-weak", "b-good", "c-dull")
    designs.write(tmp_path, names=names)
    for job in designs.read(tmp_path).screening_jobs:
        if job.name == "tiny/b-good/1":
            designs.fail(job, "error")
        else:
            designs.finish(job, 0.3 if job.variant == "c-dull" else 0.5)
    words = ("-m", "helpers.fake_cells", "rerun", "failed", "ablations.yaml")
    done = run_python(tmp_path, *words)
    assert done.returncode == 0, done.stdout
    assert "screening: " not in done.stdout
    assert list_runs(tmp_path) == ["b-good/1"]
    assert designs.kept(designs.read(tmp_path)) == ["a-weak", "b-good"]


@pytest.mark.slow
def test_a_run_that_is_killed_in_both_stages_gives_the_same_table(tmp_path: Path) -> None:
    """The cells train. The first kill ends the screening, the second one the confirmation."""
    names = ("base", "a", "b", "c")
    folders = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
        designs.write(folder, "{screen: 1, keep: 1, confirm: 2}", names)
    run_study(folders[0], "--jobs", "2")
    for results in (2, 5):
        kill_study(folders[1], results, "--jobs", "1")
    run_study(folders[1], "--jobs", "2")
    records = [(folder / "runs/tiny/screening.json").read_bytes() for folder in folders]
    assert records[0] == records[1]
    values = [read_metrics(folder) for folder in folders]
    assert values[0] == values[1]
    assert len(values[0]) == 4


def test_the_answer_of_a_dry_run_has_both_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    designs.write(tmp_path, "{screen: 2, keep: 2, confirm: 8}")
    assert main(["run", "--dry-run", "--json"]) == 0
    (study,) = read_answer(capsys.readouterr().out)["studies"]
    assert study["variants"] == list(designs.NAMES)
    assert study["seeds"] == list(range(1000, 1008))
    assert len(study["cells"]) == study["to_run"] == 10
    assert study["screening"] is None
    stages = report_designs.Screening(2, 2, 8)
    assert study["power"] == pytest.approx(stages.power(4))
    design = study["design"]
    assert (design["trainings"], design["kept"]) == (34, None)
    designs.finish_screening(tmp_path, VALUES)
    main(["run", "--dry-run", "--json"])
    (study,) = read_answer(capsys.readouterr().out)["studies"]
    assert (len(study["cells"]), study["to_run"]) == (34, 24)
    assert study["design"]["kept"] == ["b", "d"]
    assert main(["status", "--json"]) == 0
    (status,) = read_answer(capsys.readouterr().out)["studies"]
    assert status["design"] == study["design"]
    assert status["counts"] == {"done": 10, "missing": 24}
    # Text has the same two stages.
    main(["run", "--dry-run"])
    output = capsys.readouterr().out
    assert "  design: screen all variants with 2 seeds by val/accuracy, and confirm the" in output
    assert "  screening: 5 variants x 2 seeds = 10 cells: 10 done\n" in output
    assert "  3 variants x 8 seeds = 24 cells: 24 missing\n" in output


def test_a_study_in_python_has_a_design(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(studies.EXPERIMENT)
    study = Study(
        "many",
        experiment="experiment.yaml",
        folder=tmp_path,
        out=tmp_path / "runs",
        design={"screen": 1, "keep": 1, "confirm": 2},
        baseline="a",
        cells={"a": {}, "b": {"optimizer.lr": 2e-3}, "c": {"optimizer.lr": 3e-3}},
    )
    assert repr(study) == (
        "Study('many': 3 variants x 1 seed, the best 1 and the baseline x 2 seeds; 3 cells:"
        " 3 missing)"
    )
    assert list(study.status()["variant"]) == ["a", "b", "c"]
    assert study.expand() == []
