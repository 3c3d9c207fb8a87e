"""Rules `gates` and `stop: futility` with each other, with `tune`, and with equal times."""

import json
from pathlib import Path

import pytest
from helpers.fake_cells import measure, result
from helpers.ladders import (
    SIZES,
    TUNED,
    TWO_SIZES,
    count_results,
    expand,
    finish,
    read_endings,
    run,
    write_ladder,
)

from lit_attn.__main__ import main
from lit_attn.ablate.plan import Job
from lit_attn.cells.folder import create_attempt
from lit_attn.cells.records import Exit, FailureClass, Plan, StepTimes, TimedVariant
from lit_attn.report.judge import judge_study
from lit_attn.report.read import read_studies
from lit_attn.schema.errors import ConfigError

LAYERS = "layer: {base: {}, weak: {optimizer.lr: 2}, good: {optimizer.lr: 3}}"
FOUR_LAYERS = LAYERS.replace("good:", "dull: {optimizer.lr: 4}, good:")
BOTH = f"stop: futility\n{TWO_SIZES.replace(LAYERS, FOUR_LAYERS).strip()}"
TUNE = "tune: {optimizer.lr: [1, 2, 4], select: val/loss, seeds: [100, 101]}\n"


def fail(job: Job, failure: FailureClass = "error") -> None:
    """Record a failed attempt of a cell."""
    attempt = create_attempt(job.folder)
    Exit(failure=failure, returncode=1, message="RuntimeError: broken").write(attempt / "exit.json")


def test_futility_and_gates_end_different_variants(tmp_path: Path) -> None:
    """A variant that futility ends at a size is not worse there, so it starts at the next one."""
    write_ladder(tmp_path, BOTH, "10")
    starts = run(tmp_path)
    assert "tiny-small/weak" in starts[0]
    assert "tiny-medium/weak" not in starts[1]
    for name in SIZES[:2]:
        endings = read_endings(tmp_path, name)
        assert endings["dull"].rule == "futility"
        assert count_results(tmp_path, name, "dull") == endings["dull"].seeds < 10
        assert count_results(tmp_path, name, "good") == 10
    assert read_endings(tmp_path, "tiny-medium")["weak"].rule == "gate"
    assert count_results(tmp_path, "tiny-small", "weak") == 10
    assert run(tmp_path) == [[], []]


@pytest.mark.parametrize("failure", ["killed", "out-of-memory"])
def test_a_killed_cell_of_an_ended_variant_does_not_keep_the_next_size_waiting(
    tmp_path: Path, failure: FailureClass
) -> None:
    """No run trains the cell again, so nothing waits for it."""
    write_ladder(tmp_path, BOTH, "10")
    matrix = expand(tmp_path)[0]
    for job in matrix.jobs:
        if job.cell.variant != "dull" or job.cell.seed < 5:
            finish(job)
    fail(matrix.jobs[-2], failure)
    assert matrix.jobs[-2].name == "tiny-small/dull/9"
    matrix.write_plan()
    assert read_endings(tmp_path, "tiny-small")["dull"].rule == "futility"
    starts = run(tmp_path)
    assert len(starts) == 2
    assert "tiny-medium/good" in starts[1]
    (study,) = read_studies(tmp_path / "runs", ["tiny-small"])
    assert not judge_study(study).is_interim


def test_a_gate_does_not_search_a_worse_variant_and_a_sealed_plan_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ladder(tmp_path, TUNE + TUNED.lstrip(), "6")
    starts = run(tmp_path)
    trials = [name for start in starts for name in start if "@" in name]
    assert {name.partition("@")[0] for name in trials} == {
        "tiny-small/base", "tiny-small/weak", "tiny-small/good",
        "tiny-medium/base", "tiny-medium/good",
    }  # fmt: skip
    ending = read_endings(tmp_path, "tiny-medium")["weak"]
    assert (ending.rule, ending.seeds) == ("gate", 0)
    for name in SIZES[:2]:
        assert count_results(tmp_path, name, "good") == 6
        # All sizes were sealed before the first cell, and no decision has changed since.
        (entry,) = json.loads((tmp_path / "runs" / name / "seals.json").read_text())["entries"]
        assert entry["results"] == 0
    (study,) = read_studies(tmp_path / "runs", ["tiny-medium"])
    judged = judge_study(study)
    assert judged.next.kind == "none"
    assert not judged.is_interim
    assert run(tmp_path) == [[], []]
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["status"]) == 0
    status = capsys.readouterr().out
    assert "ended    weak  not tuned: not run: worse at size small (p = " in status
    # Its trials are not missing, so `status --watch` ends.
    assert main(["status", "--json"]) == 0
    by_name = {study["study"]: study for study in json.loads(capsys.readouterr().out)["studies"]}
    assert by_name["tiny-medium"]["counts"] == {"stopped": 6, "done": 24}
    assert main(["run", "ablations.yaml", "--dry-run", "--json"]) == 0
    _, planned = json.loads(capsys.readouterr().out)["studies"]
    assert planned["to_run"] == {"low": 0, "high": 0}


