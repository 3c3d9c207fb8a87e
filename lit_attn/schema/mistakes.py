"""Mistakes of lit_attn itself: one line that says so, and a file with the traceback.

Whatever catches any exception must not tell a user that his records, data or code are wrong when
the program is. `describe_mistake` writes the traceback and returns the line; a command in whose
process a mistake was described ends with EXIT_CODE (`lit_attn.schema.errors.command`).
"""

import os
import sys
import sysconfig
import tempfile
import time
import traceback
from pathlib import Path

import lit_attn

EXIT_CODE = 70
"""Exit code of a command after a mistake of lit_attn (EX_SOFTWARE of sysexits.h)."""

PACKAGE = Path(__file__).parents[1]

LIBRARIES = [
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
]
"""Folders of Python's own modules and of installed packages."""

DESCRIBED: list[BaseException] = []
"""Mistakes that this process has described."""


def describe_mistake(error: BaseException) -> str:
    """Write the traceback of `error` to a file, and return one line that names place and file."""
    DESCRIBED.append(error)
    words = " ".join(f"{type(error).__name__}: {error}".split())
    if len(words) > 200:
        words = f"{words[:200]}..."
    place = _find_place(error)
    return (
        f"this is a mistake of lit_attn ({words}, {place}); {_write_traceback(error)}, please "
        "report it"
    )


def describe_uncaught(error: BaseException) -> tuple[str, int]:
    """Return one line about an exception that a command did not expect, and the exit code.

    It is a mistake of lit_attn unless a package is not installed, or the innermost line outside of
    Python and of installed packages is in code of the user, such as the `parts` of a study.
    """
    place = find_user_place(error)
    if not place:
        package = _find_missing_package(error)
        if package:
            message = f"{package} is not installed for {sys.executable}; install lit_attn as in"
            return f"{message} README.md: pip install -e .", 1
        return describe_mistake(error), EXIT_CODE
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{place}: {words}; {_write_traceback(error)}", 1


def find_user_place(error: BaseException) -> str:
    """Return file and line of the code of the user that has raised `error`, or an empty text.

    The innermost line outside of Python and of installed packages is in it, and not in lit_attn.
    """
    frames = traceback.extract_tb(error.__traceback__)
    written = [frame for frame in frames if not _is_of_library(Path(frame.filename))]
    if not written or Path(written[-1].filename).is_relative_to(PACKAGE):
        return ""
    return f"{written[-1].filename}:{written[-1].lineno}"


def _find_missing_package(error: BaseException) -> str:
    """Return the package that an import has not found, or an empty text; lit_attn is none."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    package = error.name.partition(".")[0]
    return "" if package == PACKAGE.name else package


def _is_of_library(file: Path) -> bool:
    """Return True for a file of Python or of an installed package other than lit_attn."""
    if file.is_relative_to(PACKAGE):
        return False
    # A frozen module has no file, but a name such as <frozen importlib._bootstrap>.
    is_frozen = file.name.startswith("<")
    return is_frozen or any(file.is_relative_to(folder) for folder in LIBRARIES)


def describe_place(error: BaseException) -> str:
    """Write the traceback of `error` to a file, and return the words that name place and file."""
    return f"{_find_place(error)}; {_write_traceback(error)}"


def describe_check_failure(error: BaseException) -> str:
    """Return the failure of a check in one line: what the machine does, or a mistake of lit_attn.

    PyTorch raises RuntimeError for a kernel that fails on this machine.
    """
    if is_unexpected(error) and not isinstance(error, RuntimeError):
        return describe_mistake(error)
    return f"{type(error).__name__}: {first_line(error)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the machine, or a device of PyTorch, had no memory left."""
    # PyTorch is not imported for the name of its class. Its allocator on a CPU has no class.
    is_of_device = type(error).__name__ == "OutOfMemoryError"
    is_of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
    return isinstance(error, MemoryError) or is_of_device or is_of_cpu


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class without a message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def is_unexpected(error: BaseException) -> bool:
    """Return True if a line of lit_attn has raised `error`, which nobody but lit_attn can mend.

    A wrong value leads to a ValueError (as ConfigError is) or a TypeError, and a machine without
    memory, files or a disk to a MemoryError or an OSError.
    """
    if isinstance(error, ValueError | TypeError | MemoryError | OSError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    # The first frame is that of the caller, which has caught the error.
    return len(frames) > 1 and Path(frames[-1].filename).is_relative_to(PACKAGE)


def _find_place(error: BaseException) -> str:
    """Return file and line of the innermost frame in the package, or of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "without a place"
    inside = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    frame = (inside or frames)[-1]
    path = Path(frame.filename)
    if path.is_relative_to(PACKAGE):
        path = path.relative_to(PACKAGE.parent)
    return f"{path}:{frame.lineno}"


def _write_traceback(error: BaseException) -> str:
    """Write the traceback to a new file in TMPDIR, and return the clause that names it."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    lines = [
        f"lit_attn {lit_attn.__version__}, Python {sys.version.split()[0]}, {sys.platform}\n",
        f"command: {' '.join(sys.argv)}\n\n",
        *traceback.format_exception(error),
    ]
    try:
        descriptor, name = tempfile.mkstemp(prefix=f"lit_attn-mistake-{stamp}-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)
    except OSError as failure:
        return f"its traceback cannot be written ({failure.strerror})"
    return f"its traceback is in {name}"
