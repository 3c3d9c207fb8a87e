"""One clear line for bad input: where it is, what is wrong, what was probably meant."""

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


class ConfigError(ValueError):
    """Bad configuration. The message is one line that names the file, the key and a remedy."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the choices where nothing is near, or nothing without choices."""
    options = [str(choice) for choice in choices]
    if close := difflib.get_close_matches(word, options, n=1, cutoff=0.5):
        return f"; did you mean '{close[0]}'?"
    return f"; choose from {', '.join(options)}" if options else ""


def explain(error: ValidationError, where: str) -> ConfigError:
    """The first problem that pydantic found, as one line beginning with `where`."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "literal_error":
        given = str(first["input"])
        choices = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        message = f"'{given}' is not a choice{nearest(given, choices)}"
    elif first["type"] == "missing":
        message = "this key is required"
    elif first["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, not {first['input']!r}"
    return ConfigError(f"{where}: {key + ': ' if key else ''}{message}")
