"""Files that a result depends on, so that `status` notices a change without reading the data."""

import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from itertools import chain, islice, product
from pathlib import Path

from lit_attn.cells.records import Result
from lit_attn.schema.plugins import FILE_HASHES, hash_source

FOLDER = "names "  # Beginning of the stamp of a folder.
LIBRARY = {str(Path(__file__).parents[1]), sys.base_prefix, "site-packages"}  # No user's code.
MAX_FILES = 100  # Data files, and folders, that are recorded; ImageNet has 1.3 million files.


def collect_inputs(parts: Iterable[Path], data: Iterable[Path]) -> dict[str, str]:
    """Return stamps of the imported plug-ins `parts`, and of the files and folders `data`.

    Imported modules below the folder of a plug-in or the working directory count as well. A stamp
    is a hash of code, size and time of a data file, a hash of a folder's names, or empty if absent.
    """
    folders = {Path.cwd(): Path.cwd()}
    for path in parts:
        # A SLURM job imports a copy. Its stamps have the paths of the original.
        copy = Path(getattr(sys.modules.get(path.stem), "__file__", path))
        folders[copy.parent] = path.absolute().parent
    code = {Path(getattr(m, "__file__", None) or os.devnull) for m in list(sys.modules.values())}
    stamps = {
        str(original / path.relative_to(copy)): _stamp(path)
        for path, (copy, original) in product(code, folders.items())
        if path.is_relative_to(copy) and LIBRARY.isdisjoint((*path.parts, *map(str, path.parents)))
    }
    stamps |= {str(path.absolute()): FILE_HASHES[path.resolve()].hex() for path in parts}
    return collect_data(data) | stamps


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