def test_a_study_in_the_middle_of_its_search_is_not_complete(tmp_path: Path) -> None:
    """Untuned variants have no cells, so none of their cells is missing."""
    write_ladder(tmp_path, TUNE + TUNED.lstrip(), "6")
    run(tmp_path, "--limit", "4")
    (study,) = read_studies(tmp_path / "runs", ["tiny-small"])
    judged = judge_study(study)
    assert judged.is_interim
    assert not any(variant.is_final for variant in judged.variants)
    assert judged.next.kind == "run"
    assert "The search of 3 variants has not ended" in judged.next.text
    (waiting,) = read_studies(tmp_path / "runs", ["tiny-medium"])
    assert judge_study(waiting).gates is not None
    assert judge_study(waiting).is_interim


def test_futility_ends_tuned_variants_and_no_search(tmp_path: Path) -> None:
    axes = "cells: {base: {}, dull: {optimizer.weight_decay: 4}, good: {optimizer.weight_decay: 3}}"
    body = f"baseline: base\nstop: futility\n{TUNE}{axes}"
    write_ladder(tmp_path, body, "10")
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
    (matrix,) = [matrix for matrix in expand(folder) if matrix.name == study]
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


def write_timed_ladder(folder: Path, extra: str = "", body: str = TWO_SIZES) -> None:
    """Write a study over two sizes, with rows at equal time."""
    write_ladder(folder, f"match: [parameters, time]\n{extra}{body.lstrip()}", "6")
    for name in SIZES[:2]:
        write_times(folder, name, base=1.0, weak=0.5, good=2.0)


def finish_fast(job: Job) -> None:
    """Give a cell a result; `weak` is as good as the baseline with twice as many steps."""
    finish(job)
    if job.cell.variant == "weak@time":
        metrics = measure(job.cell)
        assert metrics is not None
        metrics["test/accuracy"] += 0.05
        result(job.cell, metrics).write(job.folder / "result.json")


def test_a_gate_ends_one_row_of_a_variant_and_keeps_the_other(tmp_path: Path) -> None:
    write_timed_ladder(tmp_path)
    starts = run(tmp_path, end=finish_fast)
    assert "tiny-medium/weak@time" in starts[1]
    assert "tiny-medium/weak" not in starts[1]
    assert list(read_endings(tmp_path, "tiny-medium")) == ["weak"]
    assert count_results(tmp_path, "tiny-medium", "weak@time") == 6


def test_a_variant_with_one_row_that_is_not_worse_is_tuned(tmp_path: Path) -> None:
    """Before its search has ended, the variant stands for its rows under all criteria."""
    write_timed_ladder(tmp_path, TUNE, TUNED)
    starts = run(tmp_path, end=finish_fast)
    trials = [name for name in starts[2] if name.startswith("tiny-medium/weak@lr")]
    assert trials
    assert "tiny-medium/weak@time" in starts[3]
    assert "tiny-medium/weak" not in starts[3]
    assert list(read_endings(tmp_path, "tiny-medium")) == ["weak"]


def test_futility_keeps_the_row_at_equal_time_that_can_have_a_star(tmp_path: Path) -> None:
    cells = "cells: {base: {}, dull: {optimizer.lr: 2}}"
    body = f"baseline: base\nstop: futility\nmatch: [parameters, time]\n{cells}"
    write_ladder(tmp_path, body, "10")
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


