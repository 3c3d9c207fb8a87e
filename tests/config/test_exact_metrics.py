"""Metrics in float64, and averages over the classes that occur in a split."""

import inspect
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, fbeta_score, jaccard_score, precision_score, recall_score
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lit_attn.segmentation.task import Overlap
from lit_attn.tasks.exact_metrics import ClassMean, clear_states, compute, update, use_float64
from lit_attn.tasks.metrics import Outputs, TorchMetric
from lit_attn.tasks.square_metrics import R2Score

Floats = NDArray[np.float64]


def measure(metric: Metric, batches: Sequence[tuple[Tensor, ...]]) -> float:
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
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1e-5), (1e4, 0.5), (1e9, 0.5)])
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
    name: str, arguments: dict[str, Any], formula: Any, mean: float, deviation: float
) -> None:
    draw = np.random.default_rng(0)
    targets = torch.from_numpy(np.sort(draw.normal(mean, deviation, 2000)))
    predicted = targets + torch.from_numpy(draw.normal(0.1 * deviation, 0.4 * deviation, 2000))
    metric = TorchMetric(name=name, arguments=arguments).build(Outputs("values", 1))
    # The batches differ in their means, and so does the first one from all.
    batches = list(zip(predicted.split(512), targets.split(512), strict=True))
    expected = formula(predicted.numpy(), targets.numpy())
    # The differences of numbers around 1e9 have seven digits, and ranks are in float32.
    has_few_digits = mean == 1e9 or name == "SpearmanCorrCoef"
    assert measure(metric, batches) == pytest.approx(expected, rel=1e-6 if has_few_digits else 1e-8)


