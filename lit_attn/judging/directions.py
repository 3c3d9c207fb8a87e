"""Better direction of a metric: written, or known from this project or from torchmetrics.

A name is never guessed. `directions.yaml` has the names that are known; a test makes it anew.
"""

import re
from functools import cache
from pathlib import Path
from typing import Literal

from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import parse_plain

Goal = Literal["max", "min"]

KNOWN = Path(__file__).parent / "directions.yaml"

SPLIT = re.compile(r"^(train|training|val|valid|validation|dev|eval|test)[/_.-]", re.IGNORECASE)
"""Split at the beginning of the name of a metric."""


def parse_metric(text: str) -> tuple[str, Goal | None]:
    """Return the name of a metric, and the direction if one is written behind it."""
    if text.endswith(":min"):
        return text.removesuffix(":min"), "min"
    if text.endswith(":max"):
        return text.removesuffix(":max"), "max"
    return text, None


def find_goal(name: str, where: str) -> Goal:
    """Return the known direction of a metric. Raises ConfigError, which begins with `where`."""
    goal = _read_known().get(simplify(name))
    if goal is None:
        raise ConfigError(
            f"{where}: whether a larger or a smaller '{name}' is better is not known; write"
            f" --metric {name}:min or --metric {name}:max"
        )
    return goal


def simplify(name: str) -> str:
    """Return the letters and digits of a name without its split, so `val/F1_score` is `f1score`."""
    without_split = SPLIT.sub("", name.strip()).removeprefix("averaged-")
    return re.sub(r"[^a-z0-9]", "", without_split.lower())


@cache
def _read_known() -> dict[str, Goal]:
    """Return the directions of directions.yaml by simplified name."""
    listed: dict[Goal, list[str]] = parse_plain(KNOWN.read_text(encoding="utf-8"), KNOWN.name)
    known: dict[str, Goal] = {}
    for goal, names in listed.items():
        for name in names:
            known[simplify(name)] = goal
    return known
