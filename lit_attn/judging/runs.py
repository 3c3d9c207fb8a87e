"""Verdicts about the runs of other programs, for the command `judge` and for Python."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_attn.judging.answers import JudgedTarget
from lit_attn.judging.budget import plan_within, read_budget
from lit_attn.judging.prepare import Choices, Prepared, make_file_name, prepare
from lit_attn.judging.run_table import RunTable
from lit_attn.judging.stream_memory import recall_rows
from lit_attn.judging.stream_verdicts import judge_stream
from lit_attn.judging.table import read_table
from lit_attn.judging.target import DEFAULT_LEVEL, judge_groups
from lit_attn.report.answers.judged import JudgedStudy
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.verdicts.judge import judge_study
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd


def judge(
    runs: "str | Path | pd.DataFrame",
    metric: str = "",
    *,
    pairs: str,
    baseline: str = "",
    variant: str = "",
    seed: str = "",
    margin: float | None = None,
    cut_seed: bool = False,
    where: Sequence[str] = (),
    states: Sequence[str] = (),
    reader: str = "",
    stream: bool = False,
    budget: str = "",
) -> JudgedStudy:
    """Return the verdict about every variant of the runs of any program.

    `runs` is a path that `read_table` reads, or a pandas frame with one row for each run. `metric`
    ends in its direction (`val_loss:min`) unless the direction is known. `pairs` is "seed" if runs
    with one seed belong together, and "none" for independent runs. With `stream` the variants are
    ideas, one after another (`lit_attn.judging.stream`), and a file beside the path
    remembers the judged rows. `budget` (`2h`, or a number of trainings) limits the next action. The
    other arguments are those of `Choices`. The result has the keys of `lit-attn judge --json`;
    `result.model_dump()` is a dictionary. PyTorch is not needed. Raises ConfigError for what the
    runs do not have.
    """
    _, judged = judge_with_record(
        runs,
        metric,
        pairs=pairs,
        baseline=baseline,
        variant=variant,
        seed=seed,
        margin=margin,
        cut_seed=cut_seed,
        where=where,
        states=states,
        reader=reader,
        stream=stream,
        budget=budget,
    )
    return judged


def judge_with_record(
    runs: "str | Path | pd.DataFrame",
    metric: str,
    *,
    stream: bool,
    reader: str,
    budget: str,
    **choices: Any,
) -> tuple[StudyRecord, JudgedStudy]:
    """Return the runs as a study, and the verdicts; the arguments are those of `judge`."""
    chosen = Choices(metric=metric, stream=stream, **choices)
    prepared = prepare(read_runs(runs, reader), chosen)
    if stream:
        judged = judge_stream(prepared.study, prepared.notes)
        if isinstance(runs, str | Path):
            recalled = recall_rows(Path(runs), prepared.study, chosen)
            notes = [*judged.notes, *recalled.notes]
            warnings = [*recalled.warnings, *judged.warnings]
            judged = judged.model_copy(update={"notes": notes, "warnings": warnings})
    else:
        judged = judge_study(prepared.study, notes=prepared.notes)
    if budget:
        judged = plan_within(prepared.study, judged, read_budget(budget))
    return prepared.study, judged


def judge_target(
    runs: "str | Path | pd.DataFrame",
    metric: str,
    target: float,
    *,
    level: float = DEFAULT_LEVEL,
    variant: str = "",
    where: Sequence[str] = (),
    states: Sequence[str] = (),
    reader: str = "",
) -> JudgedTarget:
    """Return whether the mean of each group of runs is beyond a target.

    The runs of one value of the column `variant` are a group. Without such a column all runs are
    one group. The other arguments are those of `judge`. Raises ConfigError for what the runs do not
    have.
    """
    table = read_runs(runs, reader)
    if not variant and table.variant not in table.columns:
        for row in table.rows:
            row[table.variant] = Path(table.source).stem
    choices = Choices(
        metric=metric,
        pairs="none",
        variant=variant,
        where=where,
        states=states,
        has_baseline=False,
    )
    prepared = prepare(table, choices)
    return judge_groups(prepared.study, target, level, prepared.notes)


def read_runs(runs: "str | Path | pd.DataFrame", reader: str) -> RunTable:
    """Return the table at a path, read by `reader` if it is given, or the rows of a frame."""
    if isinstance(runs, str | Path):
        return read_table(Path(runs), reader)
    if reader:
        raise ConfigError("reader: reads a path, and the runs are a frame; leave it out")
    return make_table(runs)


def make_table(frame: "pd.DataFrame") -> RunTable:
    """Return the rows of a frame as the runs of a table.

    Raises ConfigError for anything else, for a frame without rows, and for equal columns.
    """
    if not hasattr(frame, "columns"):
        raise ConfigError(
            f"runs: needs a path or a pandas frame, as pandas.DataFrame(rows), not a"
            f" {type(frame).__name__}"
        )
    columns = [str(column) for column in frame.columns]
    for column in columns:
        if columns.count(column) > 1:
            raise ConfigError(f"frame: has the column '{column}' twice")
    if not len(frame):
        raise ConfigError("frame: contains no run")
    # A missing value of pandas can be NaN, which would be the name of a variant.
    objects = frame.astype(object)
    tuples = objects.where(objects.notna(), None).itertuples(index=False, name=None)
    rows = [dict(zip(columns, values, strict=True)) for values in tuples]
    places = [f"frame: row {place}" for place in range(len(rows))]
    return RunTable("frame", rows, places)


def prepare_metrics(table: RunTable, choices: Choices, metrics: list[str]) -> list[Prepared]:
    """Return one study for each metric of a table, with different names of their folders."""
    if len(metrics) < 2:
        return [prepare(table, Choices(**{**vars(choices), "metric": "".join(metrics)}))]
    stem = Path(table.source).stem
    studies = []
    folders: set[str] = set()
    for metric in metrics:
        name = f"{stem}-{metric.removesuffix(':min').removesuffix(':max')}"
        title = name
        number = 2
        while make_file_name(name) in folders:
            name = f"{title}-{number}"
            number += 1
        folders.add(make_file_name(name))
        studies.append(prepare(table, Choices(**{**vars(choices), "metric": metric}), name))
    return studies


def read_tables(options: Namespace) -> list[StudyRecord]:
    """Return a study for each metric of the runs in `options.csv`; print what is odd in them."""
    choices = Choices(
        pairs=options.pairs or "",
        baseline=options.baseline,
        variant=options.variant,
        seed=options.seed,
        cut_seed=options.cut_seed,
        where=options.where,
        states=options.states,
    )
    table = read_table(options.csv, options.reader)
    prepared = prepare_metrics(table, choices, options.metric or [])
    notes = dict.fromkeys(note for entry in prepared for note in entry.notes)
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)
    return [entry.study for entry in prepared]
