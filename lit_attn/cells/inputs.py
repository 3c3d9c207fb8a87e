"""Files that a result depends on, so that `status` notices a change without reading the data."""

import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path

from lit_attn.cells.records import Result
from lit_attn.schema.plugins import PACKAGE_FOLDERS
from lit_attn.schema.sources import FILE_HASHES, hash_source, is_user_code

FOLDER = "names "  # Beginning of the stamp of a folder.
MAX_FILES = 100  # Data files, and folders, that are recorded; ImageNet has 1.3 million files.


def collect_inputs(parts: Iterable[Path], data: Iterable[Path]) -> dict[str, str]:
    """Return stamps of the imported plug-ins `parts`, and of the files and folders `data`.

    Modules count as in `collect_modules`. A stamp is a hash of code, size and time of a data file,
    a hash of a folder's names, or empty if absent.
    """
    return collect_data(data) | collect_modules(parts)


def collect_modules(parts: Iterable[Path]) -> dict[str, str]:
    """Return the hashes of the plug-ins `parts` and of the user's other imported modules, by path.

    These lie below the folder of a plug-in or the working directory, and not in a library. The hash
    is that of the source which was executed.
    """
    paths = list(parts)
    originals = {folder: folder for folder in (Path.cwd(), *PACKAGE_FOLDERS)}
    for path in paths:
        # A SLURM job imports a copy. Its stamps have the paths of the original.
        copy = Path(getattr(sys.modules.get(path.stem), "__file__", path))
        originals[copy.parent] = path.absolute().parent
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    modules = {Path(file) for file in files if file is not None}
    stamps: dict[str, str] = {}
    for module in filter(is_user_code, modules):
        for folder, original in originals.items():
            if module.is_relative_to(folder):
                stamps[str(original / module.relative_to(folder))] = _module_stamp(module)
    for path in paths:
        stamps[str(path.absolute())] = FILE_HASHES[path.resolve()].hex()
    return dict(sorted(stamps.items()))


def _module_stamp(path: Path) -> str:
    executed = FILE_HASHES.get(path.resolve())
    return _stamp(path) if executed is None else executed.hex()


def add_changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Return the stamps `before`, with `old+new` for a data file that has changed meanwhile."""
    stamps: dict[str, str] = {}
    for name, old in before.items():
        new = after.get(name, "")
        is_file = bool(old) and not old.startswith(FOLDER)
        stamps[name] = f"{old}+{new}" if is_file and new and new != old else old
    return stamps


def collect_data(data: Iterable[Path]) -> dict[str, str]:
    """Return the stamps of files and folders."""
    paths = list(data)
    walks = chain.from_iterable(map(os.walk, paths))
    # A named folder without files, such as `data`, may get folders of other data.
    walked = (entry for entry in walks if entry[2] or Path(entry[0]) not in paths)
    walked_folders = list(islice(walked, MAX_FILES))
    inside = (Path(folder, name) for folder, _, names in walked_folders for name in sorted(names))
    files = islice(chain((path for path in paths if not path.is_dir()), inside), MAX_FILES)
    recorded = (*files, *(Path(folder) for folder, _, _ in walked_folders))
    return {str(path.absolute()): _stamp(path) for path in recorded}


def change_finder() -> Callable[[Result | None], str]:
    """Return a function from a result to the change of an input that makes it stale, or to "".

    Inputs in folders that this machine does not see count as unchanged. The function checks every
    input once, because cells share their data.
    """

    @cache
    def describe_change(name: str, before: str) -> str:
        path = Path(name)
        if not path.exists():
            is_absent = path.parent.exists() and before and not before.startswith(FOLDER)
            return f"{name} is missing" if is_absent else ""
        files = "other files" if path.is_dir() else "another size or time"
        text = "changed" if path.suffix == ".py" else files
        return "" if not before or _stamp(path) == before else f"{name} has {text}"

    def find_change(result: Result | None) -> str:
        entries = () if result is None else result.inputs.items()
        return next(filter(None, (describe_change(*entry) for entry in entries)), "")

    return find_change


def _stamp(path: Path) -> str:
    if path.is_dir():
        # Hidden files are locks and caches.
        names = sorted(entry.name for entry in path.iterdir() if entry.name[0] != ".")
        # A name need not be UTF-8.
        return FOLDER + sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()
    try:
        if path.suffix == ".py":
            return hash_source(path.read_bytes()).hex()
        return f"{path.stat().st_size} {path.stat().st_mtime_ns}"
    except (OSError, SyntaxError, ValueError):
        return ""
