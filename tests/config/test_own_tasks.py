"""The examples of docs/own-tasks.md, run as they stand there, and refused classes."""

import re
import sys
import types
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from helpers.commands import run_python
from helpers.paths import ROOT
from helpers.training_cells import digits_cell
from torchmetrics.classification import MulticlassAccuracy

from lit_attn.cells.records import Result
from lit_attn.config.cell import Cell
from lit_attn.schema.yaml_text import format_yaml
from lit_attn.tasks.base import TaskModule
from lit_attn.train import main
from lit_attn.training.first_step import Mistake, find_mistake

PAGE = (ROOT / "docs" / "own-tasks.md").read_text(encoding="utf-8")


def write_page(folder: Path) -> None:
    """Write the files of the page: the name of each stands before its block."""
    files = re.findall(r"`([\w-]+\.(?:yaml|py))`[^`]*?:\n\n```\w+\n(.*?)```", PAGE, flags=re.S)
    for name, content in files:
        (folder / name).write_text(content)
    assert len(files) == 7
    draw = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 256), ("test", 64)):
        images = draw.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
        halves = [images[:, rows].mean((1, 2, 3)) / 255 for rows in (slice(4), slice(4, 8))]
        arrays |= {f"x_{split}": images, f"y_{split}": np.stack(halves, 1).astype(np.float32)}
    np.savez(folder / "numbers.npz", **arrays)


@pytest.mark.process
@pytest.mark.parametrize(
    ("study", "names"),
    [
        ("metrics", {"test/CalibrationError", "val/F1", "test/accuracy"}),
        ("regression", {"test/mae", "test/r2", "test/loss"}),
        ("focal", {"test/error", "val/loss", "test/AUROC"}),
    ],
)
def test_an_example_of_the_page_trains(study: str, names: set[str], tmp_path: Path) -> None:
    write_page(tmp_path)
    words = [f"{study}-study.yaml", "--seeds", "1", "--jobs", "1", "--set", "training.epochs=1"]
    done = run_python(tmp_path, "-m", "lit_attn.ablate", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    paths = list((tmp_path / "runs").glob("*/*/*/result.json"))
    assert len(paths) == 2
    for path in paths:
        assert names <= Result.model_validate_json(path.read_text()).metrics.keys()


class Plain(L.LightningModule):
    """The task of image classification, as a LightningModule of its own."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: object, batch_index: int) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: object, batch_index: int) -> None:
        images, labels = batch
        logits = self.network(images).float()
        loss = torch.nn.functional.cross_entropy(logits, labels)
        accuracy = (logits.argmax(1) == labels).float().mean()
        self.log_dict({"loss": loss, "accuracy": accuracy})


class WithoutTraining(L.LightningModule):
    def validation_step(self, batch: object, batch_index: int) -> None: ...


class WithOptimizer(Plain):
    def configure_optimizers(self) -> None: ...


class LogsMetric(Plain):
    def validation_step(self, batch: object, batch_index: int) -> None:
        super().validation_step(batch, batch_index)
        self.log("accuracy", MulticlassAccuracy(10))


class Raises(Plain):
    def __init__(self, network: torch.nn.Module) -> None:
        raise KeyError("weights")


def module_cell(target: str, training: dict[str, object]) -> dict[str, object]:
    cell = digits_cell(training=training).model_dump(mode="json")
    cell["experiment"]["data"]["augment"] = ["normalize"]
    cell["experiment"]["task"] = {
        "kind": "module",
        "import": target,
        "measures": ["loss", "accuracy"],
    }
    cell["metric"] = {"name": "test/accuracy", "goal": "max"}
    return cell


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("mine")
    for cls in (Plain, WithoutTraining, WithOptimizer, LogsMetric, Raises):
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "mine", module)


@pytest.mark.process
def test_a_module_has_the_results_of_the_same_task(mine: None, tmp_path: Path) -> None:
    """Losses, averaged weights and metrics equal those of the package's own classification."""
    training = {"epochs": 2, "accelerator": "cpu", "average": {"decay": 0.5}}
    module = module_cell("mine:Plain", training)
    task = module | {"experiment": module["experiment"] | {"task": "image-classification"}}
    results = []
    for name, fields in (("module", module), ("task", task)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(format_yaml(fields))
        assert main([str(tmp_path / name)]) == 0
        text = (tmp_path / name / "result.json").read_text()
        results.append(Result.model_validate_json(text).metrics)
    for name in (
        "train/loss",
        "test/loss",
        "test/accuracy",
        "val/averaged-loss",
        "val/averaged-accuracy",
    ):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5), name


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine:WithoutTraining", "mine:WithoutTraining does not define training_step"),
        ("mine:WithOptimizer", "mine:WithOptimizer defines configure_optimizers, but `optimizer`"),
        ("mine:Plane", "import: module 'mine' has no 'Plane'; did you mean 'Plain'?"),
        (
            "mine:__nam__",
            "import: module 'mine' has no '__nam__'; choose from LogsMetric, Plain, Raises, With",
        ),
        ("mien:Plain", "import: mien:Plain: No module named 'mien'; write MODULE:CLASS, with"),
    ],
)
def test_a_class_that_cannot_be_trained_is_refused(mine: None, target: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Cell.model_validate(module_cell(target, {"epochs": 1, "accelerator": "cpu"}))


def test_a_wrong_argument_of_a_task_names_its_class(mine: None) -> None:
    cell = module_cell("mine:Plain", {"epochs": 1, "accelerator": "cpu"})
    cell["experiment"]["task"]["arguments"] = {"gama": 2}
    with pytest.raises(ValueError, match=r"task: arguments: mine:Plain: .* argument 'gama'"):
        Cell.model_validate(cell)


def test_a_class_that_cannot_be_built_stops_the_study_before_its_first_cell(
    mine: None,
) -> None:
    cell = module_cell("mine:Raises", {"epochs": 1})
    assert find_mistake([cell]) == Mistake(0, "task: mine:Raises: KeyError: 'weights'")


@pytest.mark.process
def test_a_logged_metric_is_one_error_line(
    mine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = module_cell("mine:LogsMetric", {"epochs": 1, "accelerator": "cpu"})
    (tmp_path / "config.yaml").write_text(format_yaml(cell))
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "task: 'accuracy' is a metric; log a number, or add the metric to `metrics`\n"
    )


def test_a_task_module_that_lacks_a_method_is_refused_at_its_definition() -> None:
    with pytest.raises(ValueError, match=r"class Half does not define build_metrics, evaluate"):

        class Half(TaskModule):
            def loss(self, batch: object) -> torch.Tensor:
                return torch.zeros(())
