"""State of a cell, read from its folder."""

import shlex
from pathlib import Path

import pytest
from helpers import fake_cells
from helpers.runs import jobs

from lit_attn import train
from lit_attn.cells import folder
from lit_attn.cells.folder import CellStatus, Progress
from lit_attn.cells.lock import hold_lock
from lit_attn.cells.records import Exit
from lit_attn.schema.errors import program


def test_states_follow_the_life_of_a_cell(tmp_path: Path) -> None:
    job = jobs(tmp_path, "ok")[0]

    def read() -> CellStatus:
        return folder.read_cell(job.folder, job.identity)

    assert read() == CellStatus("missing")
    attempt = folder.create_attempt(job.folder)
    (job.folder / "progress.json").write_text('{"step": 1, "total": 4}')
    with hold_lock(job.folder):
        assert read() == CellStatus("running", None, attempt, None, Progress(step=1, total=4))
    assert read() == CellStatus("interrupted", None, attempt, None, Progress(step=1, total=4))
    failed = Exit(failure="diverged", returncode=1, message="m", finished="f")
    failed.write(attempt / "exit.json")
    assert read() == CellStatus("diverged", None, attempt, failed, Progress(step=1, total=4))
    result = fake_cells.result(job.cell)
    result.model_copy(update={"identity": "0000000000"}).write(job.folder / "result.json")
    assert read().state == "unreadable"
    result.write(job.folder / "result.json")
    assert read() == CellStatus("done", result)


@pytest.mark.parametrize(
    ("text", "progress"),
    [
        (
            '{"step": 3, "total": 10, "step_time": 0.5}',
            Progress(step=3, total=10, step_time=0.5),
        ),
        ('{"step": 3, "total": 10, "new": 1}', Progress(step=3, total=10)),
        ('{"step": 3, "total": 10, "step_time": 1e400}', None),
        ('{"step": 3, "total": 10, "step_time": NaN}', None),
        ('{"step": 1e400, "total": 10}', None),
        ('{"step": 3, "total": 1e400}', None),
        ('{"step": 0, "total": 0}', None),
        ('{"step": 3', None),
        ("[3, 10]", None),
        ("", None),
    ],
)
def test_invalid_progress_is_ignored(text: str, progress: Progress | None, tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text(text)
    assert folder.read_progress(tmp_path) == progress


def test_train_accepts_the_command_that_a_failed_cell_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A smoke run printed --smoke in it, which `train` refuses."""
    words = shlex.split(program("train", tmp_path / "a cell"))
    assert words[:2] == ["lit-attn", "train"]
    assert train.main(words[2:]) == 2
    assert "a cell/config.yaml: cannot be read" in capsys.readouterr().err
