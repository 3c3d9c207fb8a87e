"""Equal cost: `match: flops`, `match: time`, and lists of criteria."""

import contextlib
from pathlib import Path

import pytest
from helpers import studies
from helpers.study_runs import run_study

from lit_attn.ablate import __main__ as ablate
from lit_attn.ablate import launch, step_times
from lit_attn.ablate.match import count_step_flops, read_ratios
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.slots import Slots, make_slots
from lit_attn.ablate.step_times import measure_step_times, time_variants
from lit_attn.ablate.variants import Variant
from lit_attn.cells.folder import read_progress
from lit_attn.cells.records import Plan, Result, StepTimes, TimedVariant
from lit_attn.config.cell import Cell
from lit_attn.config.study import read_studies
from lit_attn.models import factory
from lit_attn.optim.schedules import Cosine, stretch
from lit_attn.schema.errors import ConfigError
from lit_attn.train import CheckEnd

BODY = """\
baseline: a
match: [parameters, flops, time]
cells: {a: {}, b: {attention: mgk}, c: {zz: with}}
"""
STEPS = 2 * 18


def make_matrix(folder: Path, body: str = BODY) -> Matrix:
    return expand(read_studies(studies.write(folder, body))["tiny"], folder / "runs")


def make_times(matrix: Matrix, ratios: dict[str, float], **spreads: float) -> StepTimes:
    kinds = {variant.name: variant.cell("", 0).kind for variant in matrix.written}
    variants = [
        TimedVariant(
            variant=name,
            kind=kinds[name],
            baseline_kind=kinds["a"],
            seconds=ratio,
            ratio=ratio,
            spread=spreads.get(name, 0.0),
        )
        for name, ratio in ratios.items()
    ]
    return StepTimes(device="CPU", variants=variants)


def write_times(matrix: Matrix, **ratios: float) -> None:
    make_times(matrix, ratios).write(matrix.folder / "step_times.json")


def test_criteria_give_blocks_that_share_the_baseline(tmp_path: Path) -> None:
    matrix = make_matrix(tmp_path)
    assert not matrix.is_measured
    write_times(matrix, a=1.0, b=2.0, c=0.8)
    matrix = make_matrix(tmp_path)
    assert matrix.is_measured
    plan = matrix.plan()
    assert plan.criteria == ["parameters", "flops", "time"]
    names = {(v.variant, v.criterion): (v.name, v.stretch) for v in plan.variants}
    assert names[("a", "parameters")] == ("a", 1)
    assert ("a", "time") not in names
    assert names[("b", "time")] == ("b@time", 0.5)
    assert names[("c", "time")] == ("c@time", 1.25)
    a, b = (next(v for v in matrix.written if v.name == name) for name in "ab")
    expected = count_step_flops(a) / count_step_flops(b)
    assert names[("b", "flops")] == ("b@flops", pytest.approx(expected, rel=1e-3))
    # A cell is complete: alone it trains the same number of steps.
    path = tmp_path / "config.yaml"
    cells = {job.variant: job.cell for job in matrix.jobs}
    assert len({cell.fingerprint for cell in cells.values()}) == len(cells) == 7
    cells["b@time"].write(path)
    assert Cell.read(path).fingerprint == cells["b@time"].fingerprint
    assert Cell.read(path).experiment.training.steps(18) == STEPS / 2
    # The widths are matched in every block.
    assert cells["b@time"].match_to == cells["b"].match_to is not None


def test_a_measurement_of_another_model_is_not_used(tmp_path: Path) -> None:
    write_times(make_matrix(tmp_path), a=1.0, b=2.0, c=0.8)
    changed = BODY.replace("b: {attention: mgk}", "b: {attention: smgk}")
    variants = make_matrix(tmp_path, changed).plan().variants
    assert [v.name for v in variants if v.criterion == "time"] == ["c@time"]


def test_equal_cost_shares_the_cell(tmp_path: Path) -> None:
    write_times(make_matrix(tmp_path), a=1.0, b=1.0, c=0.8)
    plan = make_matrix(tmp_path).plan()
    paths = {(cell.variant, cell.seed): cell.path for cell in plan.cells}
    assert paths[("b@time", 0)] == paths[("b", 0)]


def test_the_count_of_flops_includes_the_backward_pass(tmp_path: Path) -> None:
    """The backward pass of a matrix product is two products of the same size."""
    a = make_matrix(tmp_path).written[0]
    forward = factory.describe(a.experiment.model, a.experiment.data).flops
    ratio = count_step_flops(a) / a.experiment.data.batch_size / forward
    # The first layer needs no gradient of its input.
    assert 2.6 < ratio < 3.4


