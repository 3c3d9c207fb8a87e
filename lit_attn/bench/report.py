"""Output of the benchmarks: tables with the date, the device and the load of the machine."""

import datetime
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import torch

from lit_attn.files import write_atomic


class Row(Protocol):
    """Row of a benchmark's table: a named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


def conditions(device: str, clock: str) -> dict[str, str]:
    """Return the conditions at the start of the measurements."""
    if device == "cuda":
        machine, time_source = torch.cuda.get_device_name(), "GPU events"
    else:
        machine = f"CPU, {_processor()}, {torch.get_num_threads()} thread(s)"
        time_source = {"wall": "wall clock", "cpu": "CPU time of the process"}[clock]
    return {
        "date": datetime.date.today().isoformat(),
        "device": machine,
        "clock": time_source,
        "torch": torch.__version__,
        "load": _load(),
    }


def finished(begun: dict[str, str]) -> dict[str, str]:
    """Return the conditions with the load average at the start and at the end."""
    return {**begun, "load": f"{begun['load']} to {_load()}"}


def document(title: str, where: dict[str, str], table: str) -> str:
    """Return title, conditions and table as Markdown."""
    line = (
        f"{where['date']}, {where['device']}, {where['clock']}, torch {where['torch']}, "
        f"load average {where['load']}."
    )
    return f"{title}\n{line}\n\n{table}\n"


def records(rows: Iterable[Row], spreads: Collection[str]) -> list[dict[str, object]]:
    """Return the rows with one number per column; each of `spreads` becomes a median and an IQR."""
    result = []
    for row in rows:
        record: dict[str, object] = {}
        for name, value in row._asdict().items():
            if name in spreads:
                record[name] = None if value is None else value.median
                record[name + "_iqr"] = None if value is None else value.iqr
            else:
                record[name] = value
        result.append(record)
    return result


def write(
    folder: Path, name: str, text: str, records: list[dict[str, object]], where: dict[str, str]
) -> None:
    """Write NAME.md and NAME.csv to `folder`; the conditions are columns of the CSV."""
    frame = pd.DataFrame([{**record, **where} for record in records])
    write_atomic(folder / f"{name}.csv", frame.to_csv(index=False))
    write_atomic(folder / f"{name}.md", text)


def mebibytes(count: float) -> str:
    """Return a number of bytes in MiB, with three digits below 100."""
    amount = count / 2**20
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _load() -> str:
    """Return the load average of the last minute, including this process."""
    return f"{os.getloadavg()[0]:.1f}"


def _processor() -> str:
    """Return the name of the processor from Linux, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return os.uname().machine
