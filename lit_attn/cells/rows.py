"""Rows of the CSV files in the folder of a cell: metrics, clock, diagnostics, unreadable images."""

import contextlib
import csv
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lit_attn.schema.limits import check_integer

LONGEST_LINE = 100_000
"""Most characters of a line of metrics.csv, clock.csv or diagnostics.csv that is read."""


class MetricRow(NamedTuple):
    """A logged value of `metrics.csv`."""

    step: int
    epoch: int
    name: str
    value: float


class DiagnosticRow(NamedTuple):
    """A value of `diagnostics.csv`. Layers and heads count from 1; head None is a whole layer."""

    step: int
    layer: int
    head: int | None
    name: str
    value: float


def read_metrics(path: Path) -> list[MetricRow]:
    """Return the rows of a metrics.csv; none if the file does not exist.

    Incomplete rows are left out: a crash cuts the last line, in which the next attempt continues.
    """
    return [MetricRow(*row) for row in _read_rows(path, read_integer, read_integer, str, float)]


def read_clock(path: Path) -> dict[int, float]:
    """Return the seconds since the start of a cell by step, of a clock.csv that may not exist."""
    return dict(_read_rows(path, read_integer, float))


def read_diagnostics(path: Path) -> list[DiagnosticRow]:
    """Return the rows of a diagnostics.csv, as `read_metrics` does."""

    def read_head(text: str) -> int | None:
        return read_integer(text) if text else None

    rows = _read_rows(path, read_integer, read_integer, read_head, str, float)
    return [DiagnosticRow(*row) for row in rows]


class UnreadableImage(NamedTuple):
    """Image of a split that could not be read and was left out."""

    split: str
    image: str
    reason: str


def read_unreadable(folder: Path) -> list[UnreadableImage]:
    """Return the images that the processes of a cell have left out, each of them once."""
    images: dict[tuple[str, str], UnreadableImage] = {}
    for path in sorted(folder.glob("unreadable-*.csv")):
        for row in _read_rows(path, str, str, str):
            image = UnreadableImage(*row)
            images.setdefault((image.split, image.image), image)
    return [images[key] for key in sorted(images)]


def read_integer(text: str) -> int:
    """Return the integer in a field of a CSV; ValueError if it has more than 64 bits."""
    return check_integer(text, "a field")


def csv_lines(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV, each ended by a line feed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _read_rows(path: Path, *types: Callable[[str], Any]) -> Iterator[Any]:
    """Yield the complete lines of a CSV whose fields have these types; none over LONGEST_LINE."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    complete_text = text[: text.rfind("\n") + 1]
    for line in complete_text.splitlines():
        if len(line) > LONGEST_LINE:
            continue
        with contextlib.suppress(csv.Error, ValueError):
            for fields in csv.reader([line]):
                yield tuple(parse(field) for parse, field in zip(types, fields, strict=True))
