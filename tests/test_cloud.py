"""Tests of docs/cloud.md: machines that disappear, pods of Kubernetes and tasks of Ray."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.holding import hold_at
from helpers.paths import ROOT
from helpers.runs import wait_until

from lit_attn.schema.yaml_text import parse_plain

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


PAGE = (ROOT / "docs" / "cloud.md").read_text(encoding="utf-8")
RAY = """\
from pathlib import Path


class Task:
    def __init__(self, function):
        self.remote = function


def remote(**options):
    return Task


def init():
    Path("initialised").touch()


def get(results):
    return results
"""
"""Substitute for Ray, which runs a task at once."""


def examples(language: str) -> list[str]:
    """Return the code blocks of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }


def write_study(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    text = STUDY.format(experiment=ROOT / "experiments" / "digits_vit.yaml")
    (folder / "ablations.yaml").write_text(text)


def start(machine: Path, bucket: Path, node: int) -> subprocess.Popen[bytes]:
    """Run the page's script in the folder of one of two machines that has nothing but the study."""
    write_study(machine)
    (example, _) = examples("yaml")
    task = parse_plain(example, "text")
    script = task["run"]
    assert task["num_nodes"] == 2
    assert task["envs"].keys() == {"STUDY", "SEEDS"}
    assert script.count("/bucket") == 4
    script = script.replace("/bucket", str(bucket)).replace("sleep 60", "sleep 0.3")
    assert script.count("-m lit_attn.ablate") == 1
    script = script.replace("-m lit_attn.ablate", "-m helpers.holding")
    python = f'export PATH="{Path(sys.executable).parent}:$PATH"; '
    variables = {"STUDY": "pair", "SEEDS": "0 1"}
    variables |= {"SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NUM_NODES": "2"}
    return subprocess.Popen(
        ["bash", "-c", python + script],
        cwd=machine,
        env=environment() | variables,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
def test_a_job_continues_on_another_machine(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    (tmp_path / "first").mkdir()
    # Cells that wait at a step cannot end before the script has copied their checkpoints.
    hold_at(tmp_path / "first", 5)
    first = start(tmp_path / "first", bucket, 0)
    try:
        wait_until(lambda: list(bucket.glob("runs/pair/*/0-*/checkpoints/*.ckpt")))
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    # The folder is out of reach at once, also while the kernel still ends the cells.
    (tmp_path / "first").rename(tmp_path / "lost")

    assert start(tmp_path / "second", bucket, 0).wait() == 0
    assert start(tmp_path / "third", bucket, 1).wait() == 0
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


def prepare_cells(folder: Path) -> list[Path]:
    """Run the page's code that writes the folders of the cells of one small study."""
    write_study(folder)
    prepare, _ = examples("python")
    assert prepare.count("belief2-cifar100") == 1
    code = prepare.replace("belief2-cifar100", "pair")
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment(), check=True)
    return [folder / line for line in (folder / "cells.txt").read_text().splitlines()]


@pytest.mark.slow
def test_the_command_of_a_pod_trains_the_cell_of_its_index(tmp_path: Path) -> None:
    """The plan lists the cells, so a run writes the tables without training."""
    cells = prepare_cells(tmp_path)
    assert len(cells) == 4
    (_, example) = examples("yaml")
    specification = parse_plain(example, "text")["spec"]
    assert specification["completionMode"] == "Indexed"
    assert specification["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = specification["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    # The program is that of this environment.
    assert command[-1].count("lit-attn train") == 1
    command[-1] = command[-1].replace("lit-attn", f"{sys.executable} -m lit_attn")
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment() | {"JOB_COMPLETION_INDEX": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [cell for cell in cells if (cell / "result.json").exists()] == [cells[2]]
    # A wrong configuration has the exit code that gives its index up.
    (cells[3] / "config.yaml").write_text("study: pair\n")
    wrong = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment() | {"JOB_COMPLETION_INDEX": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    give_up = specification["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    assert wrong.returncode == 2
    assert wrong.returncode in give_up


@pytest.mark.slow
def test_the_tasks_of_ray_train_every_cell(tmp_path: Path) -> None:
    cells = prepare_cells(tmp_path)
    (tmp_path / "cells.txt").write_text(f"{cells[0].relative_to(tmp_path)}\nnowhere\n")
    (tmp_path / "ray.py").write_text(RAY)
    _, code = examples("python")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (tmp_path / "initialised").exists()
    assert (cells[0] / "result.json").exists()
    assert done.stdout.splitlines()[-1] == "nowhere: exit code 2"
