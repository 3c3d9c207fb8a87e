"""Tests of docs/cloud.md: machines that disappear, pods of Kubernetes and tasks of Ray."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.commands import run_python
from helpers.holding import hold_at
from helpers.paths import ROOT
from helpers.runs import wait_until

from lit_attn.__main__ import main
from lit_attn.schema.yaml_text import parse_plain

STUDY = """\
studies:
  pair:
    title: Two seeds on two machines
    experiment: {experiment}
    seeds: [0, 1]
    set: {{training.epochs: 4, training.evaluate_every: 1, training.checkpoint_every: 0.001}}
    cells: {{standard: {{}}}}
    baseline: standard
"""


PAGE = (ROOT / "docs" / "cloud.md").read_text(encoding="utf-8")


def examples(language: str) -> list[str]:
    """Return the code blocks of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


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
    variables |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["bash", "-c", python + script],
        cwd=machine,
        env=os.environ | variables,
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
    assert len(results) == 2
    # The interrupted cell has two attempts in its folder: it was continued, not started again.
    assert any((path.parent / "attempts" / "2").is_dir() for path in results)

    words = ["lit_attn.ablate", "ablations.yaml", "--seeds", "0,1", "--out", str(bucket / "runs")]
    words += ["--reports", str(tmp_path / "reports")]
    merged = run_python(tmp_path / "third", "-m", *words)
    assert merged.returncode == 0, merged.stderr
    assert "2 done, 0 to run" in merged.stdout
    assert (tmp_path / "reports" / "pair" / "table.md").exists()


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Run the page's code that writes the folders of the cells of one small study."""
    write_study(tmp_path)
    monkeypatch.chdir(tmp_path)
    prepare, _ = examples("python")
    assert prepare.count("belief2-cifar100") == 1
    exec(prepare.replace("belief2-cifar100", "pair"), {})
    cells = [Path(line) for line in Path("cells.txt").read_text().splitlines()]
    assert len(cells) == 2
    return cells


@pytest.mark.slow
def test_the_command_of_a_pod_trains_the_cell_of_its_index(cells: list[Path]) -> None:
    (_, example) = examples("yaml")
    specification = parse_plain(example, "text")["spec"]
    assert specification["completionMode"] == "Indexed"
    assert specification["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = specification["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    assert command[-1].count("exec lit-attn ") == 1
    command[-1] = command[-1].replace("exec lit-attn ", "echo ")

    def run_pod(index: int) -> int:
        """Run the command of the shell in this process, and return its exit code."""
        variables = os.environ | {"JOB_COMPLETION_INDEX": str(index)}
        words = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True)
        return main(shlex.split(words.stdout.decode()))

    assert run_pod(1) == 0
    assert [(cell / "result.json").exists() for cell in cells] == [False, True]
    # A wrong configuration has the exit code that gives its index up.
    (cells[0] / "config.yaml").write_text("study: pair\n")
    give_up = specification["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    assert run_pod(0) == 2
    assert 2 in give_up


@pytest.mark.slow
def test_the_tasks_of_ray_train_every_cell(
    cells: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A substitute for Ray runs a task at once, and its command in a fork."""
    Path("cells.txt").write_text(f"{cells[0]}\nnowhere\n")
    ray = types.ModuleType("ray")
    ray.remote = lambda **_: lambda task: SimpleNamespace(remote=task)
    ray.init = Path("initialised").touch
    ray.get = list
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(subprocess, "run", lambda words: run_python(Path.cwd(), *words[1:]))
    _, code = examples("python")
    exec(code, {})
    assert Path("initialised").exists()
    assert (cells[0] / "result.json").exists()
    assert capsys.readouterr().out == "nowhere: exit code 2\n"
