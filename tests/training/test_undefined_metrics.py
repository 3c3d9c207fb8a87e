"""Metrics that are NaN, infinite or absent at some evaluations.

An earlier evaluation never stands in for one whose metric is not finite.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import fake_study
from helpers.finished_cells import train_cell
from helpers.stopping import run_until
from helpers.training_cells import digits_cell, folder_of, result_of, text_cell
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_attn.cells.failure import Diverged, classify_failure
from lit_attn.cells.records import Metric
from lit_attn.cells.rows import MetricRow, read_metrics
from lit_attn.config.cell import Cell
from lit_attn.report.records.read import read_studies
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.language import TokenLoss
from lit_attn.tasks.metrics import DEFAULT_METRIC
from lit_attn.train import run_cell
from lit_attn.training.result import has_diverged
from lit_attn.training.selection import select_epoch

SCRIPTED = '''
import os

import torch
from torchmetrics import Metric


class Scripted(Metric):
    """Metric whose value at each evaluation comes from a list; the last value repeats."""

    higher_is_better = True

    def __init__(self, values):
        super().__init__()
        self.values = [float(value) for value in values.split(",")]
        self.count = int(os.environ.get("SCRIPTED_START", 0))

    def update(self, *arguments):
        pass

    def compute(self):
        value = self.values[min(self.count, len(self.values) - 1)]
        self.count += 1
        return torch.tensor(value, dtype=torch.float64)
'''
LAST = {"name": "test/Scripted", "label": "s", "goal": "max", "scale": 1.0}
BEST = {**LAST, "selection": "best-validation"}
EPOCHS = 4  # Each has 4 steps.
PART: list[Path] = []  # The file of the plug-in.


@pytest.fixture(scope="module", autouse=True)
def _written_part(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Write the plug-in once: a process imports one module of a name."""
    PART.clear()
    PART.append(tmp_path_factory.mktemp("part") / "scripted_metric.py")
    PART[0].write_text(SCRIPTED)


def scripted_cell(folder: Path, values: str, metric: dict[str, Any], **training: Any) -> Path:
    """Write a cell of EPOCHS evaluations that measure `values`, and return its folder."""
    written = digits_cell(training={"epochs": EPOCHS}).model_dump(mode="json")
    written["experiment"]["training"] |= training
    added = {"name": "scripted_metric:Scripted", "arguments": {"values": values}}
    written["experiment"]["metrics"] = [added]
    written |= {"metric": {**DEFAULT_METRIC.model_dump(), **metric}, "parts": [str(PART[0])]}
    return folder_of(Cell.parse(written, "config.yaml"), folder)


@pytest.mark.process
def test_a_metric_that_is_not_finite_at_the_end_has_diverged(tmp_path: Path) -> None:
    folder = scripted_cell(tmp_path, "0.6,0.7,-inf,-inf", LAST)
    with pytest.raises(Diverged, match="test/Scripted is -inf at the selected step 16"):
        run_cell(folder)
    assert not (folder / "result.json").exists()
    rows = [row for row in read_metrics(folder / "metrics.csv") if row.name == "test/Scripted"]
    assert [row.value for row in rows] == [0.6, 0.7, -math.inf, -math.inf]
    line = "lit_attn.cells.failure.Diverged: test/Scripted is -inf at the selected step 16"
    assert classify_failure(1, line) == "diverged"


@pytest.mark.process
def test_another_metric_that_is_not_finite_is_left_out_of_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy = {"name": "test/accuracy"}
    folder = scripted_cell(tmp_path, "0.6,0.7,nan,inf", accuracy)
    run_cell(folder)
    result = result_of(folder)
    assert result.selected_epoch == EPOCHS - 1
    assert "test/Scripted" not in result.metrics
    assert "test/loss" in result.metrics
    assert "not in the result: test/Scripted, val/Scripted" in capsys.readouterr().out


@pytest.mark.process
def test_a_perplexity_that_overflows_loses_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exponential of a loss above 709 is infinite in float64; the loss itself is finite."""
    compute = TokenLoss.compute
    monkeypatch.setattr(
        TokenLoss, "compute", lambda self: compute(self) | {"perplexity": self.total.exp() * 1e308}
    )
    metrics = result_of(train_cell(text_cell(), tmp_path)).metrics
    assert "test/loss" in metrics
    assert "test/perplexity" not in metrics


@pytest.mark.process
def test_the_best_epoch_has_a_finite_metric(tmp_path: Path) -> None:
    """The values of single samples are those of the same epoch."""
    folder = scripted_cell(tmp_path, "nan,0.7,inf,0.4", BEST)
    run_cell(folder)
    result = result_of(folder)
    assert result.selected_epoch == 1
    assert result.metrics["test/Scripted"] == 0.7
    with np.load(folder / "units.npz") as units:
        assert units["test/correct"].mean() == pytest.approx(result.metrics["test/accuracy"])


def test_no_epoch_is_the_best_without_a_finite_metric() -> None:
    metric = DEFAULT_METRIC.model_copy(update={"selection": "best-validation"})
    rows = [
        MetricRow(1, 0, "val/accuracy", math.nan),
        MetricRow(1, 0, "test/accuracy", 0.5),
        MetricRow(2, 1, "val/accuracy", math.inf),
        MetricRow(2, 1, "test/accuracy", 0.6),
    ]
    with pytest.raises(Diverged, match="val/accuracy is not finite at any of 2 evaluations"):
        select_epoch(rows, metric)


@pytest.mark.process
@pytest.mark.parametrize(("values", "steps"), [("0.6,nan,inf,0.9", 12), ("nan,nan,0.4,0.6", 8)])
def test_early_stopping_counts_an_undefined_metric_as_no_improvement(
    values: str, steps: int, tmp_path: Path
) -> None:
    stop = {"metric": "val/Scripted", "patience": 2}
    folder = scripted_cell(tmp_path, values, {"name": "test/accuracy"}, stop=stop)
    run_cell(folder)
    assert result_of(folder).steps == steps


@pytest.mark.process
@pytest.mark.parametrize("metric", [LAST, BEST])
def test_a_resumed_cell_selects_the_same_evaluation(
    metric: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluations before the checkpoint have the values 0.6 and NaN."""
    folder = scripted_cell(tmp_path, "0.6,nan,0.3,nan", metric)
    run_until(8, folder)
    monkeypatch.setenv("SCRIPTED_START", "2")
    if metric == LAST:
        with pytest.raises(Diverged, match="test/Scripted is nan at the selected step 16"):
            run_cell(folder)
    else:
        run_cell(folder)
        assert result_of(folder).selected_epoch == 0


