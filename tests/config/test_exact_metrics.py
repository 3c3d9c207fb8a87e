"""Metrics in float64, and averages over the classes that occur in a split."""

import inspect
import warnings
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lit_attn.tasks.exact_metrics import ClassMean, compute, update, use_float64
from lit_attn.tasks.metrics import Outputs, TorchMetric

Floats = NDArray[np.float64]


def measure(metric: Metric, batches: list[tuple[Tensor, ...]]) -> float:
    """Return the value of a metric after a reset and some batches, as a task computes it."""
    collection = MetricCollection({"m": metric}, compute_groups=False)
    use_float64(collection)
    # An earlier evaluation and its reset change nothing.
    update(collection, batches[0])
    compute(collection)
    collection.reset()
    for batch in batches:
        update(collection, batch)
    return float(compute(collection)[0]["m"])


def r_squared(predicted: Floats, targets: Floats) -> float:
    return 1 - ((predicted - targets) ** 2).sum() / ((targets - targets.mean()) ** 2).sum()


def explained_variance(predicted: Floats, targets: Floats) -> float:
    return 1 - (predicted - targets).var() / targets.var()


def relative_squared_error(predicted: Floats, targets: Floats) -> float:
    return 1 - r_squared(predicted, targets)


def pearson(predicted: Floats, targets: Floats) -> float:
    return float(pearsonr(predicted, targets)[0])


def spearman(predicted: Floats, targets: Floats) -> float:
    return float(spearmanr(predicted, targets)[0])


def concordance(predicted: Floats, targets: Floats) -> float:
    covariance = np.cov(predicted, targets, ddof=1)
    shift = (predicted.mean() - targets.mean()) ** 2
    return 2 * covariance[0, 1] / (covariance[0, 0] + covariance[1, 1] + shift)


def normalised_error(predicted: Floats, targets: Floats) -> float:
    return np.sqrt(((predicted - targets) ** 2).mean()) / targets.std()


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save")
@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize(
    ("name", "arguments", "formula"),
    [
        ("R2Score", {}, r_squared),
        ("ExplainedVariance", {}, explained_variance),
        ("RelativeSquaredError", {}, relative_squared_error),
        ("PearsonCorrCoef", {}, pearson),
        ("SpearmanCorrCoef", {}, spearman),
        ("ConcordanceCorrCoef", {}, concordance),
        ("NormalizedRootMeanSquaredError", {"normalization": "std"}, normalised_error),
    ],
)
def test_metrics_of_targets_far_from_zero_are_right(
    name: str, arguments: dict[str, Any], formula: Any, mean: float
) -> None:
    draw = np.random.default_rng(0)
    targets = torch.from_numpy(draw.normal(mean, 0.5, 2000).astype(np.float32))
    predicted = targets + torch.from_numpy(draw.normal(0, 0.2, 2000).astype(np.float32))
    metric = TorchMetric(name=name, arguments=arguments).build(Outputs("values", 1))
    batches = list(zip(predicted.split(512), targets.split(512), strict=True))
    expected = formula(predicted.double().numpy(), targets.double().numpy())
    assert measure(metric, batches) == pytest.approx(expected, rel=1e-5)


def test_a_cosine_of_long_vectors_is_right() -> None:
    targets = torch.full((64, 3), 1e4) + torch.arange(192).view(64, 3)
    predicted = targets.flip(1)
    metric = TorchMetric(name="CosineSimilarity", arguments={"reduction": "mean"})
    value = measure(metric.build(Outputs("values", 3)), [(predicted, targets)])
    lengths = predicted.double().norm(dim=1) * targets.double().norm(dim=1)
    expected = ((predicted.double() * targets.double()).sum(1) / lengths).mean()
    assert value == pytest.approx(float(expected), rel=1e-6)


def test_r_squared_of_one_sample_is_undefined_and_the_others_are_not() -> None:
    metrics = MetricCollection(
        {"r2": torchmetrics.R2Score(), "mae": torchmetrics.MeanAbsoluteError()},
        compute_groups=False,
    )
    update(metrics, (torch.tensor([1.0]), torch.tensor([3.0])))
    values, reasons = compute(metrics)
    assert values["r2"].isnan()
    assert values["mae"] == 2
    assert list(reasons) == ["r2"]
    assert "two samples" in reasons["r2"]


