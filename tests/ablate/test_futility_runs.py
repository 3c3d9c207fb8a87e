"""Rule `stop: futility` in runs: with `tune`, with equal times, and in a smoke run."""

import json
from pathlib import Path

import pytest
from helpers.fake_cells import measure, result
from helpers.futility import DULL, count_results, expand, finish, read_endings, run, write_study

from lit_attn.__main__ import main
from lit_attn.ablate.plan import Job
from lit_attn.cells.folder import create_attempt
from lit_attn.cells.records import Exit, FailureClass, Plan, StepTimes, TimedVariant
from lit_attn.report.records.read import read_studies
from lit_attn.report.verdicts.judge import judge_study

TUNE = "tune: {optimizer.lr: [1, 2, 4], select: val/loss, seeds: [100, 101]}\n"
TUNED = f"{TUNE}cells: {{base: {{}}, dull: {{optimizer.weight_decay: 4}}}}"


def fail(job: Job, failure: FailureClass = "error") -> None:
    """Record a failed attempt of a cell."""
    attempt = create_attempt(job.folder)
    Exit(failure=failure, returncode=1, message="RuntimeError: broken").write(attempt / "exit.json")


@pytest.mark.parametrize("failure", ["killed", "out-of-memory"])
def test_a_killed_cell_of_an_ended_variant_is_not_trained_again(
    tmp_path: Path, failure: FailureClass
) -> None:
    """No run trains the cell again, so no verdict waits for it."""
    write_study(tmp_path)
    (matrix,) = expand(tmp_path)
    for job in matrix.jobs:
        if job.cell.variant != "dull" or job.cell.seed < 5:
            finish(job)
    fail(matrix.jobs[-1], failure)
    matrix.write_plan()
    assert read_endings(tmp_path, "tiny")["dull"].rule == "futility"
    assert run(tmp_path) == [[]]
    (study,) = read_studies(tmp_path / "runs")
    assert not judge_study(study).is_interim


def test_a_study_in_the_middle_of_its_search_is_not_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Untuned variants have no cells, so none of their cells is missing."""
    write_study(tmp_path, TUNED)
    run(tmp_path, "--limit", "4")
    assert "tuning: the search of 2 variants has not ended" in capsys.readouterr().out
    (study,) = read_studies(tmp_path / "runs")
    judged = judge_study(study)
    assert judged.is_interim
    assert not any(variant.is_final for variant in judged.variants)
    assert judged.next.kind == "run"
    assert "The search of 2 variants has not ended" in judged.next.text


def test_futility_ends_tuned_variants_and_no_search(tmp_path: Path) -> None:
    write_study(tmp_path, TUNED)
    starts = run(tmp_path)
    assert len(starts) == 2
    ending = read_endings(tmp_path, "tiny")["dull"]
    assert ending.rule == "futility"
    plan = Plan.load(tmp_path / "runs" / "tiny" / "plan.json")
    trials = [cell for cell in plan.trials if cell.variant.startswith("dull@")]
    assert all((tmp_path / "runs/tiny" / cell.path / "result.json").exists() for cell in trials)
    assert len(trials) == 6
    assert count_results(tmp_path, "tiny", "dull") == ending.seeds < 10
    assert run(tmp_path) == [[]]


def write_times(folder: Path, study: str, **ratios: float) -> None:
    """Record step times of the variants of a study, relative to `base`."""
    (matrix,) = expand(folder)
    kinds = {variant.name: variant.cell("", 0).kind for variant in matrix.written}
    timed = []
    for name, ratio in ratios.items():
        entry = TimedVariant(
            variant=name,
            kind=kinds[name],
            baseline_kind=kinds["base"],
            seconds=ratio,
            ratio=ratio,
            spread=0.0,
        )
        timed.append(entry)
    StepTimes(device="CPU", variants=timed).write(matrix.folder / "step_times.json")


def test_futility_keeps_the_row_at_equal_time_that_can_have_a_star(tmp_path: Path) -> None:
    write_study(tmp_path, f"match: [parameters, time]\n{DULL}")
    write_times(tmp_path, "tiny", base=1.0, dull=0.5)

    def end(job: Job) -> None:
        finish(job)
        if job.cell.variant == "dull@time":
            metrics = measure(job.cell)
            assert metrics is not None
            metrics["test/accuracy"] += 0.1
            result(job.cell, metrics).write(job.folder / "result.json")

    run(tmp_path, end=end)
    assert list(read_endings(tmp_path, "tiny")) == ["dull"]
    assert count_results(tmp_path, "tiny", "dull@time") == 10
    assert count_results(tmp_path, "tiny", "base") == 10


def test_an_undefined_metric_is_a_seed_without_a_pair(tmp_path: Path) -> None:
    """A result leaves out a metric that is not finite, and the cell is not trained again."""
    write_study(tmp_path)

    def end(job: Job) -> None:
        finish(job)
        if job.name == "tiny/dull/0":
            result(job.cell, {"val/loss": 1.0}).write(job.folder / "result.json")

    run(tmp_path, end=end)
    assert read_endings(tmp_path, "tiny")["dull"].seeds < 10


def test_a_smoke_run_tries_every_cell(tmp_path: Path) -> None:
    """Values after one step decide nothing."""
    write_study(tmp_path)
    assert run(tmp_path, "--smoke") == [["tiny@smoke/base", "tiny@smoke/dull"]]


def test_the_dry_run_counts_no_cell_of_an_ended_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "ablations.yaml", "--dry-run", "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["studies"]
    assert (planned["to_run"], planned["ended"]) == (20, [])
    run(tmp_path)
    capsys.readouterr()
    assert main(["run", "ablations.yaml", "--dry-run", "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["studies"]
    (ended,) = planned["ended"]
    assert (planned["to_run"], ended["rule"]) == (0, "futility")
    assert f"after {ended['seeds']} of 10 seeds" in ended["text"]


def test_records_with_the_former_rule_of_gates_stay_readable(tmp_path: Path) -> None:
    """The rule has left the package: the cells that it had ended are missing."""
    write_study(tmp_path)
    (matrix,) = expand(tmp_path)
    for job in matrix.jobs:
        if job.cell.variant == "base":
            finish(job)
    matrix.write_plan()
    gate = {"axis": "size", "size": "large", "before": ["tiny-small"], "level": 0.025}
    folder = tmp_path / "runs" / "tiny"
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"stop": None, "gate": gate}))
    seals = json.loads((folder / "seals.json").read_text())
    seals["entries"][0]["gate"] = gate
    (folder / "seals.json").write_text(json.dumps(seals))
    dull = next(job for job in matrix.jobs if job.cell.variant == "dull")
    entry = {"variant": "dull", "identity": dull.identity, "rule": "gate", "seeds": 0}
    entry |= {"planned": 10, "power": None, "size": "size small", "p": 0.01}
    (folder / "endings.json").write_text(json.dumps({"entries": [entry]}))
    (study,) = read_studies(tmp_path / "runs")
    assert study.endings == {}
    assert study.unreadable == []
    judged = judge_study(study)
    assert judged.next.cells == 10
    assert (judged.variants[0].ended, judged.variants[0].verdict) == (None, "undecided")
