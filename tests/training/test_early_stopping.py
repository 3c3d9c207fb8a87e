"""Early stopping: after which evaluation a training ends, and which metrics can end it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.finished_cells import train_cell
from helpers.stopping import run_until
from helpers.training_cells import accuracy_at, digits_cell, folder_of, result_of
from pydantic import ValidationError

from lit_attn.cells.rows import read_metrics
from lit_attn.train import run_cell

pytestmark = pytest.mark.process


def test_early_stopping_counts_evaluations_before_a_kill(tmp_path: Path) -> None:
    """The training stops after the third evaluation, although the cell continues twice."""
    training = {"epochs": 6, "stop": {"metric": "val/accuracy", "patience": 2}}
    cell = digits_cell(training=training, optimizer={"lr": 1e-30})
    folder = folder_of(cell, tmp_path)
    for step in (4, 8):
        run_until(step, folder)
    run_cell(folder)
    result = result_of(folder)
    assert (result.stopped_early, result.steps, result.epochs) == (True, 12, 3)
    assert accuracy_at(folder) == [(4, 0), (8, 1), (12, 2)]
    with np.load(folder / "units.npz") as units:
        assert units["test/correct"].mean() == pytest.approx(result.metrics["test/accuracy"])
    assert len(read_metrics(folder / "metrics.csv")) == len(
        {(row.step, row.name) for row in read_metrics(folder / "metrics.csv")}
    )


def test_training_that_improves_is_not_stopped(tmp_path: Path) -> None:
    result = result_of(train_cell(digits_cell(training={"stop": {"patience": 3}}), tmp_path))
    assert (result.stopped_early, result.steps) == (False, 12)


def test_a_threshold_ends_a_training(tmp_path: Path) -> None:
    stop = {"metric": "val/accuracy", "patience": 9, "threshold": 0.01}
    result = result_of(train_cell(digits_cell(training={"epochs": 6, "stop": stop}), tmp_path))
    assert (result.stopped_early, result.steps) == (True, 4)


@pytest.mark.parametrize(
    ("metric", "data", "message"),
    [
        ("test/loss", {}, "needs a metric of validation, as val/loss, not 'test/loss'"),
        ("val/los", {}, "training.stop.metric: 'val/los' is not measured; did you mean 'val/loss'"),
        (
            "val/loss",
            {"kind": "cifar10", "augment": ["normalize"]},
            "training.stop: needs a validation split: set data.validation",
        ),
    ],
)
def test_only_validation_metrics_stop_a_training(
    metric: str, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        digits_cell(training={"stop": {"metric": metric, "patience": 1}}, data=data)


def test_early_stopping_is_part_of_the_identity_only_if_it_is_set() -> None:
    plain, without = digits_cell(), digits_cell(training={"stop": None})
    assert plain.fingerprint == without.fingerprint
    assert plain.fingerprint != digits_cell(training={"stop": {"patience": 3}}).fingerprint
