"""Designs of studies, checked against simulations of the complete screening and of its test."""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from helpers.paths import ROOT
from numpy.typing import NDArray

from lit_attn.report.statistics import stats
from lit_attn.report.statistics.designs import Screening, choose_screening, find_better, find_power

Floats = NDArray[np.float64]

STUDIES = 2000


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return generator.normal(size=shape)


def heavy_tailed(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return values of Student's t with three degrees of freedom, whose deviation is sqrt(3)."""
    return generator.standard_t(3, size=shape) / np.sqrt(3)


def skewed(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return lognormal values with mean 0 and standard deviation 1."""
    values = np.exp(generator.normal(size=shape)) - np.exp(0.5)
    return values / np.sqrt(np.exp(2) - np.exp(1))


Draw = Callable[[np.random.Generator, tuple[int, ...]], Floats]


def simulate(
    design: Screening, variants: int, effect: float, draw: Draw, spread: float = 1.0
) -> tuple[float, float]:
    """Return the shares of studies with a star for variant 0, and with any star.

    `effect` is that of variant 0; `spread` is the standard deviation of every variant.
    """
    generator = np.random.default_rng(variants)
    own_stars = 0
    any_star = 0
    for _ in range(STUDIES):
        means = np.zeros(variants)
        means[0] = effect
        screened = spread * draw(generator, (variants, design.screen)) + means[:, None]
        kept = np.argsort(-screened.mean(axis=1))[: design.keep]
        fresh = spread * draw(generator, (design.keep, design.confirm)) + means[kept, None]
        baseline = draw(generator, (design.confirm,))
        has_star = np.array(stats.joint_sign_flip(fresh - baseline)) <= 0.05
        own_stars += has_star[kept == 0].any()
        any_star += has_star.any()
    return own_stars / STUDIES, any_star / STUDIES


class Row(NamedTuple):
    """Row of the table in docs/simulations.md, whose lists are normal, heavy-tailed and skewed."""

    variants: int
    all_seeds: float
    design: Screening
    trainings: int
    power: list[float]
    wide_power: list[float]
    false_stars: list[float]
    wide_false_stars: list[float]


def read_rows() -> list[Row]:
    """Return the rows of the section "Screening" of docs/simulations.md."""
    page = (ROOT / "docs/simulations.md").read_text("utf-8")
    section = page.partition("\n## Screening\n")[2].partition("\n## ")[0]
    rows = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not cells[0].isdigit():
            continue
        screen, keep, confirm = (int(number) for number in re.findall(r"\d+", cells[2]))
        power, wide_power, false_stars, wide = (
            [float(number.strip("*")) for number in cell.split(", ")] for cell in cells[4:]
        )
        rows.append(
            Row(
                variants=int(cells[0]),
                all_seeds=float(cells[1].split()[0]),
                design=Screening(screen, keep, confirm),
                trainings=int(cells[3]),
                power=power,
                wide_power=wide_power,
                false_stars=false_stars,
                wide_false_stars=wide,
            )
        )
    return rows


ROWS = {row.variants: row for row in read_rows()}
DRAWS: list[Draw] = [normal, heavy_tailed, skewed]

# The power of the first simulation of these designs, which the real test must reach.
LEAST = {5: 0.57, 10: 0.85, 20: 0.96, 50: 0.94}

ROUNDING = 0.0051
"""Largest difference of a share to its text with two decimals."""


@pytest.mark.slow
@pytest.mark.parametrize(("variants", "kind"), [(5, 0), (10, 1), (20, 2)])
def test_the_page_has_the_power_and_the_false_stars_of_the_complete_test(
    variants: int, kind: int
) -> None:
    row = ROWS[variants]
    power, _ = simulate(row.design, variants, 2.0, DRAWS[kind])
    _, false_stars = simulate(row.design, variants, 0.0, DRAWS[kind])
    _, wide_false_stars = simulate(row.design, variants, 0.0, DRAWS[kind], 3.0)
    wide_power, _ = simulate(row.design, variants, 6.0, DRAWS[kind], 3.0)
    assert power == pytest.approx(row.power[kind], abs=ROUNDING)
    assert wide_power == pytest.approx(row.wide_power[kind], abs=ROUNDING)
    assert false_stars == pytest.approx(row.false_stars[kind], abs=0.00051)
    assert wide_false_stars == pytest.approx(row.wide_false_stars[kind], abs=0.00051)
    assert min(power, wide_power) >= LEAST[variants] - ROUNDING
    assert false_stars <= 0.06
    if DRAWS[kind] is not skewed:
        # The differences are symmetric, whatever the spreads.
        assert wide_false_stars <= 0.06


@pytest.mark.parametrize("variants", LEAST)
def test_the_computed_power_is_that_of_the_simulation(variants: int) -> None:
    row = ROWS[variants]
    assert row.design.power(variants) == pytest.approx(row.power[0], abs=0.04)
    assert row.design.trainings(variants) == row.trainings
    assert find_power(variants, 6) == pytest.approx(row.all_seeds, abs=ROUNDING)


def test_the_share_that_is_kept_equals_a_simulation() -> None:
    generator = np.random.default_rng(0)
    means = generator.normal(size=(20_000, 10, 2)).mean(axis=2)
    means[:, 0] += 2
    rank = (means > means[:, :1]).sum(axis=1)
    for keep in (1, 2, 5):
        share = Screening(2, keep, 6).share_kept(10)
        assert share == pytest.approx((rank < keep).mean(), abs=0.01)
    assert Screening(1, 10, 6).share_kept(10) == pytest.approx(1)


@pytest.mark.parametrize(("variants", "seeds"), [(4, 6), (7, 5), (20, 6), (50, 3)])
def test_the_better_screening_costs_at_most_as_much_and_finds_more(
    variants: int, seeds: int
) -> None:
    design = find_better(variants, seeds)
    assert design is not None
    assert design.trainings(variants) <= (variants + 1) * seeds
    assert design.power(variants) > find_power(variants, seeds) + 0.05
    assert 2 <= design.keep < variants
    for other in (Screening(1, 2, 6), Screening(2, 3, 8), Screening(3, 3, 13)):
        if other.trainings(variants) <= (variants + 1) * seeds:
            assert other.power(variants) <= design.power(variants)


def test_no_screening_is_named_where_none_helps() -> None:
    assert find_better(3, 6) is None
    assert find_better(5, 40) is None, "forty seeds of all variants find everything"
    assert choose_screening(50, 60) is None, "sixty trainings leave no six fresh seeds"
