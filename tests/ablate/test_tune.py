"""Equal tuning: `tune:` of a study."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import fake_cells, studies
from helpers.study_runs import kill_study, read_metrics, run_study

from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.tune import Point, Search, read_search
from lit_attn.cells.folder import CellStatus
from lit_attn.cells.records import TunedVariant, Tuning, TuningTrial
from lit_attn.config.study import read_studies
from lit_attn.report.records.read import read_studies as read_records
from lit_attn.report.verdicts.judge import judge_study
from lit_attn.schema.errors import ConfigError

TUNE = "{optimizer.lr: [1e-3, 2e-3, 4e-3, 8e-3], select: val/loss, seeds: [100, 101]}"
BODY = "baseline: a\ncells: {a: {}, b: {attention: mgk}}\ntune: "


def make_matrix(folder: Path, tune: str = TUNE, body: str = BODY) -> Matrix:
    return expand(read_studies(studies.write(folder, body + tune))["tiny"], folder / "runs")


def make_search(folder: Path, tune: str = TUNE) -> Search:
    matrix = make_matrix(folder, tune)
    search = read_search(matrix.source, matrix.seeds, matrix.written, None)
    assert search is not None
    return search


def evaluate_all(search: Search, best: Point) -> tuple[TunedVariant, list[Point]]:
    """Run a search whose metric is the distance to `best`; return it and the points in order."""
    points = []

    def evaluate(name: str, point: Point) -> TuningTrial:
        points.append(point)
        distance = float(sum(abs(i - j) for i, j in zip(point, best, strict=True)))
        return TuningTrial(values=search.values(point), mean=distance, by_seed={})

    return search.run(["a"], evaluate)[0].variants[0], points


def test_every_variant_gets_the_same_trials_with_the_tuning_seeds(tmp_path: Path) -> None:
    matrix = make_matrix(tmp_path)
    assert not matrix.jobs
    assert [variant.name for variant in matrix.untuned] == ["a", "b"]
    trials = {(job.variant, job.seed) for job in matrix.trials}
    names = ["lr=0.001", "lr=0.002", "lr=0.004", "lr=0.008"]
    assert trials == {(f"{v}@{name}", s) for v in "ab" for name in names for s in (100, 101)}
    rates = {job.cell.experiment.optimizer.lr for job in matrix.trials}
    assert rates == {1e-3, 2e-3, 4e-3, 8e-3}
    plan = matrix.plan()
    assert len(plan.trials) == 16
    assert [variant.name for variant in plan.variants] == ["a", "b"]
    assert plan.cells == []


def test_a_study_without_its_search_forgets_the_record_of_the_search(tmp_path: Path) -> None:
    matrix = make_matrix(tmp_path)
    matrix.folder.mkdir(parents=True)
    matrix.write_plan()
    assert (matrix.folder / "tuning.json").exists()
    make_matrix(tmp_path, "", BODY.removesuffix("tune: ")).write_plan()
    assert not (matrix.folder / "tuning.json").exists()


def test_the_grid_chooses_the_best_mean_and_reports_the_edge(tmp_path: Path) -> None:
    search = make_search(tmp_path)
    inside, points = evaluate_all(search, (1,))
    assert points == [(0,), (1,), (2,), (3,)]
    assert (inside.chosen, inside.at_edge) == ({"optimizer.lr": 2e-3}, [])
    edge, _ = evaluate_all(search, (3,))
    assert (edge.chosen, edge.at_edge) == ({"optimizer.lr": 8e-3}, ["optimizer.lr"])


def test_a_variant_whose_search_has_chosen_nothing_is_named(tmp_path: Path) -> None:
    matrix = make_matrix(tmp_path)
    assert matrix.list_without_choice() == []
    search = make_search(tmp_path)

    def evaluate(name: str, point: Point) -> TuningTrial | None:
        # Every trial of "a" has diverged, and those of "b" have not ended.
        if name == "b":
            return None
        return TuningTrial(values=search.values(point), mean=None, by_seed={})

    tuning, _ = search.run(["a", "b"], evaluate)
    assert replace(matrix, tuning=tuning).list_without_choice() == ["a"]


def test_every_combination_of_several_keys_is_a_trial_of_each_variant(tmp_path: Path) -> None:
    grid = "optimizer.lr: [1, 2, 3, 4], optimizer.weight_decay: [0, 0.1, 0.2]"
    search = make_search(tmp_path, f"{{{grid}, select: val/loss, seeds: [9]}}")
    tuned, points = evaluate_all(search, (2, 1))
    assert points == [(i, j) for i in range(4) for j in range(3)]
    assert tuned.chosen == {"optimizer.lr": 3, "optimizer.weight_decay": 0.1}


def test_nothing_is_chosen_before_all_trials_have_ended(tmp_path: Path) -> None:
    search = make_search(tmp_path)
    has_ended = False

    def evaluate(name: str, point: Point) -> TuningTrial | None:
        if point == (3,) and not has_ended:
            return None
        mean = None if point == (0,) else 1.0
        return TuningTrial(values=search.values(point), mean=mean, by_seed={})

    tuning, best = search.run(["a"], evaluate)
    assert best == {}
    assert tuning.variants[0].chosen is None
    assert len(tuning.variants[0].trials) == 3
    has_ended = True
    # The first of equal means is chosen, and no diverged trial.
    assert search.run(["a"], evaluate)[1] == {"a": (1,)}


def test_a_trial_with_a_diverged_seed_is_not_chosen(tmp_path: Path) -> None:
    matrix = make_matrix(tmp_path)
    search = make_search(tmp_path)

    def done(loss: float) -> CellStatus:
        metrics = {"val/loss": loss}
        return CellStatus("done", fake_cells.result(matrix.trials[0].cell, metrics))

    values = {"optimizer.lr": 2e-3}
    trial = search.summarize((1,), {100: done(0.25), 101: CellStatus("diverged")})
    assert trial == TuningTrial(values=values, mean=None, by_seed={"100": 0.25, "101": None})
    assert search.summarize((1,), {100: done(0.25), 101: CellStatus("killed")}) is None
    # The result of a cell leaves out a metric that is not finite.
    undefined = CellStatus("done", fake_cells.result(matrix.trials[0].cell, {"test/loss": 1.0}))
    assert search.summarize((1,), {100: done(0.25), 101: undefined}) == trial
    complete = search.summarize((1,), {100: done(0.25), 101: done(0.75)})
    assert complete == TuningTrial(values=values, mean=0.5, by_seed={"100": 0.25, "101": 0.75})


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ("{select: val/loss, seeds: 1}", "tiny.tune: needs a key to tune"),
        ("{optimizer.lr: 1e-3, select: val/loss, seeds: [9]}", "tune.optimizer.lr: needs a list"),
        (
            "{optimizer.lr: [1e-3, 0.001], select: val/loss, seeds: [9]}",
            "tiny.tune.optimizer.lr: has a value twice",
        ),
        ("{optimizer.lr: [1, 2], seeds: [9]}", "tiny.tune.select: "),
        (
            "{optimizer.lr: [1, 2], select: test/loss, seeds: [9]}",
            "select: needs a validation metric",
        ),
        ("{optimizer.lr: [1, 2], select: val/los, seeds: [9]}", "did you mean 'val/loss'?"),
        (
            "{optimizer.lr: [1, 2], select: val/loss, seeds: [1]}",
            "{1} are seeds of the final",
        ),
        (
            "{optimizer.lr: [1, 2], select: val/loss, seeds: [9], sampler: tpe}",
            "tune.sampler: needs a list of at least two values of a key of the experiment",
        ),
        ("{optimizer.rl: [1, 2], select: val/loss, seeds: [9]}", "optimizer.rl"),
    ],
)
def test_mistakes_are_one_error_line(tmp_path: Path, tune: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_matrix(tmp_path, tune)
    text = str(caught.value)
    assert message in text
    assert "ablations.yaml:" in text
    assert "\n" not in text


def test_data_without_a_validation_split_are_refused(tmp_path: Path) -> None:
    body = BODY.replace("a: {}", "a: {data: {kind: cifar10, root: x}}")
    with pytest.raises(ConfigError, match="variant 'a': its data have no validation split"):
        make_matrix(tmp_path, body=body)


def test_a_study_in_the_middle_of_its_search_is_not_complete(tmp_path: Path) -> None:
    """Untuned variants have no cells, so none of their cells is missing."""
    make_matrix(tmp_path).write_plan()
    (study,) = list(read_records(tmp_path / "runs"))
    judged = judge_study(study)
    assert judged.is_interim
    assert not any(variant.is_final for variant in judged.variants)
    assert judged.next.kind == "run"
    assert "The search of 2 variants has not ended" in judged.next.text


@pytest.mark.slow
def test_a_search_that_is_killed_twice_gives_the_same_table(tmp_path: Path) -> None:
    """The first kill ends a search from its beginning, the second one a search that continues."""
    tune = "{optimizer.lr: [1e-3, 3e-3, 1e-2], select: val/loss, seeds: [100]}"
    experiment = studies.EXPERIMENT + "  accelerator: cpu\n  checkpoint_every: 0.2\n"
    folders = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
        path = studies.write(folder, BODY + tune, experiment)
        path.write_text(path.read_text().replace("seeds: 2", "seeds: 1"))
    jobs = ("--jobs", "2")
    run_study(folders[0], *jobs)
    kill_study(folders[1], 1, *jobs)
    kill_study(folders[1], 3, *jobs)
    run_study(folders[1], *jobs)
    records = [(folder / "runs/tiny/tuning.json").read_bytes() for folder in folders]
    assert records[0] == records[1]
    tuning = Tuning.model_validate_json(records[0])
    assert all(variant.chosen is not None for variant in tuning.variants)
    numbers = [read_metrics(folder) for folder in folders]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 2
