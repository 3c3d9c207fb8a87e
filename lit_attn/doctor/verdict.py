"""Record of one examination of a machine, its table and its verdict."""

import math
from typing import Any, NamedTuple

from pydantic import Field

from lit_attn.cells.records import Record
from lit_attn.checks.comparison import LayerCheck
from lit_attn.doctor.trainings import TrainingCheck


class PathCheck(NamedTuple):
    """Outcome of the comparisons on one path: both texts are empty if the path holds."""

    path: str
    comparisons: int
    failure: str = ""
    unavailable: str = ""


class Choice(NamedTuple):
    """Path of a preset on this machine, and the properties that led to it."""

    preset: str
    path: str
    reason: str


class Speed(NamedTuple):
    """Forward and backward pass of a block: milliseconds, spread and bytes; ratios to standard."""

    milliseconds: float
    spread: float
    time_ratio: float
    bytes: int
    memory_ratio: float


class Examination(Record):
    """Everything that a doctor has learnt about a machine."""

    checked: str = Field(description="time in UTC, ISO 8601")
    is_short: bool
    named: list[str] = Field(default=[], description="presets that alone were compared")
    device: str
    code: str = Field(description="hash of the attention code")
    machine: dict[str, str]
    paths: list[PathCheck]
    layers: list[LayerCheck]
    choices: list[Choice]
    compiled: list[LayerCheck]
    compiled_failure: str = ""
    compiled_not_checked: str = ""
    trainings: list[TrainingCheck]
    speeds: dict[str, Speed] = Field(description="times, which never decide the verdict, by preset")

    def list_problems(self) -> list[str]:
        """Return a line for everything that does not hold."""
        paths = [path for path in self.paths if path.failure]
        compiled = [check for check in self.compiled if check.failure]
        problems = [f"path {path.path} ({path.failure})" for path in paths]
        problems += [f"compiled {check.path} ({check.failure})" for check in compiled]
        if self.compiled_failure:
            problems.append(f"compiled layers ({self.compiled_failure})")
        problems += [check.problem for check in self.trainings if check.problem]
        return problems

    def list_unknown(self) -> list[str]:
        """Return a line for everything that could not be checked."""
        paths = [path for path in self.paths if path.unavailable]
        trainings = [check for check in self.trainings if check.not_checked]
        unknown = [f"path {path.path} ({path.unavailable})" for path in paths]
        if self.compiled_not_checked:
            unknown.append(f"compiled layers ({self.compiled_not_checked})")
        unknown += [f"{check.name} ({check.not_checked})" for check in trainings]
        return unknown

    @property
    def verdict(self) -> str:
        """One line that says what does not hold."""
        problems = self.list_problems()
        if problems:
            return "VERDICT: does not hold on this machine: " + "; ".join(problems)
        unknown = self.list_unknown()
        if unknown:
            return "VERDICT: everything that was checked holds; not checked: " + "; ".join(unknown)
        return "VERDICT: everything that was checked holds"


ERROR_COLUMNS = ("preset", "path", "largest error")
SPEED_COLUMNS = ("time", "memory", "time / standard", "memory / standard")


def make_table(examination: Examination) -> list[str]:
    """Return the lines of the table of all presets that were compared, in Markdown.

    The error is the largest of a preset in any precision, in multiples of its eps.
    """
    has_speeds = len(examination.speeds) > 0
    rows: list[tuple[str, ...]] = [ERROR_COLUMNS + SPEED_COLUMNS if has_speeds else ERROR_COLUMNS]
    for choice in examination.choices:
        checks = [check for check in examination.layers if check.preset == choice.preset]
        if not checks:
            continue
        row: tuple[str, ...] = (choice.preset, choice.path, _largest(checks))
        if has_speeds:
            row += _speed_cells(examination, choice)
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    rule = "|".join("-" * (width + 2) for width in widths)
    return [lines[0], f"|{rule}|", *lines[1:]]


def _largest(checks: list[LayerCheck]) -> str:
    """Return the largest error with its precision."""
    for check in checks:
        if not math.isfinite(check.error):
            return f"FAILED ({check.precision})"
    worst = max(checks, key=lambda check: check.error)
    return f"{worst.error:.1f} eps ({worst.precision})"


def _speed_cells(examination: Examination, choice: Choice) -> tuple[str, ...]:
    """Return the cells of time and memory, which are empty for a preset without a benchmark."""
    speed = examination.speeds.get(choice.preset)
    if speed is None:
        return ("", "", "", "")
    return (
        f"{speed.milliseconds:.3g} ± {speed.spread:.2g} ms",
        f"{speed.bytes / 2**20:.0f} MiB",
        f"{speed.time_ratio:.2f}",
        f"{speed.memory_ratio:.2f}",
    )


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
    return f"| {' | '.join(cells)} |"


def to_json(examination: Examination) -> dict[str, Any]:
    """Return the record with its verdict; numbers that are not finite become null."""
    content: dict[str, Any] = {}
    for key, value in examination:
        content[key] = _to_json(value)
    content["problems"] = examination.list_problems()
    content["verdict"] = examination.verdict
    return content


def _to_json(value: Any) -> Any:
    """Return a value of a record for JSON: named tuples become mappings of their fields."""
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return _to_json(value._asdict())  # type: ignore[attr-defined]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
