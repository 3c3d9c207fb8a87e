"""A stream of ideas: each is screened, and confirmed at a level that later ideas do not change.

The runs of a stream stand in the order in which they ended. The first SCREEN_RUNS runs of an idea
screen it against the first BASELINE_RUNS runs of the baseline, which claims nothing. An idea that
passes is confirmed by fresh runs of both. Confirmation j has the level alpha j^-1.5 / zeta(1.5),
and all of these levels add up to alpha, so that a false star has at most this probability, however
many ideas follow and however they are chosen (alpha spending over hypotheses; Foster and Stine,
"Alpha-investing", 2008, without the wealth that a rejection earns). The number of its runs follows
from its level, so nobody can stop at a lucky moment. Whatever decides about an idea stands above a
certain line of the file, so no later line changes a verdict.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from scipy import special

from lit_attn.report.answers.judged import SCREEN_RUNS, Stage
from lit_attn.report.records.study_record import CellRecord
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.designs import EFFECT
from lit_attn.report.statistics.significance_base import SignificanceTest

BASELINE_RUNS = 4
"""Runs of the baseline with which every screening compares."""

THRESHOLD = 1.0
"""Smallest improvement that passes, in standard deviations of a run: half of EFFECT."""

POWER = 0.9
"""Probability of a star in the confirmation of an idea that is better by EFFECT."""

EXPONENT = 1.5
"""Exponent of the levels. With 2, the level of the tenth confirmation would be half as large."""


@dataclass
class Idea:
    """An idea of a stream and the places of its runs.

    `screening` and `confirmation` are places in the list of runs; those of the confirmation have a
    place of the baseline each. `end` is the place of the last run on which the screening depends.
    """

    name: str
    stage: Stage
    screening: list[int]
    screened: float | None = None
    threshold: float | None = None
    end: int | None = None
    number: int | None = None
    runs: int | None = None
    confirmation: list[int] = field(default_factory=list)
    baseline: list[int] = field(default_factory=list)
    has_failed: bool = False


def find_level(number: int, alpha: float = stats.ALPHA) -> float:
    """Return the level of a confirmation, counted from 1 on."""
    return float(alpha / number**EXPONENT / special.zeta(EXPONENT))


@cache
def count_runs(level: float, test: SignificanceTest) -> int:
    """Return the fewest runs of idea and baseline that find EFFECT with POWER.

    The power is that of a t test of pairs without correlation, or of two groups. The test of a star
    must be able to reach the level, too.
    """
    runs = 1
    while True:
        runs += 1
        if test.find_smallest_p(runs) > level:
            continue
        if test.find_t_power(test.scale_effect(EFFECT), runs, level) >= POWER:
            return runs


def follow_ideas(
    runs: Sequence[CellRecord],
    baseline: str,
    goal: Literal["max", "min"],
    test: SignificanceTest,
) -> list[Idea]:
    """Return the ideas of a stream in the order of their first runs, each in its stage.

    `runs` have all ended, in the order of this list. A run without a value has failed.
    """
    places: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        places.setdefault(run.variant, []).append(place)
    valued = [place for place in places.get(baseline, []) if runs[place].value is not None]
    screening_of_baseline = valued[:BASELINE_RUNS]
    is_ready = len(screening_of_baseline) == BASELINE_RUNS
    ideas = []
    for name, places_of_idea in places.items():
        if name == baseline:
            continue
        idea = Idea(name, "screening", places_of_idea[:SCREEN_RUNS])
        ideas.append(idea)
        if is_ready and len(idea.screening) == SCREEN_RUNS:
            idea.end = max(idea.screening[-1], screening_of_baseline[-1])
    screened = [idea for idea in ideas if idea.end is not None]
    screened.sort(key=lambda idea: (idea.end, idea.screening[-1]))
    known = _list_values(runs, screening_of_baseline)
    spread = _Spread()
    spread.add(known)
    for idea in screened:
        values = _list_values(runs, idea.screening)
        # The spread comes from the screenings that ended before this one, and from this one.
        spread.add(values)
        _screen(idea, values, statistics.fmean(known), spread.find(), goal)
    passed = [idea for idea in screened if idea.stage == "confirming"]
    fresh = {}
    if is_ready:
        last = screening_of_baseline[-1]
        fresh = {place: runs[place].seed for place in places[baseline] if place > last}
    for number, idea in enumerate(passed, start=1):
        idea.number = number
        idea.runs = count_runs(find_level(number), test)
        further = {place: runs[place].seed for place in places[idea.name][SCREEN_RUNS:]}
        chosen, chosen_baseline = test.choose_places(further, fresh)
        idea.confirmation = chosen[: idea.runs]
        idea.baseline = chosen_baseline[: idea.runs]
        if min(len(idea.confirmation), len(idea.baseline)) == idea.runs:
            idea.stage = "judged"
    return ideas


class _Spread:
    """Standard deviation of a run, from all groups of runs that were added."""

    def __init__(self) -> None:
        self._squares = 0.0
        self._freedom = 0

    def add(self, values: Sequence[float]) -> None:
        """Add a group of runs; a single run has no spread."""
        if len(values) > 1:
            self._squares += statistics.variance(values) * (len(values) - 1)
            self._freedom += len(values) - 1

    def find(self) -> float:
        """Return the standard deviation."""
        return math.sqrt(self._squares / self._freedom)


def _screen(
    idea: Idea, values: list[float], baseline: float, spread: float, goal: Literal["max", "min"]
) -> None:
    """Set whether an idea passes its screening, by the mean and the spread of the baseline."""
    idea.has_failed = len(values) < SCREEN_RUNS
    idea.stage = "screened-out"
    if idea.has_failed:
        return
    idea.threshold = THRESHOLD * spread
    idea.screened = statistics.fmean(values) - baseline
    gain = idea.screened if goal == "max" else -idea.screened
    if gain >= idea.threshold and gain > 0:
        idea.stage = "confirming"


def _list_values(runs: Sequence[CellRecord], places: list[int]) -> list[float]:
    values = []
    for place in places:
        value = runs[place].value
        if value is not None:
            values.append(value)
    return values
