"""Rows of runs of another program, which every reader of such runs returns."""

import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_attn.schema.errors import ConfigError, require

Row = dict[str, Any]
"""Values of a run by column."""


@dataclass
class RunTable:
    """Rows of a file with one run each, and what the program that wrote them says about columns.

    `places` names the file and line of each row. `metrics` are the columns that the program
    records as metrics (None: it does not say). `variant`, `metric` and `baseline` are used if the
    user names no other ones. The runs of one value of a column in `parts` belong together. `notes`
    are sentences about runs that the reader left out or changed.
    """

    source: str
    rows: list[Row]
    places: list[str]
    metrics: list[str] | None = None
    variant: str = "variant"
    seed: str = "seed"
    metric: str = ""
    baseline: str = ""
    parts: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order of their first row."""
        # A dictionary keeps the order in which its keys were added.
        return list(dict.fromkeys(itertools.chain(*self.rows)))


def join_factors(table: RunTable, variant: str) -> RunTable:
    """Return the table with the variants of `variant`, which names factors if it has commas.

    `residual,zz` makes variants such as `residual=full,zz=with` of two columns, which it replaces.
    Raises ConfigError for a column that does not exist, and for a value without a clear name.
    """
    names = [name.strip() for name in variant.split(",")]
    if variant in table.columns or len(names) < 2:
        return table
    for name in names:
        require(f"{table.source}: --variant {variant}: there is no column", name, table.columns)
    rows = []
    for row, place in zip(table.rows, table.places, strict=True):
        terms = []
        for name in names:
            value = str(row.get(name, "")).strip()
            if not value or "," in value:
                raise ConfigError(
                    f"{place}: {name}: '{value}' names no level; a factor needs a text without a"
                    " comma in every run"
                )
            terms.append(f"{name}={value}")
        rest = {name: value for name, value in row.items() if name not in names}
        rows.append({variant: ",".join(terms), **rest})
    return replace(table, rows=rows)


def read_entries(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a file of JSON with the place of each. Raises ConfigError.

    The file is a list of objects, one object, or lines with one object each, which often have the
    ending .json too.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as JSON in UTF-8: {error}") from error
    is_whole = path.suffix == ".json" and not _has_lines_of_objects(text)
    entries = _parse_whole(path, text) if is_whole else _parse_lines(path, text)
    for place, entry in entries:
        if not isinstance(entry, dict):
            raise ConfigError(f"{place}: is no JSON object with the columns of a run")
    if not entries:
        raise ConfigError(f"{path}: contains no run")
    return entries


def _has_lines_of_objects(text: str) -> bool:
    """Return True if the first line is an object of its own, and further lines follow."""
    first_line, _, further_lines = text.strip().partition("\n")
    if not further_lines:
        return False
    try:
        return isinstance(json.loads(first_line), dict)
    except ValueError:
        return False


def _parse_whole(path: Path, text: str) -> list[tuple[str, Any]]:
    """Return the members of the list in a file, or its one object, with their places."""
    content = _parse(str(path), text)
    listed = content if isinstance(content, list) else [content]
    return [(f"{path}: run {number}", entry) for number, entry in enumerate(listed, start=1)]


def _parse_lines(path: Path, text: str) -> list[tuple[str, Any]]:
    """Return the objects in the lines of a file with their places."""
    entries = []
    # A string of JSON may contain other line separators than this one.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            entries.append((place, _parse(place, line)))
    return entries


def _parse(place: str, text: str) -> Any:
    """Return the content of a JSON text; ConfigError with its place if it has a mistake."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place}: cannot be read as JSON: {error}") from error
