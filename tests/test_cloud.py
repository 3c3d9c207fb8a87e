"""Test of docs/cloud.md: a study whose machine disappears continues from the copy in a bucket."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.holding import hold_at
from helpers.paths import ROOT
from helpers.runs import wait_until

STUDY = """\
studies:
  pair:
    title: Two variants on two machines
    experiment: {experiment}
    seeds: [0, 1]
    set: {{training.epochs: 4, training.evaluate_every: 1, training.checkpoint_every: 0.001}}
    cells:
      standard: {{attention: standard}}
      belief: {{attention: belief}}
    baseline: standard
"""


def start(machine: Path, bucket: Path, seeds: str) -> subprocess.Popen[bytes]:
    """Run the page's script in the folder of a machine that has nothing but the study."""
    machine.mkdir(exist_ok=True)
    (machine / "ablations.yaml").write_text(
        STUDY.format(experiment=ROOT / "experiments" / "digits_vit.yaml")
    )
    example = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "cloud.md").read_text(), re.DOTALL)
    assert example
    script = yaml.safe_load(example[1])["run"]
    assert script.count("/bucket") == 4
    script = script.replace("/bucket", str(bucket)).replace("sleep 60", "sleep 0.3")
    assert script.count("-m lit_attn.ablate") == 1
    script = script.replace("-m lit_attn.ablate", "-m helpers.holding")
    python = f'export PATH="{Path(sys.executable).parent}:$PATH"; '
    environment = os.environ | {"STUDY": "pair", "SEEDS": seeds}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return subprocess.Popen(
        ["bash", "-c", python + script], cwd=machine, env=environment, start_new_session=True
    )


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_a_job_continues_on_another_machine(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    (tmp_path / "first").mkdir()
    # Cells that wait at a step cannot end before the script has copied their checkpoints.
    hold_at(tmp_path / "first", 5)
    first = start(tmp_path / "first", bucket, "0,")
    try:
        wait_until(lambda: list(bucket.glob("runs/pair/*/0-*/checkpoints/*.ckpt")))
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    # The folder is out of reach at once, also while the kernel still ends the cells.
    (tmp_path / "first").rename(tmp_path / "lost")

    assert start(tmp_path / "second", bucket, "0,").wait() == 0
    assert start(tmp_path / "third", bucket, "1,").wait() == 0
    results = sorted(bucket.glob("runs/pair/*/*/result.json"))
    assert len(results) == 4
    # The interrupted cell has two attempts in its folder: it was continued, not started again.
    assert any((path.parent / "attempts" / "2").is_dir() for path in results)

    command = [sys.executable, "-m", "lit_attn.ablate", "ablations.yaml", "--seeds", "0,1"]
    merged = subprocess.run(
        [*command, "--out", bucket / "runs", "--reports", tmp_path / "reports"],
        cwd=tmp_path / "third",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "4 done, 0 to run" in merged.stdout
    assert (tmp_path / "reports" / "pair" / "table.md").exists()