def test_a_stretched_schedule_keeps_its_proportions() -> None:
    rate = Cosine(warmup=1).rate(1.0, 10, 4)
    slower, faster = stretch(rate, 1.5), stretch(rate, 0.5)
    assert [slower(15), slower(59)] == [rate(10), rate(39)]
    assert [faster(5), faster(19)] == [rate(11), rate(39)]
    # A factor that gives no step more delays none.
    nearly_equal = [stretch(rate, 1.006)(step) for step in range(40)]
    assert nearly_equal == [rate(step) for step in range(40)]
    assert stretch(rate, 1.0) is rate


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("match: [time, time]", "ablations.yaml:9: studies.tiny.match: needs a list of"),
        ("match: [none, parameters]", "ablations.yaml:9: studies.tiny.match: needs a list of"),
        ("match: []", "ablations.yaml:9: studies.tiny.match: needs a list of"),
        ("match: flop", "ablations.yaml:9: studies.tiny.match.0: "),
    ],
)
def test_wrong_criteria_are_one_error_line(tmp_path: Path, written: str, message: str) -> None:
    body = f"baseline: a\ncells: {{a: {{}}, b: {{zz: with}}}}\n{written}"
    with pytest.raises(ConfigError) as caught:
        make_matrix(tmp_path, body)
    text = str(caught.value).replace(f"{tmp_path}/", "")
    assert text.startswith(message), text
    assert "\n" not in text


def test_another_length_of_training_is_refused(tmp_path: Path) -> None:
    body = "baseline: a\nmatch: flops\ncells: {a: {}, b: {training.epochs: 3}}"
    with pytest.raises(ConfigError, match=r"variant 'b': match: flops: data, training.epochs and"):
        make_matrix(tmp_path, body)


@pytest.mark.parametrize("criterion", ["flops", "time"])
def test_early_stopping_is_refused_where_budgets_are_equal(criterion: str, tmp_path: Path) -> None:
    stop = "set: {training.stop: {patience: 2}}"
    body = f"baseline: a\nmatch: {criterion}\n{stop}\ncells: {{a: {{}}, b: {{zz: with}}}}"
    with pytest.raises(ConfigError, match=f"match: {criterion}: excludes training.stop") as caught:
        make_matrix(tmp_path, body)
    assert "\n" not in str(caught.value)


def test_a_callback_that_can_end_a_training_is_refused_where_budgets_are_equal(
    tmp_path: Path,
) -> None:
    target = "lightning.pytorch.callbacks:EarlyStopping"
    callback = f"{{kind: module, import: '{target}', arguments: {{monitor: val/loss}}}}"
    body = "baseline: a\nmatch: flops\nset: {training.callbacks: [CALLBACK]}\n"
    body = body.replace("CALLBACK", callback) + "cells: {a: {}, b: {zz: with}}"
    with pytest.raises(ConfigError, match=r"match: flops: excludes training\.callbacks that can"):
        make_matrix(tmp_path, body)


@pytest.mark.process
def test_the_measurement_trains_every_variant_in_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = make_matrix(tmp_path)
    monkeypatch.setattr(step_times, "ROUNDS", 3)
    for number, variant in enumerate(matrix.written[:2]):
        path = tmp_path / "cell" / "timed" / str(number) / "config.yaml"
        variant.cell("tiny", 0).write(path)
    matrix.written[0].cell("tiny", 0).write(tmp_path / "cell" / "config.yaml")
    time_variants(tmp_path / "cell")
    progress = read_progress(tmp_path / "cell")
    assert progress is not None
    assert progress.step == progress.total == 3 * 2 * step_times.STEPS
    times = StepTimes.model_validate_json((tmp_path / "cell" / "step_times.json").read_bytes())
    a, b = times.variants
    assert (a.ratio, a.spread) == (1.0, 0.0)
    assert b.kind == matrix.written[1].cell("", 0).kind
    assert b.seconds > 0
    assert b.ratio > 0


