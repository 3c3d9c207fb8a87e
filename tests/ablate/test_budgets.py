"""Key `budgets`: the studies and cells that it makes, what it refuses, and the order of cells."""

import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import fake_cells, studies
from helpers.runs import run

from lit_attn.ablate.budgets import estimate_seconds, order_matrices
from lit_attn.ablate.display import Display, Snapshot
from lit_attn.ablate.dry_run import print_cells
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import Job, Matrix, expand
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import make_slots
from lit_attn.ablate.slurm import submit
from lit_attn.cells.branches import branch_folder
from lit_attn.cells.lock import hold_lock
from lit_attn.cells.records import Branch, Timing
from lit_attn.config.study import choose, read_studies
from lit_attn.report import write_reports
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import Mapping, Where

BODY = """
baseline: ok
cells: {ok: {}, other: {attention: belief2}}
budgets: [4, 0.5, 1]
set:
  training: {epochs: 4}
  schedule: {kind: trapezoid, warmup: 0.5, warmdown: 1}
"""


def expand_all(folder: Path, body: str = BODY) -> list[Matrix]:
    """Return the studies of all budgets, in the order of the file."""
    sources = read_studies(studies.write(folder, body))
    return [expand(source, folder / "runs") for source in sources.values()]


def list_jobs(folder: Path, variant: str) -> list[Job]:
    """Return the cells of seed 0 of two budgets of one variant, in the order of a run."""
    body = BODY.replace("[4, 0.5, 1]", "[0.5, 1]").replace("ok", variant)
    jobs = []
    for matrix in order_matrices(expand_all(folder, body)):
        jobs += [job for job in matrix.jobs if job.name.endswith(f"/{variant}/0")]
    return jobs


def test_every_budget_is_a_study_of_ordinary_cells(tmp_path: Path) -> None:
    matrices = expand_all(tmp_path)
    names = ["tiny-budget-0.5", "tiny-budget-1", "tiny-budget-4"]
    assert [matrix.name for matrix in matrices] == names
    epochs = [matrix.jobs[0].cell.experiment.training.epochs for matrix in matrices]
    assert epochs == [2, 4, 16]
    plan = matrices[0].plan()
    assert (plan.family, plan.level) == ("tiny", "budget-0.5")
    assert plan.title == "A tiny study, budget 0.5"
    # A cell has the identity of a training of its length from scratch.
    alone = BODY.replace("budgets: [4, 0.5, 1]\n", "").replace("epochs: 4", "epochs: 2")
    scratch = expand(studies.study(tmp_path, alone), tmp_path / "scratch")
    assert [job.identity for job in scratch.jobs] == [job.identity for job in matrices[0].jobs]


def test_the_largest_budget_is_the_trunk_of_the_others(tmp_path: Path) -> None:
    small, medium, large = expand_all(tmp_path)
    runs = tmp_path / "runs"
    for cells in zip(small.jobs, medium.jobs, large.jobs, strict=True):
        trunk = cells[-1]
        siblings = {str(job.folder.relative_to(runs)): job for job in cells[:-1]}
        assert list(trunk.cell.branches) == list(siblings)
        for name, job in siblings.items():
            assert trunk.cell.branches[name] == job.cell.experiment.training.epochs
            assert runs / str(job.cell.trunk) == trunk.folder
            assert (job.cell.variant, job.cell.seed) == (trunk.cell.variant, trunk.cell.seed)
        assert trunk.cell.trunk is None


def test_cells_of_a_trial_branch_from_the_same_trial(tmp_path: Path) -> None:
    sources = read_studies(studies.write(tmp_path, BODY))
    changes = Mapping(Where(""), {"optimizer.lr": 0.5})
    trial = expand(sources["tiny-budget-1"], tmp_path / "runs", changes)
    trunk_trial = expand(sources["tiny-budget-4"], tmp_path / "runs", changes)
    assert trial.name == "tiny-budget-1@optimizer.lr=0.5"
    for job, trunk in zip(trial.jobs, trunk_trial.jobs, strict=True):
        assert tmp_path / "runs" / str(job.cell.trunk) == trunk.folder
    # Cells of one step share nothing.
    smoke = expand(sources["tiny-budget-1"], tmp_path / "runs", smoke=True)
    assert {job.cell.trunk for job in smoke.jobs} == {None}


