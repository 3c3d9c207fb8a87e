"""Runs of W&B as its API returns them: name, state, config, and summary or history."""

import json
from pathlib import Path
from typing import Any

from lit_attn.judging.run_table import Row, RunTable
from lit_attn.schema.errors import ConfigError

PARTS = {"config", "summary", "history"}


def is_run(entry: dict[str, Any]) -> bool:
    """Return True for a run of W&B: a name, and settings or values in mappings."""
    return "name" in entry and bool(PARTS & entry.keys())


def make_table(path: Path, entries: list[tuple[str, dict[str, Any]]]) -> RunTable:
    """Return the table of runs, each with its settings and the last value of each metric."""
    rows = []
    metrics: dict[str, None] = {}
    for place, entry in entries:
        if "name" not in entry:
            raise ConfigError(f"{place}: has no name; write name, config and summary or history")
        row: Row = {"Name": entry["name"]}
        for key in ("state", "group", "project"):
            if entry.get(key):
                row[key] = entry[key]
        row |= _read_mapping(place, "config", entry)
        values = _read_history(place, entry.get("history"))
        summary = _read_mapping(place, "summary", entry).items()
        values |= {name: value for name, value in summary if value is not None}
        metrics |= dict.fromkeys(values)
        rows.append(row | values)
    places = [place for place, _ in entries]
    return RunTable(str(path), rows, places, metrics=list(metrics), parts=("project",))


def _read_mapping(place: str, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the settings or values under a key with dotted names, none without the key."""
    mapping = _parse(place, key, entry.get(key))
    if not isinstance(mapping, dict):
        raise ConfigError(f"{place}: {key}: is no mapping of names to values")
    return _flatten(mapping)


def _read_history(place: str, history: Any) -> dict[str, Any]:
    """Return the last value of each metric. A row has None where nothing was logged."""
    rows = _parse(place, "history", history or [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{place}: history: is no list of logged rows")
    for row in rows:
        if not isinstance(row.get("_step") or 0, int | float):
            raise ConfigError(f"{place}: history: _step: '{row['_step']}' is no number")
    values: Row = {}
    # Equal steps keep their order, so the last of them counts.
    for row in sorted(rows, key=lambda row: row.get("_step") or 0):
        logged = _flatten(row).items()
        values |= {name: value for name, value in logged if value is not None}
    return values


def _parse(place: str, key: str, value: Any) -> Any:
    """Return a mapping or list that may have been exported as a text of JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{place}: {key}: cannot be read as JSON: {error}") from error
    return {} if value is None else value


def _flatten(mapping: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys; W&B wraps some values as {"value": ...}."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if str(key).startswith("_"):
            continue
        if isinstance(value, dict) and set(value) <= {"value", "desc"} and "value" in value:
            value = value["value"]
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
