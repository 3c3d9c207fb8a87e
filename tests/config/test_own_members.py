"""Data, model, task and metric from a file outside the package: the example of docs/own-members.md.

A registered member stays registered, so the tests import the example in other processes.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers.commands import run_python
from helpers.paths import ROOT
from helpers.training_cells import digits_cell

from lit_attn.cells.records import Plan, Result
from lit_attn.config.experiment import Experiment
from lit_attn.data.image_sets import Digits
from lit_attn.data.images import ClassImages, OwnTargets
from lit_attn.models.base import Model
from lit_attn.models.vit import ViTConfig
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import format_yaml, parse_plain
from lit_attn.training.build import build

# The command `lit_attn.train`, to which SIGTERM is sent after its 100th step.
STOP = """\
import sys
import pytest
from helpers.stopping import stop_at
from lit_attn.train import main
with pytest.MonkeyPatch.context() as patch:
    stop_at(patch, 100)
    sys.exit(main(sys.argv[1:]))
"""


def write_example(folder: Path, **changes: str) -> None:
    """Write the files of the page; `changes` replace lines of the experiment."""
    text = (ROOT / "docs" / "own-members.md").read_text(encoding="utf-8")
    (folder / "signals.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", text, re.S)))
    experiment, study = re.findall(r"```yaml\n(.*?)```", text, re.S)
    for key, value in changes.items():
        experiment = re.sub(rf"^{key}: .*$", f"{key}: {value}", experiment, flags=re.M)
    (folder / "signals.yaml").write_text(experiment)
    (folder / "signals-study.yaml").write_text(study)


def ablate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(folder, "-m", "lit_attn.ablate", "signals-study.yaml", *arguments)


@pytest.mark.process
def test_the_study_of_the_page_trains(tmp_path: Path) -> None:
    """All variants reach a result, and the metric has the heading and direction of the task."""
    write_example(tmp_path)
    finished = ablate(tmp_path, "--jobs", "2")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    plan = Plan.model_validate_json((tmp_path / "runs/signals/plan.json").read_text())
    metric = plan.metric
    assert (metric.label, metric.goal, metric.scale) == ("mean absolute error", "min", 1)
    paths = [tmp_path / "runs/signals" / cell.path for cell in plan.cells]
    results = [Result.model_validate_json((path / "result.json").read_text()) for path in paths]
    assert {result.steps for result in results} == {4 * 8}
    assert all(0 < result.metrics["test/mae"] < 4 for result in results)
    # The FFN of belief2, which has more matrices, is narrower: the parameters match.
    parameters = {result.variant: result.parameters for result in results}
    assert parameters["belief2"] == pytest.approx(parameters["standard"], rel=0.01)
    assert all(result.flops > 0 for result in results)
    written = parse_plain((paths[0] / "config.yaml").read_text(), "text")
    assert written["experiment"]["task"] == {"kind": "frequency"}
    assert written["parts"] == [str(tmp_path / "signals.py")]


@pytest.mark.process
def test_a_cell_with_own_members_runs_on_two_devices(tmp_path: Path) -> None:
    write_example(tmp_path, training="{epochs: 1, devices: 2, accelerator: cpu}")
    finished = ablate(tmp_path, "--jobs", "1", "--seeds", "1")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    paths = sorted((tmp_path / "runs/signals").glob("*/*/result.json"))
    assert [json.loads(path.read_text())["devices"] for path in paths] == [2, 2]


@pytest.mark.process
def test_a_stopped_cell_with_own_members_resumes(tmp_path: Path) -> None:
    """The metrics of a cell that was stopped are those of one that was not."""
    training = "{epochs: 20, evaluate_every: 10, accelerator: cpu}"
    write_example(tmp_path, training=training)
    cell = {
        "study": "s",
        "variant": "v",
        "seed": 0,
        "experiment": parse_plain((tmp_path / "signals.yaml").read_text(), "text"),
        "metric": {"name": "test/mae"},
        "parts": [str(tmp_path / "signals.py")],
    }
    uninterrupted, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (uninterrupted, stopped):
        folder.mkdir()
        (folder / "config.yaml").write_text(format_yaml(cell))
    assert run_python(tmp_path, "-m", "lit_attn.train", str(uninterrupted)).returncode == 0
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    interrupted = run_python(tmp_path, "-c", STOP, str(stopped), PYTHONPATH=path)
    assert interrupted.returncode == 143, interrupted.stderr
    assert run_python(tmp_path, "-m", "lit_attn.train", str(stopped)).returncode == 0
    assert (stopped / "metrics.csv").read_bytes() == (uninterrupted / "metrics.csv").read_bytes()


@pytest.mark.process
def test_own_keys_are_part_of_the_identity(tmp_path: Path) -> None:
    def cells(data: str) -> list[str]:
        write_example(tmp_path, data=data)
        finished = ablate(tmp_path, "--dry-run")
        assert finished.returncode == 0, finished.stderr
        return re.findall(r"\b[0-9a-f]{10}\b", finished.stdout)

    first = cells("{kind: waves, batch_size: 32}")
    assert len(set(first)) == 4
    assert cells("{batch_size: 32, length: 64, kind: waves}") == first
    assert not set(cells("{kind: waves, batch_size: 32, length: 128}")) & set(first)


def test_a_model_without_forward_is_one_error_line(tmp_path: Path) -> None:
    write_example(tmp_path)
    source = tmp_path / "signals.py"
    text = source.read_text()
    assert text.count("def forward(self, values):") == 1
    source.write_text(text.replace("def forward(self, values):", "def compute(self, values):"))
    finished = ablate(tmp_path, "--dry-run")
    assert finished.returncode == 2
    assert re.fullmatch(r".*variant '\w+': model: .*forward.*\n", finished.stderr), finished.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": "{kind: digits}"},
            "data: 'digits' does not go with `task: frequency`; choose from waves, or set "
            "`task: image-classification` or `task: module`",
        ),
        (
            {"model": "{kind: vit, dim: 8, depth: 1, heads: 1, patch: 1, ffn: none}"},
            "model: 'vit' does not go with `data: waves`; choose from module, signal-transformer",
        ),
        (
            {"model": "{kind: signal-transformer, patch: 7}"},
            "model: patch: 7 values do not divide signals of 64; the nearest that do are 8",
        ),
        (
            {"task": "frequncy"},
            "task: 'frequncy' is not a known task; did you mean 'frequency'?",
        ),
    ],
)
def test_mistakes_in_own_members_are_one_error_line(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    write_example(tmp_path, **changes)
    finished = ablate(tmp_path, "--dry-run")
    assert finished.returncode == 2
    assert finished.stderr.endswith(f"{message}\n")
    assert finished.stderr.count("\n") == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (r"    def build\(self, seed.*?\n\n", "class Waves (kind 'waves') does not define build"),
        (r" -> Signals:", "the return annotation of `signature` has to be a signature class"),
        (r"    takes = \(Signals,\)\n", "(kind 'signal-transformer') does not define takes"),
        (r"    def metrics.*?\n\n", "class Frequency (kind 'frequency') does not define metrics"),
    ],
)  # fmt: skip
def test_an_incomplete_member_is_one_error_line(tmp_path: Path, removed: str, message: str) -> None:
    write_example(tmp_path)
    path = tmp_path / "signals.py"
    replacement = ":" if removed.endswith(":") else ""
    path.write_text(re.sub(removed, replacement, path.read_text(), count=1, flags=re.S))
    finished = ablate(tmp_path, "--dry-run")
    assert finished.returncode == 2
    assert message in finished.stderr
    assert re.match(r"\S*signals\.py:\d+: ", finished.stderr)
    assert finished.stderr.count("\n") == 1


def test_a_build_that_returns_something_else_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Digits, "build", lambda *_: [1])
    with pytest.raises(ConfigError, match=r"data: `build` of kind 'digits' returns list, which is"):
        build(digits_cell(), torch.device("cpu"))


def test_a_text_without_a_task_is_a_language_model() -> None:
    """A mistake is that of the model, not of the default task."""
    text = {"kind": "text", "name": "t", "train": "t.txt"}
    experiment = {"data": text, "model": {"kind": "gpt"}, "optimizer": "adamw", "training": {}}
    with pytest.raises(ValueError, match=r"model\.ffn\n  Field required") as caught:
        Experiment.model_validate(experiment)
    assert "task" not in str(caught.value)


def test_images_of_your_own_have_to_define_their_number_of_classes() -> None:
    with pytest.raises(ConfigError, match=r"'unnumbered'\) does not define num_classes"):

        class Unnumbered(ClassImages, kind="unnumbered"):
            def read_splits(self) -> Any: ...

            image_shape: ClassVar = (1, 8, 8)

    with pytest.raises(ConfigError, match=r"'untargeted'\) does not define num_outputs"):

        class Untargeted(OwnTargets, kind="untargeted"):
            def read_splits(self) -> Any: ...


def test_a_model_of_your_own_can_have_a_switch_named_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Model, "family", dict(Model.family))

    class Switched(ViTConfig, kind="switched"):
        checkpoint: bool = False

    Switched(dim=8, depth=1, heads=1, patch=4, ffn=None).check_files()
