"""Tests of `training.loggers`: MLflow and Weights & Biases receive a cell's metrics, offline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import run_python
from helpers.paths import ROOT

STUDY = """\
studies:
  tracked:
    title: A study with trackers
    experiment: {root}/experiments/digits_vit.yaml
    seeds: [0]
    set:
      training.epochs: 3
      training.loggers: {loggers}
    cells:
      standard: {{attention: standard}}
    baseline: standard
"""


def run(folder: Path, loggers: str, **environment: str) -> subprocess.CompletedProcess[str]:
    study = folder / "ablations.yaml"
    study.write_text(STUDY.format(root=ROOT, loggers=loggers))
    return run_python(folder, "-m", "lit_attn.ablate", str(study), **environment)


@pytest.mark.slow
def test_mlflow_receives_the_metrics_and_settings_of_a_cell(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    finished = run(tmp_path, f"[tensorboard, csv, {{kind: mlflow, uri: '{uri}'}}]")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    # The cell's own records, which may be named too, occur once.
    names = [path.name for path in tmp_path.glob("runs/tracked/standard/0-*/*")]
    assert sum("tfevents" in name for name in names) == names.count("metrics.csv") == 1
    reader = (
        "from mlflow.tracking import MlflowClient\n"
        f"client = MlflowClient({uri!r})\n"
        "experiment = client.get_experiment_by_name('tracked')\n"
        "(run,) = client.search_runs([experiment.experiment_id])\n"
        "print(run.info.run_name, run.info.status, 'test/accuracy' in run.data.metrics,\n"
        "      run.data.params['optimizer/lr'])\n"
    )
    printed = subprocess.run([sys.executable, "-c", reader], capture_output=True, text=True)
    assert printed.stdout.split() == ["standard/0", "FINISHED", "True", "0.005"], printed.stderr


@pytest.mark.slow
def test_cells_that_start_together_share_a_new_database_of_mlflow(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    # The imports take long, so the cells are forks of one process that has imported.
    build = (
        "import os, sys, time; from pathlib import Path; import lightning.pytorch.loggers, mlflow\n"
        "from lit_attn.config.training import MLflowLogger\n"
        "folder = Path(sys.argv[1])\n"
        "pids = []\n"
        "for number in '012':\n"
        "    pids.append(os.fork())\n"
        "    if pids[-1] == 0:\n"
        "        (folder / f'ready-{number}').touch()\n"
        "        while len(list(folder.glob('ready-*'))) < 3: time.sleep(0.01)\n"
        f"        logger = MLflowLogger(uri={uri!r})\n"
        "        place = folder / 'runs/s/a' / number\n"
        "        logger.build('tracked', f'a/{number}', f'id{number}', place)\n"
        "        os._exit(0)\n"
        "print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout.splitlines()[-1] == "[0, 0, 0]", finished.stderr


@pytest.mark.slow
def test_weights_and_biases_writes_an_offline_run_into_the_folder_of_the_cell(
    tmp_path: Path,
) -> None:
    finished = run(tmp_path, "[{kind: wandb, project: demo, offline: true}]")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (run_file,) = tmp_path.glob("runs/tracked/standard/0-*/wandb/offline-run-*/run-*.wandb")
    assert b"test/accuracy" in run_file.read_bytes()


@pytest.mark.process
def test_a_tracker_that_is_not_installed_is_one_line_before_anything_runs(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    # A module that hides the installed package, with a specification of None.
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: "
        "None if name == 'wandb' else find(name, package)\n"
    )
    study = tmp_path / "ablations.yaml"
    study.write_text(STUDY.format(root=ROOT, loggers="[{kind: wandb, project: demo}]"))
    finished = subprocess.run(
        [sys.executable, "-m", "lit_attn.ablate", study],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{hidden}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 2
    assert "wandb needs wandb, which is not installed" in finished.stderr + finished.stdout
    assert not list((tmp_path / "runs").glob("*/*/*/attempts"))
