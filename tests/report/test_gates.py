"""Rule `gates`: error rates, power and saved cells in simulated studies over sizes."""

import numpy as np
import pytest

from lit_attn.report import stats
from lit_attn.report.gates import gate_level, is_worse

ALPHA = 0.05
SEEDS = 10
SIZES = 3


def simulate(effects: list[float], studies: int):
    """Return which variants are stopped (studies, variants), false stars, and the share of cells.

    `effects` are those of the variants at every size, in standard deviations of a difference. A
    false star is one of a variant without effect at the last size, among those that run there.
    """
    count = len(effects)
    generator = np.random.default_rng(5)
    shift = np.sqrt(2) * np.array(effects)[:, None]
    stopped = np.zeros((studies, count), dtype=bool)
    has_false_star = np.zeros(studies, dtype=bool)
    cells = 0
    for study in range(studies):
        for size in range(SIZES):
            running = np.flatnonzero(~stopped[study])
            values = generator.normal(size=(count + 1, SEEDS))
            differences = (values[1:] - values[:1] + shift)[running]
            cells += SEEDS * (1 + len(running))
            if len(running) == 0:
                continue
            p_values = np.array(stats.joint_sign_flip(differences))
            if size == SIZES - 1:
                is_equal = np.array(effects)[running] == 0
                has_false_star[study] = bool((p_values[is_equal] <= ALPHA).any())
                continue
            for variant, row, p in zip(running, differences, p_values, strict=True):
                record = {"difference": row.mean(), "p_adjusted": p}
                stopped[study, variant] = is_worse(record, "max", gate_level(SIZES))
    share = cells / (studies * SIZES * SEEDS * (count + 1))
    return stopped, has_false_star, share


@pytest.mark.slow
@pytest.mark.parametrize("comparisons", [1, 4])
def test_equal_variants_are_stopped_in_at_most_five_percent_of_studies(comparisons: int) -> None:
    """The limit is 0.05 and three standard errors of 500 studies without effects."""
    limit = ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / 500)
    stopped, has_false_star, _ = simulate([0.0] * comparisons, 500)
    assert stopped.any(axis=1).mean() <= limit
    # Results of a size select no variant by the seeds of the next size.
    assert has_false_star.mean() <= limit


@pytest.mark.slow
def test_worse_variants_are_stopped_and_their_cells_are_saved() -> None:
    stopped, has_false_star, share = simulate([-1.5, -1.5, 0.0, 1.5], 300)
    assert stopped[:, :2].mean() > 0.9
    assert stopped[:, 2].mean() <= ALPHA
    assert not stopped[:, 3].any()
    assert has_false_star.mean() <= ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / 300)
    # Two of five variants run at one of three sizes: 11 of 15 parts of the cells remain.
    assert 11 / 15 <= share < 0.85


def test_only_a_significant_loss_is_worse() -> None:
    worse = {"difference": -1.0, "p_adjusted": 0.02}
    assert is_worse(worse, "max", 0.025)
    assert not is_worse(worse, "min", 0.025)
    assert not is_worse(worse, "max", 0.0125)
    # Failed seeds need the agreement of the rank test.
    assert not is_worse(worse | {"p_ranked": 0.2}, "max", 0.025)
    assert not is_worse({"difference": None, "p_adjusted": None}, "max", 0.025)


def test_the_gates_share_the_error() -> None:
    assert gate_level(2) == ALPHA
    assert gate_level(3) == ALPHA / 2
