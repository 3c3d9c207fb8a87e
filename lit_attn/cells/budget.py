"""Budgets of trainings or time, and the record of the design that a study has for its budget."""

import re
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, FiniteFloat

from lit_attn.cells.records import Integer, Record, utc_now
from lit_attn.schema.errors import plural

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
"""Seconds of a unit of time."""

FILE = "budget.json"
"""Name of the record of the chosen design in the folder of a study."""

TIMES_FILE = "training_times.json"
"""Name of the record of the measured seconds in the folder of a study."""


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


class TrainingTime(Record):
    """Seconds of a whole training of a variant as written; `kind` is that of its cells."""

    variant: str
    kind: str
    seconds: FiniteFloat


class TrainingTimes(Record):
    """Seconds of the trainings of all variants, estimated from a few steps of each."""

    finished: str = Field(default_factory=utc_now, description="time in UTC, ISO 8601")
    variants: list[TrainingTime]


class ChosenDesign(Record):
    """Design that was chosen for a budget, and stays when other seconds are measured.

    Either `seeds` is the number of seeds of all variants, or `screen`, `keep` and `confirm` are the
    numbers of a screening and its confirmation.
    """

    trainings: Integer = Field(description="trainings of the budget")
    budget_seconds: FiniteFloat | None = Field(None, description="seconds of a budget of time")
    training_seconds: FiniteFloat | None = Field(
        None, description="mean seconds of a training, with which the time became trainings"
    )
    variants: Integer = Field(description="variants of the study, with the baseline")
    seeds: Integer | None = None
    screen: Integer | None = None
    keep: Integer | None = None
    confirm: Integer | None = None

    def is_for(self, budget: Budget, variants: int) -> bool:
        """Return True if the design was chosen for this budget and as many variants."""
        is_same_time = self.budget_seconds == budget.seconds
        is_same_number = budget.trainings is None or self.trainings == budget.trainings
        return is_same_time and is_same_number and self.variants == variants

    def describe(self) -> str:
        """Return the budget and what was chosen for it, in words."""
        text = f"budget of {plural(self.trainings, 'training')}"
        if self.budget_seconds is not None:
            hours = Budget(self.budget_seconds, None).describe()
            text = (
                f"budget of {hours}: {plural(self.trainings, 'training')} of"
                f" {write_seconds(self.training_seconds or 0.0)}, one after another"
            )
        if self.seeds is not None:
            return f"{text}; chosen: {plural(self.seeds, 'seed')} of all variants"
        return f"{text}; chosen: a screening"


def write_seconds(seconds: float) -> str:
    """Return seconds with three digits or more, as 0.123 s or 2,400 s."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def read_chosen(folder: Path) -> ChosenDesign | None:
    """Return the recorded design of the study in `folder`, None without a readable one."""
    return ChosenDesign.read_valid(folder / FILE)
