"""Limits of files that somebody else may have written, and the reader of JSON."""

import json
from collections.abc import Iterable
from typing import Any

from lit_attn.schema.errors import ConfigError

MAX_NODES = 200_000  # Largest number of values in a file, aliases included.
MAX_DEPTH = 50  # Largest depth of nested values.
MAX_INTEGER = 2**63 - 1  # Largest integer that tables and tensors can contain.


def parse_json(text: str, place: str) -> Any:
    """Return the value of a JSON text; ConfigError, which begins with `place`, if it has none.

    Keys that are written twice, and values beyond MAX_NODES, MAX_DEPTH and MAX_INTEGER are errors.
    """

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated_keys = [key for key in keys if keys.count(key) > 1]
            raise ConfigError(
                f"{place}: the key '{repeated_keys[0]}' is written twice; remove one of them"
            )
        return value

    def read_integer(digits: str) -> int:
        return check_integer(digits, place)

    try:
        value = json.loads(text, object_pairs_hook=read_object, parse_int=read_integer)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    except RecursionError as error:
        raise beyond_limits(place) from error
    check_size(value, place)
    return value


def check_integer(digits: str, place: str) -> int:
    """Return the integer that `digits` spell; ConfigError if it is beyond MAX_INTEGER."""
    # Python itself refuses to read an integer of more than 4,300 digits.
    if len(digits) > 30:
        raise ConfigError(f"{place}: an integer of {len(digits)} characters is too large")
    try:
        value = int(digits)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
    if abs(value) > MAX_INTEGER:
        raise ConfigError(f"{place}: {digits} is too large for an integer of 64 bits")
    return value


def check_size(value: Any, place: str) -> None:
    """Raise ConfigError if a value exceeds MAX_NODES or MAX_DEPTH."""
    count = 0
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        count += len(level)
        if count > MAX_NODES:
            raise beyond_limits(place)
        next_level: list[Any] = []
        for parent in level:
            next_level.extend(list_children(parent))
        if not next_level:
            return
        level = next_level
    raise beyond_limits(place)


def beyond_limits(place: str) -> ConfigError:
    """Return the error of a file with too many values or too many levels."""
    return ConfigError(
        f"{place}: too large or too deeply nested: "
        f"more than {MAX_NODES:,} values, aliases included, or {MAX_DEPTH} levels. "
        "Write a smaller or flatter file."
    )


def list_children(value: Any) -> Iterable[Any]:
    """Return the values in a mapping or a list; none for other values."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return ()
