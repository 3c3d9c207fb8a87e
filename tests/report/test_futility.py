"""Rule `stop: futility`: error rates, power and saved seeds in simulated studies."""

import math

import numpy as np
import pytest
from helpers.fake_study import write_study

from lit_attn.cells.decisions import Ending, Endings
from lit_attn.report.records.read import read_studies
from lit_attn.report.statistics import futility, stats
from lit_attn.report.statistics.futility import FUTILITY, fill_ended, find_end, predict_verdict
from lit_attn.report.tables.results import make_results_table
from lit_attn.report.tables.summary import make_variant_frame
from lit_attn.report.tables.terminal import draw_judgement
from lit_attn.report.verdicts.comparison import compare_variants
from lit_attn.report.verdicts.judge import is_decided, judge_study

ALPHA = 0.05
PLANNED = 10


def simulate(effects: list[float], studies: int, is_filled: bool = True):
    """Return stars without and with the rule (studies, variants), and the share of seeds used.

    `effects` are those of the variants in standard deviations of a difference. Without `is_filled`
    the correction forgets the seeds that ended variants lack.
    """
    count = len(effects)
    values = np.random.default_rng(3).normal(size=(studies, count + 1, PLANNED))
    differences = values[:, 1:] - values[:, :1] + np.sqrt(2) * np.array(effects)[:, None]
    stars = []
    stars_with_rule = []
    used = []
    for study in differences:
        remaining = study.copy()
        is_ended = np.zeros(count, dtype=bool)
        for row in range(count):
            end = find_end(study[row].tolist(), PLANNED, count, ALPHA)
            if end is not None:
                is_ended[row] = True
                remaining[row, end[0] :] = np.nan
        used.append(np.isfinite(remaining).mean())
        stars.append(np.array(stats.joint_sign_flip(study)) <= ALPHA)
        counted = fill_ended(remaining, is_ended) if is_filled else np.nan_to_num(remaining)
        p = np.array(stats.joint_sign_flip(counted))
        stars_with_rule.append((p <= ALPHA) & ~is_ended)
    return np.array(stars), np.array(stars_with_rule), np.mean(used)


@pytest.mark.slow
@pytest.mark.parametrize("comparisons", [1, 6])
def test_the_rule_does_not_make_false_stars_more_frequent_and_saves_seeds(comparisons: int) -> None:
    """The limit is 0.05 and three standard errors of 400 studies without effects."""
    limit = ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / 400)
    _, stars, used = simulate([0.0] * comparisons, 400)
    assert stars.any(axis=1).mean() <= limit
    # More than a third of the seeds is saved.
    assert used < 0.65


@pytest.mark.slow
def test_a_correction_for_the_kept_variants_alone_would_make_false_stars_frequent() -> None:
    """Both rates come from the same 400 studies."""
    _, forgetful, _ = simulate([0.0] * 6, 400, is_filled=False)
    _, filled, _ = simulate([0.0] * 6, 400)
    assert forgetful.any(axis=1).mean() > 1.4 * filled.any(axis=1).mean()


def test_without_the_seeds_of_ended_variants_the_correction_would_be_too_small() -> None:
    """The rule keeps the promising variants, so these must be corrected for all of them."""
    rng = np.random.default_rng(0)
    differences = rng.normal(size=(5, PLANNED))
    differences[0] += 0.9
    ended = np.array([False, True, True, True, True])
    shortened = differences.copy()
    shortened[1:, 2:] = np.nan
    complete = stats.joint_sign_flip(differences)[0]
    filled = stats.joint_sign_flip(fill_ended(shortened, ended))[0]
    unfilled = stats.joint_sign_flip(np.nan_to_num(shortened))[0]
    assert unfilled < 0.7 * complete
    assert complete <= filled <= 2 * complete


@pytest.mark.slow
@pytest.mark.parametrize("effects", [[0.8], [1.0], [1.2, 0.0, 0.0, 0.0]], ids=str)
def test_the_rule_costs_little_power(effects: list[float]) -> None:
    """The probability of a star falls by at most 0.05."""
    stars, with_rule, _ = simulate(effects, 400)
    power = stars[:, 0].mean()
    assert power > 0.4
    assert power - with_rule[:, 0].mean() <= 0.05


