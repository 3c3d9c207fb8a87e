"""Numbers of a paper's tables: published cells, our values of each seed, and claims."""

import csv
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from lit_attn.cells.records import Metric, read_diagnostics
from lit_attn.config import papers as config
from lit_attn.report import scaling, stats
from lit_attn.report.columns import DAGGER, format_difference, format_number
from lit_attn.report.comparison import ALPHA, FAILURES
from lit_attn.report.numbers import find_magnitude, write_number
from lit_attn.report.read import BUSY, CellRecord, StudyRecord, read_or_skip, read_studies
from lit_attn.schema.errors import ConfigError, require

Records = dict[str, StudyRecord]  # Studies by name.
Values = dict[int, float]  # Values in printed units by seed.


class Entry(NamedTuple):
    """A cell of a table: the published text, our values of each seed, our text, our variants."""

    row: str
    column: str
    published: str
    values: Values
    ours: str
    references: list[config.Reference]


class Verdict(NamedTuple):
    """Claims, their tables and figures, the titles of our studies, and the differences by seed.

    Small models have other data. `judgement` is "agree", "disagree", "not run" (no seed has both
    results), "undecided" (the interval contains 0) or "undecided: <reason>"; a dagger marks
    different code or data.
    """

    text: str
    places: str
    studies: str
    published: str
    ours: str
    pairs: int
    judgement: str


def read_records(source: config.PaperSource, items: Iterable[config.Layout], runs: Path) -> Records:
    """Read the studies that `items` need, by name; studies that have not started are left out."""
    needed = {reference.study for item in items for reference in source.references(item)}
    planned = [study for study in sorted(needed) if (runs / study / "plan.json").exists()]
    records = read_studies(runs, planned) if planned else ()
    return {record.plan.study: record for record in records}


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
    return {
        cell.seed: number
        for cell in study.finished_cells(reference.variant)
        if (number := _read_value(cell, study.plan.metric, value, epoch)) is not None
    }


def _read_value(cell: CellRecord, metric: Metric, value: str, epoch: int | None) -> float | None:
    """Return one value of a cell in recorded units, the study's metric in printed units."""
    if epoch is not None:
        curve = cell.curve(metric if value == "metric" else value)
        # Epochs of the records count from 0.
        return next((row.value for row in curve if row.epoch + 1 == epoch), None)
    if value == "metric":
        return cell.value
    numbers = cell.measurements
    if value == "epoch_time":
        return float(numbers["step_time"] * numbers["steps"] / numbers["epochs"])
    if value.startswith("diagnostics/"):
        _, layer, name = value.split("/")
        rows = read_or_skip(read_diagnostics, cell.folder, "diagnostics.csv") or []
        chosen = [row for row in rows if row.layer == int(layer) and row.name == name]
        last = [row.value for row in chosen if row.step == chosen[-1].step]
        return statistics.fmean(last) if last else None
    return numbers.get(value if value in config.COSTS else f"metric {value}")


def read_file(
    source: config.PaperSource, line: config.Reference, column: config.Column, *names: str
) -> list[tuple[float, ...]]:
    """Return the numbers in the columns `names` of the file of `column`, from its chosen rows.

    It lies beside the paper's file or in the results; a file that does not exist has no rows. A
    file with a mistake is skipped with a warning.
    """
    where = {name: text.replace("{}", line.variant) for name, text in column.where.items()}

    def read(path: Path) -> list[tuple[float, ...]]:
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            for name in (*where, *names):
                require(f"{path}:1: no column", name, reader.fieldnames or ())
            rows = [row for row in reader if all(fnmatchcase(row[n], where[n]) for n in where)]
        try:
            return [tuple(float(row[name]) for name in names) for row in rows]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: columns {', '.join(names)}: {error}") from error

    file = Path(line.study, (column.file or "").replace("{}", line.variant))
    folders = [f for f in (source.path.parent, source.runs) if (f / file).exists()]
    return (read_or_skip(read, folders[0] / file) or []) if folders else []


