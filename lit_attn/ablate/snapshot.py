"""Snapshot of the code that SLURM jobs run, however long they wait in the queue.

It is a folder `<out>/.code/<hash of its content>` with the package and the folders of the study's
plug-ins. Equal code has one snapshot. A submission removes the snapshots that no job needs.
"""

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import lit_attn
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import SNAPSHOT, locate_copy

STORE = ".code"
RECORD = "snapshot.txt"
"""File of a batch of jobs with the names of their snapshot and of their cluster, a line each."""


def take_snapshot(out: Path, parts: Iterable[Path]) -> Path:
    """Copy the package and the folders of `parts`; return the snapshot. Raises ConfigError.

    The caller holds the lock of the store `<out>/.code` until all jobs are submitted, or another
    submission could remove the snapshot.
    """
    store, package, digest = out.absolute() / STORE, Path(lit_attn.__file__).parent, sha256()
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=store) as name:
            copy = Path(name, "code")
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(package, copy / "package" / package.name, ignore=ignored)
            for folder, target in {p.parent: locate_copy(p, copy).parent for p in parts}.items():
                _copy_code(folder, target)
            for path in sorted(copy.rglob("*")):
                content = path.read_bytes() if path.suffix == ".py" and path.is_file() else b""
                digest.update(f"{path.relative_to(copy)}\0{len(content)}\0".encode() + content)
            snapshot = store / digest.hexdigest()[:16]
            if not snapshot.exists():
                copy.rename(snapshot)
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"--launcher slurm: the code cannot be copied: {error}") from error
    return snapshot


def remove_unneeded(out: Path, queued: set[str], cluster: str) -> None:
    """Remove the snapshots that no `queued` batch needs and no batch of another user or cluster.

    The caller holds the lock of the store. Raises OSError if the snapshot of a batch is unknown.
    """
    needed = set()
    for batch in out.glob("*/.slurm/*"):
        name, *clusters = (batch / RECORD).read_text().split("\n")
        # The jobs of another user, and those of another cluster, cannot be listed.
        is_listed = batch.stat().st_uid == os.getuid() and clusters == [cluster]
        if batch.name in queued or not is_listed:
            needed.add(name)
    old = [p for p in (out / STORE).iterdir() if p.is_dir() and p.name not in needed]
    # Renamed first, because equal code would use a snapshot that is half removed.
    with tempfile.TemporaryDirectory(dir=out / STORE, ignore_cleanup_errors=True) as folder:
        for path in old:
            path.rename(Path(folder, path.name))


def activation_lines(snapshot: Path) -> list[str]:
    """Return the shell lines after which Python imports the code of `snapshot`."""
    root, directory = (shlex.quote(str(path)) for path in (snapshot, Path.cwd()))
    # The working directory, which may have newer code, gets the last place of the search path.
    path = f"{root}/package${{PYTHONPATH:+:$PYTHONPATH}}:{directory}"
    return [f"export PYTHONSAFEPATH=1 {SNAPSHOT}={root} PYTHONPATH={path}"]


def _copy_code(folder: Path, target: Path) -> None:
    """Copy the Python files of `folder` and of its packages; link everything else, such as data."""
    target.mkdir(parents=True)
    for entry in folder.iterdir():
        copy = target / entry.name
        if entry.suffix == ".py" and entry.is_file():
            shutil.copy2(entry, copy)
        elif entry.is_dir() and not entry.is_symlink() and any(entry.glob("*.py")):
            _copy_code(entry, copy)
        elif entry.name != "__pycache__":
            copy.symlink_to(entry.absolute())
