"""`rerun`: stale, failed or named cells are set aside and run again from their first step."""

import os
from pathlib import Path

import pytest
from helpers import fake_cells, studies
from helpers.runs import count_runs, jobs, make_body, run_cli

from lit_attn.ablate.__main__ import main
from lit_attn.ablate.job import Job
from lit_attn.ablate.plan import expand
from lit_attn.ablate.rerun import select_cells, set_aside
from lit_attn.cells.folder import read_result
from lit_attn.cells.inputs import change_finder
from lit_attn.cells.lock import hold_lock
from lit_attn.cells.records import Result
from lit_attn.data.text.plain_text import TextFiles
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import hash_source
from lit_attn.train import run_cell
from lit_attn.training.provenance import code_hash


def list_set_aside(path: Path) -> list[str]:
    """Return the names of the folders that were set aside, without their identities."""
    folders = (path / "runs" / "tiny").glob("*/aside-*")
    return sorted(f"{folder.parent.name}/{folder.name.rpartition('-')[0]}" for folder in folders)


@pytest.mark.slow
def test_rerun_starts_failed_cells_afresh_and_a_run_skips_diverged_ones(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok", "crashonce", "diverged"))
    assert run_cli(tmp_path, "--seeds", "0,")[0] == 1
    code, output = run_cli(tmp_path, "--seeds", "0,", command=("rerun", "failed"))
    assert code == 1
    assert "3 cells: 1 done, 2 to run\n" in output
    # The new folder of the cell has no trace of its first attempt, so it crashes again.
    assert count_runs(tmp_path) == {"ok/0": 1, "crashonce/0": 2, "diverged/0": 2}
    assert list_set_aside(tmp_path) == ["crashonce/aside-1-0", "diverged/aside-1-0"]
    assert len(list((tmp_path / "runs").glob("tiny/crashonce/0-*/attempts/*"))) == 1
    # Folders that were set aside are no started seeds.
    code, output = run_cli(tmp_path, "--seeds", "0,")
    assert code == 1
    assert output.startswith("3 cells: 1 done, 1 to run")
    assert "skipped: 1 cell that diverged; see `lit-attn rerun failed`" in output
    assert count_runs(tmp_path) == {"ok/0": 1, "crashonce/0": 3, "diverged/0": 2}


@pytest.mark.slow
def test_one_cell_runs_again(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok", "ok-2"))
    assert run_cli(tmp_path, "--limit", "3")[0] == 0
    for _ in range(2):
        code, output = run_cli(tmp_path, command=("rerun", "tiny/ok/0"))
        assert code == 0, output
    # The missing cell was not chosen.
    assert count_runs(tmp_path) == {"ok/0": 3, "ok/1": 1, "ok-2/0": 1}
    assert list_set_aside(tmp_path) == ["ok/aside-1-0", "ok/aside-2-0"]


def test_results_of_other_code_or_data_are_stale(tmp_path: Path) -> None:
    matrix = expand(studies.study(tmp_path, make_body("ok", "ok-2")), tmp_path / "runs", seeds=(0,))
    first, second = matrix.jobs
    current = {"code": code_hash(()), "data": hash_data(first)}

    def write(job: Job, **changes: str) -> None:
        result = fake_cells.result(job.cell).model_copy(update=current | changes)
        result.write(job.folder / "result.json")

    write(first)
    assert select_cells([matrix], "stale") == []
    write(second, data="0123456789ab")
    assert select_cells([matrix], "stale") == [second]
    write(first, code="0123456789ab")
    assert select_cells([matrix], "stale") == [first, second]


def test_a_changed_module_beside_a_plug_in_makes_results_stale(tmp_path: Path) -> None:
    """The command that looks for stale cells has not imported the module."""
    matrix = expand(studies.study(tmp_path, make_body("ok")), tmp_path / "runs", seeds=(0,))
    (job,) = matrix.jobs
    module = tmp_path / "package" / "layer.py"
    module.parent.mkdir()
    module.write_text("value = 1\n")
    inputs = {str(module): hash_source(module.read_bytes()).hex()}
    current = {"code": code_hash(()), "data": hash_data(job), "inputs": inputs}
    fake_cells.result(job.cell).model_copy(update=current).write(job.folder / "result.json")
    assert select_cells([matrix], "stale") == []
    module.write_text("value = 2\n")
    # The search itself does not forget the module.
    assert select_cells([matrix], "stale") == [job]
    assert select_cells([matrix], "stale") == [job]


@pytest.mark.slow
def test_without_a_chosen_cell_nothing_is_run_or_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = "\ntune: {optimizer.weight_decay: [0.1, 0.2], select: val/loss, seeds: [9]}"
    studies.write(tmp_path, make_body("ok", "ok-2") + tune)
    monkeypatch.chdir(tmp_path)
    assert main(["rerun", "stale", "ablations.yaml", "--dry-run"]) == 0
    assert capsys.readouterr() == ("0 cells\n", "rerun: no cell is stale\n")
    code, output = run_cli(tmp_path, command=("rerun", "stale"))
    assert "tuning" not in output
    assert count_runs(tmp_path) == {}
    assert code == 1


TEXT = """\
task: language-modelling
data: {kind: text, name: mine, train: train.txt, test: test.txt, context: 16, epoch_steps: 2}
model: {kind: gpt, dim: 16, depth: 1, heads: 2, ffn: {width: 32}}
optimizer: {kind: adamw, lr: 1e-3}
schedule: {kind: cosine, warmup: 1}
training: {epochs: 1, accelerator: cpu}
"""


def test_changed_data_are_stale_at_once_and_rerun_compares_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text("A sentence about attention and beliefs. " * 40)
    body = "baseline: a\nmetric: {name: test/loss}\ncells: {a: {}}"
    matrix = expand(studies.study(tmp_path, body, TEXT), tmp_path / "runs", seeds=(0,))
    (job,) = matrix.jobs
    job.write_config()
    run_cell(job.folder)

    def find() -> str:
        return change_finder()(read_result(job.folder, job.identity))

    assert find() == ""
    with monkeypatch.context() as patch:
        patch.setattr(TextFiles, "build", lambda *_: pytest.fail("unchanged files were read"))
        assert select_cells([matrix], "stale") == []
    os.utime(tmp_path / "test.txt", ns=(1, 1))
    assert find() == f"{tmp_path / 'test.txt'} has another size or time"
    assert select_cells([matrix], "stale") == []
    # The content is the same, so `status` does not report the cell after this comparison.
    assert find() == ""
    (tmp_path / "train.txt").write_text("Another text. " * 100)
    assert find() == f"{tmp_path / 'train.txt'} has another size or time"
    assert select_cells([matrix], "stale") == [job]


def test_a_run_reports_the_stale_cells_that_it_keeps(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok"))
    assert run_cli(tmp_path, "--seeds", "0,")[0] == 0
    (path,) = tmp_path.glob("runs/tiny/ok/0-*/result.json")
    result, data = Result.read(path), tmp_path / "data.txt"
    assert result is not None
    data.write_text("new")
    result.model_copy(update={"inputs": {str(data): "1 1"}}).write(path)
    code, output = run_cli(tmp_path, "--seeds", "0,")
    assert code == 0
    line = f"stale: 1 done cell; {data} has another size or time; see `"
    assert f"1 cell: 1 done, 0 to run\n{line}" in output


def hash_data(job: Job) -> str:
    import torch

    return job.cell.experiment.data.build(0, torch.device("cpu")).fingerprint()


def test_a_running_cell_is_not_set_aside(tmp_path: Path) -> None:
    (job, *_) = jobs(tmp_path, "ok")
    with hold_lock(job.folder), pytest.raises(ConfigError, match="tiny/ok/0 is running"):
        set_aside(job)
    set_aside(job)
    assert list_set_aside(tmp_path) == ["ok/aside-1-0"]
    assert [path.name for path in job.folder.iterdir()] == ["config.yaml"]
    assert job.state() == "missing"


def test_a_dry_run_lists_the_chosen_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.write(tmp_path, make_body("ok"))
    monkeypatch.chdir(tmp_path)
    assert main(["rerun", "tiny/ok/1", "ablations.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out == "tiny/ok/1  missing\n1 cell\n"
    for words, message in (
        (["rerun", "stal", "ablations.yaml"], "rerun: no cell 'stal'; did you mean 'stale'?\n"),
        (["rerun"], "rerun: needs stale, failed or STUDY/VARIANT/SEED"),
    ):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith(message)
