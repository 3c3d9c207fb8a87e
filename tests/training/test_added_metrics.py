"""Metrics that an experiment adds: torchmetrics by name, and classes from files in `parts`."""

import itertools
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import studies
from helpers.commands import run_python
from helpers.finished_cells import read_weights
from helpers.training_cells import (
    composition_cell,
    digits_cell,
    result_of,
    scenes_cell,
    text_cell,
)
from sklearn.metrics import cohen_kappa_score, f1_score
from torch import Tensor

from lit_attn.cells.records import Plan, Result
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import format_yaml, parse_plain
from lit_attn.tasks.metrics import MetricChoice
from lit_attn.train import main
from lit_attn.training.build import build

HITS = """
import torch
from torchmetrics import Metric


class Hits(Metric):
    \"\"\"Number of correct predictions.\"\"\"

    higher_is_better = True

    def __init__(self):
        super().__init__()
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, probabilities, labels):
        self.hits += (probabilities.argmax(1) == labels).sum()

    def compute(self):
        return self.hits
"""

METRICS = [
    {"name": "CalibrationError", "arguments": {"task": "multiclass", "n_bins": 10}},
    {"name": "MulticlassF1Score", "arguments": {"average": "macro"}, "record_as": "F1"},
    {"name": "AUROC", "arguments": {"task": "multiclass"}},
    {"name": "CohenKappa", "arguments": {"task": "multiclass"}},
    {"name": "my_hits:Hits"},
]

BODY = """
baseline: a
match: none
parts: [my_hits.py]
set: {training.devices: 2, training.average: {decay: 0.5}}
cells: {a: {}, b: {optimizer.lr: 1e-2}}
metric: {name: test/CalibrationError}
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(folder, "-m", "lit_attn.ablate", *arguments)


def write_study(folder: Path, metrics: list[dict[str, object]], body: str = BODY) -> None:
    experiment = parse_plain(studies.EXPERIMENT, "text") | {"metrics": metrics}
    studies.write(folder, body, format_yaml(experiment))
    (folder / "my_hits.py").write_text(HITS)


def outputs(folder: Path, split: str, weights: str) -> tuple[Tensor, Tensor]:
    """Return the probabilities and labels of a split, computed in one process without the task."""
    cell = Cell.read(folder / "config.yaml")
    parts = build(cell, torch.device("cpu"))
    network = parts.task.network
    network.load_state_dict(torch.load(folder / "checkpoints" / weights, weights_only=True))
    network.eval()
    loader = parts.data.evaluation_loader(split)
    with torch.no_grad():
        batches = [(network(images).softmax(1), labels) for images, labels in loader]
    return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int) -> float:
    confidences, predicted = probabilities.double().max(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    error = 0.0
    for low, high in itertools.pairwise(edges):
        inside = (confidences > low) & (confidences <= high)
        if inside.any():
            accuracy = (predicted == labels)[inside].double().mean()
            gap = (accuracy - confidences[inside].mean()).abs()
            error += inside.double().mean().item() * gap.item()
    return error


@pytest.mark.process
def test_added_metrics_of_two_processes_equal_a_direct_computation(tmp_path: Path) -> None:
    """Every split and the averaged weights are measured; the metric labels its own column."""
    write_study(tmp_path, METRICS)
    finished = run(tmp_path, "ablations.yaml", "--jobs", "1", "--seeds", "1")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for variant in "ab":
        (folder,) = (tmp_path / "runs" / "tiny" / variant).iterdir()
        result = result_of(folder)
        assert result.devices == 2
        for split in ("val", "test"):
            for prefix, weights in (("", "weights.pt"), ("averaged-", "averaged.pt")):
                probabilities, labels = outputs(folder, split, weights)
                predicted = probabilities.argmax(1)
                expected = {
                    "CalibrationError": calibration_error(probabilities, labels, 10),
                    "F1": f1_score(labels, predicted, average="macro"),
                    "CohenKappa": cohen_kappa_score(labels, predicted),
                    "Hits": (predicted == labels).sum().item(),
                }
                for name, value in expected.items():
                    recorded = result.metrics[f"{split}/{prefix}{name}"]
                    assert recorded == pytest.approx(value, rel=1e-4, abs=1e-6), name
                assert 0.5 < result.metrics[f"{split}/{prefix}AUROC"] <= 1
    plan = Plan.model_validate_json((tmp_path / "runs" / "tiny" / "plan.json").read_text())
    assert (plan.metric.label, plan.metric.goal, plan.metric.scale) == (
        "CalibrationError (%)",
        "min",
        100,
    )
    assert "CalibrationError (%)" in (tmp_path / "reports" / "tiny" / "table.full.md").read_text()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            [{"name": "CalibrationEror"}],
            "metrics: 'CalibrationEror' is not a metric of torchmetrics; did you mean "
            "'CalibrationError'?",
        ),
        ([{"name": "Accuracy"}], "metrics: Accuracy cannot be used for predictions in the form of"),
        ([{"name": "MeanSquaredError"}], "MeanSquaredError cannot be used for predictions in the"),
        (
            [{"name": "MulticlassF1Score", "arguments": {"average": "none"}}],
            "for predictions in the form of probabilities: it computes 10 numbers; choose an av",
        ),
        ([{"name": "my_hits:Missing"}], "import: module 'my_hits' has no 'Missing'; "),
        ([{"name": "my_hits:torch"}], "my_hits:torch is not a subclass of torchmetrics.Metric"),
        (
            [{"name": "my_hits:Hits", "record_as": "accuracy"}],
            "metrics: 'accuracy' is measured twice; set `record_as`",
        ),
        ([{"name": "my_hits:Hits"}], "tiny.metric.name: 'test/CalibrationError' is not measured"),
        (
            [
                {
                    "name": "MulticlassNegativePredictiveValue",
                    "record_as": "CalibrationError",
                }
            ],
            "tiny.metric.name: 'test/CalibrationError' does not say which direction is better",
        ),
    ],
)
def test_a_metric_that_cannot_be_measured_is_one_error_line(
    tmp_path: Path,
    metrics: list[dict[str, object]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("my_hits")
    exec(HITS, vars(module))
    monkeypatch.setitem(sys.modules, "my_hits", module)
    body = BODY.replace("parts: [my_hits.py]\n", "")
    experiment = parse_plain(studies.EXPERIMENT, "text") | {"metrics": metrics}
    with pytest.raises(ConfigError) as caught:
        studies.variants(tmp_path, body, format_yaml(experiment))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert re.match(r"\S+\.yaml:\d+: ", str(caught.value))


def train(cell: Cell, metrics: list[dict[str, object]], folder: Path) -> Result:
    experiment = cell.experiment.model_dump(mode="json") | {"metrics": metrics}
    cell = Cell.model_validate(cell.model_dump(mode="json") | {"experiment": experiment})
    folder.mkdir()
    cell.write(folder / "config.yaml")
    assert main([str(folder)]) == 0
    return result_of(folder)


@pytest.mark.process
def test_metrics_get_the_predicted_tokens_of_a_language_model(tmp_path: Path) -> None:
    metrics = [{"name": "MulticlassAccuracy", "arguments": {"average": "micro"}}]
    result = train(text_cell(), metrics, tmp_path / "cell")
    cell = Cell.read(tmp_path / "cell" / "config.yaml")
    parts = build(cell, torch.device("cpu"))
    parts.task.network.load_state_dict(read_weights(tmp_path / "cell"))
    parts.task.eval()
    hits: list[Tensor] = []
    with torch.no_grad():
        for inputs, targets in parts.data.evaluation_loader("test"):
            predicted = parts.task.network(inputs).argmax(-1)
            hits.append((predicted == targets)[targets != -100])
    share = torch.cat(hits).double().mean().item()
    assert result.metrics["test/MulticlassAccuracy"] == pytest.approx(share, rel=1e-6)


@pytest.mark.process
def test_metrics_get_the_answers_of_head_composition(tmp_path: Path) -> None:
    metrics = [{"name": "MulticlassAccuracy", "arguments": {"average": "micro"}}]
    cell = composition_cell()
    training = cell.experiment.training.model_copy(update={"epochs": 1, "max_steps": 2})
    experiment = cell.experiment.model_copy(update={"training": training})
    result = train(cell.model_copy(update={"experiment": experiment}), metrics, tmp_path / "cell")
    assert result.metrics["test/MulticlassAccuracy"] == pytest.approx(
        result.metrics["test/accuracy"], abs=1e-6
    )


@pytest.mark.process
def test_metrics_get_the_labelled_pixels_of_a_segmentation(tmp_path: Path) -> None:
    """The micro-averaged accuracy of labelled pixels is the task's own pixel accuracy."""
    metrics = [{"name": "MulticlassAccuracy", "arguments": {"average": "micro"}}]
    result = train(scenes_cell(tmp_path / "scenes"), metrics, tmp_path / "cell")
    assert result.metrics["test/MulticlassAccuracy"] == pytest.approx(
        result.metrics["test/aAcc"], rel=1e-5
    )


