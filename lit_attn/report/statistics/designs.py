"""Designs of a study: the probability that its trainings find a variant that is better.

A study with `seeds` trains every variant with all seeds. A screening trains every variant with a
few seeds, keeps the best, and trains these and the baseline with fresh seeds. Screening claims
nothing. The stars come from the fresh seeds alone, so their test is that of any study, and it is
corrected for the kept variants only.

One variant is better by EFFECT, the others do not differ from the baseline, and values are normal
with equal variances. docs/simulations.md has what other distributions do.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy import special

from lit_attn.report.statistics.significance import OWN_TEST
from lit_attn.report.statistics.significance_base import SignificanceTest
from lit_attn.report.statistics.stats import ALPHA

EFFECT = 2.0
"""Difference to the baseline, in standard deviations of the values over seeds."""

FEWEST_VARIANTS = 4
"""Number of variants from which on a screening is considered."""

MOST_SCREENED = 4
FEWEST_KEPT = 2
"""A screening that keeps one variant could never show two that are better."""

MOST_KEPT = 8

GAIN = 0.05
"""Smallest gain in power that is worth a second stage."""


class Screening(NamedTuple):
    """Seeds of the screening, variants that it keeps, and fresh seeds that confirm them."""

    screen: int
    keep: int
    confirm: int

    def trainings(self, variants: int) -> int:
        """Return the trainings of a baseline and `variants` others."""
        return self.screen * (variants + 1) + self.confirm * (self.keep + 1)

    def share_kept(self, variants: int) -> float:
        """Return the probability that the better one of `variants` is among the kept ones."""
        # The mean of the better variant over the seeds of the screening, at 2,000 quantiles.
        shares = (np.arange(2000) + 0.5) / 2000
        means = EFFECT + special.ndtri(shares) / math.sqrt(self.screen)
        share_above = special.ndtr(-means * math.sqrt(self.screen))
        kept = special.bdtr(self.keep - 1, variants - 1, share_above)
        return float(kept.mean())

    def power(self, variants: int, test: SignificanceTest = OWN_TEST) -> float:
        """Return the probability that the better one of `variants` is kept and gets a star."""
        return self.share_kept(variants) * find_power(self.keep, self.confirm, test)


@cache
def find_power(variants: int, seeds: int, test: SignificanceTest = OWN_TEST) -> float:
    """Return the probability that the better one of `variants` gets a star."""
    return test.find_power(test.scale_effect(EFFECT), test.list_sizes(seeds), variants, ALPHA)


@cache
def choose_screening(
    variants: int, trainings: int, test: SignificanceTest = OWN_TEST
) -> Screening | None:
    """Return the screening with the largest power of at most `trainings`, None if there is none."""
    best = None
    best_power = 0.0
    for screen in range(1, MOST_SCREENED + 1):
        for keep in range(FEWEST_KEPT, min(MOST_KEPT, variants - 1) + 1):
            confirm = (trainings - screen * (variants + 1)) // (keep + 1)
            design = Screening(screen, keep, confirm)
            # Fewer seeds than these never give a star.
            if confirm < test.find_fewest(ALPHA):
                continue
            # The power is at most the share that is kept, which is quick to compute.
            if design.share_kept(variants) <= best_power:
                continue
            power = design.power(variants, test)
            if power > best_power:
                best = design
                best_power = power
    return best


def find_better(variants: int, seeds: int, test: SignificanceTest = OWN_TEST) -> Screening | None:
    """Return a screening that costs at most as much as `seeds` of all variants and finds more.

    Returns None with few variants, or if no screening gains GAIN.
    """
    if variants < FEWEST_VARIANTS:
        return None
    design = choose_screening(variants, (variants + 1) * seeds, test)
    if design is None:
        return None
    gain = design.power(variants, test) - find_power(variants, seeds, test)
    return design if gain >= GAIN else None
