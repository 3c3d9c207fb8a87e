"""Numbers of a paper's tables: published cells, and our values of each seed."""

import csv
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lit_attn.cells.records import SMOKE, Metric
from lit_attn.cells.rows import read_diagnostics
from lit_attn.papers import layout
from lit_attn.papers import source as config
from lit_attn.papers.floors import FloorText, write_floors
from lit_attn.papers.printed import format_values
from lit_attn.report.figures import scaling
from lit_attn.report.records.read import read_studies
from lit_attn.report.records.skipped import read_or_skip
from lit_attn.report.records.study_record import BUSY_RATIO, CellRecord, StudyRecord
from lit_attn.report.records.timing import TIME_MARK
from lit_attn.report.tables.columns import BUSY_TEXT, DAGGER
from lit_attn.report.verdicts.comparison import FAILURES
from lit_attn.schema.errors import ConfigError, require

Records = dict[str, StudyRecord]  # Studies by name.
Values = dict[int, float]  # Values in printed units by seed.
Counts = dict[tuple[config.Reference, str], float]  # Counts by variant, and name in COUNTS.


UNMEASURED = "\N{EM DASH}"
"""Our text of a cell that no study of the page's size measures."""

SMOKE_SUFFIX = f"@{SMOKE}"
"""End of the name of a study of a smoke run."""


class Entry(NamedTuple):
    """A cell of a table: the published text, our values of each seed, our text, our variants.

    `is_file` is True for values of a script's file, whose keys are the places of the rows, and
    `error` is the standard error of a single one in printed units, None if it is unknown.
    `is_counted` is True for a count of the model of a variant without a result; its key is 0.
    `floors` has the best floor of each study whose metric the cell shows.
    """

    row: str
    column: str
    published: str
    values: Values
    ours: str
    references: list[config.Reference]
    is_file: bool = False
    error: float | None = None
    is_counted: bool = False
    floors: Mapping[str, FloorText] = MappingProxyType({})


def read_records(source: config.PaperSource, items: Iterable[layout.Layout], runs: Path) -> Records:
    """Read the studies that `items` need, by name; studies that have not started are left out.

    A study that has only had a smoke run, whose folder ends in SMOKE_SUFFIX, is read from it.
    """
    needed: set[str] = set()
    for item in items:
        needed |= {reference.study for reference in source.references(item)}
        needed |= {other.study for other in item.replications if other.study is not None}
    names: dict[str, str] = {}
    for study in sorted(needed):
        for folder in (study, study + SMOKE_SUFFIX):
            if (runs / folder / "plan.json").exists():
                names[folder] = study
                break
    records = read_studies(runs, list(names)) if names else ()
    return {names[record.plan.study]: record for record in records}


def measure(
    records: Records, reference: config.Reference | None, value: str, epoch: int | None = None
) -> Values:
    """Return a value (see `Column.value`) of every finished seed of a variant, by seed."""
    if reference is None or reference.study not in records:
        return {}
    study = records[reference.study]
    if value == "compute_multiplier":
        family = [record for record in records.values() if record.plan.family == study.plan.family]
        points = scaling.read_points(family)
        return scaling.find_multipliers(points, study.plan, reference.variant, study.plan.level)
    values: Values = {}
    for cell in study.finished_cells(reference.variant):
        number = _read_value(cell, study.plan.metric, value, epoch)
        if number is not None:
            values[cell.seed] = number
    return values


def read_counts(source: config.PaperSource, reading: layout.Reading = "*") -> Counts:
    """Return the counts of the variants of a paper's rows and lines, from COUNTS_FILE.

    Small models and alternative readings have none: their pages show results only.
    """
    path = source.path.parent / config.COUNTS_FILE
    if source.size or reading != "*" or not path.exists():
        return {}

    def read(file: Path) -> Counts:
        counts: Counts = {}
        with file.open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                reference = config.Reference(row["study"], row["variant"])
                for name in layout.COUNTS:
                    counts[reference, name] = float(row[name])
        return counts

    return read_or_skip(read, path) or {}


def _read_value(cell: CellRecord, metric: Metric, value: str, epoch: int | None) -> float | None:
    """Return one value of a cell in recorded units, the study's metric in printed units."""
    if epoch is not None:
        curve = cell.curve(metric if value == "metric" else value)
        # Epochs of the records count from 0.
        values = [row.value for row in curve if row.epoch + 1 == epoch]
        return values[0] if values and math.isfinite(values[0]) else None
    if value == "metric":
        return cell.value
    numbers = cell.measurements
    if value == "epoch_time":
        return float(numbers["step_time"] * numbers["steps"] / numbers["epochs"])
    if value.startswith("diagnostics/"):
        _, layer, name = value.split("/")
        rows = read_or_skip(read_diagnostics, cell.folder, "diagnostics.csv") or []
        chosen = [row for row in rows if row.layer == int(layer) and row.name == name]
        if not chosen:
            return None
        last_step = chosen[-1].step
        # One value for each head.
        return statistics.fmean(row.value for row in chosen if row.step == last_step)
    recorded_name = value if value in layout.COSTS else f"metric {value}"
    return numbers.get(recorded_name)


