"""The command `board`, which serves a study in TensorBoard."""

from pathlib import Path
from typing import Any

import pytest
from helpers.fake_results import write_results
from tensorboard import program
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lit_attn.__main__ import main


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder of runs with one study."""
    write_results(tmp_path, 2)
    return tmp_path / "runs"


# TensorBoard's own copy of a library warns when it is imported.
@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")
def test_board_serves_the_folder_of_the_study(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (study,) = (path for path in runs.iterdir() if path.is_dir())
    cell = next(study.glob("*/*/"))
    writer = EventFileWriter(str(cell))
    writer.add_event(Event(step=1))
    writer.close()
    served: list[Any] = []
    monkeypatch.setattr(
        program.TensorBoard,
        "main",
        lambda self: served.append((self.flags.logdir, self.flags.port)),
    )
    assert main(["board", str(study), "--port", "0"]) == 0
    assert served == [(str(study), 0)]


def test_board_refuses_a_folder_without_studies_or_events(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["board", str(runs / "nothing")]) == 2
    assert "this folder does not exist" in capsys.readouterr().err
    assert main(["board", str(runs)]) == 2
    assert "has no event files yet" in capsys.readouterr().err
