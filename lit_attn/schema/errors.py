"""One clear line for bad input: where it is, what is wrong, what was probably meant."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

# Choices that are listed in a line, and how many of more than these.
LISTED, FEW = 20, 5


class ConfigError(ValueError):
    """Bad configuration. The message is one line that names the file, the key and a remedy."""


def suggest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the choices where nothing is near, or nothing without choices.

    Of many choices those few that are least far.
    """
    options = [str(choice) for choice in choices]
    if close := difflib.get_close_matches(word, options, n=1, cutoff=0.5):
        return f"; did you mean '{close[0]}'?"
    if len(options) > LISTED:
        least = difflib.get_close_matches(word, options, n=FEW, cutoff=0)
        return f"; of {len(options)} the nearest are {', '.join(least)}"
    return f"; choose from {', '.join(options)}" if options else ""


def find_nearest_divisor(number: int, whole: int) -> int:
    """The divisor of `whole` that is next to `number`, the smaller of two; 1 where none is near."""
    start = min(number, whole)
    near = (start + way * distance for distance in range(10_000) for way in (-1, 1))
    return next((found for found in near if 0 < found <= whole and whole % found == 0), 1)


def unknown_key(key: object, choices: Iterable[str]) -> PydanticCustomError:
    """What a validator raises for a key that is none of `choices`."""
    hint = suggest(str(key), choices)
    return PydanticCustomError(
        "unknown_key", "unknown key '{key}'{hint}", {"key": key, "hint": hint}
    )


def explain(error: ValidationError, where: str) -> ConfigError:
    """The first problem that pydantic found, as one line beginning with `where`."""
    keys, message = find_problem(error)
    key = ".".join(str(part) for part in keys)
    return ConfigError(f"{where}: {key + ': ' if key else ''}{message}")


def find_problem(error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """The first problem that pydantic found: the keys that lead to it, and what is wrong there."""
    first = error.errors()[0]
    keys = first["loc"]
    message = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "unknown_key":
            keys = (*keys, str(first["ctx"]["key"]))
        case "extra_forbidden":
            message = "unknown key"
        case "literal_error":
            given = str(first["input"])
            choices = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            message = f"'{given}' is not a choice{suggest(given, choices)}"
        case "missing":
            message = "this key is required"
        case "value_error":
            pass
        case _:
            message = f"{message[0].lower()}{message[1:]}, not {_short(first['input'])}"
    return keys, " ".join(message.split())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
