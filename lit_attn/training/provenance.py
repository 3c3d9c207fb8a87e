"""The code, data and package versions that produced a result.

The hash of the package and the versions are computed when this module is imported, so that they are
those of the files that run: the fork server imports it before the first cell.
"""

import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lit_attn.schema.plugins import PACKAGE_VERSIONS
from lit_attn.schema.sources import FILE_HASHES, hash_source, list_modules

PACKAGES = ("lightning", "numpy", "timm", "torch", "torchmetrics")
NOT_TRAINING = (
    "ablate/",
    "bench/",
    "doctor/",
    "hub/",
    "judging/",
    "papers/",
    "report/",
    "__main__.py",
    "generate.py",
    "study.py",
    "data/prepare.py",
)
"""Beginnings of the paths, below lit_attn, of code that a training cell does not execute."""


class Provenance(NamedTuple):
    """Hashes of the code and the data, and versions of packages, of one attempt or of several.

    `code` covers the package and the plug-ins. `modules` has the hash of each of the user's modules
    that was imported, by path: those beside the plug-ins too.
    """

    code: str
    data: str
    versions: dict[str, str]
    modules: dict[str, str]


def join_provenances(attempts: list[Provenance]) -> Provenance:
    """Return the provenance of several attempts; values that differ are joined by +."""
    return Provenance(
        _join(attempt.code for attempt in attempts),
        _join(attempt.data for attempt in attempts),
        _join_by_name([attempt.versions for attempt in attempts]),
        _join_by_name([attempt.modules for attempt in attempts]),
    )


def describe_changes(before: Provenance, now: Provenance) -> list[str]:
    """Return a sentence about each value that differs between two attempts."""
    sentences = []
    for name in ("code", "data", "versions"):
        old = getattr(before, name)
        new = getattr(now, name)
        if old != new:
            sentences.append(_describe_change(name, old, new))
    # A module that only one of the attempts has imported so far is no change.
    for path in sorted(before.modules.keys() & now.modules.keys()):
        old_hash = before.modules[path]
        new_hash = now.modules[path]
        if old_hash != new_hash:
            sentences.append(_describe_change(f"code in {path}", old_hash[:12], new_hash[:12]))
    return sentences


def _describe_change(name: str, old: object, new: object) -> str:
    """Return a sentence about a value that differs between two attempts."""
    return (
        f"The checkpoint was written with other {name}: {old} then, {new} now. "
        "The result names both."
    )


def _join_by_name(attempts: list[dict[str, str]]) -> dict[str, str]:
    """Return the values of all attempts by name; values of one name that differ are joined."""
    values_by_name: dict[str, list[str]] = {}
    for values in attempts:
        for name, value in values.items():
            values_by_name.setdefault(name, []).append(value)
    return {name: _join(values) for name, values in values_by_name.items()}


def _join(values: Iterable[str]) -> str:
    """Return the different values in their order, joined by +."""
    return "+".join(dict.fromkeys(values))


def code_hash(parts: Iterable[Path]) -> str:
    """Return 12 hexadecimal digits that identify the code that a cell with `parts` executes."""
    digest = _PACKAGE.copy()
    for path in parts:
        digest.update(path.name.encode())
        digest.update(FILE_HASHES[path.resolve()])
    return digest.hexdigest()[:12]


def hash_package(sources: dict[str, bytes]) -> "hashlib._Hash":
    """Return the hash of all modules, by relative path, that a training cell can reach."""
    digest = hashlib.sha256()
    for name, source in sources.items():
        if not name.startswith(NOT_TRAINING):
            digest.update(name.encode())
            digest.update(hash_source(source))
    return digest


def package_versions() -> dict[str, str]:
    """Return the versions of the packages on which the numbers depend, plug-ins included."""
    return _VERSIONS | PACKAGE_VERSIONS


_PACKAGE = hash_package(list_modules())
_VERSIONS = {name: importlib.metadata.version(name) for name in PACKAGES}
