"""Log of the data readers: warnings about files that can be read but are probably not as meant.

A cell writes them to its log. The check before the first cell sends them to the runner, which shows
each of them once.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger("lit_attn.data")


class _Collector(logging.Handler):
    """Handler that keeps every different message, in the order of their first occurrence."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().splitlines())
        if message not in self.messages:
            self.messages.append(message)


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Yield a list to which every different warning of the package is appended.

    Beside the readers, a check that cannot be made warns.
    """
    collector = _Collector()
    package = logging.getLogger("lit_attn")
    package.addHandler(collector)
    try:
        yield collector.messages
    finally:
        package.removeHandler(collector)