@pytest.mark.parametrize("is_noise_allowed", [False, True])
@pytest.mark.parametrize("spreads", [[0.4, 0.02], [0.4, 0.3, 0.2]])
def test_noisy_variants_are_measured_again_and_quiet_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spreads: list[float], is_noise_allowed: bool
) -> None:
    """Variant b is noisy at first, c never; a third noisy measurement is an error."""
    matrix = make_matrix(tmp_path)
    measured: list[list[str]] = []

    def run(matrix: Matrix, variants: list[Variant], slots: Slots) -> StepTimes:
        measured.append([variant.name for variant in variants])
        ratios = dict.fromkeys(measured[-1], 2.0) | {"a": 1.0}
        return make_times(matrix, ratios, b=spreads[len(measured) - 1])

    monkeypatch.setattr(step_times, "_run_measurement", run)
    is_error = len(spreads) == 3 and not is_noise_allowed
    message = r"variant 'b': .* varies by 20%, and the limit is 10%; measure again"
    with pytest.raises(ConfigError, match=message) if is_error else contextlib.nullcontext():
        measure_step_times(matrix, make_slots(1), is_noise_allowed=is_noise_allowed)

    again = [["a", "b"]] * (len(spreads) - 1)
    assert measured == [["a", "b", "c"], *([] if is_noise_allowed else again)]
    known = read_ratios(matrix.folder, matrix.written, matrix.baseline)
    assert known == {"a": 1.0, "c": 2.0} | ({} if is_error else {"b": 2.0})
    stored = StepTimes.read(matrix.folder / "step_times.json")
    assert stored is not None
    assert stored.is_noisy == is_noise_allowed


@pytest.mark.slow
def test_a_study_at_equal_time_trains_stretched_cells(tmp_path: Path) -> None:
    body = "baseline: a\nmatch: [parameters, time]\ncells: {a: {}, b: {attention: mgk}}"
    studies.write(tmp_path, body, studies.EXPERIMENT + "  accelerator: cpu\n")
    options = ("--seeds", "0,", "--jobs", "1", "--allow-noisy-timing")
    run_study(tmp_path, *options)
    plan = Plan.model_validate_json((tmp_path / "runs/tiny/plan.json").read_bytes())
    (stretched,) = (v for v in plan.variants if v.criterion == "time" and v.variant == "b")
    (cell,) = (c for c in plan.cells if c.variant == "b@time" and c.seed == 0)
    path = tmp_path / "runs/tiny" / cell.path / "result.json"
    result = Result.model_validate_json(path.read_bytes())
    assert result.steps == max(1, round(STEPS * stretched.stretch))
    stored = (tmp_path / "runs/tiny/step_times.json").read_bytes()
    assert "3 cells: 3 done, 0 to run" in run_study(tmp_path, *options)
    assert (tmp_path / "runs/tiny/step_times.json").read_bytes() == stored


def test_wrong_data_are_told_before_step_times_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = "{kind: npz, path: mine.npz, name: m, size: 8, channels: 1, classes: 2}"
    experiment = studies.with_data(data)
    body = "baseline: a\nmatch: [parameters, time]\ncells: {a: {}, b: {attention: mgk}}"
    studies.write(tmp_path, body, experiment)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step_times, "_run_measurement", lambda *arguments: 1 / 0)
    command = ["ablations.yaml", "--jobs", "1"]
    assert ablate.main(command) == 2
    assert "experiment.yaml:1: tiny: variant 'a': data.path: no file" in capsys.readouterr().err

    (tmp_path / "mine.npz").touch()
    end = CheckEnd((1, "data.classes: 2, but train has 3", "", False), [])
    monkeypatch.setattr(launch, "check_variants", lambda *arguments: end)
    monkeypatch.setattr(launch, "start_server", lambda: None)
    assert ablate.main(command) == 2
    assert "experiment.yaml:1: tiny: variant 'b': data.classes: 2" in capsys.readouterr().err


@pytest.mark.slow
def test_quiet_timing_comes_after_the_cells_and_never_costs_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement that is too noisy is one error line, after the tables are written.

    The second command has no cells to train, and accepts a noisy measurement.
    """
    studies.write(tmp_path, "baseline: a\ncells: {a: {}, b: {zz: with}}", studies.EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    finished: list[bool] = []

    def run(matrix: Matrix, variants: list[Variant], slots: Slots) -> StepTimes:
        finished.append(all(job.state() == "done" for job in matrix.jobs))
        return make_times(matrix, {"a": 1.0, "b": 2.0}, b=0.4)

    def read_table() -> str:
        return (tmp_path / "reports/tiny/table.full.md").read_text(encoding="utf-8")

    monkeypatch.setattr(step_times, "_run_measurement", run)
    options = ["ablations.yaml", "--seeds", "0,", "--jobs", "1", "--quiet-timing"]
    assert ablate.main(options) == 2
    assert finished == [True] * step_times.ATTEMPTS
    assert "on a device whose times varied" not in read_table()
    assert "each variant alone (not for b)" in read_table()
    finished.clear()
    assert ablate.main([*options, "--allow-noisy-timing"]) == 0
    assert finished == [True]
    assert "on a device whose times varied" in read_table()
    assert "each variant alone (not for b)" not in read_table()
