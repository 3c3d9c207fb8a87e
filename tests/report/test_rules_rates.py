"""Error rates of `gates`, `stop: futility` and looks after every seed together, in simulations."""

from typing import NamedTuple

import numpy as np
import pytest

from lit_attn.report import stats
from lit_attn.report.futility import fill_ended, find_end
from lit_attn.report.gates import gate_level, is_worse
from lit_attn.report.sequential import look_level

ALPHA = 0.05
SEEDS = 10
SIZES = 3
VARIANTS = 3
STUDIES = 2000

Floats = np.ndarray


class Rates(NamedTuple):
    """Shares of studies without true differences, of SIZES sizes.

    `stars` has a false star at any look, by size. `any_star` has one at any size. `stopped` has a
    variant that a gate stops.
    """

    stars: list[float]
    any_star: float
    stopped: float


def list_p(differences: Floats) -> Floats:
    """Return the uncorrected p (studies, variants) of differences (studies, variants, n)."""
    scaled = differences / np.sqrt((differences**2).sum(axis=2, keepdims=True))
    patterns = np.abs(scaled @ stats._signs(differences.shape[2]).T)
    observed = np.abs(scaled.sum(axis=2, keepdims=True))
    return (patterns >= observed - stats.TIE).mean(axis=2)


def can_decide(differences: Floats) -> np.ndarray:
    """Return which studies (S,) can have a star at a look, or a variant that a gate stops.

    A corrected p is never smaller than the uncorrected one of the same seeds, whatever futility
    ends, so all other studies have no false decision.
    """
    can = np.zeros(len(differences), dtype=bool)
    for done in range(2, SEEDS + 1):
        level = max(look_level(done, SEEDS, ALPHA), gate_level(SIZES))
        can |= (list_p(differences[:, :, :done]) <= level).any(axis=1)
    return can


def list_corrected_p(differences: Floats, is_ended: np.ndarray) -> Floats:
    """Return the corrected p of each variant as `lit_attn.report.comparison` computes it."""
    of_ended = np.array(stats.joint_sign_flip(np.nan_to_num(differences)))
    of_others = np.array(stats.joint_sign_flip(fill_ended(differences, is_ended)))
    return np.where(is_ended, of_ended, of_others)


def decide(differences: Floats) -> tuple[bool, np.ndarray]:
    """Return if a size (variants, SEEDS) has a star at any look, and which variants are worse."""
    count = len(differences)
    ends = []
    for row in differences:
        end = find_end(row.tolist(), SEEDS, count, ALPHA)
        ends.append(SEEDS if end is None else end[0])
    seeds = np.array(ends)
    has_star = False
    for done in range(2, SEEDS + 1):
        measured = np.minimum(seeds, done)
        is_ended = (seeds < SEEDS) & (seeds <= done)
        available = differences[:, :done].copy()
        for row, number in enumerate(measured):
            available[row, number:] = np.nan
        p_values = list_corrected_p(available, is_ended)
        levels = [look_level(int(number), SEEDS, ALPHA) for number in measured]
        has_star |= bool((p_values <= levels).any())
    worse = []
    for row, p in zip(available, p_values, strict=True):
        record = {"difference": np.nanmean(row), "p_adjusted": p}
        worse.append(is_worse(record, "max", gate_level(SIZES)))
    return has_star, np.array(worse)


def simulate(studies: int) -> Rates:
    """Return the rates of studies in which all values have the same distribution."""
    generator = np.random.default_rng(11)
    runs = np.ones((studies, VARIANTS), dtype=bool)
    has_star = np.zeros((studies, SIZES), dtype=bool)
    for size in range(SIZES):
        values = generator.normal(size=(studies, VARIANTS + 1, SEEDS))
        differences = values[:, 1:] - values[:, :1]
        for study in np.flatnonzero(can_decide(differences)):
            running = np.flatnonzero(runs[study])
            if not len(running):
                continue
            has_star[study, size], worse = decide(differences[study, running])
            if size < SIZES - 1:
                runs[study, running[worse]] = False
    return Rates(
        stars=has_star.mean(axis=0).tolist(),
        any_star=float(has_star.any(axis=1).mean()),
        stopped=float((~runs).any(axis=1).mean()),
    )


@pytest.mark.slow
def test_all_rules_together_keep_the_level() -> None:
    """The limit is 0.05 and three standard errors of STUDIES studies without effects."""
    rates = simulate(STUDIES)
    limit = ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / STUDIES)
    assert max(rates.stars) <= limit
    assert rates.stopped <= limit
    # The comparisons of several sizes are not corrected for each other.
    assert rates.any_star <= SIZES * limit


def test_a_study_that_cannot_decide_has_no_decision() -> None:
    """The shortcut of the simulation agrees with the decisions themselves."""
    values = np.random.default_rng(2).normal(size=(25, VARIANTS + 1, SEEDS))
    differences = values[:, 1:] - values[:, :1]
    can = can_decide(differences)
    assert 0 < can.sum() < len(can)
    for study in differences[~can][:6]:
        has_star, worse = decide(study)
        assert not has_star
        assert not worse.any()
