"""Sources of the modules that a process executes: those of the package, and those of the user.

A study may run for days while its code is edited, or while another commit is checked out.
`freeze_package` reads all files of the package once, so that the process and its forks import
these, whatever happens on the disk. `hash_imports` hashes the source of each of the user's modules
when it is imported, so that a result can name the code that its cell has executed.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import linecache
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = Path(__file__).parents[1]
LIBRARY_NAMES = {"site-packages", "dist-packages"}
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))

# `hash_source` of each of the user's files at its import; a file can change while a study runs.
FILE_HASHES: dict[Path, bytes] = {}

_FROZEN: dict[Path, bytes] = {}  # Content of the package's files when they were frozen.


@functools.cache
def hash_source(source: bytes) -> bytes:
    """Return a SHA-256 of the code in a Python file, without comments, docstrings and layout.

    The cache saves most of the time, because every cell of a process asks for the same files.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [statement for statement in body if not _is_text(statement)]
    return hashlib.sha256(ast.unparse(tree).encode()).digest()


def _is_text(statement: ast.AST) -> bool:
    """Return True for a statement that is only a string; it has no effect."""
    if not isinstance(statement, ast.Expr):
        return False
    value = getattr(statement.value, "value", None)
    return isinstance(value, str)


def freeze_package() -> None:
    """Read all files of the package; this process and its forks import them from memory."""
    if _FROZEN:
        return
    for path in sorted(PACKAGE.rglob("*")):
        if "__pycache__" not in path.parts and path.is_file():
            # A checkout may remove a file at this moment.
            with contextlib.suppress(FileNotFoundError):
                _FROZEN[path] = path.read_bytes()
    sys.meta_path.insert(_finder_position(), FrozenFinder())


def read_package_file(path: Path) -> bytes:
    """Return the content of a file of the package, as it was frozen if it was."""
    return _FROZEN[path] if path in _FROZEN else path.read_bytes()


def list_modules(root: Path = PACKAGE) -> dict[str, bytes]:
    """Return the sources of the modules below `root` by relative path, in alphabetical order."""
    paths = [path for path in _FROZEN if path.is_relative_to(root)]
    if not paths:
        paths = list(root.rglob("*"))
    sources = {}
    for path in sorted(paths):
        if path.suffix == ".py":
            sources[path.relative_to(root).as_posix()] = read_package_file(path)
    return sources


def hash_imports() -> None:
    """Record in FILE_HASHES what each of the user's modules contains when it is imported."""
    if not any(isinstance(finder, UserFinder) for finder in sys.meta_path):
        sys.meta_path.insert(_finder_position(), UserFinder())


def is_user_code(path: Path) -> bool:
    """Return True unless a module belongs to this package, to a library or to Python."""
    folders = path.parents
    is_library = not LIBRARY_NAMES.isdisjoint(path.parts)
    return not is_library and PACKAGE not in folders and STANDARD_LIBRARY not in folders


class FrozenFinder:
    """Finder of the modules of the package as they were frozen, also if their files are gone."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the package, or None for other modules."""
        package, *parts = name.split(".")
        if package != PACKAGE.name or not parts:
            return None
        folder = PACKAGE.joinpath(*parts)
        package_file = folder / "__init__.py"
        if package_file in _FROZEN:
            return _make_spec(name, package_file, [str(folder)])
        module_file = folder.with_name(f"{folder.name}.py")
        if module_file in _FROZEN:
            return _make_spec(name, module_file, None)
        return None


def _make_spec(name: str, file: Path, locations: list[str] | None) -> ModuleSpec | None:
    """Return the spec of a frozen file; `locations` are the folders of a package."""
    loader = FrozenLoader(name, str(file))
    return importlib.util.spec_from_file_location(
        name, file, loader=loader, submodule_search_locations=locations
    )


class FrozenLoader(SourceFileLoader):
    """Loader of the frozen source of a module of the package."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module; compile it anew only if its file has changed."""
        source = _FROZEN[Path(self.path)]
        lines = source.decode().splitlines(keepends=True)
        # Tracebacks and `inspect.getsource` show the lines that run, not those of the file.
        linecache.cache[self.path] = (len(source), None, lines, self.path)
        with contextlib.suppress(OSError):
            if Path(self.path).read_bytes() == source:
                return super().get_code(fullname)
        return self.source_to_code(source, self.path)


class UserFinder:
    """Finder that makes the imports of the user's modules record their sources."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that Python's own finder returns, with another loader for user code."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        if is_user_code(Path(str(spec.origin))):
            spec.loader = UserLoader(name, str(spec.origin))
        return spec


class UserLoader(SourceFileLoader):
    """Loader that records the source that it executes.

    It uses no cached bytecode, which Python takes for current if a file has changed within a second
    and has the same size.
    """

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the file, and record its hash in FILE_HASHES."""
        source = self.get_data(self.path)
        code: Any = self.source_to_code(source, self.path)
        FILE_HASHES[Path(self.path).resolve()] = hash_source(source)
        return code


def _finder_position() -> int:
    """Return the place before Python's finder of files, behind the finders of other tools.

    `UserFinder` asks Python's finder, so `FrozenFinder` has to come before it.
    """
    for position, finder in enumerate(sys.meta_path):
        if finder is PathFinder or isinstance(finder, UserFinder):
            return position
    return len(sys.meta_path)
