"""From the table of another program to a study: columns, checks, and what is odd about the runs."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lit_attn.cells.records import Metric, Plan, PlannedVariant
from lit_attn.judging.conditions import parse_condition, select_rows
from lit_attn.judging.costs import COUNTS, Cost, find_cost
from lit_attn.judging.directions import find_goal, parse_metric
from lit_attn.judging.hints import describe_mixtures, describe_twins
from lit_attn.judging.run_table import RunTable, join_factors
from lit_attn.judging.states import STATE_COLUMNS, read_states
from lit_attn.judging.values import check_units, clean, read_number, read_values
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.statistics import PAIRS
from lit_attn.report.statistics.significance import TESTS
from lit_attn.schema.errors import ConfigError, plural, require

SEED_AT_END = re.compile(r"(?P<name>.+?)[-_/ .=]+(?:seed[-_/ .=]*)?(?P<seed>\d+)", re.IGNORECASE)
"""Name of a run that ends in its seed behind a separator, as in `belief2-seed3` or `belief2/3`."""


@dataclass(frozen=True)
class Choices:
    """Choices of the user about a table.

    `metric` can end in its direction (`loss:min`). Empty names stand for what the program that
    wrote the table calls its columns. `where` has conditions that every row must meet (`size=S`),
    and `states` the meanings of words for states of runs (`PRUNED=failed`). `cut_seed` takes the
    seed from the end of the names of runs. `stream` says that the rows stand in the order in which
    their runs ended, as the ideas of a stream need it. Without `has_baseline` the variants are
    compared with a target instead of each other, and the first one stands for the baseline.
    """

    metric: str = ""
    pairs: str = ""
    baseline: str = ""
    variant: str = ""
    seed: str = ""
    margin: float | None = None
    cut_seed: bool = False
    stream: bool = False
    where: Sequence[str] = ()
    states: Sequence[str] = ()
    has_baseline: bool = True

    @property
    def is_paired(self) -> bool:
        """True if runs of two variants with one seed belong together."""
        return self.pairs in PAIRS and TESTS[self.pairs].is_paired


class Prepared(NamedTuple):
    """A study of the runs of another program, and sentences about what is odd in them."""

    study: StudyRecord
    notes: list[str]


class _Run(NamedTuple):
    """A run: the value is None if it has not ended, and NaN if it has failed."""

    variant: str
    seed: str
    place: str
    value: float | None
    costs: dict[str, float | int]


def prepare(table: RunTable, choices: Choices, name: str = "") -> Prepared:
    """Return the study of a table, called `name` (default: that of its file).

    Raises ConfigError, in one line, for a choice that the table does not have.
    """
    table = join_factors(select_rows(table, choices.where), choices.variant)
    _check_parts(table)
    _check_choices(table, choices)
    notes = list(table.notes)
    metric_name, goal = find_metric(table, choices)
    runs = _read_runs(table, choices, metric_name, notes)
    variants = list(dict.fromkeys(run.variant for run in runs))
    baseline = find_baseline(table, choices, variants)
    _check_units(table, metric_name, goal, runs)
    fields = {"name": metric_name, "label": metric_name, "scale": 1, "goal": goal}
    if choices.margin is not None:
        if not choices.margin > 0 or not math.isfinite(choices.margin):
            raise ConfigError(f"margin: needs a number above 0, not {choices.margin:g}")
        fields["margin"] = choices.margin
    metric = Metric.model_validate(fields)
    test = TESTS[choices.pairs]
    used = _list_used(table, choices, metric_name)
    cells = _list_cells(runs)
    if test.is_paired:
        cells = _number_cells(table, runs, used, notes)
    if choices.stream:
        _check_ended(runs)
    elif test.is_paired:
        cells = _pair_cells(cells, variants, notes)
    _note_copies(table, notes)
    if not choices.stream and choices.has_baseline:
        # Ideas of a stream have different numbers of runs.
        _note_values(runs, variants, baseline, test.is_paired, notes)
    if not choices.stream and not test.is_paired:
        # A pair has the same settings on both sides.
        values = [run.value for run in runs]
        notes += describe_mixtures(table, used, [run.variant for run in runs], values)
    title = name or Path(table.source).stem
    plan = Plan(
        study=make_file_name(title),
        title=title,
        baseline=baseline,
        metric=metric,
        variants=[PlannedVariant(name=variant) for variant in variants],
        seeds=sorted({cell.seed for cell in cells}),
        cells=[],
    )
    return Prepared(StudyRecord(plan, cells, test=test), notes)


def make_file_name(title: str) -> str:
    """Return the name of a folder of reports for a title: `a/b` must not lead elsewhere."""
    return title.replace("/", "-").replace("\\", "-").lstrip(".") or "table"


def list_metrics(table: RunTable, choices: Choices) -> list[str]:
    """Return the columns with numbers that can be the metric: no seed, cost or state."""
    used = {choices.variant or table.variant, choices.seed or table.seed, "Name", *table.parts}
    used |= {parse_condition(text).column for text in choices.where}
    listed = []
    for column in table.columns if table.metrics is None else table.metrics:
        if column in used or column.lower() in STATE_COLUMNS or find_cost(column) is not None:
            continue
        values = [read_number(row.get(column)) for row in table.rows]
        if any(isinstance(value, float) for value in values):
            listed.append(column)
    return listed


def _find_only_metric(table: RunTable, choices: Choices) -> str:
    """Return the only column that can be the metric. Raises ConfigError for none or several."""
    listed = list_metrics(table, choices)
    if len(listed) == 1:
        return listed[0]
    if not listed:
        raise ConfigError(f"{table.source}: has no column of numbers that could be a metric")
    raise ConfigError(
        f"{table.source}: name the metric with --metric NAME:min or NAME:max; choose from"
        f" {', '.join(listed)}"
    )


def find_metric(table: RunTable, choices: Choices) -> tuple[str, Literal["max", "min"]]:
    """Return the column of the metric and its better direction.

    Raises ConfigError for an unknown column, or if one of both is not known.
    """
    name, goal = parse_metric(choices.metric or table.metric)
    if not name:
        name = _find_only_metric(table, choices)
    require(f"{table.source}: has no column", name, table.columns)
    return name, goal or find_goal(name, f"{table.source}: {name}")


def _check_choices(table: RunTable, choices: Choices) -> None:
    """Raise one ConfigError about all options that are missing or wrong."""
    problems = []
    for check in (_check_pairs, _check_variant, _check_seed, find_metric, _check_baseline):
        try:
            check(table, choices)
        except ConfigError as error:
            problems.append(str(error).removeprefix(f"{table.source}: "))
    if problems:
        raise ConfigError(f"{table.source}: {'; '.join(problems)}")


def _check_pairs(_: RunTable, choices: Choices) -> None:
    if choices.pairs not in PAIRS:
        options = [f"--pairs {value} ({words})" for value, words in PAIRS.items()]
        raise ConfigError(
            f"say with --pairs whether runs of two variants belong together: {' or '.join(options)}"
        )


def _check_variant(table: RunTable, choices: Choices) -> None:
    column = choices.variant or table.variant
    advice = "name the column with --variant, or those of a product with commas (residual,zz)"
    require(f"{advice}; there is no column", column, table.columns)


def _check_seed(table: RunTable, choices: Choices) -> None:
    """Raise ConfigError without the column of seeds, if there has to be one."""
    is_needed = choices.is_paired and not choices.cut_seed
    column = choices.seed or table.seed
    if column in table.columns or not (choices.seed or is_needed):
        return
    names = [str(row.get(choices.variant or table.variant)) for row in table.rows]
    if all(SEED_AT_END.fullmatch(name) for name in names):
        raise ConfigError(
            f"there is no column '{column}', but all names end in a seed, as '{names[0]}': take it"
            " from there with --cut-seed, or name the column with --seed"
        )
    require("name the column with --seed; there is no column", column, table.columns)


def _check_baseline(table: RunTable, choices: Choices) -> None:
    """Raise ConfigError if the baseline is not known, but its column is."""
    column = choices.variant or table.variant
    if column in table.columns:
        names = _read_names(table, column, [])
        if choices.cut_seed:
            names, _ = _cut_seeds(names, table.places)
        find_baseline(table, choices, list(dict.fromkeys(names)))


def _check_units(
    table: RunTable, metric: str, goal: Literal["max", "min"], runs: Sequence[_Run]
) -> None:
    """Raise ConfigError if some variants have shares and others have percentages."""
    by_variant: dict[str, list[float]] = {}
    for run, row in zip(runs, table.rows, strict=True):
        if str(row.get(metric)).strip().endswith("%"):
            return
        if run.value is not None and math.isfinite(run.value):
            by_variant.setdefault(run.variant, []).append(run.value)
    check_units(f"{table.source}: {metric}", by_variant, goal)


def _list_used(table: RunTable, choices: Choices, metric: str) -> list[str]:
    """Return the columns that have a meaning, so that they are no settings of runs."""
    return [metric, choices.variant or table.variant, choices.seed or table.seed]


def _check_parts(table: RunTable) -> None:
    """Raise ConfigError for runs of several experiments, which must not be taken for one."""
    for column in table.parts:
        values = list(dict.fromkeys(str(row[column]) for row in table.rows if column in row))
        if len(values) > 1:
            shown = ", ".join(values[:6]) + (", ..." if len(values) > 6 else "")
            raise ConfigError(
                f"{table.source}: has runs of {len(values)} values of '{column}' ({shown});"
                f" choose one with --where {column}={values[0]}"
            )


def find_baseline(table: RunTable, choices: Choices, variants: list[str]) -> str:
    """Return the baseline: the one that is named, that of the program, or `baseline`."""
    if not choices.has_baseline:
        return variants[0]
    wanted = choices.baseline or table.baseline
    if wanted:
        require(f"{table.source}: has no variant", wanted, variants)
        return wanted
    if "baseline" in variants:
        return "baseline"
    shown = ", ".join(variants[:6]) + (", ..." if len(variants) > 6 else "")
    raise ConfigError(f"{table.source}: name the baseline with --baseline; choose from {shown}")


def _read_runs(table: RunTable, choices: Choices, metric: str, notes: list[str]) -> list[_Run]:
    """Return every row as a run, and add sentences about cells that had to be cleaned."""
    names = _read_names(table, choices.variant or table.variant, notes)
    seeds = ["" for _ in names]
    if choices.cut_seed:
        names, seeds = _cut_seeds(names, table.places)
    elif choices.is_paired:
        column = choices.seed or table.seed
        seeds = [str(clean(row.get(column))) for row in table.rows]
    states = read_states(table, notes, choices.states)
    values = read_values(table, metric, states, notes)
    cost_columns = _choose_cost_columns(table, metric, notes)
    runs = []
    for place, row in enumerate(table.rows):
        costs: dict[str, float | int] = {}
        for name, cost in cost_columns.items():
            number = _read_cost(table.places[place], name, row.get(name))
            if number is not None:
                amount = number * cost.factor
                is_count = cost.measurement in COUNTS
                costs[cost.measurement] = round(amount) if is_count else amount
        runs.append(_Run(names[place], seeds[place], table.places[place], values[place], costs))
    return runs


def _choose_cost_columns(table: RunTable, metric: str, notes: list[str]) -> dict[str, Cost]:
    """Return the costs of columns by name: the first column of each measurement.

    Two columns of one measurement, such as runtime and GPU hours, may mean two things.
    """
    chosen: dict[str, Cost] = {}
    by_measurement: dict[str, str] = {}
    for name in table.columns:
        cost = None if name == metric else find_cost(name)
        if cost is None:
            continue
        first = by_measurement.setdefault(cost.measurement, name)
        if first == name:
            chosen[name] = cost
        else:
            notes.append(f"The column '{name}' is not used, because '{first}' is the same cost.")
    return chosen


def _read_names(table: RunTable, column: str, notes: list[str]) -> list[str]:
    """Return the name of each row's variant without blanks around it."""
    names = []
    blank = 0
    for row, place in zip(table.rows, table.places, strict=True):
        written = row.get(column)
        name = "" if written is None else str(written)
        blank += name != name.strip()
        if not name.strip():
            raise ConfigError(f"{place}: {column}: is empty; every run needs a variant")
        names.append(name.strip())
    if blank:
        notes.append(f"Blanks around names of variants are ignored in {plural(blank, 'run')}.")
    return names


