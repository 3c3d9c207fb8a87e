"""Memory of the attention paths that failed a check on this machine, with this torch and this code.

`lit-attn doctor` compares every path of lit_attn.attention.dispatch with the float64 reference, and
the first cell of its kind on a GPU the paths that it takes. Both write one small JSON file for each
combination of device, torch and attention code to the user's cache folder
(`$XDG_CACHE_HOME/lit_attn/paths`). A path that the file refuses is not used. Without a file every
path is used.
"""

import contextlib
import functools
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import NamedTuple

import torch
from pydantic import Field

from lit_attn.cells.records import Record, utc_now
from lit_attn.schema.sources import PACKAGE, hash_source, list_modules

REMEMBERED_DEVICES = ("cpu", "cuda")
"""Types of devices that can have a record; FLOPs are counted on others."""


class PathRecord(Record):
    """Attention paths that hold, and those that are refused, on one combination."""

    device: str
    torch: str
    code: str = Field(description="hash of the attention code, without comments")
    checked: str = Field(description="time in UTC, ISO 8601")
    held: list[str] = Field(description="names of the paths that hold")
    refused: dict[str, str] = Field(description="reason for each refused path, by its name")
    is_of_doctor: bool = Field(
        False, description="True if `lit-attn doctor` has checked presets; no cell checks its calls"
    )
    calls: list[str] = Field([], description="calls of attention layers that cells have checked")


class Combination(NamedTuple):
    """Everything on which the correctness of a path depends: device, torch, attention code."""

    device: str
    torch: str
    code: str

    @property
    def file(self) -> FilePath:
        """File of the record, which may not exist."""
        digest = hashlib.sha256("\0".join(self).encode()).hexdigest()[:16]
        return cache_folder() / f"{digest}.json"


# Refused paths with their reasons, by type of device, as they were read for this process.
_REFUSED: dict[str, dict[str, str]] = {}


def cache_folder() -> FilePath:
    """Return the folder of all records."""
    base = os.environ.get("XDG_CACHE_HOME") or FilePath.home() / ".cache"
    return FilePath(base) / "lit_attn" / "paths"


def describe_device(kind: str) -> str:
    """Return name and capability of the current device of type `kind` ("cpu" or "cuda")."""
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} sm_{major}{minor}"
    return f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def read_combination(kind: str) -> Combination:
    """Return the combination of this process and its current device of type `kind`."""
    return Combination(describe_device(kind), torch.__version__, _hash_attention_code())


@functools.cache
def _hash_attention_code() -> str:
    """Return 12 hexadecimal digits that identify the code of lit_attn.attention."""
    digest = hashlib.sha256()
    for name, source in list_modules(PACKAGE / "attention").items():
        digest.update(name.encode())
        digest.update(hash_source(source))
    return digest.hexdigest()[:12]


def refused_paths(kind: str) -> dict[str, str]:
    """Return the reasons of the refused paths on devices of type `kind`, by the path's name.

    The file is read once in a process.
    """
    if kind not in _REFUSED:
        _REFUSED[kind] = _read_refused(kind)
    return _REFUSED[kind]


# Compiled code takes the result as a constant: the compiler could not trace the reading of a file.
@torch.compiler.assume_constant_result
def is_refused(path: str, kind: str) -> bool:
    """Return True if the path with this name is not used on devices of type `kind`."""
    return path in refused_paths(kind)


def set_refused(kind: str, refused: dict[str, str]) -> None:
    """Refuse exactly these paths in this process, whatever the file says."""
    _REFUSED[kind] = refused


@contextlib.contextmanager
def leave_out(path: str, kind: str, reason: str) -> Iterator[None]:
    """Refuse one more path in this context, which `reason` explains."""
    refused = refused_paths(kind)
    set_refused(kind, {**refused, path: reason})
    try:
        yield
    finally:
        set_refused(kind, refused)


def remember(
    combination: Combination,
    held: list[str],
    refused: dict[str, str],
    calls: list[str] | None = None,
) -> str:
    """Write the record of the combination. Return why it cannot be written, or an empty text.

    `calls` are those that cells have checked; None for the record of a doctor.
    """
    record = PathRecord(
        **combination._asdict(),
        checked=utc_now(),
        held=held,
        refused=refused,
        is_of_doctor=calls is None,
        calls=calls or [],
    )
    try:
        record.write(combination.file)
    except OSError as error:
        return f"{combination.file}: cannot be written: {error.strerror}"
    return ""


def _read_refused(kind: str) -> dict[str, str]:
    # Most machines have no record, so the hash of the code is not needed.
    if kind not in REMEMBERED_DEVICES or not cache_folder().is_dir():
        return {}
    record = PathRecord.read_valid(read_combination(kind).file)
    return {} if record is None else record.refused
