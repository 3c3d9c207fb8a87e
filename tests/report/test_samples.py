"""Uncertainty from the test samples, from the recorded values of each sample."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.fake_study import write_study

from lit_attn.cells.records import Metric
from lit_attn.report import write_reports

pytestmark = pytest.mark.usefixtures("no_rendering")

SAMPLES = 500


def record_samples(study: Path, metric: str = "accuracy", factor: float = 1.0) -> None:
    """Write `units.npz` of every cell, and the metric that follows from it into its result."""
    for path in sorted(study.glob("*/*/result.json")):
        result = json.loads(path.read_text())
        generator = np.random.default_rng([result["seed"], int(result["identity"])])
        easy = np.random.default_rng(1).random(SAMPLES)
        chances = 0.5 * easy + 0.5 * generator.random(SAMPLES)
        correct = (chances < result["metrics"]["test/accuracy"] - 0.2).astype(np.int32)
        targets = np.random.default_rng(2).integers(0, 9, SAMPLES).astype(np.int32)
        losses = (chances * targets).astype(np.float32)
        if metric == "accuracy":
            targets[:] = 1
        sums = correct if metric == "accuracy" else losses
        result["metrics"][f"test/{metric}"] = factor * float(sums.sum() / targets.sum())
        path.write_text(json.dumps(result))
        arrays = {"test/loss": losses, "test/targets": targets, "test/correct": correct}
        np.savez(path.with_name("units.npz"), **arrays)


def read_table(root: Path) -> pd.DataFrame:
    (folder,) = write_reports(root / "runs", root / "reports")
    return pd.read_csv(folder / "table.csv").set_index("variant")


def test_the_test_error_of_an_accuracy_is_binomial(tmp_path: Path) -> None:
    record_samples(write_study(tmp_path / "runs", seeds=1))
    table = read_table(tmp_path)
    share = table.loc["standard", "mean"] / 100
    expected = 100 * np.sqrt(share * (1 - share) / (SAMPLES - 1))
    assert table.loc["standard", "test_error"] == pytest.approx(expected)
    assert table["units"].tolist() == [SAMPLES] * 3
    # One seed shows no variation between seeds.
    assert table["both_low"].isna().all()


def test_intervals_over_seeds_and_samples_are_in_the_table(tmp_path: Path) -> None:
    record_samples(write_study(tmp_path / "runs", seeds=5))
    table = read_table(tmp_path)
    row = table.loc["belief2"]
    assert row["both_low"] < row["difference"] < row["both_high"]
    assert row["both_high"] - row["both_low"] > 4 * row["test_error_difference"]
    # The samples are the same ones, so the difference varies less than both values.
    assert row["test_error_difference"] < row["test_error"]
    text = (tmp_path / "reports" / "fake" / "table.full.md").read_text()
    assert f"standard error over the {SAMPLES} test samples, which are taken as independent" in text


def test_samples_of_unequal_size_are_weighted_by_their_targets(tmp_path: Path) -> None:
    metric = Metric(name="test/bits_per_byte", label="bits", goal="min", scale=1)
    study = write_study(tmp_path / "runs", seeds=4, metric=metric)
    record_samples(study, "bits_per_byte", factor=1.44)
    table = read_table(tmp_path)
    # Samples without a target do not count.
    assert 400 < table.loc["belief", "units"] < SAMPLES
    assert table["test_error"].notna().all()


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "torn", "other"])
def test_samples_that_do_not_belong_to_every_result_are_left_out(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = write_study(tmp_path / "runs", seeds=3)
    record_samples(study)
    (path,) = study.glob("v1/1-*/units.npz")
    if damage == "missing":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[:50])
    else:
        (other,) = study.glob("v1/2-*/units.npz")
        path.write_bytes(other.read_bytes())
    table = read_table(tmp_path)
    assert table["test_error"].notna().tolist() == [True, False, True]
    assert ("units.npz" in caplog.text) == (damage != "missing")
