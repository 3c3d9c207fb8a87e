"""Outcomes with two values, such as a probe that a seed solves or does not solve: shares of seeds.

The sign-flip test of such values counts the seeds that only the variant solves and those that only
the baseline solves, which is McNemar's exact test. Student's t interval needs means that are nearly
normal, which shares of few seeds are not.
"""

from collections.abc import Iterable, Sequence

from scipy import special

from lit_attn.report.statistics.stats import Interval


def are_two_valued(values: Iterable[float], unit: float) -> bool:
    """Return True if each of the values is 0 or `unit`, the printed value of 1."""
    return all(value in (0.0, unit) for value in values)


def share_interval(count: int, total: int, confidence: float) -> tuple[float, float]:
    """Return the exact interval of a share after `count` of `total` cases.

    Source: Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case
    of the binomial", 1934.
    """
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else float(special.betaincinv(count, total - count + 1, tail))
    high = 1.0 if count == total else float(special.betaincinv(count + 1, total - count, 1 - tail))
    return low, high


def difference_interval(
    differences: Sequence[float], confidence: float, unit: float
) -> Interval | None:
    """Return an interval of the difference of two shares, or None with fewer than two pairs.

    `differences` of pairs are `unit`, 0 or -`unit`. Their mean is the share of the pairs that the
    variant wins minus the share of those that it loses. Each share has its exact interval with half
    of the error, so that of the difference covers with a probability of at least `confidence`.
    """
    count = len(differences)
    if count < 2:
        return None
    wins = sum(difference > 0 for difference in differences)
    losses = sum(difference < 0 for difference in differences)
    half_error = 1 - (1 - confidence) / 2
    least_wins, most_wins = share_interval(wins, count, half_error)
    least_losses, most_losses = share_interval(losses, count, half_error)
    mean = unit * (wins - losses) / count
    return Interval(mean, unit * (least_wins - most_losses), unit * (most_wins - least_losses))
