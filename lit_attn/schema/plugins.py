"""Parts of one's own, from Python files outside the package.

A file registers what it defines when it is imported (docs/adding-a-part.md). The study's `parts`
names it, and so does every cell's config.yaml, so that a cell can be run again alone.
"""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path

from lit_attn.schema.errors import ConfigError

# Of the files' contents, taken when they are imported: they may change, or go, under a long study.
_HASHES: dict[Path, bytes] = {}


def load_parts(files: Iterable[Path]) -> None:
    """Import each of `files` once; what lies beside one it can import too.

    Raises ConfigError, beginning with file and line, for one that cannot be imported.
    """
    for path in (file.resolve() for file in files):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        known = sys.modules.get(path.stem)
        if known is None:
            _load(path)
        elif _file(known.__spec__) != path:
            raise ConfigError(_hides(path))


def get_file_hash(path: Path) -> bytes:
    """Of the contents that a file had when it was loaded; KeyError where it was not."""
    return _HASHES[path.resolve()]


def _load(path: Path) -> None:
    name = path.stem
    if _file(importlib.util.find_spec(name)) not in (None, path):
        raise ConfigError(_hides(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # By its name, so that what it defines can be pickled.
    sys.modules[name] = module
    _HASHES[path] = hashlib.sha256(path.read_bytes()).digest()
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Somebody else's code raises whatever it likes.
        del sys.modules[name]
        sys.path[:] = before
        said = " ".join(str(error).split())
        raise ConfigError(f"{_line(error, path)}: {type(error).__name__}: {said}") from error


def _file(spec: ModuleSpec | None) -> Path | None:
    """Where a module comes from; of a built-in one no file's path."""
    return None if spec is None else Path(spec.origin or "").resolve()


def _hides(path: Path) -> str:
    return f"{path}: another module is called '{path.stem}'; give the file a name of its own"


def _line(error: Exception, path: Path) -> str:
    """The last line of the file that the error went through."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
