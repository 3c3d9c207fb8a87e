"""The configuration of an experiment determines its metrics, and cells measure exactly these."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torchmetrics.classification
from helpers import fake_study, studies
from helpers.paths import ROOT
from helpers.training_cells import COMPOSITION, digits_cell, scenes_cell, text_cell

from lit_attn.ablate.variants import resolve
from lit_attn.cells.records import Metric
from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.config.source import load
from lit_attn.optim.averaging import WeightAverage
from lit_attn.report.__main__ import main as report
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts
from lit_attn.signatures import TaggedTokens
from lit_attn.tasks.metrics import MetricChoice, Outputs, TorchMetric, available
from lit_attn.tasks.task import Task

BODY = "baseline: a\ncells: {a: {}, b: {attention: belief2}, c: {training.average: {decay: 0.5}}}\n"


def names_of_task(cell: Cell) -> list[str]:
    """Return the metrics that the task module of a cell computes."""
    import torch

    from lit_attn.training.build import build

    task = build(cell, torch.device("cpu")).task
    return [f"{split}/{name}" for split in task.splits for name in task.metric_names(split)]


def composition_cell() -> Cell:
    load_parts([COMPOSITION])
    fields = text_cell().model_dump(mode="json")
    fields["metric"]["name"] = "test/held-out"
    data = {"kind": "head-composition", "batch_size": 8, "eval_questions": 2}
    fields["experiment"] |= {"task": "head-composition", "data": data}
    return Cell.model_validate(fields)


@pytest.mark.slow
@pytest.mark.parametrize("make", [digits_cell, text_cell, composition_cell, scenes_cell])
def test_available_metrics_are_those_of_the_task_module(make: Any, tmp_path: Path) -> None:
    cell = make(tmp_path) if make is scenes_cell else make()
    computed, infos = set(names_of_task(cell)), available(cell.experiment)
    names = {info.name for info in infos if not info.name.startswith(("train/", "evaluation/"))}
    assert computed == names
    for name in computed:
        assert MetricChoice(name=name).resolve(cell.experiment).name == name


EXPERIMENTS = {
    "image-classification": "digits_vit",
    "sequence-classification": "long_range_arena/listops",
    "language-modelling": "python_text_gpt",
    "segmentation": "scenes_segmenter",
}


def shipped(name: str) -> Experiment:
    load_parts([COMPOSITION])
    return Experiment.model_validate(load(ROOT / "experiments" / f"{name}.yaml"))


def test_the_page_lists_the_metrics_of_token_classification() -> None:
    text = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"\| token classification \|(.*)\|", text)
    infos = Task.family["token-classification"]().metrics(TaggedTokens(9, 4, 3))
    assert all(f"`{info.name}`" in row for info in infos)


@pytest.mark.parametrize("task", EXPERIMENTS)
def test_the_page_lists_the_metrics_of_every_task(task: str) -> None:
    text = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    experiment = shipped(EXPERIMENTS[task])
    assert experiment.task.kind == task
    row = re.search(rf"\| {task.replace('-', ' ')} \|(.*)\|", text)
    assert row is not None
    names = [info.name for info in experiment.task.metrics(experiment.data.signature())]
    names = [name for name in names if ":" not in name]
    is_listed = all(f"`{name}`" in row[1] for name in names)
    assert is_listed or (task == "sequence-classification" and "same" in row[1])


@pytest.mark.parametrize(
    ("experiment", "name", "label", "scale", "goal"),
    [
        ("digits_vit", "test/accuracy", "accuracy (%)", 100, "max"),
        ("digits_vit", "test/loss", "loss (nats)", 1, "min"),
        ("digits_vit", "test/calibration", "expected calibration error (%)", 100, "min"),
        ("python_text_gpt", "val/bits_per_byte", "validation bits per byte", 1, "min"),
        ("python_text_gpt", "train/tokens_per_second", "tokens per second", 1, "max"),
        ("scenes_segmenter", "test/IoU:digit 0", "IoU of digit 0 (%)", 100, "max"),
        ("ade20k_segmenter/experiment", "test/IoU:wall", "IoU of wall (%)", 100, "max"),
        (
            "head_composition/experiment",
            "test/held-out",
            "accuracy on held-out tasks (%)",
            100,
            "max",
        ),
        ("digits_vit", "evaluation/seconds", "time of an evaluation (s)", 1, "min"),
    ],
)
def test_label_scale_and_direction_come_from_the_metric(
    experiment: str, name: str, label: str, scale: float, goal: str
) -> None:
    metric = MetricChoice(name=name).resolve(shipped(experiment))
    assert (metric.label, metric.scale, metric.goal) == (label, scale, goal)


TRIED = [
    ("Accuracy", "probabilities", 100, "max"),
    ("AUROC", "probabilities", 100, "max"),
    ("CalibrationError", "probabilities", 100, "min"),
    ("HammingDistance", "probabilities", 100, "min"),
    ("HingeLoss", "probabilities", 1, "min"),
    ("CohenKappa", "probabilities", 1, "max"),
    ("MatthewsCorrCoef", "probabilities", 1, "max"),
    ("JaccardIndex", "classes", 100, "max"),
    ("F1Score", "classes", 100, "max"),
    ("CramersV", "classes", 1, "max"),
    ("NormalizedMutualInfoScore", "classes", 1, None),
    ("CosineSimilarity", "values", 1, "max"),
    ("ExplainedVariance", "values", 1, "max"),
    ("R2Score", "values", 1, "max"),
    ("MeanAbsoluteError", "values", 1, "min"),
    ("MeanAbsolutePercentageError", "values", 1, "min"),
    ("KendallRankCorrCoef", "values", 1, None),
    ("SpearmanCorrCoef", "values", 1, "max"),
    ("WordErrorRate", None, 100, "min"),
    ("BLEUScore", None, 1, "max"),
    ("EditDistance", None, 1, "min"),
    ("Perplexity", None, 1, "min"),
    ("DiceScore", None, 100, "max"),
    ("MeanIoU", None, 100, "max"),
    ("HausdorffDistance", None, 1, "min"),
    # torchmetrics 1.9 states the wrong directions for these two.
    ("DaviesBouldinScore", None, 1, "min"),
    ("WordInfoPreserved", None, 1, "max"),
]


@pytest.mark.parametrize(("name", "form", "scale", "goal"), TRIED)
def test_only_shares_of_torchmetrics_are_printed_in_percent(
    name: str, form: Any, scale: float, goal: str | None
) -> None:
    outputs = None if form is None else Outputs(form, 2 if form == "values" else 10)
    arguments: dict[str, Any] = {}
    if "RankCorr" in name or name == "SpearmanCorrCoef":
        arguments = {"num_outputs": 2}
    elif name in ("DiceScore", "MeanIoU", "HausdorffDistance"):
        arguments = {"num_classes": 10}
    elif hasattr(torchmetrics.classification, name):
        arguments = {"task": "multiclass"}
    info = TorchMetric(name=name, arguments=arguments).info(outputs)
    assert info[:4] == (name, name + " (%)" * (scale == 100), scale, goal)
    assert info.event == "", "no metric of torchmetrics is the time until an event"


def test_a_subclass_of_a_metric_says_itself_whether_it_is_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchmetrics.classification import MulticlassHingeLoss

    module = types.ModuleType("my_metrics")
    module.__dict__["Hinge"] = type("Hinge", (MulticlassHingeLoss,), {})
    bounds = {"plot_lower_bound": 0.0, "plot_upper_bound": 1.0, "__module__": "my_metrics"}
    module.__dict__["Share"] = type("Share", (MulticlassHingeLoss,), bounds)
    monkeypatch.setitem(sys.modules, "my_metrics", module)
    for name, scale in (("Hinge", 1), ("Share", 100)):
        metric = TorchMetric(name=f"my_metrics:{name}")
        assert metric.info(Outputs("probabilities", 10)).scale == scale


def test_a_metric_of_whole_masks_is_refused_for_single_pixels() -> None:
    metric = TorchMetric(name="MeanIoU", arguments={"num_classes": 5, "input_format": "index"})
    with pytest.raises(ValueError, match="of classes: needs whole masks; JaccardIndex is mIoU"):
        metric.info(Outputs("classes", 5))


def test_a_study_may_override_label_scale_and_direction() -> None:
    choice = MetricChoice(name="test/loss", label="bits", scale=1.4427, goal="max")
    metric = choice.resolve(shipped("digits_vit"))
    assert (metric.label, metric.scale, metric.goal) == ("bits", 1.4427, "max")


def test_averaged_weights_are_in_the_label() -> None:
    experiment = shipped("digits_vit")
    training = experiment.training.model_copy(update={"average": WeightAverage(decay=0.9)})
    experiment = experiment.model_copy(update={"training": training})
    assert MetricChoice(name="val/averaged-loss").resolve(experiment).label == (
        "validation loss (nats), averaged weights"
    )


def test_a_cell_completes_its_metric() -> None:
    written = text_cell().model_dump(mode="json") | {"metric": {"name": "test/perplexity"}}
    assert Cell.model_validate(written).metric == Metric(
        name="test/perplexity", label="perplexity", goal="min", scale=1
    )


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("name: test/acuracy", "'test/acuracy' is not measured; did you mean 'test/accuracy'?"),
        ("name: tset/accuracy", "'tset/accuracy' is not measured; did you mean 'test/accuracy'?"),
        ("name: accuracy", "'accuracy' is not measured; did you mean 'val/accuracy'?"),
        (
            "name: test/averaged-accuracy",
            "'test/averaged-accuracy' measures averaged weights; set training.average",
        ),
        (
            "name: train/tokens_per_second",
            "'train/tokens_per_second' is not measured; did you mean 'train/loss'?",
        ),
        (
            "{name: evaluation/seconds, selection: best-validation}",
            "'evaluation/seconds' is not evaluated on a split; set `selection: last`",
        ),
    ],
)
def test_an_unmeasured_metric_is_refused(tmp_path: Path, metric: str, message: str) -> None:
    written = metric if metric.startswith("{") else f"\n  {metric}"
    with pytest.raises(ConfigError) as caught:
        resolve(studies.study(tmp_path, f"{BODY}metric: {written}"))
    line = 9 if metric.startswith("{") else 10
    place = f"{tmp_path / 'ablations.yaml'}:{line}: tiny.metric.name: "
    assert str(caught.value).startswith(place + message)


def test_a_metric_that_the_task_does_not_have_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    message = (
        r"'test/CohenKappa' is not measured; .* \(a metric that the task does not have needs an"
        r" entry in `metrics`\)"
    )
    with pytest.raises(ConfigError, match=message):
        resolve(studies.study(tmp_path, f"{BODY}metric: {{name: test/CohenKappa}}"))


def test_a_variant_without_the_metric_of_the_baseline_is_refused(tmp_path: Path) -> None:
    cells = "baseline: c\ncells: {c: {training.average: {decay: 0.5}}, a: {}}"
    body = f"{cells}\nmetric: {{name: test/averaged-accuracy}}"
    with pytest.raises(
        ConfigError, match=r":9: tiny.metric.name: variant 'a': 'test/averaged-accuracy'"
    ):
        resolve(studies.study(tmp_path, body))


@pytest.mark.parametrize(
    ("experiment", "metric", "message"),
    [
        ("scenes_segmenter", {"name": "test/IoU:digit 0"}, None),
        ("scenes_segmenter", {"name": "test/IoU:digt 0"}, "did you mean 'test/IoU:digit 0'"),
        ("scenes_segmenter", {"name": "val/mIoU"}, "did you mean 'test/mIoU'"),
        ("scenes_segmenter", {"name": "x"}, "choose from test/mIoU, test/mAcc, test/aAcc, test/l"),
        ("ade20k_segmenter/experiment", {"name": "test/IoU:wall"}, None),
        ("ade20k_segmenter/experiment", {"name": "test/IOU"}, "did you mean 'test/mIoU'"),
        ("pile_dcmha/overhead", {"name": "train/tokens_per_second"}, None),
        ("cifar100_vit/experiment", {"selection": "best-validation"}, "set data.validation"),
        ("head_composition/experiment", {"name": "test/same-key:copy"}, None),
        (
            "head_composition/experiment",
            {"name": "test/same-key:cop"},
            "did you mean 'test/same-key:copy'",
        ),
        ("python_text_gpt", {}, None),
        ("python_text_gpt", {"name": "test/bits_per_bite"}, "did you mean 'test/bits_per_byte'"),
    ],
)
def test_metrics_are_checked_for_every_task(
    experiment: str, metric: dict[str, str], message: str | None
) -> None:
    choice = MetricChoice.model_validate(metric)
    if message is None:
        name = metric.get("name", "test/loss" if experiment == "python_text_gpt" else choice.name)
        assert choice.resolve(shipped(experiment)).name == name
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        choice.resolve(shipped(experiment))


def test_a_report_refuses_a_metric_that_no_cell_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metric = Metric(name="test/lss", label="loss", goal="min", scale=1)
    folder = fake_study.write_study(tmp_path / "runs", metric=metric, skip=(("standard", 0),))
    assert report([str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]) == 2
    message = (
        f"{folder / 'plan.json'}: metric.name: no cell has 'test/lss'; did you mean 'test/loss'?"
    )
    assert capsys.readouterr().err == f"{message}\n"
    assert not (tmp_path / "reports").exists()
