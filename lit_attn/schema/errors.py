"""Error messages of one line: the place, what is wrong, and what was probably meant."""

import argparse
import difflib
import errno
import functools
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, ParamSpec, TextIO

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from lit_attn.schema import mistakes
from lit_attn.schema.error_answer import Kind, write_mistake

MOST_CHOICES = 20  # Number of choices up to which a message lists all of them.
FEW_CHOICES = 5  # Number of the nearest choices that a message lists otherwise.
REFUSALS = {
    # The user may not write.
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    # The disk or the user's share of it is full.
    errno.ENOSPC,
    errno.EDQUOT,
    # The path is no such file.
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    # The disk or its server fails.
    errno.EIO,
    errno.ESTALE,
}
"""Errors of a file that are not mistakes in the code, for example on a full disk."""
P = ParamSpec("P")


class ConfigError(ValueError):
    """Wrong configuration; the message is one line that names the file, the key and a remedy."""

    def __init__(self, message: str) -> None:
        # A value of a downloaded file may contain line separators and escape sequences.
        super().__init__(escape_control(" ".join(message.splitlines())))


class UsageError(ConfigError):
    """Wrong command line."""


def plural(count: int, noun: str) -> str:
    """Return `1 cell` or `1,200 cells`."""
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"


def escape_control(text: str) -> str:
    """Return `text` with control and invisible characters in visible form (`\\x1b`, `\\ufeff`).

    Spaces, tabs and newlines stay. Terminals execute control characters, and nobody sees a
    byte-order mark or tells a no-break space from a space.
    """
    if text.isprintable():
        return text
    shown = []
    for character in text:
        is_shown = character.isprintable() or character in "\n\t"
        shown.append(character if is_shown else _escape(character))
    return "".join(shown)


def _escape(character: str) -> str:
    number = ord(character)
    # Python keeps the bytes of a file name that are not UTF-8 as these characters, which no stream
    # accepts.
    if 0xDC80 <= number <= 0xDCFF:
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 256 else ascii(character)[1:-1]


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message about `word`, which is none of `choices`.

    It is `; did you mean 'x'?` for a near choice, `; choose from ...`, or empty without choices.
    The nearest choice is one with two neighbouring letters swapped, if there is one.
    """
    options = [str(choice) for choice in choices]
    near = suggest_near(word, options)
    if near:
        return near
    if len(options) > MOST_CHOICES:
        nearest = difflib.get_close_matches(word, options, n=FEW_CHOICES, cutoff=0)
        return f"; of {len(options)} the nearest are {', '.join(nearest)}"
    return f"; choose from {', '.join(options)}" if options else ""


def suggest_near(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for a near choice, or nothing."""
    options = list(choices)
    swaps = _swap_neighbours(word)
    swapped = [option for option in options if option in swaps]
    close = swapped or difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def _swap_neighbours(word: str) -> list[str]:
    """Return the words that differ from `word` by one swap of neighbouring letters."""
    swaps = []
    for position in range(len(word) - 1):
        before = word[:position]
        pair = word[position + 1] + word[position]
        after = word[position + 2 :]
        swaps.append(before + pair + after)
    return swaps


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
    for distance in range(10_000):
        for candidate in (start - distance, start + distance):
            if 0 < candidate <= total and total % candidate == 0:
                return candidate
    return 1


def key_error(key: object, message: str) -> PydanticCustomError:
    """Return the error `message` about a key of a mapping."""
    return PydanticCustomError("key_error", "{message}", {"key": key, "message": message})


