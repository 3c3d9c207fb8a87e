"""Results of other programs as one frame: W&B, MLflow, TensorBoard and trackio.

Every reader returns one row for each run: `run` (its name), its settings, and the last value of
each metric. Nothing here needs PyTorch or the program that wrote the results.
"""

import contextlib
import json
import math
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from lit_attn.schema.errors import ConfigError, require

Run = dict[str, Any]
"""Settings and last values of a run by name."""

EVENTS = "events.out.tfevents.*"

SEED_AT_END = re.compile(r"[-_/ .]*(?:seed)?[-_= ]*(\d+)$", re.IGNORECASE)
"""End of a run's name that holds its seed, as in `belief2-seed3` or `belief2/3`."""


def read_runs(path: str | Path, *, variant: str = "", seed: str = "seed") -> pd.DataFrame:
    """Return the runs at `path` as a frame with the columns `variant` and `seed`.

    `path` is a CSV or JSON export of W&B, a folder `mlruns` or an SQLite file of MLflow, a folder
    of TensorBoard's event files, or an SQLite file of trackio. `variant` names the setting that
    tells variants apart; without one it is the name of a run without its seed. `seed` names the
    setting with the seed; if no run has it, it is the number at the end of the name of a run.
    Raises ConfigError for another path, and for a setting that no run has.
    """
    path = Path(path)
    runs = list(_read(path))
    if not runs:
        raise ConfigError(f"{path}: contains no run")
    frame = pd.DataFrame(runs)
    if variant:
        require(f"{path}: no run has a setting", variant, map(str, frame))
        frame["variant"] = frame[variant].astype(str)
    elif "variant" not in frame:
        frame["variant"] = [SEED_AT_END.sub("", name) or name for name in frame["run"]]
    if seed not in frame:
        frame[seed] = _read_seeds(path, frame["run"].tolist(), seed)
    frame["seed"] = frame[seed].astype(float).astype(int)
    first = ["run", "variant", "seed"]
    others = [name for name in frame if name not in first]
    return frame[first + others]


def _read_seeds(path: Path, names: list[str], seed: str) -> list[int]:
    """Return the numbers at the end of the names of runs. Raises ConfigError without one."""
    seeds = []
    for name in names:
        match = SEED_AT_END.search(name)
        if match is None:
            raise ConfigError(
                f"{path}: run '{name}' has no setting '{seed}' and no number at its end; "
                "name the setting with the seed, as in read_runs(path, seed='random_state')"
            )
        seeds.append(int(match[1]))
    return seeds


def _read(path: Path) -> Iterator[Run]:
    """Yield the runs at a path. Raises ConfigError for a path that no reader knows."""
    if path.is_dir():
        if next(path.rglob(EVENTS), None) is not None:
            yield from _read_tensorboard(path)
        elif next(path.rglob("meta.yaml"), None) is not None:
            yield from _read_mlruns(path)
        else:
            raise ConfigError(f"{path}: contains neither event files nor runs of MLflow")
    elif not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    elif path.suffix == ".csv":
        yield from _read_wandb_csv(path)
    elif path.suffix in (".json", ".jsonl"):
        yield from _read_wandb_json(path)
    else:
        yield from _read_sqlite(path)


def _read_wandb_csv(path: Path) -> Iterator[Run]:
    """Yield the rows of an exported table of runs, whose names stand in the column `Name`."""
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
    names = {str(name).lower(): name for name in frame}
    require(f"{path}: has no column", "name", names)
    for row in frame.rename(columns={names["name"]: "run"}).to_dict("records"):
        yield {str(key): value for key, value in row.items()} | {"run": str(row["run"])}


