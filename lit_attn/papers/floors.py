"""Floors on the page of a paper: the rows of its tables, its warnings, and a table of them all."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lit_attn.papers import layout
from lit_attn.papers.printed import choose_digits, find_unit
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.tables.columns import format_number
from lit_attn.report.tables.formats import Cell, Table, named_table
from lit_attn.report.verdicts.floors import (
    find_best_floor,
    find_best_value,
    is_below_floor,
)


class FloorText(NamedTuple):
    """The rule of a floor, and its value in the style of the cell that it belongs to."""

    rule: str
    value: str


def write_floors(
    studies: Iterable[StudyRecord], column: layout.Column, published: list[str]
) -> dict[str, FloorText]:
    """Return the best floor of each study in the values of a column, by the study's name.

    `published` are the printed cells of the column, whose decimals and unit a floor has too. A mean
    of columns, a ratio and the value of a script's file have no floor.
    """
    texts: dict[str, FloorText] = {}
    if column.file or column.mean or column.relative:
        return texts
    for study in studies:
        if column.value == "metric":
            best = find_best_floor(study)
        else:
            best = find_best_value(study, column.value)
        if best is not None:
            value = best.value * column.scale
            digits = choose_digits(column, published, value)
            number = format_number(value, f".{digits}f")
            texts[study.plan.study] = FloorText(best.rule, f"{number}{find_unit(published)}")
    return texts


def make_floor_rows(
    columns: Sequence[Iterable[Mapping[str, FloorText]]],
) -> list[list[Cell]]:
    """Return the rows of the floors of a table, one for each study and rule.

    `columns` has the floors of every cell, column by column as they are printed.
    """
    rows: dict[tuple[str, str], list[str]] = {}
    for place, cells in enumerate(columns):
        for floors in cells:
            for study, floor in floors.items():
                row = rows.setdefault((study, floor.rule), [""] * len(columns))
                row[place] = floor.value
    studies = {study for study, _ in rows}
    names = {}
    for study, rule in rows:
        names[study, rule] = f"floor of {study}: {rule}" if len(studies) > 1 else f"floor: {rule}"
    return [[Cell(names[key]), *map(Cell, values)] for key, values in rows.items()]


def make_floors_table(studies: Iterable[StudyRecord]) -> Table:
    """Return the baseline and the best floor of every study that has one in its metric."""
    rows = []
    below = 0
    for study in studies:
        floor = find_best_floor(study)
        values = list(study.values(study.plan.baseline).values())
        if floor is None or not values:
            continue
        below += is_below_floor(study)
        row = [
            study.plan.study,
            study.plan.metric.label,
            study.plan.baseline,
            format_number(statistics.fmean(values), ".4g"),
            format_number(floor.value, ".4g"),
            f"{floor.rule} ({floor.conditions})",
            "below" if is_below_floor(study) else "above",
        ]
        rows.append([Cell(text, is_bold=text == "below") for text in row])
    return named_table("floors", rows, below=below, count=len(rows))
