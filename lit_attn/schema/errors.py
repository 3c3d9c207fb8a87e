"""Error messages of one line: the place, what is wrong, and what was probably meant."""

import argparse
import difflib
import errno
import functools
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn, ParamSpec, TextIO

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

MOST_CHOICES = 20  # Number of choices up to which a message lists all of them.
FEW_CHOICES = 5  # Number of the nearest choices that a message lists otherwise.
REFUSALS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),  # The user may not write.
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # The disk or a limit is full.
    *(errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),  # The path is no such file.
    *(errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO),  # The disk or its server fails.
    *(errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.EBUSY, errno.ENOLCK),
    *(errno.EMFILE, errno.ENFILE),  # Too many files are open.
}
"""Errors of a file that are not mistakes in the code, for example on a full disk."""
P = ParamSpec("P")
# Control characters and their visible form. Terminals execute escape sequences.
CONTROL = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"}
# Python keeps the bytes of a file name that are not UTF-8 as these characters, which no stream
# accepts.
CONTROL |= {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(128, 256)}


class ConfigError(ValueError):
    """Wrong configuration; the message is one line that names the file, the key and a remedy."""

    def __init__(self, message: str) -> None:
        # A value of a downloaded file may contain line separators and escape sequences.
        super().__init__(escape_control(" ".join(message.splitlines())))


def plural(count: int, noun: str) -> str:
    """Return `1 cell` or `1,200 cells`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def escape_control(text: str) -> str:
    """Return `text` with control characters in visible form (`\\x1b`), except tab and newline."""
    return text.translate(CONTROL)


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message about `word`, which is none of `choices`.

    It is `; did you mean 'x'?` for a near choice, `; choose from ...`, or empty without choices.
    The nearest choice is one with two neighbouring letters swapped, if there is one.
    """
    options = [str(choice) for choice in choices]
    swaps = [word[:i] + word[i : i + 2][::-1] + word[i + 2 :] for i in range(len(word) - 1)]
    swapped = [option for option in options if option in swaps]
    if close := swapped or difflib.get_close_matches(word, options, n=1, cutoff=0.5):
        return f"; did you mean '{close[0]}'?"
    if len(options) > MOST_CHOICES:
        nearest = difflib.get_close_matches(word, options, n=FEW_CHOICES, cutoff=0)
        return f"; of {len(options)} the nearest are {', '.join(nearest)}"
    return f"; choose from {', '.join(options)}" if options else ""


def require(message: str, word: str, choices: Iterable[str]) -> None:
    """Raise ConfigError with `message`, the word and a hint if `word` is none of `choices`."""
    options = list(choices)
    if word not in options:
        raise ConfigError(f"{message} '{word}'{suggest(word, options)}")


def find_nearest_divisor(number: int, total: int) -> int:
    """Return the divisor of `total` that is nearest to `number`, the smaller one of two.

    It is 1 if no divisor is within 10,000 of `number`.
    """
    start = min(number, total)
    candidates = (start + sign * distance for distance in range(10_000) for sign in (-1, 1))
    return next((n for n in candidates if 0 < n <= total and total % n == 0), 1)


def key_error(key: object, message: str) -> PydanticCustomError:
    """Return the error `message` about a key of a mapping."""
    return PydanticCustomError("key_error", "{message}", {"key": key, "message": message})


def silence(stream: TextIO) -> None:
    """Redirect a stream without a reader to the null device, so that the exit code stays."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def command(function: Callable[P, int]) -> Callable[P, int]:
    """Return `function` with an exit code for each exception that is no mistake in the code.

    It is 2 after a ConfigError or an error of REFUSALS, which is printed, 130 after Ctrl-C, and 141
    without a reader.
    """

    @functools.wraps(function)
    def run(*arguments: P.args, **keywords: P.kwargs) -> int:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                # It is closed (`>&-`). The next file would get its number, and the output of cells.
                number = os.open(os.devnull, os.O_RDWR)
                os.set_inheritable(number, True)
                setattr(sys, name, os.fdopen(number, mode))
        try:
            return function(*arguments, **keywords)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return 128 + signal.SIGINT
        except BrokenPipeError:
            # The reader, such as `head`, has closed the pipe.
            silence(sys.stdout)
            return 128 + signal.SIGPIPE
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            path = error.filename2 or error.filename or "a file"
            print(ConfigError(f"{path}: {error.strerror}"), file=sys.stderr)
            return 2

    return run


MODULES = {name: f"ablate {name}" for name in ("judge", "logs", "rerun", "seal", "status")}
MODULES |= {"": "ablate", "run": "ablate", "prepare": "data.prepare"}


def program(command: str, *words: object) -> str:
    """Return a command as this process was called, `lit-attn` or `python -m`, and its words."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_module = "lit_attn." in ("" if spec is None else spec.name.removesuffix(".__main__"))
    module = MODULES.get(command, command)
    name = f"python -m lit_attn.{module}" if is_module else f"lit-attn {command}"
    return " ".join([name, *(shlex.quote(str(word)) for word in words)]).rstrip()


class OneLineParser(argparse.ArgumentParser):
    """Parser of a command line that raises ConfigError where argparse prints its usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def from_one(text: str) -> int:
    """Return the number that an option has; argparse reports the error of a smaller one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 on")
    return int(text)


def explain(error: ValidationError, where: str) -> ConfigError:
    """Return the first problem that pydantic reports as one line that begins with `where`."""
    keys, message = find_problem(error)
    key = ".".join(str(part) for part in keys)
    return ConfigError(f"{where}: {key + ': ' if key else ''}{message}")


def find_problem(error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """Return the first problem that pydantic reports: the keys that lead to it, and a message."""
    first = error.errors()[0]
    keys = first["loc"]
    message = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "key_error":
            keys = (*keys, str(first["ctx"]["key"]))
        case "literal_error":
            value = str(first["input"])
            choices = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            message = f"'{value}' is not a choice{suggest(value, choices)}"
        case "missing":
            message = "this key is required"
        case "tuple_type":
            message = f"write a list, not {first['input']!r}"
        case "too_short":
            message = f"needs {first['ctx']['min_length']} or more entries"
        case kind if kind != "value_error":
            text = repr(first["input"])
            value = text if len(text) <= 60 else f"{text[:57]}..."
            message = f"{message[0].lower()}{message[1:]}, not {value}"
    return keys, " ".join(message.split())