def _read_wandb_json(path: Path) -> Iterator[Run]:
    """Yield the runs of a JSON list, or of lines of JSON, with name, config and summary.

    `history`, a list of logged rows, takes the place of a missing `summary`.
    """
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            entries = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(entries, list):
        entries = [entries]
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or "name" not in entry:
            raise ConfigError(f"{path}: run {number} has no name; write name, config and summary")
        run: Run = {"run": str(entry["name"])}
        run |= _flatten(_parse(entry.get("config")))
        for row in entry.get("history") or []:
            run |= _flatten(row)
        run |= _flatten(_parse(entry.get("summary")))
        yield run


def _parse(value: Any) -> dict[str, Any]:
    """Return a mapping that may have been exported as a text of JSON."""
    if isinstance(value, str):
        value = json.loads(value)
    return value if isinstance(value, dict) else {}


def _flatten(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
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


def _read_mlruns(path: Path) -> Iterator[Run]:
    """Yield the runs of MLflow's folders: EXPERIMENT/RUN/{meta.yaml, params, metrics, tags}."""
    for meta in sorted(path.rglob("meta.yaml")):
        folder = meta.parent
        if not (folder / "metrics").is_dir():
            continue
        described = yaml.safe_load(meta.read_text(encoding="utf-8")) or {}
        run: Run = {"run": str(described.get("run_name") or folder.name)}
        for file in _list_files(folder / "params"):
            text = file.read_text(encoding="utf-8")
            run[file.relative_to(folder / "params").as_posix()] = _read_value(text)
        for file in _list_files(folder / "metrics"):
            # A line has the time, the value and the step.
            lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
            _, value, *_ = max(lines, key=lambda line: int(line[2]) if len(line) > 2 else 0)
            run[file.relative_to(folder / "metrics").as_posix()] = float(value)
        yield run


def _list_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _read_value(text: str) -> Any:
    """Return a setting as a number if it is one."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def _read_sqlite(path: Path) -> Iterator[Run]:
    """Yield the runs of an SQLite file of MLflow or of trackio."""
    try:
        # Read-only: a program that still trains keeps its file.
        address = f"{path.resolve().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            tables = {name for (name,) in database.execute(query)}
            if {"runs", "latest_metrics", "params"} <= tables:
                yield from _read_mlflow(database)
            elif "metrics" in tables:
                yield from _read_trackio(database, has_settings="configs" in tables)
            else:
                raise ConfigError(f"{path}: has neither the tables of MLflow nor those of trackio")
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: cannot be read as SQLite: {error}") from error


def _read_mlflow(database: sqlite3.Connection) -> Iterator[Run]:
    """Yield the runs of MLflow's tables that are not deleted."""
    query = "SELECT run_uuid, name FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time"
    for identity, name in database.execute(query).fetchall():
        run: Run = {"run": str(name or identity)}
        settings = database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (identity,))
        for key, value in settings:
            run[key] = _read_value(value)
        query = "SELECT key, value, is_nan FROM latest_metrics WHERE run_uuid = ?"
        for key, value, is_nan in database.execute(query, (identity,)):
            run[key] = math.nan if is_nan else value
        yield run


def _read_trackio(database: sqlite3.Connection, has_settings: bool) -> Iterator[Run]:
    """Yield the runs of trackio's tables; a row of `metrics` has a JSON mapping."""
    runs: dict[str, Run] = {}
    if has_settings:
        for name, settings in database.execute("SELECT run_name, config FROM configs"):
            runs[name] = {"run": str(name), **_flatten(_parse(settings))}
    for name, values in database.execute("SELECT run_name, metrics FROM metrics ORDER BY step, id"):
        run = runs.setdefault(name, {"run": str(name)})
        run |= _flatten(_parse(values))
    yield from runs.values()


def _read_tensorboard(path: Path) -> Iterator[Run]:
    """Yield a run for each folder of event files, with the last value of each scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for folder in sorted({file.parent for file in path.rglob(EVENTS)}):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 1})
        events.Reload()
        name = folder.relative_to(path).as_posix()
        run: Run = {"run": folder.name if name == "." else name}
        for tag in events.Tags()["scalars"]:
            run[tag] = events.Scalars(tag)[-1].value
        yield run
