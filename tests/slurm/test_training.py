"""Training as interrupted jobs of a real SLURM, on one device and on two devices."""

import subprocess
from pathlib import Path

import pytest
from helpers import slurm_cluster, studies
from helpers.runs import wait_until

from lit_attn.ablate.plan import expand
from lit_attn.cells.records import Result
from lit_attn.cells.rows import read_metrics
from lit_attn.config.study import read_studies
from lit_attn.train import run_cell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]

EXPERIMENT = studies.EXPERIMENT.replace(
    "  epochs: 2", "  epochs: 12\n  accelerator: cpu\n  checkpoint_every: 0.2"
)


@pytest.mark.parametrize(
    ("devices", "stop"),
    [(1, ["scontrol", "requeue"]), (2, ["scancel", "--signal=USR2"])],
    ids=["one device, preempted", "two devices, out of time"],
)
def test_an_interrupted_job_gives_the_metrics_of_an_undisturbed_run(
    tmp_path: Path, devices: int, stop: list[str]
) -> None:
    options = [] if devices == 1 else ["--set", f"training.devices={devices}"]
    path = studies.write(tmp_path, "baseline: a\ncells: {a: {}}", EXPERIMENT)
    cell = expand(read_studies(path)["tiny"], tmp_path / "runs").jobs[0]
    with slurm_cluster.cluster() as environment:
        process = slurm_cluster.start_study(tmp_path, environment, "--seeds", "0,", *options)
        wait_until(
            lambda: list(cell.folder.glob("checkpoints/step-*")) or process.poll() is not None
        )
        job = subprocess.run(
            ["squeue", "-h", "--format=%i"], env=environment, capture_output=True, text=True,
            check=True,
        ).stdout.strip()  # fmt: skip
        subprocess.run([*stop, job], env=environment, check=True)
        output, _ = process.communicate(timeout=500)
        logs = "".join(log.read_text() for log in tmp_path.glob("runs/*/.slurm/*/*_log.*"))
        assert process.returncode == 0, output + logs
    result = Result.model_validate_json((cell.folder / "result.json").read_bytes())
    assert (result.devices, result.attempts) == (devices, 2), logs
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    cell.cell.write(undisturbed / "config.yaml")
    run_cell(undisturbed)
    folders = (cell.folder, undisturbed)
    rows, expected = (read_metrics(folder / "metrics.csv") for folder in folders)
    assert [row[:3] for row in rows] == [row[:3] for row in expected]
    if devices == 1:
        # All rows except the measured time.
        timed = "evaluation/seconds"
        assert [row for row in rows if row.name != timed] == [
            row for row in expected if row.name != timed
        ]
    else:
        # Two devices add up the halves of a batch in another order.
        last = {row.name: row.value for row in expected}
        for row in rows:
            if row.step == expected[-1].step and row.name.endswith("loss"):
                assert row.value == pytest.approx(last[row.name], rel=0.05)
