"""Signals that end a run."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Signals that end a run.


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` for the signals that end a run, except for signals that nohup ignores."""
    handled = [n for n in ENDING_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


@contextlib.contextmanager
def block_interrupts() -> Iterator[None]:
    """Block SIGINT for processes that start meanwhile: Ctrl-C must reach only the runner."""
    # Started first, because its start unblocks interrupts.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