def silence(stream: TextIO) -> None:
    """Redirect a stream without a reader to the null device, so that the exit code stays."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def command(function: Callable[P, int]) -> Callable[P, int]:
    """Return `function` with an exit code for each exception.

    It is 2 after a ConfigError or an error of REFUSALS, which is printed, 130 after Ctrl-C, and 141
    without a reader. Any other exception becomes one line and a file with the traceback, and the
    exit code is `mistakes.EXIT_CODE`, as after a mistake of lit_attn that was described, or 1 if
    code of the user has raised it. With --json a mistake of the user is printed on stdout as JSON,
    too.
    """

    @functools.wraps(function)
    def run(*arguments: P.args, **keywords: P.kwargs) -> int:
        described_before = len(mistakes.DESCRIBED)
        lists = [words for words in arguments if isinstance(words, list)]
        has_json = "--json" in (lists[0] if lists else sys.argv)
        code = _run_command(lambda: function(*arguments, **keywords), has_json)
        has_mistake = len(mistakes.DESCRIBED) > described_before
        return mistakes.EXIT_CODE if has_mistake and code in (0, 1, 2) else code

    return run


def _run_command(run: Callable[[], int], has_json: bool) -> int:
    """Return the exit code of `run`, or that of the exception that it raises (see `command`)."""
    try:
        return run()
    except ConfigError as error:
        is_usage = isinstance(error, UsageError) or str(error).startswith("--")
        return _print_mistake(error, "usage" if is_usage else "config", has_json)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    except SystemExit as error:
        place = mistakes.find_user_place(error)
        if not place:
            raise
        exit_error = ConfigError(f"{place}: calls sys.exit; raise an exception instead")
        return _print_mistake(exit_error, "config", has_json)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe.
        silence(sys.stdout)
        return 128 + signal.SIGPIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in REFUSALS:
            # The message of a rename is about its target.
            path = error.filename2 or error.filename or "a file"
            return _print_mistake(ConfigError(f"{path}: {error.strerror}"), "file", has_json)
        if mistakes.is_out_of_memory(error):
            message = f"not enough memory: {mistakes.first_line(error)}"
            return _print_mistake(ConfigError(message), "usage", has_json)
        message, code = mistakes.describe_uncaught(error)
        print(escape_control(message), file=sys.stderr)
        return code


def _print_mistake(error: ConfigError, kind: Kind, has_json: bool) -> int:
    """Print a mistake, also as JSON if a program asked for it, and return the exit code."""
    if has_json:
        print(write_mistake(kind, str(error)))
    print(error, file=sys.stderr)
    return 2


MODULES = {
    "": "ablate",
    "run": "ablate",
    "judge": "ablate judge",
    "logs": "ablate logs",
    "rerun": "ablate rerun",
    "seal": "ablate seal",
    "status": "ablate status",
    "prepare": "data.prepare",
}
"""Module of a command, and its first word, where the module has another name than the command."""


def program(command: str, *words: object) -> str:
    """Return a command as this process was called, `lit-attn` or `python -m`, and its words."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module_name = "" if spec is None else spec.name.removesuffix(".__main__")
    if "lit_attn." in module_name:
        name = f"python -m lit_attn.{MODULES.get(command, command)}"
    else:
        name = f"lit-attn {command}"
    quoted_words = [shlex.quote(str(word)) for word in words]
    return " ".join([name, *quoted_words]).rstrip()


class OneLineParser(argparse.ArgumentParser):
    """Parser of a command line that raises ConfigError where argparse prints its usage.

    The last line of its help names the `page` of docs/ that explains the command.
    """

    def __init__(self, *arguments: Any, page: str = "commands.md", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.page = page

    def format_help(self) -> str:
        """Return the help, and the line that names the page."""
        return f"{super().format_help()}\nMore: docs/{self.page}\n"

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def from_one(text: str) -> int:
    """Return the number that an option has; argparse reports the error of a smaller one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 on")
    return int(text)


def explain(error: ValidationError, where: str) -> ConfigError:
    """Return the first problem that pydantic reports as one line that begins with `where`."""
    keys, message = find_problem(error)
    key = ".".join(str(part) for part in keys)
    if not key:
        return ConfigError(f"{where}: {message}")
    return ConfigError(f"{where}: {key}: {message}")


TYPES = re.compile(r"(constrained-)?(bool|float|int|str)")
"""Last key of pydantic's error about one of several types that a value can have."""


def _choose_error(errors: Sequence[Any]) -> Any:
    """Return the first of pydantic's `errors`, or that of the names of a value that has both.

    A value of several types has an error of each, with the type as the last key, which is left
    out. A text was meant as a name, if there are names.
    """
    first = errors[0]
    *keys, kind = first["loc"] or ("",)
    if TYPES.fullmatch(str(kind)):
        first = {**first, "loc": tuple(keys)}
    for other in errors:
        *other_keys, kind = other["loc"] or ("",)
        is_of_names = str(kind).startswith("literal[")
        if is_of_names and other_keys == keys:
            meant = other if isinstance(other["input"], str) else first
            return {**meant, "loc": tuple(keys)}
    return first


def find_problem(error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """Return the first problem that pydantic reports: the keys that lead to it, and a message."""
    first = _choose_error(error.errors())
    keys = first["loc"]
    message = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "key_error":
            keys = (*keys, str(first["ctx"]["key"]))
        case "literal_error":
            value = str(first["input"])
            # pydantic lists the choices as "'a', 'b' or 'c'".
            expected = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
            choices = expected.split(", ")
            message = f"'{value}' is not a choice{suggest(value, choices)}"
        case "bool_parsing" | "bool_type":
            message = f"write true or false, not {first['input']!r}"
        case "missing":
            message = "this key is required"
        case "tuple_type":
            message = f"write a list, not {first['input']!r}"
        case "too_short":
            message = f"needs {first['ctx']['min_length']} or more entries"
        case kind if kind != "value_error":
            value = repr(first["input"])
            if len(value) > 60:
                value = f"{value[:57]}..."
            message = f"{message[0].lower()}{message[1:]}, not {value}"
    return keys, " ".join(message.split())