def test_an_error_of_an_own_metric_is_raised() -> None:
    class Mine(torchmetrics.MeanMetric):
        def compute(self) -> Tensor:
            raise ValueError("a mistake")

    metrics = MetricCollection({"m": Mine()})
    update(metrics, (torch.ones(1),))
    with pytest.raises(ValueError, match="a mistake"):
        compute(metrics)


REFUSED = (
    "MulticlassEER",
    "MulticlassPrecisionRecallCurve",
    "MulticlassROC",
    "MulticlassStatScores",
)


def list_averaged() -> list[str]:
    """Return the classes of torchmetrics that are averages over classes of one label a sample."""
    names = []
    for name in import_module("torchmetrics.classification").__all__:
        member = getattr(torchmetrics.classification, name)
        parameters = inspect.signature(member.__init__).parameters
        # Classes with several numbers for each class of the data are refused before a run.
        is_accepted = name not in REFUSED
        if name.startswith("Multiclass") and "average" in parameters and is_accepted:
            names.append(name)
    return names


AVERAGED = list_averaged()
TASKS = ("Accuracy", "AUROC", "AveragePrecision", "F1Score", "Precision", "Recall", "Specificity")


def build_averaged(name: str, size: int) -> tuple[Metric, Metric]:
    """Return an averaged metric as the product builds it, and as torchmetrics does."""
    arguments: dict[str, Any] = {"average": "macro"}
    if name in TASKS:
        arguments["task"] = "multiclass"
    if "FBeta" in name:
        arguments["beta"] = 2.0
    metric = TorchMetric(name=name, arguments=arguments)
    outputs = Outputs("probabilities", size)
    metric.info(outputs)
    return metric.build(outputs), metric.build_as_written(outputs)


def draw_samples(classes: list[int]) -> tuple[Tensor, Tensor]:
    """Return probabilities (60, 4) and labels among `classes`, of which most are the largest."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor(classes)[torch.randint(len(classes), (60,), generator=generator)]
    logits = torch.randn(60, 4, generator=generator) + 2 * torch.eye(4)[labels]
    return logits.softmax(1), labels


@pytest.mark.parametrize("name", [*AVERAGED, *TASKS])
def test_averages_are_those_of_torchmetrics_if_all_classes_occur(name: str) -> None:
    metric, written = build_averaged(name, 4)
    samples = draw_samples([0, 1, 2, 3])
    assert measure(metric, [samples]) == pytest.approx(measure(written, [samples]), rel=1e-6)


@pytest.mark.parametrize("name", [*AVERAGED, *TASKS])
@pytest.mark.parametrize("absent", [0, 2, 3])
def test_averages_cover_the_classes_that_occur(name: str, absent: int) -> None:
    classes = [number for number in range(4) if number != absent]
    metric, _ = build_averaged(name, 4)
    assert isinstance(metric, ClassMean)
    samples = draw_samples(classes)
    value = measure(metric, [samples])
    with warnings.catch_warnings():
        # torchmetrics warns that the absent class has no value.
        warnings.simplefilter("ignore")
        metric.update(*samples)
        each: Tensor = metric.per_class.compute()
    assert value == pytest.approx(float(each[classes].mean()), rel=1e-6)


@pytest.mark.parametrize("name", [*AVERAGED, *TASKS])
def test_perfect_predictions_have_the_best_average_without_a_class(name: str) -> None:
    metric, _ = build_averaged(name, 3)
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    value = measure(metric, [(torch.eye(3)[labels] * 0.9 + 1 / 30, labels)])
    is_distance = "Hamming" in name
    assert value == pytest.approx(0.0 if is_distance else 1.0)


def test_samples_with_the_ignored_label_make_no_class_occur() -> None:
    metric = TorchMetric(name="MulticlassAUROC", arguments={"ignore_index": 2})
    built = metric.build(Outputs("probabilities", 3))
    labels = torch.tensor([0, 1, 0, 1, 2, 2])
    assert measure(built, [(torch.eye(3)[labels], labels)]) == pytest.approx(1.0)
