"""Budgets of trainings or time."""

import re
from typing import NamedTuple

from lit_attn.schema.errors import plural

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
"""Seconds of a unit of time."""


class Budget(NamedTuple):
    """Seconds of trainings one after another, or a number of trainings; the other one is None."""

    seconds: float | None
    trainings: int | None

    def describe(self) -> str:
        """Return the budget in words."""
        if self.trainings is not None:
            return plural(self.trainings, "training")
        number = (self.seconds or 0.0) / 3600
        hours = f"{number:.2g}" if number < 1 else f"{number:.4g}"
        return "1 hour" if hours == "1" else f"{hours} hours"


def parse_budget(text: str) -> Budget:
    """Return the budget that `40` (trainings), `90min`, `2h`, `1.5d` or `8:00:00` stand for."""
    if text.isdecimal() and int(text) > 0:
        return Budget(None, int(text))
    clock = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text)
    time = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)", text)
    seconds = 0.0
    if clock is not None:
        hours, minutes, rest = (int(part) for part in clock.groups())
        seconds = 3600.0 * hours + 60 * minutes + rest
    elif time is not None:
        seconds = float(time[1]) * UNITS[time[2]]
    if not seconds > 0:
        raise ValueError("write a time (90min, 2h, 1.5d or 8:00:00) or a number of trainings (40)")
    return Budget(seconds, None)
