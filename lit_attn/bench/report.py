"""What a measurement is printed and kept with: when, on what, and how busy the machine was."""

import datetime
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import torch

from lit_attn.files import write_atomic


class Row(Protocol):
    """A row of a benchmark's table: a named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


def conditions(device: str, clock: str) -> dict[str, str]:
    """Under which conditions the measurements are taken; call it when they start."""
    if device == "cuda":
        what, counted = torch.cuda.get_device_name(), "GPU events"
    else:
        what = f"CPU, {_processor()}, {torch.get_num_threads()} thread(s)"
        counted = {"wall": "wall clock", "cpu": "CPU time of the process"}[clock]
    return {
        "date": datetime.date.today().isoformat(),
        "device": what,
        "clock": counted,
        "torch": torch.__version__,
        "load": _load(),
    }


def finished(begun: dict[str, str]) -> dict[str, str]:
    """The same with the load average at the end beside that at the start."""
    return {**begun, "load": f"{begun['load']} to {_load()}"}


def document(title: str, where: dict[str, str], table: str) -> str:
    """Title, conditions and table, in Markdown."""
    line = (
        f"{where['date']}, {where['device']}, {where['clock']}, torch {where['torch']}, "
        f"load average {where['load']}."
    )
    return f"{title}\n{line}\n\n{table}\n"


def records(rows: Iterable[Row], spreads: Collection[str]) -> list[dict[str, object]]:
    """The rows with every number in a column of its own; `spreads` are medians with their IQR."""
    found = []
    for row in rows:
        record: dict[str, object] = {}
        for name, value in row._asdict().items():
            if name in spreads:
                record[name] = None if value is None else value.median
                record[name + "_iqr"] = None if value is None else value.iqr
            else:
                record[name] = value
        found.append(record)
    return found


def write(
    folder: Path, name: str, text: str, records: list[dict[str, object]], where: dict[str, str]
) -> None:
    """NAME.md and NAME.csv in `folder`; the conditions are columns of the CSV."""
    frame = pd.DataFrame([{**record, **where} for record in records])
    write_atomic(folder / f"{name}.csv", frame.to_csv(index=False))
    write_atomic(folder / f"{name}.md", text)


def mebibytes(count: float) -> str:
    """Bytes in MiB, with three figures where it is little."""
    found = count / 2**20
    return f"{found:,.0f}" if found >= 100 else f"{found:.3g}"


def _load() -> str:
    """The load average of the last minute: runnable processes, ours included."""
    return f"{os.getloadavg()[0]:.1f}"


def _processor() -> str:
    """The processor's name as Linux gives it, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return os.uname().machine
