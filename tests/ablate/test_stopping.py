"""Key `stop: futility`: its mistakes, its seal, and the cells that do not run."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import fake_cells, studies
from helpers.fake_cells import result
from helpers.runs import jobs

from lit_attn.__main__ import main
from lit_attn.ablate.display import Display
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import Matrix, expand, find_ended
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import make_slots
from lit_attn.ablate.slurm.job import SlurmCell
from lit_attn.ablate.stopping import update_endings
from lit_attn.cells.decisions import Ending, Endings
from lit_attn.config.study import read_studies
from lit_attn.report.statistics.futility import FUTILITY
from lit_attn.schema.errors import ConfigError

BODY = "baseline: base\ncells: {base: {}, dull: {optimizer.lr: 2}, good: {optimizer.lr: 3}}"
EFFECTS = {"base": 0.0, "dull": 0.0, "good": 0.05}


def write_study(folder: Path, seeds: str = "10", extra: str = "stop: futility") -> Matrix:
    """Write a study and return its cells."""
    path = studies.write(folder, f"{BODY}\n{extra}")
    path.write_text(path.read_text().replace("    seeds: 2\n", f"    seeds: {seeds}\n"))
    return expand(read_studies(path)["tiny"], folder / "runs")


def train(matrix: Matrix, seeds: range) -> None:
    """Give the cells of `seeds` results."""
    for job in matrix.jobs:
        if job.cell.seed in seeds:
            noise = np.random.default_rng([job.cell.seed, len(job.cell.variant)]).normal(0, 0.004)
            # Signs alternate, so that no variant but `good` has a lead.
            balance = (-1) ** job.cell.seed * 0.004 * (job.cell.variant == "dull")
            accuracy = 0.7 + EFFECTS[job.cell.variant] + balance + 0.1 * noise
            job.folder.mkdir(parents=True, exist_ok=True)
            result(job.cell, {"test/accuracy": accuracy}).write(job.folder / "result.json")


def list_ended(matrix: Matrix) -> list[str]:
    """Return the cells that need not run."""
    ended = find_ended([matrix])
    return [job.name for job in matrix.jobs if job.folder in ended and job.state() != "done"]


@pytest.mark.parametrize(
    ("seeds", "extra", "message"),
    [
        ("1", "stop: futility", "tiny.stop: with 1 planned seed no variant can have a star"),
        ("5", "stop: futility", "use at least 6 seeds, set metric.margin, or leave out `stop`"),
        (
            "2",
            "stop: futility\nmetric: {margin: 1}",
            "with 2 planned seeds the rule decides after two seeds at the earliest; use at least 3",
        ),
    ],
)
def test_too_few_seeds_are_refused(seeds: str, extra: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ablations.yaml:9: tiny.stop: ") as error:
        write_study(tmp_path, seeds, extra)
    assert message in str(error.value)


def test_a_run_of_some_planned_seeds_is_accepted(tmp_path: Path) -> None:
    write_study(tmp_path)
    source = read_studies(tmp_path / "ablations.yaml")["tiny"]
    matrix = expand(source, tmp_path / "runs", seeds=(0, 1))
    assert matrix.plan().seeds == list(range(10))


def test_a_full_disk_keeps_the_decisions(tmp_path: Path) -> None:
    """A folder in place of the record is an error of the disk in every file system."""
    matrix = write_study(tmp_path)
    train(matrix, range(6))
    matrix.plan().write(matrix.folder / "plan.json")
    (matrix.folder / "endings.json").mkdir()
    assert {ending.variant for ending in update_endings(matrix.folder).values()} == {"dull"}


def test_a_misspelt_rule_names_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stop: .*futility"):
        write_study(tmp_path, extra="stop: futile")


def test_the_seal_records_the_rule(tmp_path: Path) -> None:
    with_rule = write_study(tmp_path)
    seal = with_rule.seal([0])
    assert seal.stop == "futility"
    assert seal.decisions["stop"] == "futility"
    plain = expand(studies.study(tmp_path, BODY), tmp_path / "runs").seal([0])
    assert plain.stop is None
    assert plain.hash != seal.hash


def test_seeds_come_before_variants(tmp_path: Path) -> None:
    seeds = [job.cell.seed for job in write_study(tmp_path).jobs]
    assert seeds == sorted(seeds)


def test_a_dull_variant_ends_and_a_good_one_goes_on(tmp_path: Path) -> None:
    matrix = write_study(tmp_path)
    train(matrix, range(6))
    assert list_ended(matrix) == [f"tiny/dull/{seed}" for seed in range(6, 10)]
    matrix.write_plan()
    recorded = Endings.read(matrix.folder / "endings.json")
    assert recorded is not None
    (ending,) = recorded.entries
    assert ending.variant == "dull"
    assert ending.power < FUTILITY
    # Seeds that ended nevertheless change nothing.
    train(matrix, range(8))
    assert {entry.seeds for entry in update_endings(matrix.folder).values()} == {ending.seeds}


def test_a_plan_without_the_rule_ends_nothing(tmp_path: Path) -> None:
    matrix = expand(studies.study(tmp_path, BODY), tmp_path / "runs")
    train(matrix, range(2))
    matrix.write_plan()
    assert list_ended(matrix) == []
    assert update_endings(matrix.folder) == {}
    assert not (matrix.folder / "endings.json").exists()


def test_status_dry_run_and_judge_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = write_study(tmp_path)
    train(matrix, range(6))
    matrix.write_plan()
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    status = capsys.readouterr().out
    assert "4 stopped" in status
    assert "ended    dull  4 seeds not needed: stopped for futility" in status
    assert main(["run", "ablations.yaml", "--dry-run"]) == 0
    assert "stopped for futility after" in capsys.readouterr().out
    assert main(["run", "ablations.yaml", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["studies"][0]["counts"]["stopped"] == 4
    assert main(["judge", "--json"]) == 1
    study = json.loads(capsys.readouterr().out)["studies"][0]
    by_name = {variant["variant"]: variant for variant in study["variants"]}
    assert by_name["dull"]["ended"]["rule"] == "futility"
    assert by_name["good"]["ended"] is None
    assert study["next"]["variants"] == ["base", "good"]


def test_the_job_of_an_ended_variant_does_not_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = write_study(tmp_path)
    train(matrix, range(6))
    matrix.write_plan()
    job = next(job for job in matrix.jobs if job.name == "tiny/dull/9")
    job.cell.write(job.folder / "config.yaml")
    SlurmCell(job.folder, fake_cells.TARGET, False, 1.0)()
    assert "a rule of the study has ended its variant" in capsys.readouterr().out
    assert job.state() == "missing"


@pytest.mark.process
def test_the_runner_drops_the_waiting_cells_of_an_ended_variant(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "ok", "ok-2")
    ending = Ending(variant="ok-2", identity="", rule="futility", seeds=1, planned=2, power=0.01)
    last = cells[-1]
    output = io.StringIO()
    runner = Runner(
        Launcher(fake_cells.TARGET),
        make_slots(1),
        Display(output),
        review=lambda study: {last.folder: ending},
    )
    summary = runner.run(cells)
    assert [outcome.job for outcome in summary.outcomes] == cells[:-1]
    assert last.state() == "missing"
    assert "ended    tiny/ok-2  stopped for futility after 1 of 2 seeds" in output.getvalue()
