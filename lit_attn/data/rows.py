"""Rows of CSV and JSON files exactly as written: no cell is guessed to be a number, date or gap.

A CSV cell is a text, or missing (None) if it is empty: `null`, `NA`, `None` and `nan` are texts. A
JSON value keeps its type. Both formats are UTF-8; a byte-order mark is no part of the first cell.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SEPARATORS = (",", ";", "\t", "|")
"""Separators of a CSV file. The first one whose header has all columns that are needed is used."""

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class Rows:
    """Columns of one table. A name gives the cells of a column, a slice the columns of its rows."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def __getitem__(self, key: str | slice) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: cells[key] for name, cells in self.columns.items()}


def read_csv(path: Path, needed: Iterable[str]) -> Rows:
    """Return the rows of a CSV file whose header has the columns `needed`.

    Raises ValueError for a malformed file, with the line, and OSError.
    """
    needed = list(needed)
    separator = "\t" if path.suffix == ".tsv" else _find_separator(path, needed)
    reader = _read_records(path, separator)
    header = next(reader, None)
    if header is None:
        raise ValueError("it is empty")
    for name in needed:
        if header[1].count(name) > 1:
            raise ValueError(f"its header has the column '{name}' {header[1].count(name)} times")
    cells: list[list[str | None]] = [[] for _ in header[1]]
    for line, record in reader:
        if len(record) != len(header[1]):
            raise ValueError(
                f"line {line}: has {len(record)} cells and the header {len(header[1])}; write "
                "texts that contain the separator in double quotes"
            )
        for column, cell in zip(cells, record, strict=True):
            column.append(cell or None)
    return Rows(dict(zip(header[1], cells, strict=True)))


def _find_separator(path: Path, needed: list[str]) -> str:
    """Return the first separator whose header has the columns `needed`, or a comma."""
    for separator in SEPARATORS:
        # Quotes of another format are no mistake yet.
        try:
            header = next(_read_records(path, separator), (0, []))[1]
        except ValueError:
            continue
        if set(needed) <= set(header):
            return separator
    return SEPARATORS[0]


def _read_records(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the last line and the cells of every record that is not a blank line."""
    # A document may be longer than the default limit of a cell, 131,072 characters.
    csv.field_size_limit(sys.maxsize)
    try:
        # `strict` refuses a quote that never ends, which would swallow the rest of the file.
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            try:
                for record in reader:
                    if record:
                        yield reader.line_num, record
            except csv.Error as error:
                raise ValueError(f"line {reader.line_num}: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(_describe_encoding(path)) from error


def _describe_encoding(path: Path) -> str:
    with path.open("rb") as file:
        is_utf16 = file.read(2) in UTF16_MARKS
    return f"it is {'UTF-16' if is_utf16 else 'not UTF-8'} text; save it as UTF-8"


def read_json(path: Path) -> Rows:
    """Return the rows of a JSON file: a list of objects, or one object a line.

    A row without a key of other rows has None there. Raises ValueError for a malformed file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(_describe_encoding(path)) from error
    is_list = text.lstrip().startswith("[") and path.suffix == ".json"
    objects = _parse_list(text) if is_list else _parse_lines(text)
    # A dictionary keeps the order of the first occurrences.
    columns: dict[str, list[Any]] = {}
    for row in objects:
        for name in row:
            columns.setdefault(name, [])
    for name, cells in columns.items():
        cells.extend(row.get(name) for row in objects)
    return Rows(columns)


def _parse_list(text: str) -> list[dict[str, Any]]:
    objects: list[Any] = json.loads(text, object_pairs_hook=_make_object)
    for number, row in enumerate(objects):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is no object with a value for each column")
    return objects


def _parse_lines(text: str) -> list[dict[str, Any]]:
    """Return the object of each line; raise ValueError, which names the line, for another one."""
    objects = []
    # Only line feeds end lines: texts may contain other separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_make_object)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: is no object with a value for each column")
        objects.append(row)
    return objects


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError for a key that occurs twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key '{twice}' twice")
    return result
