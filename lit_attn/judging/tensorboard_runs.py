"""Runs of TensorBoard, through its own reader: one run for each folder of event files."""

from pathlib import Path
from typing import Any

from lit_attn.judging.run_table import Row, RunTable
from lit_attn.schema.errors import plural

EVENTS = "events.out.tfevents.*"
START = "_hparams_/session_start_info"
"""Tag with the settings that `add_hparams` writes, into a folder of its own below the run."""


def is_folder(path: Path) -> bool:
    """Return True for a folder with event files at any depth."""
    return next(path.rglob(EVENTS), None) is not None


def read_folder(path: Path) -> RunTable:
    """Return a run for each folder, with its settings and the last value of each scalar."""
    rows: dict[Path, Row] = {}
    metrics: dict[str, None] = {}
    merged = 0
    restarted = []
    for folder in sorted({file.parent for file in path.rglob(EVENTS)}):
        events = _load(folder)
        values, has_restarted = _read_scalars(events)
        settings = _read_settings(events)
        run = folder
        if settings is not None and folder.parent in rows:
            run = folder.parent
            merged += 1
        name = run.relative_to(path).as_posix()
        row = rows.setdefault(run, {"Name": path.name if name == "." else name})
        row.update(settings or {})
        row.update(values)
        metrics |= dict.fromkeys(values)
        if has_restarted:
            restarted.append(str(row["Name"]))
    notes = []
    if merged:
        notes.append(f"{plural(merged, 'folder')} of add_hparams belong to the runs above them.")
    if restarted:
        notes.append(
            f"{plural(len(restarted), 'run')} started again at an earlier step ({restarted[0]}):"
            " the values of the last start count, as in TensorBoard."
        )
    places = [f"{path}: {row['Name']}" for row in rows.values()]
    return RunTable(str(path), list(rows.values()), places, metrics=list(metrics), notes=notes)


def _load(folder: Path) -> Any:
    """Return all events of a folder, also those before a restart."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    guidance = {"scalars": 0, "tensors": 0, "images": 1, "histograms": 1, "audio": 1, "graph": 1}
    events = EventAccumulator(str(folder), size_guidance=guidance, purge_orphaned_data=False)
    events.Reload()
    return events


def _read_scalars(events: Any) -> tuple[Row, bool]:
    """Return the last value of each scalar, and whether its steps ever went back.

    A scalar is an event of the old style, or a tensor with one number (TensorFlow 2, `new_style`).
    """
    from tensorboard.util import tensor_util

    values: Row = {}
    has_restarted = False
    tags = events.Tags()
    series = {tag: events.Scalars(tag) for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            series[tag] = events.Tensors(tag)
    for tag, points in series.items():
        last = points[-1]
        number = last.value if tag in tags["scalars"] else None
        if number is None:
            number = tensor_util.make_ndarray(last.tensor_proto).item()
        values[tag] = number
        has_restarted |= any(point.step > last.step for point in points)
    return values, has_restarted


def _read_settings(events: Any) -> Row | None:
    """Return the settings of `add_hparams`, None for a folder without them."""
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    try:
        content = events.SummaryMetadata(START).plugin_data.content
    except KeyError:
        return None
    parsed = plugin_data_pb2.HParamsPluginData.FromString(content)
    if parsed.version != metadata.PLUGIN_DATA_VERSION:
        return {}
    settings: Row = {}
    for name, value in parsed.session_start_info.hparams.items():
        kind = value.WhichOneof("kind")
        number = getattr(value, kind) if kind else None
        # All numbers are floats there.
        is_whole = isinstance(number, float) and number.is_integer()
        settings[name] = int(number) if is_whole and isinstance(number, float) else number
    return settings
