"""Import of plug-ins: Python code outside the package that defines members of families.

A plug-in is a file that a study names under `parts`, or an installed package with an entry point in
the group `lit_attn.parts`. Importing it registers its members (docs/adding-a-part.md). The
config.yaml of every cell names the files too, so every process that reads a cell imports the same
plug-ins: the runner, a process of a cell, a SLURM job.
"""

import contextlib
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from pydantic import ValidationError

from lit_attn.schema.errors import ConfigError, explain
from lit_attn.schema.mistakes import describe_mistake, describe_place, is_unexpected
from lit_attn.schema.sources import FILE_HASHES, hash_imports, hash_source
from lit_attn.schema.trust import require_trust

GROUP = "lit_attn.parts"  # Entry-point group of installed packages with plug-ins.

SNAPSHOT = "LIT_ATTN_SNAPSHOT"
"""Environment variable of a SLURM job: folder with the code as it was at the submission."""

T = TypeVar("T")

PACKAGE_VERSIONS: dict[str, str] = {}
"""Versions of the packages whose plug-ins have been imported."""
PACKAGE_FOLDERS: set[Path] = set()
"""Folders of the modules of these packages; those of an editable installation can change."""


def load_parts(files: Iterable[Path]) -> None:
    """Import the plug-ins of installed packages and each of `files`, each once.

    A file can import its neighbours. A SLURM job imports the copies in its snapshot. Raises
    ConfigError, which begins with file and line or package, if that is not possible.
    """
    hash_imports()
    _import_installed()
    snapshot = os.environ.get(SNAPSHOT)
    for file in files:
        path = file.resolve()
        if snapshot:
            path = locate_copy(file, Path(snapshot)).resolve()
            # The neighbours are copies too, also if the search path has the folder of the file.
            _replace_in_search_path(file.resolve().parent, path.parent)
        _load_file(path)
        FILE_HASHES[file.resolve()] = FILE_HASHES[path]


def _replace_in_search_path(folder: Path, replacement: Path) -> None:
    """Replace `folder` in `sys.path`, however it is written."""
    for position, entry in enumerate(sys.path):
        if Path(entry).resolve() == folder:
            sys.path[position] = str(replacement)


def _load_file(path: Path) -> None:
    """Import the file at the resolved `path`, once, and record its hash."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.suffix != ".py":
        raise ConfigError(f"{path}: is not a Python file, whose name ends in .py")
    imported = sys.modules.get(path.stem)
    if imported is None:
        _import_file(path)
    elif _origin(imported.__spec__) != path:
        raise _name_conflict(path)
    if path not in FILE_HASHES:
        # The file was imported before its hash could be recorded, or by another loader.
        FILE_HASHES[path] = hash_source(path.read_bytes())


def locate_copy(file: Path, snapshot: Path) -> Path:
    """Return the path of a plug-in's copy in `snapshot`, which copies the folder of the plug-in."""
    folder_hash = hashlib.sha256(str(file.parent).encode()).hexdigest()[:16]
    return snapshot / folder_hash / file.name


def explain_failure(error: BaseException, source: Path | str) -> str:
    """Return an error of foreign code in one line, which begins as `_place` says.

    An error of lit_attn itself is described as a mistake of the program. If a result of a user's
    code can be its reason, the text also names the place and a file with the traceback.
    """
    if is_own_mistake(error):
        return describe_mistake(error)
    place = _place(error, source)
    if isinstance(error, ValidationError):
        return str(explain(error, place))
    message = " ".join(str(error).split())
    # A member that is not complete names its class itself.
    if isinstance(error, ConfigError):
        return f"{place}: {message}"
    text = f"{place}: {type(error).__name__}: {message}"
    if is_unexpected(error) and not find_user_line(error):
        text += f" ({describe_place(error)})"
    return text


def is_own_mistake(error: BaseException) -> bool:
    """Return True if a line of lit_attn has raised `error` without any code of a user.

    A wrong argument leads to a ValueError or a TypeError. With a user's module in the process, a
    result of it can be the reason.
    """
    has_user_code = bool(FILE_HASHES or PACKAGE_VERSIONS)
    return is_unexpected(error) and not has_user_code