def draw_pairs() -> tuple[Tensor, Tensor]:
    """Return predictions and targets (40, 3) in float64."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    errors = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    return targets + 0.3 * errors, targets * torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("R2Score", {}),
        ("R2Score", {"multioutput": "variance_weighted", "adjusted": 3}),
        ("R2Score", {"multioutput": "raw_values"}),
        ("ExplainedVariance", {"multioutput": "variance_weighted"}),
        ("RelativeSquaredError", {"num_outputs": 3, "squared": False}),
        ("NormalizedRootMeanSquaredError", {"num_outputs": 3, "normalization": "mean"}),
        ("NormalizedRootMeanSquaredError", {"num_outputs": 3, "normalization": "range"}),
        ("NormalizedRootMeanSquaredError", {"num_outputs": 3, "normalization": "l2"}),
    ],
)
def test_metrics_of_squares_are_those_of_torchmetrics(name: str, arguments: dict[str, Any]) -> None:
    """Near 0, where torchmetrics is right; also if processes have their own batches."""
    predicted, targets = draw_pairs()
    metric = TorchMetric(name=name, arguments=arguments).build(Outputs("values", 3))
    theirs = getattr(torchmetrics.regression, name)(**arguments)
    use_float64(theirs)
    theirs.update(predicted, targets)
    processes = []
    for part in (slice(0, 7), slice(7, 7), slice(7, 40)):
        process = metric.clone()
        if part.start != part.stop:
            process.update(predicted[part], targets[part])
        else:
            # A process without samples has evaluated padding.
            process.update(predicted, targets)
            clear_states(process)
        processes.append(process)
    metric.update(predicted, targets)
    torch.testing.assert_close(metric.compute(), theirs.compute(), rtol=1e-6, atol=1e-12)
    for state in metric.metric_state:
        gathered = torch.stack([getattr(process, state) for process in processes])
        if state in ("lowest", "highest"):
            gathered = gathered.amin(0) if state == "lowest" else gathered.amax(0)
        setattr(metric, state, gathered)
    metric._computed = None
    torch.testing.assert_close(metric.compute(), theirs.compute(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    ["R2Score", "ExplainedVariance", "RelativeSquaredError", "PearsonCorrCoef"],
)
@pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero")
def test_constant_targets_have_no_value(name: str) -> None:
    metric = TorchMetric(name=name).build(Outputs("values", 1))
    collection = MetricCollection({"m": metric}, compute_groups=False)
    use_float64(collection)
    for count in (3, 4):
        update(collection, (torch.rand(count), torch.full((count,), 0.1)))
    values, reasons = compute(collection)
    assert values["m"].isnan()
    assert "targets" in reasons["m"]


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
        {"r2": R2Score(), "mae": torchmetrics.MeanAbsoluteError()},
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


def specificity(labels: Any, predicted: Any) -> float:
    """Return the mean over classes that occur, but for the only label of all samples."""
    shares = []
    for number in sorted({*labels.tolist(), *predicted.tolist()}):
        others = labels != number
        if others.any():
            shares.append((predicted[others] != number).mean())
    return float(np.mean(shares)) if shares else np.nan


def negative_predictive_value(labels: Any, predicted: Any) -> float:
    shares = []
    for number in sorted({*labels.tolist(), *predicted.tolist()}):
        others = predicted != number
        shares.append((labels[others] != number).mean() if others.any() else 0.0)
    return float(np.mean(shares))


def recall(labels: Any, predicted: Any) -> float:
    return recall_score(labels, predicted, labels=np.unique(labels), average="macro")


def fbeta(labels: Any, predicted: Any) -> float:
    return fbeta_score(labels, predicted, beta=2, average="macro", zero_division=0)


def precision(labels: Any, predicted: Any) -> float:
    return precision_score(labels, predicted, average="macro", zero_division=0)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("JaccardIndex", partial(jaccard_score, average="macro")),
        ("F1Score", partial(f1_score, average="macro", zero_division=0)),
        ("MulticlassFBetaScore", fbeta),
        ("Precision", precision),
        ("Recall", recall),
        ("Accuracy", recall),
        ("Specificity", specificity),
        ("NegativePredictiveValue", negative_predictive_value),
    ],
)
def test_averages_are_those_of_scikit_learn(name: str, formula: Any) -> None:
    """Predicted classes without a label count, and classes that do not occur do not."""
    arguments: dict[str, Any] = {"average": "macro"}
    arguments |= {"beta": 2.0} if "FBeta" in name else {"task": "multiclass"}
    metric = TorchMetric(name=name, arguments=arguments).build(Outputs("classes", 6))
    assert isinstance(metric, ClassMean)
    draw = np.random.default_rng(0)
    # The report's example: class 2 is predicted without a label.
    samples = [(np.array([0, 0, 1, 1]), np.array([0, 2, 1, 1]))]
    for label_count, predicted_count in ((1, 1), (1, 4), (3, 5), (5, 2), (6, 6), (4, 4)):
        samples.append(
            (draw.integers(label_count, size=30), draw.integers(predicted_count, size=30))
        )
    for labels, predicted in samples:
        batches = [(torch.from_numpy(predicted), torch.from_numpy(labels))]
        assert measure(metric, batches) == pytest.approx(formula(labels, predicted), nan_ok=True)
        metric.reset()


def test_the_mean_iou_is_that_of_the_segmentation() -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (50,), generator=draw)
    predicted = torch.randint(5, (50,), generator=draw)
    arguments = {"task": "multiclass", "average": "macro"}
    metric = TorchMetric(name="JaccardIndex", arguments=arguments).build(Outputs("classes", 6))
    overlap = Overlap(tuple("abcdef"))
    overlap.update(predicted, labels, torch.zeros(50))
    expected = float(overlap.compute()["mIoU"])
    assert measure(metric, [(predicted, labels)]) == pytest.approx(expected)


RANKED = ("AUROC", "AveragePrecision", "MulticlassAUROC", "MulticlassLogAUC")


@pytest.mark.parametrize("name", RANKED)
def test_areas_cover_the_classes_with_labels(name: str) -> None:
    metric, _ = build_averaged(name, 4)
    assert isinstance(metric, ClassMean)
    samples = draw_samples([0, 1, 3])
    value = measure(metric, [samples])
    with warnings.catch_warnings():
        # torchmetrics warns that the absent class has no value.
        warnings.simplefilter("ignore")
        metric.update(*samples)
        each: Tensor = metric.per_class.compute()
    assert value == pytest.approx(float(each[[0, 1, 3]].mean()), rel=1e-6)


def test_an_area_of_one_label_is_undefined() -> None:
    metric, _ = build_averaged("AUROC", 4)
    collection = MetricCollection({"m": metric}, compute_groups=False)
    update(collection, draw_samples([0]))
    values, reasons = compute(collection)
    assert values["m"].isnan()
    assert "none of the classes" in reasons["m"]


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
    # Nor does a prediction of the ignored class.
    metric = TorchMetric(name="MulticlassF1Score", arguments={"ignore_index": 2})
    built = metric.build(Outputs("classes", 3))
    predicted = torch.tensor([0, 1, 0, 2, 0, 1])
    assert measure(built, [(predicted, labels)]) == pytest.approx((1 + 2 / 3) / 2)
