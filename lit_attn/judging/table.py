"""Runs of other programs as one table: the reader of every kind of file.

A reader returns rows as they are written. What their columns mean is decided in `prepare.py`.
"""

import csv
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_attn.judging import harness, mlflow_runs, tensorboard_runs, wandb_runs
from lit_attn.judging.run_table import Row, RunTable, read_entries
from lit_attn.schema.errors import ConfigError, plural

Reader = Callable[[Path], Iterable[Mapping[str, Any]]]
"""Function of a user that yields a mapping for each run at a path."""

DELIMITERS = ("\t", ",", ";")

MOST_BYTES = 10**9
"""Memory of the runs of a file from which on it is refused."""

ROW_BYTES, CELL_BYTES = 800, 90
"""Memory of a run and of each of its cells beside its text."""

JSON_BYTES = 10
"""Memory of a file of JSON for each of its bytes."""

LEDGER = ("commit", "val_bpb", "memory_gb", "status", "description")
"""Columns of results.tsv of karpathy/autoresearch (program.md at commit 228791f), whose metric is
minimised and whose first row is the baseline."""


def read_table(path: Path, reader: str = "") -> RunTable:
    """Return the runs at `path`, read by `reader` (`FILE.py:FUNCTION`) or by the kind of the file.

    Raises ConfigError for a path that cannot be read, in one line.
    """
    if reader:
        return _read_with(load_reader(reader), path)
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    with path.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"SQLite format 3"):
        return mlflow_runs.read_mlflow(path)
    if path.suffix in (".json", ".jsonl", ".ndjson"):
        if path.stat().st_size * JSON_BYTES > MOST_BYTES:
            raise _name_size(str(path))
        return _read_json(path)
    return _read_csv(path)


def _read_folder(path: Path) -> RunTable:
    """Return the runs of a folder. Raises ConfigError for a folder of no known program."""
    for module in (tensorboard_runs, mlflow_runs, harness):
        if module.is_folder(path):
            return module.read_folder(path)
    raise ConfigError(
        f"{path}: is no folder of TensorBoard, MLflow or lm-evaluation-harness; name a function"
        " that reads it with --reader FILE.py:FUNCTION"
    )


def load_reader(text: str) -> Reader:
    """Return the function that `FILE.py:FUNCTION` names. Its file is executed."""
    name, _, function_name = text.rpartition(":")
    path = Path(name)
    if not name or not function_name.isidentifier() or path.suffix != ".py":
        raise ConfigError(f"--reader {text}: write FILE.py:FUNCTION, as in mine.py:read")
    if not path.is_file():
        raise ConfigError(f"--reader {text}: no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--reader {text}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{_find_line(error, path)}: {_describe(error)}") from error
    function: Any = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"--reader {text}: {path} has no function '{function_name}'")
    reader: Reader = function
    return reader


def _read_with(reader: Reader, path: Path) -> RunTable:
    """Return the rows that a function of the user yields for a path."""
    code = Path(reader.__code__.co_filename) if hasattr(reader, "__code__") else Path("reader")
    rows: list[Row] = []
    try:
        for row in reader(path):
            if not isinstance(row, Mapping):
                raise ConfigError(
                    f"{code}: yields {type(row).__name__}; a run is a mapping of columns to values"
                )
            rows.append({str(key): value for key, value in row.items()})
    except ConfigError:
        raise
    except Exception as error:
        # The mistake is in the file that the user named.
        raise ConfigError(f"{_find_line(error, code)}: {path}: {_describe(error)}") from error
    return _make_table(path, rows, [f"{path}: run {number}" for number in range(1, len(rows) + 1)])


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _find_line(error: Exception, file: Path) -> str:
    """Return `file:line` of the innermost frame of an exception in `file`."""
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{file}:{line}" if line else str(file)


def _make_table(path: Path, rows: list[Row], places: list[str]) -> RunTable:
    """Return a table with at least one row. Raises ConfigError for an empty one."""
    if not rows:
        raise ConfigError(f"{path}: contains no run")
    return RunTable(str(path), rows, places)


def _read_csv(path: Path) -> RunTable:
    """Return the rows of a table with a heading, whose columns a tab, comma or semicolon divides.

    Every cell stays a text, so that a variant can be called `null` and a seed `007`.
    """
    csv.field_size_limit(sys.maxsize)
    rows: list[Row] = []
    places = []
    taken = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            heading = file.readline()
            delimiter = max(DELIMITERS, key=heading.count)
            file.seek(0)
            lines = csv.reader(file, delimiter=delimiter, skipinitialspace=delimiter != "\t")
            columns = [name.strip() for name in next(lines, [])]
            _check_columns(path, columns)
            for cells in lines:
                if not any(cell.strip() for cell in cells):
                    continue
                place = f"{path}:{lines.line_num}"
                if len(cells) != len(columns):
                    raise ConfigError(
                        f"{place}: has {plural(len(cells), 'cell')}, and the heading has"
                        f" {len(columns)}"
                    )
                taken += ROW_BYTES + sum(CELL_BYTES + len(cell) for cell in cells)
                if taken > MOST_BYTES:
                    raise _name_size(place)
                row = dict(zip(columns, cells, strict=True))
                # pandas writes an index without a heading.
                row.pop("", None)
                rows.append(row)
                places.append(place)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a table in UTF-8: {error}") from error
    table = _make_table(path, rows, places)
    _describe_known_table(table, columns)
    return table


def _name_size(place: str) -> ConfigError:
    """Return the error of a file whose runs need too much memory."""
    return ConfigError(
        f"{place}: the runs up to here need {MOST_BYTES // 10**9} GB of memory; leave out rows that"
        " are no runs (a log has a row for each step) and columns with long texts"
    )


def _check_columns(path: Path, columns: list[str]) -> None:
    """Raise ConfigError for a heading with no column or with one column twice."""
    named = [name for name in columns if name]
    if not named:
        raise ConfigError(f"{path}:1: has no heading with the names of columns")
    for name in named:
        if named.count(name) > 1:
            raise ConfigError(f"{path}:1: has the column '{name}' twice")


def _describe_known_table(table: RunTable, columns: list[str]) -> None:
    """Set what is known about the tables of autoresearch and about the exports of W&B."""
    if tuple(columns) == LEDGER:
        table.variant = "commit"
        table.metric = "val_bpb:min"
        table.baseline = str(table.rows[0]["commit"]).strip()
    if {"Name", "State"} <= set(columns):
        table.parts = ("Project",)


def _read_json(path: Path) -> RunTable:
    """Return the runs of a JSON list or of lines of JSON: flat rows, runs of W&B, or samples."""
    entries = read_entries(path)
    first = entries[0][1]
    if harness.is_sample(first):
        return harness.read_files(path, [path])
    if wandb_runs.is_run(first):
        return wandb_runs.make_table(path, entries)
    return _make_table(path, [entry for _, entry in entries], [place for place, _ in entries])
