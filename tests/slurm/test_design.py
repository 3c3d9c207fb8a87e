"""Studies with `design` as jobs: the confirmation is submitted after the screening."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import designs, slurm_cluster
from helpers.runs import TIMEOUT, start_cli

from lit_attn.cells.screening import Screening

needs_cluster = pytest.mark.skipif(
    bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "SLURM runs here"
)
NAMES = ("base", "a-weak", "b-good", "c-dull")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm_cluster.cluster() as environment:
        yield environment


@needs_cluster
@pytest.mark.slow
@pytest.mark.process
def test_the_jobs_of_both_stages_run(tmp_path: Path, cluster: dict[str, str]) -> None:
    designs.write(tmp_path, "{screen: 1, keep: 1, confirm: 2}", NAMES)
    with start_cli(tmp_path, "--launcher", "slurm", environment=cluster) as process:
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    assert "screening: 4 cells to run" in output
    assert "4 jobs submitted" in output.replace(",", "")
    record = Screening.read(tmp_path / "runs/tiny/screening.json")
    assert record is not None
    assert record.kept == ["b-good"]
    names = (tmp_path / "runs/tiny/ran.txt").read_text().split()
    screened = {f"{name}/0" for name in NAMES}
    assert set(names[:4]) == screened
    assert set(names[4:]) == {
        f"{name}/{seed}" for name in ("base", "b-good") for seed in (1000, 1001)
    }