def make_entries(
    source: config.PaperSource, item: config.Layout, records: Records, reading: config.Reading = "*"
) -> list[list[Entry]]:
    """Return the cells of a table, or the final metric of the lines of a figure, row by row."""
    columns, rows = item.grid()
    lines = source.locate(item, reading)
    located = {cell: line for cell, line in lines.items() if line.study in records}
    if source.size:
        columns = {name: config.Column() if c.file else c for name, c in columns.items()}
    grid: list[list[Entry]] = []
    above: dict[str | None, dict[str, Values]] = {}
    for name, row in rows.items():
        values: dict[str, Values] = {}
        for heading, column in columns.items():
            cell = (name, heading)
            measured = measure(records, located.get(cell), column.value, column.epoch)
            if column.file and cell in lines:
                numbers = read_file(source, lines[cell], column, *column.value.split("/"))
                measured = dict(enumerate(itertools.chain(*numbers)))
            if column.relative and cell in located:
                base = located[cell]._replace(variant=column.relative)
                start = measure(records, base, column.value, column.epoch).values()
                measured = {s: v / statistics.fmean(start) for s, v in measured.items() if start}
            values[heading] = {seed: v * column.scale for seed, v in measured.items()}
        for heading, column in columns.items():
            if column.mean:
                parts = [values[other] for other in column.mean]
                seeds = sorted(set(parts[0]).intersection(*parts))
                values[heading] = {seed: statistics.fmean(p[seed] for p in parts) for seed in seeds}
        grid.append([])
        for place, (heading, column) in enumerate(columns.items()):
            keys = [(name, part) for part in column.mean or (heading,)]
            references = [located[key] for key in keys if key in located]
            entry = Entry(name, heading, row.cells[place], values[heading], "", references)
            published = [other.cells[place] for other in rows.values()]
            other = row.against if column.difference else next(iter(rows))
            text = _format(column, published, entry.values, above.get(other, {}).get(heading, {}))
            text = "busy machine" if _is_busy(records, entry, column.value) else text
            grid[-1].append(entry._replace(ours=_add_count(text, entry, records)))
        above[name] = values
    return grid


def _add_count(text: str, entry: Entry, records: Records) -> str:
    """Add the number of seeds, the seeds without a result and the dagger to the text of a cell."""
    cells = _find_cells(records, entry)
    statuses = Counter(cell.status for cell in cells if cell.status != "done")
    if not cells or not (text or FAILURES & statuses.keys()):
        return text
    count, planned = len(entry.values), len({cell.seed for cell in cells})
    missing = [f"{number} {status}" for status, number in sorted(statuses.items())]
    number = ", ".join([f"n={count} of {planned}", *missing]) if count < planned else f"n={count}"
    studies = [(records[r.study], r.variant) for r in entry.references]
    is_mixed = any(study.is_mixed(variant, study.plan.baseline) for study, variant in studies)
    return f"{text} ({number}){f' {DAGGER}' * is_mixed}".strip()


def _find_cells(records: Records, entry: Entry) -> list[CellRecord]:
    return [cell for r in entry.references for cell in records[r.study].variant_cells(r.variant)]


def _is_busy(records: Records, entry: Entry, value: str) -> bool:
    """Return True for times or speeds that differ too much over the seeds."""
    metric = next((records[r.study].plan.metric.name for r in entry.references), "")
    name = metric if value == "metric" else value
    times, is_time = entry.values.values(), name.endswith(("_time", "_per_second", "/seconds"))
    return is_time and max(times, default=0) > BUSY * min(times, default=0)


def _format(column: config.Column, published: list[str], values: Values, base: Values) -> str:
    """Return mean ± standard deviation with the decimals of the column's published cells.

    `base` has the values of the row with which an overhead or a difference compares.
    """
    if not values:
        return ""
    digits = max(map(count_decimals, published)) if any(map(config.find_numbers, published)) else 2
    digits = digits if column.digits is None else column.digits
    mean = statistics.fmean(values.values())
    if column.value == "parameters" or 0 < abs(mean) < 1:
        # Small models have fewer parameters and shorter times than the paper: two digits remain.
        digits = max(digits, 1 - find_magnitude(mean))
    units = {match[1] for text in published if (match := re.match(r"[\d.]+([KMBG%])", text))}
    unit = units.pop() if len(units) == 1 else ""
    shown = values.values() if column.file else [mean]
    texts = ["/".join(format_number(value, f".{digits}f") + unit for value in shown)]
    if len(set(values.values())) > 1 and not column.file:
        texts.append(f"± {write_number(statistics.stdev(values.values()), f'.{digits}f')}")
    start = statistics.fmean(base.values()) if base else None
    if column.overhead:
        texts.append(f"({format_number(100 * (mean / start - 1), '.1f')}%)" if start else "(-)")
    if column.difference and start is not None:
        texts.append(f"/{format_number(mean - start, f'+.{digits}f')}")
    return " ".join(texts)


