"""Error rate of `stop: futility` with a look after every seed, in simulations."""

import numpy as np
import pytest

from lit_attn.report.statistics import stats
from lit_attn.report.statistics.futility import fill_ended, find_end
from lit_attn.report.statistics.sequential import look_level

ALPHA = 0.05
SEEDS = 10
VARIANTS = 3
STUDIES = 2000

Floats = np.ndarray


def list_p(differences: Floats) -> Floats:
    """Return the uncorrected p (studies, variants) of differences (studies, variants, n)."""
    scaled = differences / np.sqrt((differences**2).sum(axis=2, keepdims=True))
    patterns = np.abs(scaled @ stats._signs(differences.shape[2]).T)
    observed = np.abs(scaled.sum(axis=2, keepdims=True))
    return (patterns >= observed - stats.TIE).mean(axis=2)


def can_decide(differences: Floats) -> np.ndarray:
    """Return which studies (S,) can have a star at a look.

    A corrected p is never smaller than the uncorrected one of the same seeds, whatever futility
    ends, so all other studies have no false decision.
    """
    can = np.zeros(len(differences), dtype=bool)
    for done in range(2, SEEDS + 1):
        level = look_level(done, SEEDS, ALPHA)
        can |= (list_p(differences[:, :, :done]) <= level).any(axis=1)
    return can


def list_corrected_p(differences: Floats, is_ended: np.ndarray) -> Floats:
    """Return the corrected p of each variant, as `lit_attn.report.verdicts.comparison` does."""
    of_ended = np.array(stats.joint_sign_flip(np.nan_to_num(differences)))
    of_others = np.array(stats.joint_sign_flip(fill_ended(differences, is_ended)))
    return np.where(is_ended, of_ended, of_others)


def has_star(differences: Floats) -> bool:
    """Return True if a study (variants, SEEDS) has a star at any look."""
    count = len(differences)
    ends = []
    for row in differences:
        end = find_end(row.tolist(), SEEDS, count, ALPHA)
        ends.append(SEEDS if end is None else end[0])
    seeds = np.array(ends)
    for done in range(2, SEEDS + 1):
        measured = np.minimum(seeds, done)
        is_ended = (seeds < SEEDS) & (seeds <= done)
        available = differences[:, :done].copy()
        for row, number in enumerate(measured):
            available[row, number:] = np.nan
        p_values = list_corrected_p(available, is_ended)
        levels = [look_level(int(number), SEEDS, ALPHA) for number in measured]
        if (p_values <= levels).any():
            return True
    return False


@pytest.mark.slow
def test_futility_and_looks_together_keep_the_level() -> None:
    """The limit is 0.05 and three standard errors of STUDIES studies without effects."""
    values = np.random.default_rng(11).normal(size=(STUDIES, VARIANTS + 1, SEEDS))
    differences = values[:, 1:] - values[:, :1]
    stars = [has_star(study) for study in differences[can_decide(differences)]]
    limit = ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / STUDIES)
    assert 0 < sum(stars) / STUDIES <= limit


def test_a_study_that_cannot_decide_has_no_decision() -> None:
    """The shortcut of the simulation agrees with the decisions themselves."""
    values = np.random.default_rng(2).normal(size=(25, VARIANTS + 1, SEEDS))
    differences = values[:, 1:] - values[:, :1]
    can = can_decide(differences)
    assert 0 < can.sum() < len(can)
    assert not any(has_star(study) for study in differences[~can][:6])
