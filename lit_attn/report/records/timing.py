"""Comparability of measured times: whether a variant was timed in turns with the baseline."""

import datetime
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Measurements = Mapping[str, Any]  # Measurements of a finished cell, see `CellRecord`.

TIME_MARK = "‡"
"""Mark of a time that cannot be compared with the baseline's."""

RESUMED = "cells were resumed in a further attempt"
SHARED = "cells shared a device"
OTHER_DEVICES = "cells ran on other devices than those of the baseline, or used them differently"
APART = "all cells ran before or after those of the baseline"
NOT_ALONE = "not measured alone, as the other variants were"


class Span(NamedTuple):
    """Start of the first cell and end of the last one."""

    start: datetime.datetime
    end: datetime.datetime


def find_time_fault(variant: Iterable[Measurements], baseline: Iterable[Measurements]) -> str:
    """Return why times of a variant cannot be compared with the baseline's, empty if they can.

    The load and the clock rate of a machine change within hours. Times are comparable if they were
    measured in one attempt, on a device that no other cell used, on equal devices with the same
    strategy, and in turns with the baseline: the spans of time in which both trained overlap.
    Records without a device or a time of measurement, for example another program's table, have no
    fault.
    """
    cells = list(variant)
    baseline_cells = list(baseline)
    faults = []
    if any(cell.get("attempts", 1) > 1 for cell in cells):
        faults.append(RESUMED)
    if any(cell.get("is_device_shared") for cell in cells):
        faults.append(SHARED)
    devices = _list_devices(cells)
    baseline_devices = _list_devices(baseline_cells)
    if devices and baseline_devices and devices != baseline_devices:
        faults.append(OTHER_DEVICES)
    if _ran_apart(_find_span(cells), _find_span(baseline_cells)):
        faults.append(APART)
    return "; ".join(faults)


def _list_devices(cells: list[Measurements]) -> set[str]:
    """Return the devices of cells with the strategy that used them, without unknown ones."""
    return {cell["device"] for cell in cells if cell.get("device")}


def _ran_apart(first: Span | None, second: Span | None) -> bool:
    """Return True if two spans do not overlap; an unknown one does not count."""
    if first is None or second is None:
        return False
    return first.start > second.end or second.start > first.end


def _find_span(cells: list[Measurements]) -> Span | None:
    """Return the span of time in which cells ran, None if it is unknown."""
    starts = []
    ends = []
    for cell in cells:
        end = _read_time(cell.get("finished"))
        if end is None:
            continue
        try:
            start = end - datetime.timedelta(seconds=cell.get("wall_time") or 0.0)
        except OverflowError:
            # The damaged record of a cell that would have started before the year 1.
            continue
        ends.append(end)
        starts.append(start)
    return Span(min(starts), max(ends)) if ends else None


def _read_time(text: str | None) -> datetime.datetime | None:
    """Return a time in UTC from ISO 8601, None for another text."""
    try:
        time = datetime.datetime.fromisoformat(text or "")
    except ValueError:
        return None
    # A time without a zone is in UTC.
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
