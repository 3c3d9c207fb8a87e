"""Power laws L = E + A C^-b of losses L at costs C, fitted to seeds that share E."""

import numpy as np

from lit_attn.report.statistics.stats import Floats

SIZES_FOR_ASYMPTOTE = 4
"""Smallest number of sizes with which an asymptote is fitted: the law has three coefficients."""

ASYMPTOTES = np.arange(200) * 0.995 / 199
"""Tried asymptotes, relative to the smallest loss.

A minimum between them would depend on the last digits of the processor: the sum of squares is flat
at its minimum.
"""


def fit_asymptote(costs: Floats, losses: Floats, limit: float) -> float:
    """Return the E below `limit` with which the lines of all seeds fit best.

    `costs` and `losses` are (seeds, sizes). E is one of ASYMPTOTES times `limit`.
    """
    asymptotes = limit * ASYMPTOTES
    _, _, errors = fit_lines(costs, losses, asymptotes)
    return float(asymptotes[errors.argmin()])


def fit_lines(costs: Floats, losses: Floats, asymptotes: Floats) -> tuple[Floats, Floats, Floats]:
    """Fit a line to log(L - E) of every seed, for each of G asymptotes.

    Returns exponents and intercepts (G, seeds), and the sums (G,) of the squared relative errors
    of L over all seeds. An error of L is (L - E) / L times as large, relative to L, as that of
    L - E, so its square is the weight.
    """
    x = np.log(costs)
    above = losses - asymptotes[:, None, None]
    y = np.log(above)
    weights = (above / losses) ** 2
    total = weights.sum(axis=-1, keepdims=True)
    mean_x = (weights * x).sum(axis=-1, keepdims=True) / total
    mean_y = (weights * y).sum(axis=-1, keepdims=True) / total
    covariance = (weights * (x - mean_x) * (y - mean_y)).sum(axis=-1, keepdims=True)
    slope = covariance / (weights * (x - mean_x) ** 2).sum(axis=-1, keepdims=True)
    intercept = mean_y - slope * mean_x
    errors = weights * (y - intercept - slope * x) ** 2
    return -slope[..., 0], intercept[..., 0], errors.sum(axis=(-1, -2))
