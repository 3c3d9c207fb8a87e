"""Renamed studies and variants: their finished cells are found by identity, and moved."""

import json
from pathlib import Path

import pytest
import yaml
from helpers import fake_cells, studies
from helpers.runs import make_body, run_cli

from lit_attn.ablate import adopt, dry_run
from lit_attn.ablate.plan import Job, Matrix, expand
from lit_attn.cells.decisions import Seals
from lit_attn.cells.folder import read_result
from lit_attn.cells.lock import hold_lock
from lit_attn.cells.records import Plan
from lit_attn.config.study import read_studies
from lit_attn.report.records.read import read_studies as read_reported


def matrix(folder: Path, *variants: str, study: str = "tiny") -> Matrix:
    """Write the file of a study and return its cells. The place of a variant is its identity."""
    path = studies.write(folder, make_body(*variants))
    path.write_text(path.read_text().replace("tiny:", f"{study}:"))
    return expand(read_studies(path)[study], folder / "runs")


def finish(job: Job, **changes: object) -> Path:
    """Write the files of a finished cell, and return its folder."""
    job.cell.write(job.folder / "config.yaml")
    result = fake_cells.result(job.cell).model_copy(update=changes)
    result.write(job.folder / "result.json")
    (job.folder / "metrics.csv").write_text("step,epoch,name,value\n")
    return job.folder


def finish_all(cells: Matrix, **changes: object) -> Matrix:
    for job in cells.jobs:
        finish(job, **changes)
    cells.write_plan()
    return cells


def find(cells: Matrix) -> list[adopt.Match]:
    missing = [job for job in cells.jobs if job.state() != "done"]
    return adopt.find_matches([cells], missing)


def run_adopt(cells: Matrix) -> list[str]:
    return list(adopt.adopt(find(cells)))


def states(cells: Matrix) -> dict[str, str]:
    return {job.name: job.state() for job in cells.jobs}


def test_a_renamed_variant_finds_its_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish_all(matrix(tmp_path, "base", "old"))
    renamed = matrix(tmp_path, "base", "new")
    matches = find(renamed)
    text = "tiny/new: 2 missing cells are finished in tiny/old; --adopt moves them"
    assert adopt.describe(matches) == [text]
    lines = run_adopt(renamed)
    assert [line.split("(")[0].rstrip() for line in lines] == [
        f"adopted  tiny/new/{seed}  from {tmp_path}/runs/tiny/old/{seed}-{job.identity}"
        for seed, job in enumerate(renamed.jobs[1::2])
    ]
    assert set(states(renamed).values()) == {"done"}
    assert not (tmp_path / "runs" / "tiny" / "old").exists()
    assert find(renamed) == []
    dry_run.print_cells([renamed], with_costs=False)
    assert "4 cells: 4 done" in capsys.readouterr().out


def test_records_have_the_new_names_and_nothing_is_lost(tmp_path: Path) -> None:
    finish_all(matrix(tmp_path, "base", "old"))
    renamed = matrix(tmp_path, "base", "new", study="other")
    job = next(job for job in renamed.jobs if job.cell.variant == "new")
    matches = find(renamed)
    old = next(match.folder for match in matches if match.job is job)
    newer = json.loads((old / "result.json").read_text()) | {"of_a_newer_version": 1}
    (old / "result.json").write_text(json.dumps(newer))
    run_adopt(renamed)
    result = json.loads((job.folder / "result.json").read_text())
    assert result == newer | {"study": "other", "variant": "new"}
    config = yaml.safe_load((job.folder / "config.yaml").read_text())
    assert (config["study"], config["variant"]) == ("other", "new")
    assert (job.folder / "metrics.csv").read_text() == "step,epoch,name,value\n"
    assert not (job.folder / "lock").exists()
    assert read_result(job.folder, job.identity) is not None


def test_a_renamed_study_takes_its_cells_and_its_seals(tmp_path: Path) -> None:
    before = finish_all(matrix(tmp_path, "base", "other"))
    sealed = Seals.read(before.folder / "seals.json")
    renamed = matrix(tmp_path, "base", "other", study="better")
    lines = run_adopt(renamed)
    assert len(lines) == 5
    assert lines[-1].startswith(f"{before.folder}: has no result any more; its plan is now aside")
    renamed.write_plan()
    assert Seals.read(renamed.folder / "seals.json") == sealed
    # Status and report list the new study only.
    (study,) = read_reported(tmp_path / "runs")
    assert study.plan.study == "better"
    assert len(study.finished_cells()) == 4
    assert Plan.load(renamed.folder / "plan.json").study == "better"
    assert (before.folder / "aside-plan.json").exists()


def test_cells_that_a_study_still_uses_stay(tmp_path: Path) -> None:
    """Another study of the file has equal cells."""
    path = studies.write(tmp_path, make_body("base", "other"))
    text = path.read_text()
    second = text.partition("  tiny:")[2].replace("default: true", "default: false")
    path.write_text(f"{text}  twin:{second}")
    sources = read_studies(path)
    finish_all(expand(sources["tiny"], tmp_path / "runs"))
    twin = expand(sources["twin"], tmp_path / "runs")
    assert [job.identity for job in twin.jobs]
    assert find(twin) == []


