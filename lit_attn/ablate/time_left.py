"""Estimate of the time that a run still needs, from finished cells and from steps that are made."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from lit_attn.cells.folder import Progress

MEASURED = 0.1
"""Fraction of its steps after which a cell's time per step is used: the first steps are slow."""


class StartedCell(NamedTuple):
    """A cell without a result: its name (`study/variant/seed`), its progress, and the seconds that
    it has run. Without `seconds` they follow from the steps."""

    name: str
    progress: Progress | None
    seconds: float | None = None

    @property
    def duration(self) -> float | None:
        """Expected seconds of the whole cell from its own steps, or None."""
        steps = self.progress
        if steps is None or steps.step_time is None or steps.step < MEASURED * steps.total:
            return None
        elapsed = steps.step * steps.step_time if self.seconds is None else self.seconds
        return elapsed + (steps.total - steps.step) * steps.step_time


def estimate_time_left(
    finished: Iterable[tuple[str, float]],
    started: Iterable[StartedCell],
    waiting: Iterable[str],
    at_once: int,
) -> float | None:
    """Return the seconds until the last cell ends, or None if no cell has been measured.

    `finished` are names and seconds. A cell is expected to take the mean of the finished cells of
    its variant, or else what the steps of started cells of its variant predict, or else the same
    for its study, or else for all cells.
    """
    started = list(started)
    predicted = [(cell.name, cell.duration) for cell in started if cell.duration is not None]
    means = [_means(finished), _means(predicted)]
    if not any(means):
        return None

    def duration(name: str) -> float:
        groups = [mean[group] for group in _groups(name) for mean in means if group in mean]
        return groups[0]

    left = []
    for cell in started:
        seconds, total = cell.seconds, duration(cell.name)
        if seconds is None:
            steps = cell.progress
            seconds = total * steps.step / steps.total if steps and steps.total else 0.0
        left.append(max(0.0, total - seconds))
    # Cells of one variant take equally long: each variant is looked up once.
    variants = Counter(name.rpartition("/")[0] for name in waiting)
    queued = sum(count * duration(f"{variant}/") for variant, count in variants.items())
    return max(max(left, default=0.0), (queued + sum(left)) / at_once)


def format_seconds(seconds: float) -> str:
    """Return `2:10` or `1:02:10`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _means(durations: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean seconds of a cell by variant, by study, and over all."""
    seconds: dict[str, list[float]] = {}
    for name, duration in durations:
        for group in _groups(name):
            seconds.setdefault(group, []).append(duration)
    return {group: sum(values) / len(values) for group, values in seconds.items()}


def _groups(name: str) -> tuple[str, str, str]:
    """Return the groups of cells that a cell belongs to, the smallest first."""
    variant = name.rpartition("/")[0]
    return variant, variant.rpartition("/")[0], ""