def _cut_seeds(names: list[str], places: list[str]) -> tuple[list[str], list[str]]:
    """Return names without the seeds at their ends, and the seeds."""
    cut = []
    seeds = []
    for name, place in zip(names, places, strict=True):
        match = SEED_AT_END.fullmatch(name)
        if match is None:
            raise ConfigError(f"{place}: '{name}' does not end in a seed, as in '{name}-seed0'")
        cut.append(match["name"])
        seeds.append(match["seed"])
    return cut, seeds


def _read_cost(place: str, column: str, value: Any) -> float | None:
    """Return a cost, None for an empty cell. Raises ConfigError for a text."""
    number = read_number(value)
    if isinstance(number, str) or (number is not None and number < 0):
        raise ConfigError(f"{place}: {column}: '{clean(value)}' is not a cost, a number from 0 on")
    return number if number is None or math.isfinite(number) else None


def _number_cells(
    table: RunTable, runs: list[_Run], used: Sequence[str], notes: list[str]
) -> list[CellRecord]:
    """Return a cell for each run with its seed. Raises ConfigError for a seed that is doubled."""
    numbers = _number_seeds(runs, notes)
    by_key: dict[tuple[str, int], int] = {}
    cells = []
    for place, run in enumerate(runs):
        key = (run.variant, numbers[run.seed])
        first = by_key.setdefault(key, place)
        if first != place:
            difference = describe_twins(table, used, first, place)
            advice = difference or "with independent runs write --pairs none"
            raise ConfigError(
                f"{run.place}: variant '{run.variant}' has seed {run.seed} twice (first at"
                f" {runs[first].place}); {advice}"
            )
        cells.append(_make_cell(run, numbers[run.seed]))
    return cells