@pytest.mark.parametrize("failed_variant", ["weak", "base"])
def test_failed_seeds_leave_a_gate_undecided(
    tmp_path: Path,
    failed_variant: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The variant runs at the next size, and no output calls it "not worse"."""
    write_ladder(tmp_path, TWO_SIZES, "6")

    def end(job: Job) -> None:
        is_failing = job.cell.variant == failed_variant and job.cell.seed < 3
        if job.cell.study == "tiny-small" and is_failing:
            fail(job)
        else:
            finish(job)

    starts = run(tmp_path, end=end)
    assert "tiny-medium/weak" in starts[1]
    reason = "undecided at size small: 3 of 6 seeds failed"
    if failed_variant == "base":
        reason = "undecided at size small: 3 seeds of the baseline failed"
    assert f"gate: weak {reason}, so it runs" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    assert f"gate     weak  {reason}, so it runs" in capsys.readouterr().out
    assert main(["judge", "tiny-medium"]) == 0
    assert f"Gates: weak is {reason}, so it runs." in " ".join(capsys.readouterr().out.split())
    assert main(["judge", "tiny-medium", "--json"]) == 0
    gates = json.loads(capsys.readouterr().out)["studies"][0]["gates"]
    assert {"variant": "weak", "text": reason} in gates["undecided"]


def test_seeds_that_fail_and_seeds_that_are_worse_decide_together(tmp_path: Path) -> None:
    """One failed seed of eight counts as the worst one, so both tests agree."""
    write_ladder(tmp_path, TWO_SIZES)

    def end(job: Job) -> None:
        if job.name == "tiny-small/weak/3":
            fail(job)
        else:
            finish(job)

    starts = run(tmp_path, end=end)
    assert "tiny-medium/weak" not in starts[1]
    # The next run tries the failed seed again before the next size goes on.
    assert run(tmp_path) == [["tiny-small/weak"], []]


def test_no_gate_decides_on_a_part_of_the_planned_seeds(tmp_path: Path) -> None:
    """The plan of the small size is older than the seeds of the file."""
    write_ladder(tmp_path, TWO_SIZES, "6")
    run(tmp_path, "--study", "tiny-small")
    write_ladder(tmp_path, TWO_SIZES, "9")
    with pytest.raises(ConfigError, match="tiny-small has not run with 3 planned seeds"):
        run(tmp_path, "--study", "tiny-medium")
    starts = run(tmp_path)
    assert set(starts[0]) == {"tiny-small/base", "tiny-small/weak", "tiny-small/good"}
    assert starts[1] == ["tiny-medium/base", "tiny-medium/good"]


def test_an_undefined_metric_is_a_seed_without_a_pair(tmp_path: Path) -> None:
    """A result leaves out a metric that is not finite, and the cell is not trained again."""
    cells = "cells: {base: {}, dull: {optimizer.lr: 2}}"
    write_ladder(tmp_path, f"baseline: base\nstop: futility\n{cells}", "10")

    def end(job: Job) -> None:
        finish(job)
        if job.name == "tiny/dull/0":
            result(job.cell, {"val/loss": 1.0}).write(job.folder / "result.json")

    run(tmp_path, end=end)
    assert read_endings(tmp_path, "tiny")["dull"].seeds < 10


def test_a_smoke_run_tries_every_cell(tmp_path: Path) -> None:
    """Values after one step decide nothing."""
    write_ladder(tmp_path, BOTH, "10")
    starts = run(tmp_path, "--smoke")
    layers = ["base", "weak", "dull", "good"]
    assert sorted(name for start in starts for name in start) == sorted(
        f"{size}@smoke/{layer}" for size in SIZES[:2] for layer in layers
    )


def test_the_dry_run_has_the_cost_as_a_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ladder(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "ablations.yaml", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "gates: waits, because tiny-small has no results" in text
    assert text.count("gates: 8 to 24 cells will run, because variants that are worse") == 2
    assert main(["run", "ablations.yaml", "--dry-run", "--json"]) == 0
    small, medium, _ = json.loads(capsys.readouterr().out)["studies"]
    assert small["to_run"] == {"low": 24, "high": 24}
    assert small["gates"]["waits"] is None
    assert medium["to_run"] == {"low": 8, "high": 24}
    assert medium["gates"]["waits"] == "tiny-small has no results"
    run(tmp_path, "--study", "tiny-small")
    capsys.readouterr()
    assert main(["run", "ablations.yaml", "--dry-run", "--json"]) == 0
    small, medium, large = json.loads(capsys.readouterr().out)["studies"]
    assert small["to_run"] == {"low": 0, "high": 0}
    assert medium["to_run"] == {"low": 16, "high": 16}
    (ended,) = medium["ended"]
    assert (ended["variant"], ended["rule"], ended["size"]) == ("weak", "gate", "size small")
    assert ended["p"] <= medium["gates"]["level"]
    assert large["to_run"] == {"low": 8, "high": 16}


def test_status_and_judge_name_the_size_that_a_study_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ladder(tmp_path)
    run(tmp_path, "--limit", "20")
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    assert "  waits    for its gate: tiny-small has 4 cells to run" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    by_name = {study["study"]: study for study in json.loads(capsys.readouterr().out)["studies"]}
    assert by_name["tiny-medium"]["gates"]["waits"] == "tiny-small has 4 cells to run"
    assert main(["judge", "tiny-medium", "--json"]) == 1
    (judged,) = json.loads(capsys.readouterr().out)["studies"]
    assert judged["gates"]["waits"] == "tiny-small has 4 cells to run"
    assert judged["next"]["kind"] == "run"
    assert "this is the largest number of cells" in judged["next"]["text"]


def test_the_next_action_of_a_decided_size_is_the_next_size(tmp_path: Path) -> None:
    """More seeds of an undecided variant would decide its gate again."""
    write_ladder(tmp_path, BOTH.replace("stop: futility\n", ""), "6")
    run(tmp_path, "--limit", "24")
    (small,) = read_studies(tmp_path / "runs", ["tiny-small"])
    action = judge_study(small).next
    assert action.kind == "run"
    assert "tiny-medium has 18 cells to run" in action.text
    run(tmp_path)
    (small,) = read_studies(tmp_path / "runs", ["tiny-small"])
    action = judge_study(small).next
    assert action.kind != "run"