def locate_code(code: Any) -> str:
    """Return the file and line that define a class or function, or "" if there is no source."""
    code = inspect.unwrap(code)
    try:
        _, line = inspect.getsourcelines(code)
        return f"{inspect.getsourcefile(code)}:{line}"
    except (OSError, TypeError):
        # A class that was defined interactively has no source.
        return ""


def find_last_return(run: Callable[[], object]) -> str:
    """Return file, line, name and result of the plug-in's function that returned last in `run`.

    `run` fails in code outside of plug-ins, for example because a function of a plug-in has
    returned a tensor of a wrong shape. The text is empty if no such function has returned.
    """
    files = {str(path) for path in FILE_HASHES}
    last = ""

    def watch(frame: FrameType, event: str, result: object) -> None:
        nonlocal last
        code = frame.f_code
        if event == "return" and code.co_filename in files and result is not None:
            place = f"{code.co_filename}:{frame.f_lineno}"
            last = f"{place}: {code.co_qualname} returned {_describe_result(result)}"

    previous = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    except Exception:
        return last
    finally:
        sys.setprofile(previous)
    return ""


def _describe_result(result: object) -> str:
    """Return the type of a result, and its shape if it has one."""
    shape = getattr(result, "shape", None)
    name = type(result).__name__
    return name if shape is None else f"a {name} of shape {tuple(shape)}"


def find_user_line(error: BaseException) -> str:
    """Return file and line of the innermost frame of `error` in a plug-in, or ""."""
    return _place(error, "")


def run_import(import_code: Callable[[], T], file: Path | str) -> T:
    """Run an import and return its result; raise ConfigError if anything is wrong.

    All foreign code is imported here, so an untrusted file is refused here (`require_trust`). The
    message begins with `file` and, if it is a path, with the line that caused the error.
    """
    require_trust(str(file))
    try:
        return import_code()
    except SystemExit as error:
        raise ConfigError(
            f"{_place(error, file)}: calls sys.exit when imported;"
            ' put the call under `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        # Foreign code can raise any exception.
        raise ConfigError(explain_failure(error, file)) from error


@cache
def _import_installed() -> None:
    """Import the plug-ins of installed packages, and record their versions and folders."""
    for entry_point in entry_points(group=GROUP):
        package = entry_point.dist
        assert package is not None
        run_import(entry_point.load, f"package {package.name}: plug-in {entry_point.value}")
        PACKAGE_VERSIONS[package.name] = package.version
        file = getattr(sys.modules[entry_point.module], "__file__", None)
        if file is not None:
            PACKAGE_FOLDERS.add(Path(file).parent)


def _import_file(path: Path) -> None:
    """Import a file as a module."""
    search_path = list(sys.path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()
    try:
        if _origin(importlib.util.find_spec(path.stem)) != path:
            raise _name_conflict(path)
        run_import(lambda: importlib.import_module(path.stem), path)
    except ConfigError:
        sys.modules.pop(path.stem, None)
        sys.path[:] = search_path
        raise


def _name_conflict(path: Path) -> ConfigError:
    return ConfigError(f"{path}: another module is called '{path.stem}'; rename the file")


def _origin(spec: ModuleSpec | None) -> Path | None:
    """Return the resolved file of a module; None if there is no module."""
    return None if spec is None else Path(spec.origin or "").resolve()


def _place(error: BaseException, source: Path | str) -> str:
    """Return the last line of plug-ins or of `source` that raised `error`, or else `source`."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    return find_own_line(error, source) or str(source)


def find_own_line(error: BaseException, *sources: Path | str) -> str | None:
    """Return the last line of plug-ins or of `sources` that raised `error`, None without one."""
    files = {str(path) for path in (*sources, *FILE_HASHES)}
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if frame.filename in files:
            return f"{frame.filename}:{frame.lineno}"
    return None


def find_class_line(member: type) -> str:
    """Return file and line of a class of a plug-in, "" for other classes."""
    with contextlib.suppress(OSError, TypeError):
        file = inspect.getsourcefile(member)
        if file is not None and Path(file) in FILE_HASHES:
            return f"{file}:{inspect.getsourcelines(member)[1]}"
    return ""