def _pair_cells(rows: list[CellRecord], variants: list[str], notes: list[str]) -> list[CellRecord]:
    """Return a cell for each variant with each seed; a cell without a row is missing."""
    by_place = {(cell.variant, cell.seed): cell for cell in rows}
    seeds = sorted({cell.seed for cell in rows})
    cells = []
    lacking: Counter[str] = Counter()
    for variant in variants:
        for seed in seeds:
            cell = by_place.get((variant, seed))
            if cell is None:
                lacking[variant] += 1
                cell = CellRecord(variant, seed, "missing")
            cells.append(cell)
    for variant, count in lacking.items():
        notes.append(f"'{variant}' lacks {count:,} of {plural(len(seeds), 'seed')}.")
    return cells


def _check_ended(runs: list[_Run]) -> None:
    """Raise ConfigError for a run that has not ended: its row would change later."""
    for run in runs:
        if run.value is None:
            raise ConfigError(
                f"{run.place}: this run has not ended; a stream has a row for each run that has"
                " ended, in the order in which they ended"
            )


def _number_seeds(runs: list[_Run], notes: list[str]) -> dict[str, int]:
    """Return a whole number for each seed; other texts are numbered in their order."""
    written = list(dict.fromkeys(run.seed for run in runs))
    places = {run.seed: run.place for run in reversed(runs)}
    numbers: dict[str, int] = {}
    for text in written:
        if text in ("", "None", "nan"):
            raise ConfigError(f"{places[text]}: has no seed; without seeds write --pairs none")
        number = read_number(text)
        if isinstance(number, float):
            if not number.is_integer():
                raise ConfigError(f"{places[text]}: seed '{text}' is not a whole number")
            numbers[text] = int(text) if text.lstrip("+-").isdecimal() else int(number)
    if len(numbers) < len(written):
        notes.append("Seeds are texts, so they are numbered from 0 on in alphabetical order.")
        numbers = {text: place for place, text in enumerate(sorted(written))}
    return numbers


