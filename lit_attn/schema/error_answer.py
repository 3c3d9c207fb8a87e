"""Answer in JSON to a mistake of the user, with the place that the message names."""

import json
import re
from typing import Literal, NamedTuple

FORMAT = 2
"""Version of the keys of every answer in JSON; it grows when a key changes or goes away."""

Kind = Literal["usage", "file", "config"]


class Place(NamedTuple):
    """File, line and key that a message names, None where it names none."""

    file: str | None
    line: int | None
    key: str | None


FILE_AND_LINE = re.compile(r"(?P<file>[^\s:]*[./][^\s:]*)(?::(?P<line>\d+))?: ")
"""File, and perhaps a line, at the beginning of a message."""

KEY = re.compile(r"(?P<key>[^\s:]+): ")
"""Key, or option of a command line, before the words of a message."""


def find_place(message: str) -> Place:
    """Return the file, the line and the key with which a message of one line begins."""
    file = None
    line = None
    rest = message
    match = FILE_AND_LINE.match(message)
    if match is not None:
        file = match["file"]
        line = int(match["line"]) if match["line"] else None
        rest = message[match.end() :]
    keys = []
    match = KEY.match(rest)
    while match is not None:
        keys.append(match["key"])
        rest = rest[match.end() :]
        match = KEY.match(rest)
    return Place(file, line, ".".join(keys) or None)


def write_mistake(kind: Kind, message: str) -> str:
    """Return the answer to a mistake of one line (schema: `lit-attn schema error`)."""
    mistake = {"kind": kind, **find_place(message)._asdict(), "message": message}
    answer = {"format": FORMAT, "command": "error", "error": mistake}
    return json.dumps(answer, indent=2, ensure_ascii=False)