@pytest.mark.process
def test_the_mean_over_predicted_numbers_is_recorded(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 64), ("test", 20)):
        arrays[f"x_{split}"] = draw.integers(256, size=(count, 8, 8), dtype=np.uint8)
        arrays[f"y_{split}"] = draw.normal(size=(count, 2))
    np.savez(tmp_path / "a.npz", **arrays)
    data = {"kind": "npz-targets", "path": str(tmp_path / "a.npz"), "name": "n", "size": 8}
    written = digits_cell().model_dump(mode="json") | {"metric": {"name": "test/mae"}}
    data |= {"channels": 1, "outputs": 2, "batch_size": 16}
    written["experiment"] |= {"task": "regression", "data": data}
    metrics = [{"name": "PearsonCorrCoef", "arguments": {"num_outputs": 2}}]
    result = train(Cell.model_validate(written), metrics, tmp_path / "cell")
    parts = build(Cell.read(tmp_path / "cell" / "config.yaml"), torch.device("cpu"))
    parts.task.network.load_state_dict(read_weights(tmp_path / "cell"))
    ((images, targets),) = parts.data.evaluation_loader("test")
    with torch.no_grad():
        predicted = parts.task.network.eval()(images).numpy()
    pairs = zip(predicted.T, targets.numpy().T, strict=True)
    expected = np.mean([np.corrcoef(*pair)[0, 1] for pair in pairs])
    assert result.metrics["test/PearsonCorrCoef"] == pytest.approx(expected, rel=1e-3)


def test_added_metrics_change_the_identity() -> None:
    cell = digits_cell()
    metrics = [{"name": "CohenKappa", "arguments": {"task": "multiclass"}}]
    experiment = cell.experiment.model_dump(mode="json") | {"metrics": metrics}
    other = Cell.model_validate(cell.model_dump(mode="json") | {"experiment": experiment})
    assert other.fingerprint != cell.fingerprint
    metric = MetricChoice(name="val/CohenKappa").resolve(other.experiment)
    assert (metric.label, metric.goal, metric.scale) == ("validation CohenKappa", "max", 1)