def test_the_links_do_not_change_the_identity_and_stay_inside_the_runs(tmp_path: Path) -> None:
    _, medium, _ = expand_all(tmp_path)
    cell = medium.jobs[0].cell
    assert cell.model_copy(update={"trunk": None}).fingerprint == cell.fingerprint
    values = cell.model_dump(mode="json")
    for path in ("../x/y", "/etc/passwd", "a/b", "a/../b"):
        with pytest.raises(ConfigError, match=r"trunk: needs the folder of a cell"):
            type(cell).parse({**values, "trunk": path}, "config.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[4, 0.5, 1]", "[1]", "tiny.budgets: needs at least two different budgets, as"),
        ("[4, 0.5, 1]", "[1, 2, 1]", "tiny.budgets: the budget 1 is written twice"),
        ("[4, 0.5, 1]", "[0, 1]", "tiny.budgets.0: input should be greater than 0, not 0"),
        ("[4, 0.5, 1]", "[0.3, 1]", "training.epochs: 4 times the budget 0.3 is 1.2, and a"),
        ("[4, 0.5, 1]", "[0.25, 1]", "schedule: its ramps take 1.5 epochs, but the budget 0.25"),
        ("warmdown: 1", "warmdown: 0", "schedule: has no decay, so every budget is a point of"),
        (
            "warmup: 0.5, warmdown: 1",
            "warmdown: 2",
            "schedule: the budget 0.5 consists of its decay, so there is no stable phase",
        ),
        (
            "{kind: trapezoid, warmup: 0.5, warmdown: 1}",
            "{kind: cosine}",
            ":8: tiny-budget-0.5: variant 'ok': schedule: cosine: its rate depends on the length",
        ),
        ("epochs: 4", "epochs: 4, max_steps: 9", "training.max_steps: cuts the decay off"),
        ("epochs: 4", "epochs: 4, stretch: 2", "training.stretch: `budgets` sets the length"),
        ("epochs: 4", "epochs: 4, stop: {patience: 2}", "training.stop: ends a budget early"),
        (
            "epochs: 4",
            "epochs: 4, callbacks: [{kind: module, import: 'lightning:Callback'}]",
            "training.callbacks: a callback could change the steps that budgets share",
        ),
        (
            "epochs: 4",
            "epochs: 4, average: {epochs: 2}",
            "training.average.epochs: the mean begins at another epoch for each budget",
        ),
        ("set:", "match: flops\nset:", "tiny.match: flops stretches the stable phase"),
        (
            "set:",
            "tune: {optimizer.lr: [1, 2], select: val/loss, seeds: [9]}\nset:",
            "tiny.tune: cannot stand beside `budgets`, because a search could choose",
        ),
        (
            "set:",
            "compare_within: [size]\naxes: {size: {small: {}}}\nset:",
            "tiny.compare_within: cannot stand beside `budgets`",
        ),
    ],
)
def test_mistakes_are_one_error_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in BODY
    with pytest.raises(ConfigError) as caught:
        expand_all(tmp_path, BODY.replace(old, new))
    assert message in str(caught.value)
    assert "ablations.yaml:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_average_without_epochs_is_shared(tmp_path: Path) -> None:
    assert expand_all(tmp_path, BODY.replace("epochs: 4", "epochs: 4, average: {decay: 0.9}"))


def test_the_largest_budget_comes_first(tmp_path: Path) -> None:
    path = studies.write(tmp_path, BODY)
    with path.open("a") as file:
        file.write(
            "  alone:\n    title: Alone\n    experiment: experiment.yaml\n    seeds: 1\n"
            "    baseline: a\n    cells: {a: {}}\n"
        )
    sources = read_studies(path)
    assert [source.name for source in choose(sources, ["tiny"], path)] == list(sources)[:3]
    matrices = [expand(source, tmp_path / "runs") for source in reversed(sources.values())]
    names = [matrix.name for matrix in order_matrices(matrices)]
    assert names == ["alone", "tiny-budget-4", "tiny-budget-1", "tiny-budget-0.5"]


def test_a_dry_run_says_what_is_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_cells(expand_all(tmp_path), with_costs=False)
    lines = capsys.readouterr().out.splitlines()
    shared = "the steps before the decay are trained once, in tiny-budget-4, if it runs first"
    assert f"  budget 0.5: 2 epochs; {shared}" in lines
    assert f"  budget 1: 4 epochs; {shared}" in lines
    assert any(line.startswith("  budget 4: 16 epochs; the smaller budgets") for line in lines)


def test_the_estimate_counts_shared_steps_once(tmp_path: Path) -> None:
    """Three of four epochs come before the decay: 30 steps and three evaluations are shared."""
    _, medium, large = expand_all(tmp_path)
    job, trunk = medium.jobs[0], large.jobs[0]
    timing = Timing(startup=100.0, step_time=1.0, steps=40, evaluation_time=5.0, evaluations=4)
    planned = {trunk.folder}
    assert estimate_seconds(trunk, timing, planned) == timing.seconds == 160.0
    assert estimate_seconds(job, timing, planned) == 100.0 + 10.0 + 5.0
    # Without the trunk, and with a trunk that has ended without a branch, all steps are trained.
    assert estimate_seconds(job, timing, set()) == timing.seconds
    trunk.folder.mkdir(parents=True)
    (trunk.folder / "result.json").touch()
    assert estimate_seconds(job, timing, planned) == timing.seconds
    branch_folder(trunk.folder, 30, job.identity).mkdir(parents=True)
    assert estimate_seconds(job, timing, set()) == 115.0


