"""The text every Python brings: its documentation topics and its standard library's source."""

import hashlib
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests, caches and what is installed beside the library; files that describe one build of Python.
LEFT_OUT = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
OF_ONE_BUILD = "_sysconfigdata"


def documents(parts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(name, text) of every document of `parts` ("topics", "library"), always in the same order."""
    if "topics" in parts:
        for topic, text in sorted(pydoc_data.topics.topics.items()):
            yield f"topics/{topic}", text
    if "library" in parts:
        root = Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
            name = path.relative_to(root)
            if not LEFT_OUT.intersection(name.parts) and not name.name.startswith(OF_ONE_BUILD):
                yield f"library/{name.as_posix()}", path.read_text("utf-8", errors="replace")


def split_of(name: str) -> str:
    """Where a document belongs, by its name alone: 80 % train, 10 % val, 10 % test."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10
    return {0: "val", 1: "test"}.get(number, "train")
