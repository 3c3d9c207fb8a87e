"""Floors of a run: computed once by another process, again for other data, and told if not."""

import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.paths import EXPERIMENTS
from helpers.studies import write
from helpers.study_runs import run_study

from lit_attn import train
from lit_attn.ablate import floors
from lit_attn.cells.floors import Floors

BODY = """
cells: {standard: {attention: standard}}
baseline: standard
"""


@pytest.mark.process
def test_a_run_computes_the_floors_of_its_data_once(tmp_path: Path) -> None:
    write(tmp_path, BODY)
    assert "computing the floors" in run_study(tmp_path)
    path = tmp_path / "runs" / "tiny" / "floors.json"
    record = Floors.read(path)
    assert record is not None
    rules = {floor.rule for floor in record.floors if floor.split == "test"}
    assert {"1 nearest neighbour", "logistic regression"} <= rules
    assert "computing the floors" not in run_study(tmp_path)
    for changed in ({"data": "others"}, {"inputs": "others"}):
        record.model_copy(update=changed).write(path)
        assert "computing the floors" in run_study(tmp_path)
        assert Floors.read(path) == record


PROBE = f"""
studies:
  probe:
    title: Recall
    experiment: {EXPERIMENTS}/probes/recall.yaml
    parts: [{EXPERIMENTS}/probes/recall.py, broken.py]
    seeds: 1
    set: {{training.max_steps: 2, training.evaluate_every: 8}}
    cells: {{standard: {{attention: standard}}}}
    baseline: standard
"""

BREAK = """
from probes import ProbeData

def floors(self, split, steps):
    raise ValueError("no rule for this split")

ProbeData.floors = floors
"""


@pytest.mark.process
def test_floors_of_own_data_are_computed_or_the_reason_is_kept(tmp_path: Path) -> None:
    (tmp_path / "ablations.yaml").write_text(PROBE)
    part = tmp_path / "broken.py"
    part.write_text(BREAK)
    log = tmp_path / "runs" / "probe" / "floors.log"
    message = f"its floors could not be computed; the reason is in {log.relative_to(tmp_path)}"
    assert message in run_study(tmp_path, "--study", "probe")
    assert "no rule for this split" in log.read_text()

    part.write_text("")
    run_study(tmp_path, "--study", "probe")
    record = Floors.read(tmp_path / "runs" / "probe" / "floors.json")
    assert record is not None
    assert {floor.rule for floor in record.floors} == {"guessing"}
    assert not log.exists()


def test_floors_of_other_data_do_not_stay_when_new_ones_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Floors(data="others", floors=[]).write(tmp_path / "floors.json")
    job = SimpleNamespace(folder=tmp_path / "cell")
    monkeypatch.setattr(floors, "_find_job_without_floors", lambda matrix: job)
    process = Mock(exitcode=1)
    launcher = Mock(module=train.__name__, context=Mock(Process=Mock(return_value=process)))
    floors.write_floors([Mock(folder=tmp_path)], launcher)
    assert "its floors could not be computed" in capsys.readouterr().out
    assert not (tmp_path / "floors.json").exists()


def test_two_runners_in_one_folder_compute_floors_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits for the first, whose log both would remove."""
    (tmp_path / "floors.log").touch()
    matrix = SimpleNamespace(name="tiny", folder=tmp_path)
    written = threading.Event()
    begun: list[str] = []

    def find_job(matrix: object) -> object:
        return None if written.is_set() else SimpleNamespace(folder=tmp_path)

    class Process:
        """Process of the first runner, which ends after the second one has asked for floors."""

        exitcode = 0

        def __init__(self, **arguments: object) -> None:
            begun.append("first")

        def start(self) -> None:
            second.start()

        def join(self, limit: float) -> None:
            written.set()

    launcher = Mock(module=train.__name__)
    launcher.context.Process = Process
    second = threading.Thread(target=floors.write_floors, args=([matrix], launcher))
    monkeypatch.setattr(floors, "_find_job_without_floors", find_job)
    floors.write_floors([matrix], launcher)
    second.join()
    assert begun == ["first"]
    assert not (tmp_path / "floors.log").exists()
