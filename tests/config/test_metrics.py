"""What may be compared is known from an experiment alone, and is what its cells measure."""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers import fake_study, studies
from helpers.paths import ROOT
from helpers.training_cells import digits_cell, scenes_cell, text_cell

from lit_attn.ablate.variants import resolve
from lit_attn.cells.records import Metric
from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.config.metrics import NAMES, check, measured
from lit_attn.report.__main__ import main as report
from lit_attn.schema.errors import ConfigError

BODY = "baseline: a\ncells: {a: {}, b: {attention: belief2}, c: {training.ema: 0.5}}\n"


def of_cell(cell: Cell) -> list[str]:
    """What the task built for a cell measures."""
    import torch

    from lit_attn.training.build import build

    task = build(cell, torch.device("cpu")).task
    return [f"{split}/{name}" for split in task.splits for name in task.names_of(split)]


def composition_cell() -> Cell:
    given = text_cell().model_dump(mode="json")
    given["metric"]["name"] = "test/held-out"
    data = {"kind": "head-composition", "batch_size": 8, "eval_questions": 2}
    given["experiment"] |= {"task": "head-composition", "data": data}
    return Cell.model_validate(given)


@pytest.mark.parametrize("make", [digits_cell, text_cell, composition_cell, scenes_cell])
def test_what_is_known_is_what_is_measured(make: Any, tmp_path: Path) -> None:
    cell = make(tmp_path) if make is scenes_cell else make()
    found, known = of_cell(cell), measured(cell.experiment)
    of_splits = [name for name in known if not name.startswith(("train/", "evaluation/"))]
    # A text of which nobody has counted the words.
    unknown = {"val/word_perplexity", "test/word_perplexity"} & (set(of_splits) - set(found))
    assert set(found) == set(of_splits) - unknown
    for name in found:
        check(Metric(name=name), cell.experiment)


def test_the_page_tables_every_name() -> None:
    text = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    for task, names in NAMES.items():
        row = re.search(rf"\| {task.replace('-', ' ')} \|(.*)\|", text)
        assert row is not None
        same = task == "sequence-classification"
        assert (
            row[1].strip() == "the same" if same else all(f"`{name}`" in row[1] for name in names)
        )


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("name: test/acuracy", "'test/acuracy' is not measured; did you mean 'test/accuracy'?"),
        ("name: tset/accuracy", "'tset/accuracy' is not measured; did you mean 'test/accuracy'?"),
        ("name: accuracy", "'accuracy' is not measured; did you mean 'val/accuracy'?"),
        ("name: test/lss", "'test/lss' is not measured; did you mean 'test/loss'?"),
        ("name: test/ema-accuracy", "'test/ema-accuracy' is of averaged weights; set training.ema"),
        (
            "name: train/tokens_per_second",
            "'train/tokens_per_second' is not measured; did you mean 'train/loss'?",
        ),
        (
            "{name: evaluation/seconds, selection: best-validation}",
            "'evaluation/seconds' has no best validation: give it `selection: last`",
        ),
    ],
)
def test_a_metric_that_nothing_measures(tmp_path: Path, metric: str, message: str) -> None:
    written = metric if metric.startswith("{") else f"\n  {metric}"
    with pytest.raises(ConfigError) as caught:
        resolve(studies.study(tmp_path, f"{BODY}metric: {written}"))
    line = 9 if metric.startswith("{") else 10
    place = f"{tmp_path / 'ablations.yaml'}:{line}: tiny.metric.name: "
    assert str(caught.value).startswith(place + message)


def test_a_variant_that_does_not_measure_what_the_baseline_does(tmp_path: Path) -> None:
    body = "baseline: c\ncells: {c: {training.ema: 0.5}, a: {}}\nmetric: {name: test/ema-accuracy}"
    with pytest.raises(
        ConfigError, match=r":9: tiny.metric.name: variant 'a': 'test/ema-accuracy'"
    ):
        resolve(studies.study(tmp_path, body))


@pytest.mark.parametrize(
    ("experiment", "metric", "message"),
    [
        ("scenes_segmenter", {"name": "test/IoU:digit 0"}, None),
        ("scenes_segmenter", {"name": "test/IoU:digt 0"}, "did you mean 'test/IoU:digit 0'"),
        ("scenes_segmenter", {"name": "val/mIoU"}, "did you mean 'test/mIoU'"),
        ("scenes_segmenter", {"name": "x"}, "choose from test/mIoU, test/mAcc, test/aAcc, test/l"),
        ("ade20k_segmenter", {"name": "test/IoU:wall"}, None),
        ("ade20k_segmenter", {"name": "test/IOU"}, "did you mean 'test/mIoU'"),
        ("dcmha_overhead", {"name": "train/tokens_per_second"}, None),
        ("imagenet_vit_small", {"selection": "best-validation"}, "set data.validation"),
        ("head_composition", {"name": "test/same-key:copy"}, None),
        ("head_composition", {"name": "test/same-key:cop"}, "did you mean 'test/same-key:copy'"),
        ("python_text_gpt", {}, "'test/accuracy' is not measured"),
        ("python_text_gpt", {"name": "test/bits_per_bite"}, "did you mean 'test/bits_per_byte'"),
        ("imagenet_jit", {"name": "train/mfu"}, None),
    ],
)
def test_every_task(experiment: str, metric: dict[str, str], message: str | None) -> None:
    from lit_attn.config.source import load

    path = ROOT / "experiments" / f"{experiment}.yaml"
    given = Experiment.model_validate(load(path))
    if message is None:
        check(Metric(**metric), given)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        check(Metric(**metric), given)


def test_a_report_of_cells_without_the_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metric = Metric(name="test/lss", label="loss", goal="min", scale=1)
    folder = fake_study.write_study(tmp_path / "runs", metric=metric, skip=(("standard", 0),))
    assert report([str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]) == 2
    said = f"{folder / 'plan.json'}: metric.name: no cell has 'test/lss'; did you mean 'test/loss'?"
    assert capsys.readouterr().err == f"{said}\n"
    assert not (tmp_path / "reports").exists()