def test_a_clear_difference_has_a_verdict_and_none_has_not() -> None:
    none = (0.1, -0.2, 0.15, -0.1, 0.05, -0.05, 0.1, -0.1)
    clear = tuple(value + 1.0 for value in none)
    assert predict_verdict(clear, PLANNED, 3, ALPHA) > 0.95
    assert predict_verdict(none, PLANNED, 3, ALPHA) < FUTILITY
    assert predict_verdict((0.1,), PLANNED, 3, ALPHA) == 1.0
    assert predict_verdict((0.1, 0.1, 0.1), PLANNED, 3, ALPHA) == 1.0


def test_with_a_margin_a_variant_that_can_be_equivalent_goes_on() -> None:
    none = (0.1, -0.2, 0.15, -0.1, 0.05, -0.05)
    assert predict_verdict(none, PLANNED, 3, ALPHA, margin=1.0) > 0.9
    assert predict_verdict(none, PLANNED, 3, ALPHA, margin=0.01) < FUTILITY


def test_many_pairs_are_predicted_by_the_t_test() -> None:
    values = np.random.default_rng(0).normal(0.3, 1, size=60)
    measured = tuple(values.tolist())
    near = predict_verdict(measured, 100, 2, ALPHA)
    assert predict_verdict(measured, 101, 2, ALPHA) == pytest.approx(near, abs=0.1)


def test_the_end_depends_on_the_first_seeds_alone() -> None:
    none = [0.1, -0.2, 0.15, -0.1, 0.05, -0.05, 0.1, -0.1]
    end = find_end(none, PLANNED, 3, ALPHA)
    assert end is not None
    seeds, power = end
    assert 2 <= seeds < len(none)
    assert power < FUTILITY
    assert find_end(none[:seeds], PLANNED, 3, ALPHA) == end
    assert find_end(none[: seeds - 1], PLANNED, 3, ALPHA) is None
    # Later seeds change nothing, and a failed seed counts as a seed without a pair.
    assert find_end([*none[:seeds], 9.0, 9.0], PLANNED, 3, ALPHA) == end
    failed = find_end([None, *none], PLANNED, 3, ALPHA)
    assert failed is not None
    # Fewer pairs remain, so the variant may end earlier.
    assert failed[0] <= seeds + 1


def test_tables_and_judge_show_an_ended_variant_with_its_reason(tmp_path) -> None:
    variants = {"standard": 0.0, "good": 0.05, "dull": 0.0}
    missing = tuple(("dull", seed) for seed in range(4, 10))
    folder = write_study(
        tmp_path / "runs", variants=variants, seeds=10, skip=missing, stop="futility"
    )
    ending = Ending(
        variant="dull", identity="0200000000", rule="futility", seeds=4, planned=10, power=0.03
    )
    Endings(entries=[ending]).write(folder / "endings.json")
    (study,) = read_studies(tmp_path / "runs")
    judged = judge_study(study)
    good, dull = judged.variants
    assert not judged.is_interim
    assert judged.interim is None
    assert is_decided(judged)
    assert good.level == ALPHA
    assert good.verdict == "better"
    assert dull.ended is not None
    assert dull.is_final
    assert (dull.verdict, dull.ended.seeds, dull.seeds.done) == ("undecided", 4, 4)
    assert judged.next.kind == "none"
    text = draw_judgement(judged)
    assert "dull: stopped for futility after 4 of 10 seeds (probability of a verdict 0.03)" in text
    comparisons = compare_variants(study)
    table = make_results_table(study, make_variant_frame(study, comparisons), comparisons)
    row = next(row for row in table.rows if row[0].text == "dull")
    assert "4/10, 6 stopped" in [cell.text for cell in row]
    assert any("stop: futility" in note and "dull stopped" in note for note in table.notes)
    assert any("ended by the futility rule" in sentence for sentence in table.summary)
    # A plan with more seeds needs a new decision.
    write_study(tmp_path / "runs", variants=variants, seeds=12, skip=missing, stop="futility")
    (longer,) = read_studies(tmp_path / "runs")
    assert longer.endings == {}


def test_a_further_pair_has_the_predictive_distribution_of_students_t() -> None:
    """With the prior 1 / variance it is t with n - 1 degrees of freedom, wider by 1 + 1 / n."""
    measured = np.array([0.1, 0.5, -0.3, 0.2, 0.7])
    next_pair = futility._complete(measured, 6, 40_000)[:, 5]
    scale = measured.std(ddof=1) * math.sqrt(1 + 1 / 5)
    for share in (0.05, 0.5, 0.95):
        expected = measured.mean() + scale * stats.student_quantile(4, share)
        assert np.quantile(next_pair, share) == pytest.approx(expected, abs=0.03)