def count_decimals(published: str) -> int:
    """Return the decimals of the first number with a decimal point."""
    match = re.search(r"\d+\.(\d+)", published)
    return len(match[1]) if match else 0


def judge_claims(
    source: config.PaperSource, items: dict[str, config.Layout], records: Records
) -> list[Verdict]:
    """Compare the claims of tables and figures with our paired differences over seeds.

    Claims about the same difference between the same cells have one verdict.
    """
    verdicts: dict[tuple[object, ...], Verdict] = {}
    for number, item in items.items():
        columns, _ = item.grid()
        located = source.locate(item)
        grid = make_entries(source, item, records) if item.claims else []
        cells = {(entry.row, entry.column): entry for entry in itertools.chain(*grid)}
        for claim in item.claims:
            heading = claim.column or next(iter(columns))
            column, names = columns[heading], (claim.row, claim.against)
            pair = [cells[name, heading] for name in names]
            verdict = _judge_claim(claim, number, column, pair, records)
            parts = column.mean or (heading,)
            references = [located.get((name, part)) for name in names for part in parts]
            key: tuple[object, ...] = (*references, column.value, column.epoch, verdict.judgement)
            key = key if all(references) else (number, claim.text)
            if first := verdicts.get(key):
                text, places = f"{first.text} / {verdict.text}", f"{first.places} / {number}"
                published = f"{first.published} / {verdict.published}"
                verdict = first._replace(text=text, places=places, published=published)
            verdicts[key] = verdict
    return list(verdicts.values())


def _judge_claim(
    claim: config.Claim, number: str, column: config.Column, pair: list[Entry], records: Records
) -> Verdict:
    """Compare a claim about a pair of cells with our paired differences over seeds."""
    names = (claim.row, claim.against)
    plans = {r.study: records[r.study].plan for entry in pair for r in entry.references}
    numbers = [config.find_numbers(entry.published) for entry in pair]
    if all(numbers):
        digits = max(count_decimals(entry.published) for entry in pair)
        published = numbers[0][0] - numbers[1][0]
        text = format_number(published, f"+.{digits}f")
    else:
        aims = {claim.goal} if claim.goal else {plan.metric.goal for plan in plans.values()}
        digits, published, text = 2, -1.0 if "min" in aims else 1.0, "curves only"
    ours, theirs = (entry.values for entry in pair)
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    resolution = stats.find_resolution([*ours.values(), *theirs.values()])
    interval = stats.paired_interval(differences, resolution=resolution)
    difference, judgement = "", "undecided: one pair" if differences else "not run"
    if interval:
        # Small differences keep two significant digits.
        places = max(digits, 2 if round(abs(interval.mean), 4) >= 0.1 else 4)
        difference = format_difference(*interval, places)
        judgement = "agree" if interval.mean * published > 0 else "disagree"
        judgement = judgement if interval.low > 0 or interval.high < 0 else "undecided"
    is_metric = column.value == "metric"
    goals = {plan.metric.goal for plan in plans.values()} if is_metric else {"min", "max"}
    failed = [{c.seed for c in _find_cells(records, e) if c.status in FAILURES} for e in pair]
    is_decided = judgement in ("agree", "disagree")
    if any(_is_busy(records, entry, column.value) for entry in pair):
        judgement = "undecided: busy machine"
    elif any(failed) and not (is_decided and all(_confirm(pair, failed, g) for g in goals)):
        counts = zip(map(len, failed), names, strict=True)
        judgement = f"undecided: {', '.join(f'{n} failed ({name})' for n, name in counts if n)}"
    compared = zip(*(entry.references for entry in pair), strict=False)
    if any(records[a.study].is_mixed(a.variant, b.variant) for a, b in compared):
        judgement += f" {DAGGER}"
    titles = "; ".join(plan.title for plan in plans.values())
    return Verdict(claim.text, number, titles, text, difference, len(differences), judgement)


def _confirm(pair: list[Entry], failed: list[set[int]], goal: str) -> bool:
    """Return True if the test that ranks failed seeds last finds the same direction."""
    ours, theirs = (entry.values for entry in pair)
    seeds = sorted((ours.keys() | failed[0]) & (theirs.keys() | failed[1]))
    values = [[by_seed.get(seed) for seed in seeds] for by_seed in (ours, theirs)]
    ranks = stats.rank_with_failures(values[0], values[1], goal == "max")
    gain = sum(ours[s] - theirs[s] for s in ours if s in theirs) * (1 if goal == "max" else -1)
    return (stats.sign_flip_p(ranks) or 1.0) <= ALPHA and gain * sum(ranks) > 0
