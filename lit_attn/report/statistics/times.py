"""Times until an event, some of them censored: a run can end before the event has come.

The time of such a run is its limit, which is no time of an event: no mean may contain it. The
median is that of Kaplan and Meier ("Nonparametric estimation from incomplete observations", 1958),
and two groups are compared by their log-rank scores (Peto and Peto, "Asymptotically efficient rank
invariant test procedures", 1972).
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lit_attn.report.statistics.stats import Floats

HALF = 1e-9  # Distance from one half of a share that equals one half up to rounding.


class Censored(float):
    """Time at which a run ended without the event."""


def has_event(time: float, steps: float) -> bool:
    """Return True if a run of `steps` steps had the event of a recorded time.

    A run without the event records all of its planned steps.
    """
    return time < steps


def count_events(values: Iterable[float]) -> int:
    """Return the number of runs with the event."""
    return sum(not isinstance(value, Censored) for value in values)


def find_median(values: Iterable[float]) -> float | None:
    """Return the Kaplan-Meier median, None if it is not reached: over half have no event.

    Between two times at which exactly half of the runs are without the event it is their middle, so
    that it is the usual median if all runs have the event.
    """
    half_time = None
    for time, share in find_shares(values):
        if half_time is not None:
            return (half_time + time) / 2
        if share < 0.5 - HALF:
            return time
        if share <= 0.5 + HALF:
            half_time = time
    return half_time


def find_shares(values: Iterable[float]) -> list[tuple[float, float]]:
    """Return each time with an event, and the Kaplan-Meier share of runs without it after that."""
    shares = []
    share = 1.0
    for time, events, at_risk in _list_events(list(values)):
        share *= 1 - events / at_risk
        shares.append((time, share))
    return shares


def find_scores(values: Sequence[float]) -> Floats:
    """Return the log-rank score of each value of two pooled groups; a later run has a larger one.

    It is the number of events that a run is expected to have until its time, minus 1 for an event.
    The scores of a group add up to its expected minus its observed events.
    """
    times = np.array(values, dtype=float)
    scores = np.array([0.0 if isinstance(value, Censored) else -1.0 for value in values])
    for time, events, at_risk in _list_events(values):
        scores[times >= time] += events / at_risk
    return scores


def _list_events(values: Sequence[float]) -> list[tuple[float, int, int]]:
    """Return each time with an event, its events, and the runs that had not ended before it."""
    with_event = sorted({float(v) for v in values if not isinstance(v, Censored)})
    counted = []
    for time in with_event:
        events = sum(value == time and not isinstance(value, Censored) for value in values)
        at_risk = sum(value >= time for value in values)
        counted.append((time, events, at_risk))
    return counted