def read_file(
    source: config.PaperSource, line: config.Reference, column: layout.Column, *names: str
) -> list[tuple[float, ...]]:
    """Return the numbers in the columns `names` of the file of `column`, from its chosen rows.

    It lies beside the paper's file or in the results; a file that does not exist has no rows. A
    file with a mistake is skipped with a warning.
    """
    patterns = {name: text.replace("{}", line.variant) for name, text in column.where.items()}

    def is_chosen(row: dict[str, str]) -> bool:
        return all(fnmatchcase(row[name], pattern) for name, pattern in patterns.items())

    def read(path: Path) -> list[tuple[float, ...]]:
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            for name in (*patterns, *names):
                require(f"{path}:1: no column", name, reader.fieldnames or ())
            rows = [row for row in reader if is_chosen(row)]
        try:
            return [tuple(float(row[name]) for name in names) for row in rows]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: columns {', '.join(names)}: {error}") from error

    file = Path(line.study, (column.file or "").replace("{}", line.variant))
    for folder in (source.path.parent, source.runs):
        if (folder / file).exists():
            return read_or_skip(read, folder / file) or []
    return []


def read_error(
    source: config.PaperSource, line: config.Reference, column: layout.Column, value: float
) -> float | None:
    """Return the standard error of the value of a file in the file's units, None if unknown."""
    if column.error is None:
        return None
    if column.error.exact:
        return 0.0
    rows_of_error = column.model_copy(update={"where": column.where | column.error.where})
    rows = read_file(source, line, rows_of_error, *column.error.columns)
    if len(rows) != 1:
        return None
    return column.error.compute(value, *rows[0])


def choose_columns(source: config.PaperSource, item: layout.Layout) -> dict[str, layout.Column]:
    """Return the columns of an item; small models have the metric instead of a script's file."""
    columns, _ = item.grid()
    if not source.size:
        return columns
    chosen = {}
    for name, column in columns.items():
        chosen[name] = layout.Column() if column.file else column
    return chosen


class Measured(NamedTuple):
    """Values of a cell in printed units, and the standard error of a single value of a file.

    `is_counted` is True for a count of a model without a result.
    """

    values: Values
    error: float | None = None
    is_counted: bool = False


def make_entries(
    source: config.PaperSource, item: layout.Layout, records: Records, reading: layout.Reading = "*"
) -> list[list[Entry]]:
    """Return the cells of a table, or the final metric of the lines of a figure, row by row."""
    columns = choose_columns(source, item)
    printed_columns, rows = item.grid()
    lines = source.locate(item, reading)
    counts = read_counts(source, reading)
    grid: list[list[Entry]] = []
    above: dict[str | None, dict[str, Measured]] = {}
    for name, row in rows.items():
        measured = _measure_row(source, records, counts, lines, columns, name)
        entries = []
        for place, (heading, column) in enumerate(columns.items()):
            parts = column.mean or (heading,)
            references = []
            for part in parts:
                line = lines.get((name, part))
                if line is not None and line.study in records:
                    references.append(line)
            entry = Entry(
                row=name,
                column=heading,
                published=row.cells[place],
                values=measured[heading].values,
                ours="",
                references=references,
                is_file=any(columns[part].file for part in parts),
                error=measured[heading].error,
                is_counted=measured[heading].is_counted,
            )
            all_published = [published_row.cells[place] for published_row in rows.values()]
            if is_busy(records, entry, column.value):
                text = BUSY_TEXT
            else:
                # Overheads compare with the first row.
                other = row.against if column.difference else next(iter(rows))
                base = above.get(other, {}).get(heading, Measured({}))
                text = format_values(column, all_published, entry.values, base.values)
            ours = _add_count(text, entry, records, column.value)
            has_study = column.mean or (name, heading) in lines
            if reading == "*" and printed_columns[heading].study is not None and not has_study:
                ours = UNMEASURED
            studies = [records[line.study] for line in references]
            floors = write_floors(studies, column, all_published)
            entries.append(entry._replace(ours=ours, floors=floors))
        grid.append(entries)
        above[name] = measured
    return grid


def _measure_row(
    source: config.PaperSource,
    records: Records,
    counts: Counts,
    lines: dict[layout.Place, config.Reference],
    columns: dict[str, layout.Column],
    row: str,
) -> dict[str, Measured]:
    """Return the values of the cells of a row, by column."""
    measured: dict[str, Measured] = {}
    for heading, column in columns.items():
        line = lines.get((row, heading))
        if column.file:
            measured[heading] = _measure_file(source, line, column)
        else:
            measured[heading] = _measure_studies(records, counts, line, column)
    # A column may show the mean of columns on its right.
    for heading, column in columns.items():
        if column.mean:
            measured[heading] = _average([measured[part] for part in column.mean])
    return measured


