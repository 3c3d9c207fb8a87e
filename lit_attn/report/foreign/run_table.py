"""Rows of runs of another program, which every reader of such runs returns."""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_attn.schema.errors import ConfigError

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


def read_entries(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a file of JSON with the place of each. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as JSON in UTF-8: {error}") from error
    entries: list[tuple[str, Any]] = []
    is_list = path.suffix == ".json"
    try:
        if is_list:
            content = json.loads(text)
            listed = content if isinstance(content, list) else [content]
            for number, entry in enumerate(listed, start=1):
                entries.append((f"{path}: run {number}", entry))
    except ValueError as error:
        # Lines of JSON often have the ending .json.
        is_list = False
        if len(text.strip().splitlines()) < 2:
            raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not is_list:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                entries.append((f"{path}:{number}", _parse_line(path, number, line)))
    for place, entry in entries:
        if not isinstance(entry, dict):
            raise ConfigError(f"{place}: is no JSON object with the columns of a run")
    if not entries:
        raise ConfigError(f"{path}: contains no run")
    return entries


def _parse_line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}:{number}: cannot be read as JSON: {error}") from error
