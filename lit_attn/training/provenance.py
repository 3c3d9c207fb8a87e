"""The code, data and package versions that produced a result."""

import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import lit_attn
from lit_attn.schema.plugins import FILE_HASHES, PACKAGE_VERSIONS, hash_source

PACKAGES = ("lightning", "numpy", "timm", "torch", "torchmetrics")
NOT_TRAINING = (
    *("ablate/", "bench/", "report/"),
    *("__main__.py", "generate.py", "study.py", "data/prepare.py"),
)
"""Beginnings of the paths, below lit_attn, of code that a training cell does not execute."""


class Provenance(NamedTuple):
    """Hashes of the code and the data, and versions of packages, of one attempt or of several."""

    code: str
    data: str
    versions: dict[str, str]


def join_provenances(attempts: list[Provenance]) -> Provenance:
    """Return the provenance of several attempts; values that differ are joined by +."""
    code, data = _join(a.code for a in attempts), _join(a.data for a in attempts)
    names = dict.fromkeys(name for attempt in attempts for name in attempt.versions)
    versions = {n: _join(a.versions[n] for a in attempts if n in a.versions) for n in names}
    return Provenance(code, data, versions)


def _join(values: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(values))


def code_hash(parts: Iterable[Path]) -> str:
    """Return 12 hexadecimal digits that identify the code that a cell with `parts` executes."""
    digest = _PACKAGE.copy()
    for path in parts:
        digest.update(path.name.encode())
        digest.update(FILE_HASHES[path.resolve()])
    return digest.hexdigest()[:12]


def hash_package(root: Path) -> "hashlib._Hash":
    """Return the hash of all modules below `root` that a training cell can reach."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(NOT_TRAINING):
            digest.update(name.encode())
            digest.update(hash_source(path.read_bytes()))
    return digest


def package_versions() -> dict[str, str]:
    """Return the versions of the packages on which the numbers depend, plug-ins included."""
    return {name: importlib.metadata.version(name) for name in PACKAGES} | PACKAGE_VERSIONS


# Computed at import, when the files are those that run: they may change during a long study.
_PACKAGE = hash_package(Path(lit_attn.__file__).parent)
