"""Files that a result depends on, so that `status` notices a change without reading the data."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from hashlib import sha256
from itertools import islice
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
    originals = _find_originals(paths)
    stamps: dict[str, str] = {}
    for module in _list_imported_files(originals):
        if not is_user_code(module):
            continue
        for folder, original in originals.items():
            if module.is_relative_to(folder):
                name = str(original / module.relative_to(folder))
                stamps[name] = _module_stamp(module)
    for path in paths:
        stamps[str(path.absolute())] = FILE_HASHES[path.resolve()].hex()
    return dict(sorted(stamps.items()))


def _find_originals(parts: list[Path]) -> dict[Path, Path]:
    """Return the folders whose modules count, with the folder that their stamps name.

    A SLURM job imports a copy of a plug-in. Its stamps have the paths of the original.
    """
    originals = {folder: folder for folder in (Path.cwd(), *PACKAGE_FOLDERS)}
    for path in parts:
        imported = Path(getattr(sys.modules.get(path.stem), "__file__", path))
        originals[imported.parent] = path.absolute().parent
    return originals


def _list_imported_files(folders: Iterable[Path]) -> set[Path]:
    """Return the files of the imported modules below some folders."""
    # Text is compared, because paths of thousands of modules take a tenth of a second for a cell.
    beginnings = tuple(f"{folder}".rstrip(os.sep) + os.sep for folder in folders)
    files = set()
    # A copy, because a property of a module may import another one.
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and str(file).startswith(beginnings):
            files.add(Path(file))
    return files


def _module_stamp(path: Path) -> str:
    """Return the hash of the source of a module that was executed, or else of its file."""
    executed = FILE_HASHES.get(path.resolve())
    return _stamp(path) if executed is None else executed.hex()


def add_changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Return the stamps `before`, with `old+new` for a data file that has changed meanwhile."""
    stamps: dict[str, str] = {}
    for name, old in before.items():
        new = after.get(name, "")
        was_file = old != "" and not old.startswith(FOLDER)
        has_changed = new not in ("", old)
        stamps[name] = f"{old}+{new}" if was_file and has_changed else old
    return stamps


def collect_data(data: Iterable[Path]) -> dict[str, str]:
    """Return the stamps of the first MAX_FILES files and the first MAX_FILES folders of `data`."""
    paths = list(data)
    files = [path for path in paths if not path.is_dir()]
    folders: list[Path] = []
    for folder, names in islice(_walk(paths), MAX_FILES):
        folders.append(folder)
        if len(files) < MAX_FILES:
            files += [folder / name for name in sorted(names)]
    recorded = files[:MAX_FILES] + folders
    return {str(path.absolute()): _stamp(path) for path in recorded}


def _walk(paths: list[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Yield every folder below `paths` with the names of its files."""
    for path in paths:
        for root, _, names in os.walk(path):
            folder = Path(root)
            # A named folder without files, such as `data`, may get folders of other data.
            if names or folder not in paths:
                yield folder, names


def change_finder() -> Callable[[Result | None], str]:
    """Return a function from a result to the change of an input that makes it stale, or to "".

    Inputs in folders that this machine does not see count as unchanged. The function checks every
    input once, because cells share their data.
    """

    @cache
    def describe_change(name: str, before: str) -> str:
        path = Path(name)
        if not path.exists():
            was_file = before != "" and not before.startswith(FOLDER)
            return f"{name} is missing" if was_file and path.parent.exists() else ""
        if before == "" or before == _stamp(path):
            return ""
        if path.suffix == ".py":
            return f"{name} has changed"
        if path.is_dir():
            return f"{name} has other files"
        return f"{name} has another size or time"

    def find_change(result: Result | None) -> str:
        if result is None:
            return ""
        for name, before in result.inputs.items():
            change = describe_change(name, before)
            if change:
                return change
        return ""

    return find_change


def _stamp(path: Path) -> str:
    """Return the stamp of a file or folder that `collect_inputs` describes; "" if absent."""
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
