"""Error messages of one line: the place, what is wrong, and what was probably meant."""

import argparse
import difflib
from collections.abc import Iterable
from typing import NoReturn

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

MOST_CHOICES = 20  # Number of choices up to which a message lists all of them.
FEW_CHOICES = 5  # Number of the nearest choices that a message lists otherwise.


class ConfigError(ValueError):
    """Wrong configuration; the message is one line that names the file, the key and a remedy."""

    def __init__(self, message: str) -> None:
        # A value in a message may contain a line separator.
        super().__init__(" ".join(message.splitlines()))


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message about `word`, which is none of `choices`.

    It is `; did you mean 'x'?` for a near choice, `; choose from ...`, or empty without choices.
    """
    options = [str(choice) for choice in choices]
    if close := difflib.get_close_matches(word, options, n=1, cutoff=0.5):
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


class OneLineParser(argparse.ArgumentParser):
    """Parser of a command line that raises ConfigError where argparse prints its usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


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
        case "extra_forbidden":
            message = "unknown key"
        case "literal_error":
            value = str(first["input"])
            choices = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
            message = f"'{value}' is not a choice{suggest(value, choices)}"
        case "missing":
            message = "this key is required"
        case "value_error":
            pass
        case _:
            text = repr(first["input"])
            value = text if len(text) <= 60 else f"{text[:57]}..."
            message = f"{message[0].lower()}{message[1:]}, not {value}"
    return keys, " ".join(message.split())
