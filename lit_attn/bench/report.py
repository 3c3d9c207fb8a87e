"""Tables of a benchmark as Markdown and CSV, with date, device and load of the machine."""

import datetime
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import torch

from lit_attn.files import write_atomic


class Row(Protocol):
    """Row of a benchmark's table, a named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


def read_conditions(device: str, clock: str) -> dict[str, str]:
    """Return the conditions at the start of the measurements."""
    if device == "cuda":
        device_name, clock_name = torch.cuda.get_device_name(), "GPU events"
    else:
        device_name = f"CPU, {_read_processor()}, {torch.get_num_threads()} thread(s)"
        clock_name = {"wall": "wall clock", "cpu": "CPU time of the process"}[clock]
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name,
        "clock": clock_name,
        "torch": torch.__version__,
        "load": _read_load(),
    }


def add_final_load(conditions: dict[str, str]) -> dict[str, str]:
    """Return `conditions` with the load average at the end beside that at the start."""
    return {**conditions, "load": f"{conditions['load']} to {_read_load()}"}


def format_document(title: str, conditions: dict[str, str], table: str) -> str:
    """Return the title, the conditions and the table in Markdown."""
    line = (
        f"{conditions['date']}, {conditions['device']}, {conditions['clock']}, "
        f"torch {conditions['torch']}, load average {conditions['load']}."
    )
    return f"{title}\n{line}\n\n{table}\n"


def make_records(rows: Iterable[Row], spreads: Collection[str]) -> list[dict[str, object]]:
    """Return the rows with one number in each column; a column of `spreads` becomes two."""
    all_records = []
    for row in rows:
        record: dict[str, object] = {}
        for name, value in row._asdict().items():
            if name in spreads:
                record[name] = None if value is None else value.median
                record[name + "_iqr"] = None if value is None else value.iqr
            else:
                record[name] = value
        all_records.append(record)
    return all_records


def write_files(
    folder: Path, name: str, text: str, records: list[dict[str, object]], conditions: dict[str, str]
) -> None:
    """Write NAME.md and NAME.csv to `folder`; the conditions are columns of the CSV."""
    frame = pd.DataFrame([{**record, **conditions} for record in records])
    write_atomic(folder / f"{name}.csv", frame.to_csv(index=False))
    write_atomic(folder / f"{name}.md", text)


def format_mebibytes(count: float) -> str:
    """Return a number of bytes in MiB, with at least three significant digits."""
    size = count / 2**20
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"


def _read_load() -> str:
    """Return the load average of the last minute: runnable processes, this one included."""
    return f"{os.getloadavg()[0]:.1f}"


def _read_processor() -> str:
    """Return the processor's name from /proc/cpuinfo, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return os.uname().machine
