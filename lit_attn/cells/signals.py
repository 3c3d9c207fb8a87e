"""Signals that end a run, answered by the run itself."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def answered(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the signals that end a run, save where they are ignored (nohup)."""
    handled = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