@pytest.mark.slow
def test_an_undefined_metric_of_two_ranks_has_diverged(tmp_path: Path) -> None:
    from lit_attn.train import main

    folder = scripted_cell(tmp_path, "0.6,0.7,nan", LAST, devices=2)
    assert main([str(folder)]) == 1
    assert not (folder / "result.json").exists()


@pytest.mark.process
def test_a_metric_that_the_last_evaluation_does_not_measure_is_an_error() -> None:
    rows = [
        MetricRow(1, 0, "test/accuracy", 0.9),
        MetricRow(1, 0, "test/loss", 0.1),
        MetricRow(2, 1, "test/loss", 0.2),
    ]
    with pytest.raises(ConfigError, match=r"\(step 2\); it was last measured at step 1"):
        select_epoch(rows, DEFAULT_METRIC)
    with pytest.raises(ConfigError, match="'test/mIoU' was not measured at the last evaluation"):
        select_epoch(rows, DEFAULT_METRIC.model_copy(update={"name": "test/mIoU"}))


NUMBERS = st.sampled_from([0.1, 0.5, -2.0, math.nan, math.inf, -math.inf])


@pytest.mark.process
@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5),
    goal=st.sampled_from(["max", "min"]),
    selection=st.sampled_from(["last", "best-validation"]),
)
def test_a_selected_value_is_finite_and_of_its_evaluation(
    pairs: list[tuple[float, float]], goal: Any, selection: Any
) -> None:
    metric = Metric(name="test/a", label="a", goal=goal, scale=1, selection=selection)
    rows = []
    for epoch, (validation, test) in enumerate(pairs):
        rows += [MetricRow(epoch + 1, epoch, "val/a", validation)]
        rows += [MetricRow(epoch + 1, epoch, "test/a", test)]
    try:
        selected = select_epoch(rows, metric)
    except Diverged:
        has_last = selection == "last" and math.isfinite(pairs[-1][1])
        has_all = all(math.isfinite(v) and math.isfinite(t) for v, t in pairs)
        assert not has_last
        assert not has_all
        return
    assert all(math.isfinite(row.value) for row in selected)
    (value,) = [row.value for row in selected if row.name == "test/a"]
    epoch = selected[0].epoch
    assert value == pairs[epoch][1]
    if selection == "last":
        assert epoch == len(pairs) - 1
    else:
        best = max if goal == "max" else min
        assert pairs[epoch][0] == best(v for v, _ in pairs if math.isfinite(v))


@pytest.mark.process
def test_curves_leave_out_steps_at_which_a_seed_is_undefined(tmp_path: Path) -> None:
    """The mean of the other seeds would hide the seed that failed."""
    study = fake_study.write_study(tmp_path, seeds=2)
    path = study / "v1" / "0-0100000000" / "metrics.csv"
    lines = path.read_text().splitlines()
    lines[3] = ",".join([*lines[3].split(",")[:3], "nan"])
    lines[4] = ",".join([*lines[4].split(",")[:3], "inf"])
    path.write_text("\n".join([*lines, ""]))
    curves = next(read_studies(tmp_path)).curves
    steps = curves.groupby(["variant", "seed"])["step"].apply(set)
    every = {100 * epoch for epoch in range(fake_study.EPOCHS)}
    assert steps["standard", 0] == steps["standard", 1] == every
    assert steps["belief", 0] == steps["belief", 1] == every - {200, 300}


@pytest.mark.parametrize(
    ("losses", "first", "diverged"),
    [
        ([2.3, 1.0], 2.3, False),
        ([2.3, 22.9], 2.3, False),
        ([2.3, 23.1], 2.3, True),
        ([90.0, 2.0], 2.3, False),
        ([2.3, 1e300], 2.3, True),
        ([2.3], None, None),
        ([-5.0], -1.0, None),
        ([], 2.3, None),
    ],
)
def test_a_finite_loss_far_above_the_first_one_has_diverged(
    losses: list[float], first: float | None, diverged: bool | None
) -> None:
    rows = [MetricRow(step, step, "train/loss", loss) for step, loss in enumerate(losses)]
    assert has_diverged(rows, first) is diverged


def test_the_result_records_an_explosion_of_the_loss(tmp_path: Path) -> None:
    """A rate of 3 makes the loss large and finite."""
    for rate, diverged in ((3e-3, False), (3.0, True)):
        cell = digits_cell(optimizer={"kind": "adamw", "lr": rate})
        assert result_of(train_cell(cell, tmp_path / str(rate))).diverged is diverged
