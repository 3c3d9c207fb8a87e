"""Cells with members from outside the package as jobs of a real SLURM on one node."""

import os
import re
from pathlib import Path

import pytest
from helpers import slurm_cluster
from helpers.commands import run_python
from helpers.paths import ROOT

from lit_attn.cells.records import Plan, Result
from lit_attn.cells.rows import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]

SCHEDULE = """\
from lit_attn.optim.schedules import Schedule


class Halving(Schedule, kind="halving"):
    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        return peak * 0.5 ** (step // steps_per_epoch)
"""


def write_study(folder: Path) -> None:
    """Write data, model, task and metric of docs/own-members.md, and a schedule of another file."""
    text = (ROOT / "docs" / "own-members.md").read_text(encoding="utf-8")
    (folder / "signals.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", text, re.S)))
    (folder / "halving.py").write_text(SCHEDULE)
    experiment, study = re.findall(r"```yaml\n(.*?)```", text, re.S)
    experiment = re.sub(r"^schedule: .*\n", "", experiment, flags=re.M) + "schedule: halving\n"
    (folder / "signals.yaml").write_text(experiment)
    study, count = re.subn(r"parts: \[signals\.py\]", "parts: [signals.py, halving.py]", study)
    assert count == 1
    (folder / "signals-study.yaml").write_text(study)


def run_study(folder: Path, *options: str, **environment: str) -> None:
    command = ["lit_attn.ablate", "signals-study.yaml", "--seeds", "1"]
    finished = run_python(folder, "-m", *command, *options, **environment)
    logs = "".join(path.read_text() for path in folder.glob("runs/*/.slurm/*/*_log.*"))
    assert finished.returncode == 0, finished.stdout + finished.stderr + logs


def test_jobs_train_members_of_five_families_as_this_machine_does(tmp_path: Path) -> None:
    write_study(tmp_path)
    with slurm_cluster.cluster() as environment:
        changed = {key: text for key, text in environment.items() if os.environ.get(key) != text}
        run_study(tmp_path, "--launcher", "slurm", **changed)
    run_study(tmp_path, "--jobs", "1", "--out", "local")
    plan = Plan.model_validate_json((tmp_path / "runs/signals/plan.json").read_bytes())
    cells = [cell for cell in plan.cells if cell.seed == 0]
    assert len(cells) == 2
    for cell in cells:
        job, local = (tmp_path / out / "signals" / cell.path for out in ("runs", "local"))
        result = Result.model_validate_json((job / "result.json").read_bytes())
        assert result.metrics["test/mae"] > 0
        timed = "evaluation/seconds"
        rows, expected = (
            [row for row in read_metrics(folder / "metrics.csv") if row.name != timed]
            for folder in (job, local)
        )
        assert rows == expected
