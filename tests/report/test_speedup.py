"""Effective speed-up: compute and wall-clock multipliers of each variant at each size."""

import math
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_study import change_results, write_study

from lit_attn.cells.records import PlannedCell, Spread
from lit_attn.report.figures.drawing import assign_styles
from lit_attn.report.figures.speedup import (
    describe_speedups,
    draw_speedups,
    find_speedups,
    make_speedup_table,
)
from lit_attn.report.records.study_record import StudyRecord

METRIC = {"name": "val/loss", "label": "loss", "goal": "min", "scale": 1}
SECONDS = {"standard": 0.010, "variant": 0.030}
FLOPS = {"standard": 1000, "variant": 2000}


def write_levels(root: Path, seconds: dict[str, float]) -> list[StudyRecord]:
    """Write two levels in which a step of each variant has its FLOPs and its time."""

    def change(cell: PlannedCell) -> dict[str, Any]:
        spread = Spread(median=seconds[cell.variant], iqr=0.0, count=9)
        costs = {"flops": FLOPS[cell.variant], "batch_size": 4, "step_time": spread}
        return {"metrics": {"val/loss": 1.0}, **costs}

    studies = []
    for level in ("small", "large"):
        settings = {"metric": METRIC, "family": "ladder", "level": level}
        variants = dict.fromkeys(FLOPS, 0.0)
        folder = write_study(root, f"ladder-{level}", variants, seeds=3, **settings)
        studies.append(change_results(folder, change))
    return studies


MULTIPLIERS = {
    ("variant", "small"): {0: 2.0, 1: 2.0, 2: 2.0},
    ("variant", "large"): {0: 1.0, 1: 2.0, 2: 4.0},
}


def test_wall_clock_counts_the_time_of_each_flop(tmp_path: Path) -> None:
    studies = write_levels(tmp_path, SECONDS)
    speedups = {(s.level, s.kind): s for s in find_speedups(studies, MULTIPLIERS)}
    assert speedups["small", "compute"].mean == pytest.approx(2.0)
    # A step of the variant has twice the FLOPs and takes three times as long.
    factor = (0.010 / 1000) / (0.030 / 2000)
    assert speedups["small", "time"].mean == pytest.approx(2.0 * factor)
    large = speedups["large", "compute"]
    assert large.mean == pytest.approx(2.0)
    # Student's interval of three logarithms with the standard deviation log 2.
    half = 4.3026527 * math.log(2) / math.sqrt(3)
    assert large.low == pytest.approx(2.0 * math.exp(-half))
    assert large.high == pytest.approx(2.0 * math.exp(half))


def test_sentences_and_rows_follow_the_sizes(tmp_path: Path) -> None:
    studies = write_levels(tmp_path, SECONDS)
    plan = studies[0].plan
    speedups = find_speedups(studies, MULTIPLIERS)
    rows = [[cell.text for cell in row[:2]] for row in make_speedup_table(speedups, plan).rows]
    assert rows == [["variant", "small"], ["variant", "large"]]
    (sentence,) = describe_speedups(speedups, plan)
    assert sentence.startswith("At large, standard needs 2.00 [")
    assert sentence.endswith("times the training time of variant for the same loss.")
    assert draw_speedups(speedups, assign_styles(plan)) is not None


def test_unknown_times_leave_the_compute(tmp_path: Path) -> None:
    studies = write_levels(tmp_path, dict.fromkeys(SECONDS, 0.0))
    speedups = find_speedups(studies, MULTIPLIERS)
    assert {speedup.kind for speedup in speedups} == {"compute"}
    (sentence,) = describe_speedups(speedups, studies[0].plan)
    assert "training time" not in sentence


def test_no_multiplier_gives_no_figure(tmp_path: Path) -> None:
    assert find_speedups(write_levels(tmp_path, SECONDS), {}) == []
    assert draw_speedups([], {}) is None