def _list_cells(runs: list[_Run]) -> list[CellRecord]:
    """Return a cell for each run, numbered within its variant."""
    counts: Counter[str] = Counter()
    cells = []
    for run in runs:
        cells.append(_make_cell(run, counts[run.variant]))
        counts[run.variant] += 1
    return cells


def _make_cell(run: _Run, seed: int) -> CellRecord:
    if run.value is None:
        return CellRecord(run.variant, seed, "running")
    if math.isnan(run.value):
        return CellRecord(run.variant, seed, "error")
    return CellRecord(run.variant, seed, "done", run.value, run.costs)


def _note_values(
    runs: list[_Run], variants: list[str], baseline: str, is_paired: bool, notes: list[str]
) -> None:
    """Add sentences about equal values and about groups of different sizes."""
    by_variant: dict[str, list[float]] = {variant: [] for variant in variants}
    for run in runs:
        if run.value is not None and math.isfinite(run.value):
            by_variant[run.variant].append(run.value)
    values = [value for group in by_variant.values() for value in group]
    ties = len(values) - len(set(values))
    if ties and len(values) < 1000:
        notes.append(f"Ties: {len(values)} values, of which {len(set(values))} are different.")
    sizes = {variant: len(group) for variant, group in by_variant.items()}
    if not is_paired and len(set(sizes.values())) > 1:
        usual = statistics.median(sizes.values())
        notes.append(
            f"Variants have {min(sizes.values())} to {max(sizes.values())} runs with a value"
            f" (median {usual:g}; the baseline has {sizes[baseline]})."
        )


def _note_copies(table: RunTable, notes: list[str]) -> None:
    """Add a sentence about rows that are equal in every column."""
    # A hash of a row takes less memory than its texts.
    copies = {hash(tuple(sorted((name, str(row[name])) for name in row))) for row in table.rows}
    repeated = len(table.rows) - len(copies)
    if repeated:
        notes.append(
            f"{plural(repeated, 'row')} equal to another one in every column: each is a run."
        )