def _measure_file(
    source: config.PaperSource, line: config.Reference | None, column: layout.Column
) -> Measured:
    """Return the values of a script's file, by their place."""
    if line is None:
        return Measured({})
    rows = read_file(source, line, column, *column.value.split("/"))
    numbers = list(itertools.chain(*rows))
    values = {place: number * column.scale for place, number in enumerate(numbers)}
    if len(numbers) != 1:
        return Measured(values)
    error = read_error(source, line, column, numbers[0])
    if error is None:
        return Measured(values)
    return Measured(values, error * column.scale)


def _measure_studies(
    records: Records,
    counts: Counts,
    reference: config.Reference | None,
    column: layout.Column,
) -> Measured:
    """Return the values of every finished seed, relative to another variant's mean if asked for.

    A variant without a result has the count of its model, if the column shows counts.
    """
    measured = measure_or_count(records, counts, reference, column.value, column.epoch)
    values = measured.values
    if column.relative and reference is not None:
        base = reference._replace(variant=column.relative)
        base_values = measure_or_count(records, counts, base, column.value, column.epoch).values
        if base_values:
            mean = statistics.fmean(base_values.values())
            values = {seed: value / mean for seed, value in values.items()}
    scaled = {seed: value * column.scale for seed, value in values.items()}
    return Measured(scaled, is_counted=measured.is_counted)


def measure_or_count(
    records: Records,
    counts: Counts,
    reference: config.Reference | None,
    value: str,
    epoch: int | None = None,
) -> Measured:
    """Return a value of every finished seed of a variant, or the count of its model if none is."""
    values = measure(records, reference, value, epoch)
    if values or reference is None or (reference, value) not in counts:
        return Measured(values)
    return Measured({0: counts[reference, value]}, is_counted=True)


def _average(parts: list[Measured]) -> Measured:
    """Return the mean of several columns, and its standard error if all of them have one."""
    seeds = set(parts[0].values).intersection(*(part.values for part in parts))
    values = {}
    for seed in sorted(seeds):
        values[seed] = statistics.fmean(part.values[seed] for part in parts)
    errors = [part.error for part in parts if part.error is not None]
    if len(errors) < len(parts):
        return Measured(values)
    return Measured(values, math.hypot(*errors) / len(parts))


def _add_count(text: str, entry: Entry, records: Records, value: str) -> str:
    """Add the number of seeds, the seeds without a result and marks to the text of a cell.

    A count of a model without a result has the word `counted` instead.
    """
    if entry.is_counted:
        return f"{text} (counted)"
    cells = find_cells(records, entry)
    statuses = Counter(cell.status for cell in cells if cell.status != "done")
    has_failed = not FAILURES.isdisjoint(statuses)
    if not cells or not (text or has_failed):
        return text
    count = len(entry.values)
    planned = len({cell.seed for cell in cells})
    if count < planned:
        missing = [f"{number} {status}" for status, number in sorted(statuses.items())]
        seeds = ", ".join([f"n={count} of {planned}", *missing])
    else:
        seeds = f"n={count}"
    marks = []
    for reference in entry.references:
        study = records[reference.study]
        if study.is_mixed(reference.variant, study.plan.baseline):
            marks.append(DAGGER)
            break
    if text != BUSY_TEXT and has_time_fault(records, entry, value):
        marks.append(TIME_MARK)
    return " ".join([f"{text} ({seeds})", *marks]).strip()


def find_cells(records: Records, entry: Entry) -> list[CellRecord]:
    """Return the planned cells of the variants of an entry."""
    cells = []
    for reference in entry.references:
        cells += records[reference.study].variant_cells(reference.variant)
    return cells


def is_time(records: Records, entry: Entry, value: str) -> bool:
    """Return True for a value that is a time or a speed."""
    name = value
    if value == "metric":
        metrics = [records[r.study].plan.metric.name for r in entry.references]
        name = metrics[0] if metrics else ""
    return name.endswith(("_time", "_per_second", "/seconds"))


def is_busy(records: Records, entry: Entry, value: str) -> bool:
    """Return True for times or speeds that differ too much over the seeds."""
    times = entry.values.values()
    differ = max(times, default=0) > BUSY_RATIO * min(times, default=0)
    return differ and is_time(records, entry, value)


def has_time_fault(records: Records, entry: Entry, value: str) -> bool:
    """Return True for times or speeds that cannot be compared with those of the baseline."""
    faults = [records[r.study].time_faults.get(r.variant) for r in entry.references]
    return any(faults) and is_time(records, entry, value)