def test_an_array_of_slurm_waits_for_the_arrays_of_its_trunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = order_matrices(expand_all(tmp_path))
    arrays = [submit.Array(matrix, 1, matrix.jobs) for matrix in matrices]
    waits: list[list[str]] = []

    def record(array: submit.Array, cell: Any, at_once: Any, after: list[str], *_: Any) -> str:
        waits.append(after)
        return str(len(waits))

    monkeypatch.setattr(submit, "_submit", record)
    arguments: Any = (None, None, None, None)
    submit._submit_all(arrays, *arguments, {})
    assert waits == [[], ["1"], ["1"]]
    # A later command finds the job of a trunk in the queue, and submits a sibling alone.
    queued = {matrices[0].jobs[0].folder: "77_0"}
    submit._submit_all(arrays[1:2], *arguments, queued)
    assert waits[-1] == ["77"]
    jobs = matrices[1].jobs
    assert submit._list_studies([matrices[1]], jobs) == {matrices[0].folder, matrices[1].folder}


def test_the_report_compares_within_a_budget_and_names_shared_steps(tmp_path: Path) -> None:
    matrices = expand_all(tmp_path, BODY + "metric: {name: val/loss}\n")
    for matrix in matrices:
        matrix.write_plan()
        budget = matrix.source.budget
        assert budget is not None
        for job in matrix.jobs:
            cell = job.cell
            loss = 10 * (16 * budget) ** -0.1 - 0.01 * cell.seed - 0.1 * (cell.variant == "other")
            branch = None
            if cell.trunk is not None:
                branch = Branch(cell=cell.trunk, steps=100, seconds=2.0)
            changes = {"steps": int(160 * budget), "batch_size": 4, "branched_from": branch}
            result = fake_cells.result(cell, {"val/loss": loss}).model_copy(update=changes)
            job.folder.mkdir(parents=True)
            result.write(job.folder / "result.json")
    reports = tmp_path / "reports"
    write_reports(tmp_path / "runs", reports)
    small = (reports / "tiny-budget-0.5" / "table.full.md").read_text()
    assert "4 of 4 results continue from the stable phase of a training with a larger budget" in (
        " ".join(small.split())
    )
    large = (reports / "tiny-budget-4" / "table.full.md").read_text()
    assert "stable phase" not in large
    rows = pd.read_csv(reports / "tiny-budget-1" / "per_seed.csv")
    assert list(rows["shared_steps"]) == [100] * 4
    scaling = (reports / "tiny" / "scaling.full.md").read_text()
    assert "compute at budget-0.5" in scaling
    assert "The sizes are budgets" in scaling


@pytest.mark.process
def test_a_cell_waits_until_its_trunk_has_kept_its_branch(tmp_path: Path) -> None:
    trunk, sibling = list_jobs(tmp_path, "gated")
    sibling.folder.parents[1].mkdir(parents=True)
    (sibling.folder.parents[1] / "go").touch()
    branch = branch_folder(trunk.folder, 8, sibling.identity)
    together: list[list[str]] = []

    class Opening(Display):
        """Display that creates the branch, and lets the trunk end after its sibling."""

        def update(self, snapshot: Snapshot) -> None:
            together.append([cell.name for cell in snapshot.running])
            if len(together) == 4:
                branch.mkdir(parents=True)
            if snapshot.done:
                (trunk.folder.parents[1] / "go").touch()

    # The first cell of the queue waits for the second one.
    launcher = Launcher(fake_cells.TARGET)
    runner = Runner(launcher, make_slots(2), Opening(io.StringIO()))
    summary = runner.run([sibling, trunk])
    assert together[:4] == [[trunk.name]] * 4
    # The sibling ends first, while the trunk is still running.
    ends = [(outcome.job.name, outcome.failure) for outcome in summary.outcomes]
    assert ends == [(sibling.name, None), (trunk.name, None)]


@pytest.mark.process
def test_a_cell_trains_from_scratch_after_its_trunk_has_failed(tmp_path: Path) -> None:
    trunk, sibling = list_jobs(tmp_path, "crash")
    summary, output = run([trunk, sibling])
    assert len(summary.failed) == 2
    line = (
        f"scratch  {sibling.name}  trains from its first step: {sibling.cell.trunk} is error and"
        " has no branch for it"
    )
    assert output.count(line) == 1
    assert output.index("FAILED   tiny-budget-1/crash/0") < output.index(line)


@pytest.mark.process
def test_a_cell_waits_for_a_trunk_of_another_process(tmp_path: Path) -> None:
    trunk, sibling = list_jobs(tmp_path, "ok")
    output = io.StringIO()
    passes = 0

    class Releasing(Display):
        """Display that gives the trunk a branch after a few passes."""

        def update(self, snapshot: Snapshot) -> None:
            nonlocal passes
            passes += 1
            if passes == 3:
                assert not snapshot.done
                branch_folder(trunk.folder, 8, sibling.identity).mkdir(parents=True)

    with hold_lock(trunk.folder):
        runner = Runner(Launcher(fake_cells.TARGET), make_slots(1), Releasing(output))
        assert runner.run([sibling]).failed == []
    line = f"runs {sibling.cell.trunk}, which keeps a branch for it"
    assert output.getvalue().count(line) == 1
