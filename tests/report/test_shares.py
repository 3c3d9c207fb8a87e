"""Outcomes with two values: exact intervals of shares of seeds, and McNemar's exact test."""

import itertools
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import fake_study
from helpers.significance import sign_flip_p
from scipy.stats import binomtest

from lit_attn.cells.records import Metric, PlannedCell
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics.shares import difference_interval, share_interval
from lit_attn.report.tables.results import make_results_table
from lit_attn.report.tables.summary import make_variant_frame
from lit_attn.report.verdicts.comparison import compare_variants

SOLVED = Metric(name="test/solved", label="solved (%)", goal="max", scale=100)


@pytest.mark.parametrize(("count", "total"), [(0, 3), (1, 7), (6, 12), (12, 12)])
def test_a_share_has_the_interval_of_scipy(count: int, total: int) -> None:
    expected = binomtest(count, total).proportion_ci(0.95, "exact")
    assert share_interval(count, total, 0.95) == pytest.approx((expected.low, expected.high))


def test_the_sign_flip_test_of_two_values_is_mcnemars_exact_test() -> None:
    for wins, losses in itertools.product(range(6), repeat=2):
        differences = [1.0] * wins + [-1.0] * losses + [0.0] * 2
        expected = 1.0
        if wins + losses:
            expected = binomtest(wins, wins + losses).pvalue
        assert sign_flip_p(differences) == pytest.approx(expected)


@pytest.mark.parametrize("pairs", [3, 6, 12])
def test_the_interval_of_a_difference_covers_at_least_as_often_as_it_says(pairs: int) -> None:
    """The coverage is a sum over all outcomes, for many probabilities of wins and losses."""
    grid = np.linspace(0, 1, 11)
    smallest = 1.0
    for win, loss in itertools.product(grid, repeat=2):
        if win + loss > 1 + 1e-9:
            continue
        coverage = 0.0
        for wins in range(pairs + 1):
            for losses in range(pairs + 1 - wins):
                rest = pairs - wins - losses
                ways = comb(pairs, wins) * comb(pairs - wins, losses)
                tie = max(0.0, 1 - win - loss)
                probability = ways * win**wins * loss**losses * tie**rest
                differences = [100.0] * wins + [-100.0] * losses + [0.0] * rest
                interval = difference_interval(differences, 0.95, 100)
                assert interval is not None
                assert interval.low <= interval.mean <= interval.high
                is_covered = interval.low - 1e-9 <= 100 * (win - loss) <= interval.high + 1e-9
                coverage += probability * is_covered
        smallest = min(smallest, coverage)
    assert smallest >= 0.95


def read_solved(folder: Path) -> StudyRecord:
    """Return a study of eight seeds: the baseline solves none, one variant all, one a half."""
    variants = {"base": 0.0, "all": 0.0, "half": 0.0}
    study = fake_study.write_study(folder, variants=variants, seeds=8, metric=SOLVED)

    def change(cell: PlannedCell) -> dict[str, Any]:
        solved = {"base": 0.0, "all": 1.0, "half": float(cell.seed < 4)}[cell.variant]
        return {"metrics": {"test/solved": solved}}

    return fake_study.change_results(study, change)


def test_shares_of_seeds_have_exact_intervals_in_the_table(tmp_path: Path) -> None:
    study = read_solved(tmp_path)
    assert study.is_two_valued
    comparisons = compare_variants(study)
    complete = comparisons.records["all"]
    assert complete["significant"]
    assert complete["difference"] == 100
    # No difference of two shares is above 100 %, which Student's interval does not know.
    assert complete["high"] == pytest.approx(100)
    # All of eight seeds are won: the least share has a probability of .0125 for this outcome.
    least = 0.0125 ** (1 / 8)
    assert complete["low"] == pytest.approx(100 * (least - (1 - least)))
    half = comparisons.records["half"]
    assert not half["significant"]
    assert half["low"] < 0 < half["high"]
    # The power of a t test says nothing about shares.
    assert "effect" not in complete
    table = make_results_table(study, make_variant_frame(study, comparisons), comparisons)
    caption = " ".join(table.notes)
    assert "its 95 % exact interval. The interval describes" in caption
    assert "paired t interval" not in caption
    assert "Every value is 0 or 100, so a mean is a share of the seeds" in caption


def test_other_values_keep_students_interval(tmp_path: Path) -> None:
    study = fake_study.read(tmp_path)
    assert not study.is_two_valued
    comparisons = compare_variants(study)
    table = make_results_table(study, make_variant_frame(study, comparisons), comparisons)
    caption = " ".join(table.notes)
    assert "its 95 % paired t interval" in caption
    assert "In simulations its coverage is 95 to 98 %" in caption
    assert "McNemar" not in caption
