"""Files that a result depends on, so that `status` notices a change without reading the data."""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from lit_attn.cells.records import Result
from lit_attn.schema.plugins import FILE_HASHES, hash_source

MAX_FILES = 100  # Data files that are recorded; ImageNet has 1.3 million.


def collect_inputs(parts: Iterable[Path], data: dict[str, Any]) -> dict[str, str]:
    """Return stamps of the imported plug-ins `parts` and of the files in the configuration `data`.

    A stamp is the hash of a plug-in's code, or the size and the modification time of a data file.
    """
    stamps = {str(path.absolute()): FILE_HASHES[path.resolve()].hex() for path in parts}
    return {str(p.absolute()): _stamp(p) for p in islice(_list_files(data), MAX_FILES)} | stamps


def find_stale(results: Iterable[tuple[Path, Result | None]]) -> dict[Path, str]:
    """Return why results are stale, by the folder of the cell: which input has changed.

    Inputs in folders that this machine does not see count as unchanged.
    """

    @cache
    def describe_change(name: str, before: str) -> str:
        path = Path(name)
        if not path.exists():
            return f"{name} is missing" if path.parent.exists() else ""
        return "" if _stamp(path) == before else f"{name} has changed"

    reasons = {}
    for cell, result in results:
        entries = result.inputs.items() if result is not None else ()
        if reason := next(filter(None, (describe_change(*entry) for entry in entries)), ""):
            reasons[cell] = reason
    return reasons


def _stamp(path: Path) -> str:
    if path.suffix != ".py":
        return f"{path.stat().st_size} {path.stat().st_mtime_ns}"
    try:
        return hash_source(path.read_bytes()).hex()
    except (SyntaxError, ValueError):
        return ""


def _list_files(value: Any) -> Iterator[Path]:
    """Yield the files that a configuration names, and the files below its folders."""
    if isinstance(value, Path):
        yield from (value,) if value.is_file() else (p for p in value.rglob("*") if p.is_file())
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _list_files(item)
