"""Plug-ins: files and installed packages with members of any family, and the mistakes in them.

A registered member stays registered, so every test that imports one runs in its own process.
"""

import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from helpers.commands import run_new_python, run_python
from helpers.paths import ROOT

from lit_attn.cells.records import Result
from lit_attn.schema.yaml_text import parse_plain

PARTS = '''
import torch
from lit_attn.optim.base import Optimizer
from lit_attn.optim.schedules import Schedule


class Plain(Optimizer, kind="plain"):
    """Gradient descent without momentum."""

    def build(self, module, fused=True):
        return torch.optim.SGD(module.parameters(), self.lr)


class Halved(Schedule, kind="halved"):
    """Half the peak in the second half of training."""

    def rate_at(self, step, peak, steps_per_epoch, epochs):
        return peak / 2 if 2 * step >= steps_per_epoch * epochs else peak


from lit_attn.data.augment.base import Augmentation
from lit_attn.tasks.task import Loss


class Negative(Augmentation, kind="negative"):
    """255 minus every value."""

    stage = "bytes"

    def build(self, images):
        return self

    def draw(self, n, generator):
        return ()

    def apply(self, images, drawn):
        return 255 - images


class Squared(Loss, kind="squared"):
    """Mean squared error of the probabilities."""

    def build(self):
        def loss(logits, targets):
            probabilities = logits.softmax(1)
            wanted = torch.nn.functional.one_hot(targets, logits.shape[1])
            return (probabilities - wanted).square().mean()
        return loss
'''

STUDY = """\
studies:
  mine:
    title: parts from outside the package
    experiment: {root}/experiments/digits_vit.yaml
    parts: [{parts}]
    seeds: 1
    set: {{training.epochs: 2, model.depth: 1, schedule: constant}}
    match: none
    cells:
      baseline: {{}}
      mine:
        optimizer: {{kind: plain, lr: 0.1}}
        schedule: halved
        loss: squared
        data.augment: [negative, normalize]
        training.devices: 2
    baseline: baseline
"""


def write_study(folder: Path, parts: str = "mine.py") -> None:
    (folder / "study.yaml").write_text(STUDY.format(root=ROOT, parts=parts))


def run(folder: Path, *arguments: str) -> CompletedProcess[str]:
    search_path = os.pathsep.join([str(ROOT), str(folder / "installed")])
    return run_new_python(folder, "-m", *arguments, PYTHONPATH=search_path)


def dry_run(folder: Path, text: str) -> CompletedProcess[str]:
    """Read a study whose part is a file with `text`."""
    (folder / "mine.py").write_text(text)
    write_study(folder)
    return run_python(folder, "-m", "lit_attn.ablate", "study.yaml", "--dry-run")


def install(folder: Path, text: str) -> None:
    """Write an installed package with an entry point to a module with `text`."""
    (folder / "installed" / "outside-1.2.dist-info").mkdir(parents=True)
    (folder / "installed" / "outside.py").write_text(text)
    info = folder / "installed" / "outside-1.2.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[lit_attn.parts]\nall = outside\n")


def cells(folder: Path, variant: str) -> list[Path]:
    return sorted((folder / "runs" / "mine" / variant).iterdir())


@pytest.mark.process
def test_a_study_trains_with_parts_from_a_file(tmp_path: Path) -> None:
    """Both processes of a cell import the file, and so does a cell that runs again alone."""
    (tmp_path / "mine.py").write_text(PARTS)
    write_study(tmp_path)
    finished = run_python(tmp_path, "-m", "lit_attn.ablate", "study.yaml", "--jobs", "1")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (cell,) = cells(tmp_path, "mine")
    config = parse_plain((cell / "config.yaml").read_text(), "text")
    optimizer = config["experiment"]["optimizer"]
    assert optimizer == {"kind": "plain", "lr": 0.1, "weight_decay": 0.0, "layer_decay": None}
    (cell / "result.json").unlink()
    repeated = run_python(tmp_path, "-m", "lit_attn.train", str(cell))
    assert repeated.returncode == 0, repeated.stderr


@pytest.mark.process
def test_a_study_trains_with_parts_of_an_installed_package(tmp_path: Path) -> None:
    """The result records the version of the package."""
    install(tmp_path, PARTS)
    write_study(tmp_path, parts="")
    finished = run(tmp_path, "lit_attn.ablate", "study.yaml", "--jobs", "1")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (cell,) = cells(tmp_path, "mine")
    result = Result.model_validate_json((cell / "result.json").read_text())
    assert result.versions["outside"] == "1.2"


def test_a_plug_in_of_a_package_that_cannot_be_imported_is_one_error_line(tmp_path: Path) -> None:
    install(tmp_path, "raise ValueError('two\\nlines')")
    write_study(tmp_path, parts="")
    finished = run(tmp_path, "lit_attn.ablate", "study.yaml", "--dry-run")
    assert finished.returncode == 2
    assert finished.stderr.endswith("outside.py:1: ValueError: two lines\n")
    assert finished.stderr.count("\n") == 1


EXIT = 'calls sys.exit when imported; put the call under `if __name__ == "__main__":`'


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit()\n", f":2: {EXIT}"),
        ("raise SystemExit(0)\n", f":1: {EXIT}"),
        (
            PARTS.replace("def build", "def built"),
            ":7: class Plain (kind 'plain') does not define build, "
            "which every optimizer has to define",
        ),
        (
            PARTS.replace("def rate_at", "def rates"),
            ":14: class Halved (kind 'halved') does not define rate_at, "
            "which every schedule has to define",
        ),
        (
            PARTS.replace('    stage = "bytes"', ""),
            ":25: class Negative (kind 'negative') does not define stage, "
            "which every augmentation has to define",
        ),
        (
            PARTS.replace('"plain"', '"adam"'),
            ":7: class Plain: kind 'adam' is already the name of "
            "lit_attn.optim.standard.Adam; choose another name",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_error_line(tmp_path: Path, text: str, message: str) -> None:
    finished = dry_run(tmp_path, text)
    assert finished.returncode == 2
    assert finished.stderr == f"{tmp_path}/mine.py{message}\n"
