"""Snapshot of the code that SLURM jobs run, however long they wait in the queue.

It is a folder `<out>/.code/<hash of its content>` with the package and the study's plug-ins, the
modules that they import, and links to the data beside them. Equal code has one snapshot. A
submission removes the snapshots that no job needs.
"""

import ast
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import lit_attn
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.names import is_file_name
from lit_attn.schema.plugins import SNAPSHOT, locate_copy

STORE = ".code"
RECORD = "snapshot.txt"
"""File of a batch of jobs with the names of their snapshot and of their cluster, a line each."""


def take_snapshot(out: Path, parts: Iterable[Path]) -> Path:
    """Copy the package, `parts` and the modules that they import; return the snapshot.

    Raises ConfigError if the code cannot be copied.
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
            by_folder: dict[Path, list[Path]] = {}
            for part in parts:
                by_folder.setdefault(part.parent, []).append(part)
            for neighbours in by_folder.values():
                _copy_code(neighbours, locate_copy(neighbours[0], copy).parent)
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


def _copy_code(parts: list[Path], target: Path) -> None:
    """Copy the plug-ins of a folder with the modules that they import, and link its data.

    Other Python files and hidden files of the folder, which can be a home folder, contain what a
    job must not get: passwords, keys, settings.
    """
    folder = parts[0].parent
    target.mkdir(parents=True)
    modules = find_modules(parts)
    for entry in folder.iterdir():
        copy = target / entry.name
        is_other_code = entry.suffix == ".py" and entry.is_file()
        if entry in modules and entry.is_dir():
            _copy_package(entry, copy)
        elif entry in modules:
            shutil.copy2(entry, copy)
        elif not (is_other_code or _is_left_out(entry)):
            copy.symlink_to(entry.absolute())


def _copy_package(package: Path, target: Path) -> None:
    """Copy the Python files of a package, and link its data."""
    target.mkdir()
    for entry in package.iterdir():
        copy = target / entry.name
        if _is_left_out(entry):
            continue
        if entry.suffix == ".py" and entry.is_file():
            shutil.copy2(entry, copy)
        elif _is_package(entry):
            _copy_package(entry, copy)
        else:
            copy.symlink_to(entry.absolute())


def find_modules(parts: Iterable[Path]) -> set[Path]:
    """Return the files and packages beside plug-ins that they import, themselves included.

    These are the modules that have been imported, and those that the code names, because a
    function can import a module later: `import x`, `from x import y`, `"x"` and `"x:function"`.
    """
    waiting = list(parts)
    folder = waiting[0].parent
    waiting += _list_imported(folder)
    modules: set[Path] = set()
    while waiting:
        module = waiting.pop()
        if module in modules or _is_left_out(module):
            continue
        modules.add(module)
        files = sorted(module.rglob("*.py")) if module.is_dir() else [module]
        for file in files:
            for name in _read_names(file):
                waiting += _locate(folder, name)
    return modules


def _list_imported(folder: Path) -> list[Path]:
    """Return the files and packages in `folder` that this process has imported."""
    imported: list[Path] = []
    # A copy, because another thread can import a module meanwhile.
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or os.devnull)
        if not file.is_relative_to(folder):
            continue
        # The folder can contain an environment of Python, whose packages are elsewhere in it.
        imported += [source for source in _locate(folder, name) if file.is_relative_to(source)]
    return imported


def _locate(folder: Path, name: str) -> list[Path]:
    """Return the file and the package in `folder` that a module with this name comes from."""
    top = name.partition(".")[0]
    if not is_file_name(top):
        return []
    sources = []
    file = folder / f"{top}.py"
    if file.is_file():
        sources.append(file)
    package = folder / top
    if _is_package(package):
        sources.append(package)
    return sources


def _read_names(file: Path) -> set[str]:
    """Return every name in a Python file that may be that of a module."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        # The import of the file reports the error.
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.add(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.partition(":")[0])
    return names


def _is_package(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and any(path.glob("*.py"))


def _is_left_out(path: Path) -> bool:
    return path.name.startswith(".") or path.name == "__pycache__"
