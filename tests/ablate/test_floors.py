"""Floors of a run: computed once by another process, again for other data, and told if not."""

from pathlib import Path

import pytest
from helpers.commands import run_python
from helpers.studies import write

from lit_attn.cells.floors import Floors

BODY = """
cells: {standard: {attention: standard}}
baseline: standard
"""


@pytest.mark.process
def test_a_run_computes_the_floors_of_its_data_once(tmp_path: Path) -> None:
    write(tmp_path, BODY)

    def run() -> str:
        done = run_python(tmp_path, "-m", "lit_attn.ablate", "ablations.yaml")
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "computing the floors" in run()
    path = tmp_path / "runs" / "tiny" / "floors.json"
    record = Floors.read(path)
    assert record is not None
    rules = {floor.rule for floor in record.floors if floor.split == "test"}
    assert {"1 nearest neighbour", "logistic regression"} <= rules
    assert "computing the floors" not in run()
    record.model_copy(update={"data": "others"}).write(path)
    assert "computing the floors" in run()
    assert Floors.read(path) == record