def test_cells_of_another_file_stay(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = matrix(tmp_path / "a", "base", study="one")
    out = tmp_path / "runs"
    first = expand(first.source, out)
    finish_all(first)
    second = expand(matrix(tmp_path / "b", "base", study="two").source, out)
    assert find(second) == []
    # The other file is not in the way once it has this study no more.
    path = first.source.path
    path.write_text(path.read_text().replace("one:", "three:"))
    assert len(find(second)) == 2


def test_trials_and_cells_of_other_seeds_stay(tmp_path: Path) -> None:
    cells = finish_all(matrix(tmp_path, "base", "other"))
    trial = tmp_path / "runs" / "tiny@training.epochs=3" / "gone"
    trial.mkdir(parents=True)
    cells.jobs[0].folder.rename(trial / cells.jobs[0].folder.name)
    assert find(cells) == []


def test_a_cell_that_runs_again_is_not_moved(tmp_path: Path) -> None:
    before = finish_all(matrix(tmp_path, "base", "old"))
    renamed = matrix(tmp_path, "base", "new")
    matches = find(renamed)
    held = next(job for job in before.jobs if job.cell.variant == "old")
    with hold_lock(held.folder):
        assert len(find(renamed)) == 1
        lines = list(adopt.adopt(matches))
    assert "not adopted  tiny/new/0" in lines[0]
    assert held.state() == "done"
    assert [line[:7] for line in lines[1:]] == ["adopted"]


def test_failed_attempts_of_the_new_name_are_set_aside(tmp_path: Path) -> None:
    finish_all(matrix(tmp_path, "base", "old"))
    renamed = matrix(tmp_path, "base", "new")
    job = renamed.jobs[1]
    (job.folder / "attempts" / "1").mkdir(parents=True)
    run_adopt(renamed)
    assert job.state() == "done"
    aside = job.folder.with_name(f"aside-1-{job.folder.name}")
    assert (aside / "attempts" / "1").is_dir()
    assert not (job.folder / "attempts").exists()


def test_a_new_folder_with_a_result_is_not_replaced(tmp_path: Path) -> None:
    finish_all(matrix(tmp_path, "base", "old"))
    renamed = matrix(tmp_path, "base", "new")
    matches = find(renamed)
    finish(renamed.jobs[1], attempts=7)
    lines = list(adopt.adopt(matches))
    assert lines[0].endswith("has a result already")
    result = read_result(renamed.jobs[1].folder, renamed.jobs[1].identity)
    assert result is not None
    assert result.attempts == 7
    assert matches[0].folder.exists()


def test_other_code_and_other_data_are_named(tmp_path: Path) -> None:
    table = tmp_path / "data.csv"
    table.write_text("x")
    before = finish_all(matrix(tmp_path, "base", "old"), data="da7a")
    old = [job for job in before.jobs if job.cell.variant == "old"]
    finish(old[0], code="0ldc0de", data="0ther", inputs={str(table): "1 1"})
    line = run_adopt(matrix(tmp_path, "base", "new"))[0]
    assert "(its code was 0ldc0de, now " in line
    assert f"{table} has another size or time" in line
    assert "its data are 0ther, other cells have da7a)" in line


def test_torn_results_and_links_are_no_matches(tmp_path: Path) -> None:
    before = finish_all(matrix(tmp_path, "base", "old"))
    old = [job for job in before.jobs if job.cell.variant == "old"]
    (old[0].folder / "result.json").write_text("{")
    elsewhere = tmp_path / "elsewhere"
    old[1].folder.rename(elsewhere)
    old[1].folder.symlink_to(elsewhere)
    assert find(matrix(tmp_path, "base", "new")) == []


@pytest.mark.slow
def test_the_commands_name_the_cells_and_move_them(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok", "ok-old"))
    assert run_cli(tmp_path)[0] == 0
    studies.write(tmp_path, make_body("ok", "ok-new"))
    text = "tiny/ok-new: 2 missing cells are finished in tiny/ok-old; --adopt moves them"
    code, output = run_cli(tmp_path, "--dry-run")
    assert (code, text in output) == (0, True)
    code, output = run_cli(tmp_path, "--adopt")
    assert code == 0
    assert "adopted  tiny/ok-new/0  from " in output
    assert "4 cells: 4 done, 0 to run" in output
    assert "--adopt moves" not in output
    log = (tmp_path / "runs" / "tiny" / "ran.txt").read_text().split()
    assert sorted(log) == ["ok-old/0", "ok-old/1", "ok/0", "ok/1"]
    # Without --adopt, a run names the cells and trains the new ones.
    studies.write(tmp_path, make_body("ok", "ok-newest"))
    code, output = run_cli(tmp_path, "--limit", "1")
    assert "tiny/ok-newest: 2 missing cells are finished in tiny/ok-new; --adopt" in output
