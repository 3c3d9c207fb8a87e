"""Runs of MLflow, through mlflow's own search, from its SQLite file or its folder `mlruns`."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from lit_attn import extras
from lit_attn.judging.run_table import Row, RunTable
from lit_attn.schema.errors import ConfigError, plural

PAGE = 1000  # Runs of one search.


def is_folder(path: Path) -> bool:
    """Return True for a folder with the experiments of MLflow's file store."""
    return next(path.glob("*/meta.yaml"), None) is not None


def read_folder(path: Path) -> RunTable:
    """Return the runs of a folder `mlruns`."""
    return _read_store(path, path.resolve().as_uri())


def read_mlflow(path: Path) -> RunTable:
    """Return the runs of an SQLite file of MLflow. Raises ConfigError for another file."""
    # mlflow would write its tables into a file that lacks them.
    try:
        address = f"{path.resolve().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
            names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {name for (name,) in names}
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: cannot be read as SQLite: {error}") from error
    if not {"experiments", "runs", "latest_metrics"} <= tables:
        raise ConfigError(
            f"{path}: is no file of MLflow; name a function that reads it with"
            " --reader FILE.py:FUNCTION"
        )
    return _read_store(path, f"sqlite:///{path.resolve()}")


def _read_store(path: Path, address: str) -> RunTable:
    """Return the active runs at an address, with their experiments and states."""
    extras.require("mlflow", str(path), "trackers")
    from mlflow.entities import ViewType
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        client = MlflowClient(tracking_uri=address)
        experiments = client.search_experiments(view_type=ViewType.ACTIVE_ONLY)
        names = {experiment.experiment_id: experiment.name for experiment in experiments}
        runs = _search(client, list(names), ViewType.ACTIVE_ONLY)
        deleted = _search(client, list(names), ViewType.DELETED_ONLY)
    except MlflowException as error:
        raise ConfigError(f"{path}: mlflow cannot read it: {error}") from error
    if not runs:
        raise ConfigError(f"{path}: contains no run")
    rows: list[Row] = []
    metrics: dict[str, None] = {}
    for run in runs:
        row: Row = {
            "Name": run.info.run_name or run.info.run_id,
            "experiment": names[run.info.experiment_id],
            "state": run.info.status,
            **run.data.params,
            **run.data.metrics,
        }
        metrics |= dict.fromkeys(run.data.metrics)
        rows.append(row)
    places = [f"{path}: run {row['Name']}" for row in rows]
    notes = []
    if deleted:
        notes.append(f"Left out: {plural(len(deleted), 'deleted run')} of MLflow.")
    return RunTable(
        str(path), rows, places, metrics=list(metrics), parts=("experiment",), notes=notes
    )


def _search(client: Any, experiments: list[str], view: int) -> list[Any]:
    """Return all runs of the experiments, in the order of their start."""
    runs: list[Any] = []
    token = None
    while True:
        page = client.search_runs(
            experiments,
            run_view_type=view,
            max_results=PAGE,
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
        runs += page
        token = page.token
        if not token:
            return runs
