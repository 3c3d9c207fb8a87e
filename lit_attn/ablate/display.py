"""Output of a run: a live table on a terminal, plain lines elsewhere, and the time left."""

import contextlib
import math
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from lit_attn.cells.folder import Progress
from lit_attn.schema.errors import escape_control, silence

MEASURED = 0.1
"""Fraction of its steps after which a cell's time per step is used: the first steps are slow."""


BAR_WIDTH = 40
"""Characters of the progress bar in a notebook."""


class StartedCell(NamedTuple):
    """A cell without a result: `study/variant/seed`, its progress, and the seconds it has run."""

    name: str
    progress: Progress | None
    seconds: float

    @property
    def duration(self) -> float | None:
        """Expected seconds of the complete cell from its steps so far, or None."""
        steps = self.progress
        if steps is None or steps.step < MEASURED * steps.total:
            return None
        rest = steps.remaining_seconds
        return None if rest is None else self.seconds + rest


def format_seconds(seconds: float) -> str:
    """Return `2:10` or `1:02:10`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def _groups(name: str) -> tuple[str, str, str]:
    """Return the groups of cells that a cell belongs to, the smallest first."""
    variant = name.rpartition("/")[0]
    study = variant.rpartition("/")[0]
    every_cell = ""
    return variant, study, every_cell


class Snapshot(NamedTuple):
    """State of a run at one moment.

    `waiting` are names of cells (`study/variant/seed`), `durations` are names and seconds of
    finished cells, and `slots` is the number of cells that run at once.
    """

    done: int
    failed: int
    waiting: list[str]
    running: list[StartedCell]
    durations: list[tuple[str, float]]
    slots: int

    def remaining_seconds(self) -> float | None:
        """Return the seconds until the last cell ends, or None if no cell has been measured.

        A cell is expected to take the mean of its variant, or else of its study, or else of all
        cells: finished ones, and running ones as their steps predict.
        """
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        predicted = [(cell.name, cell.duration) for cell in self.running]
        for name, duration in (*self.durations, *predicted):
            if duration is not None:
                for group in _groups(name):
                    seconds[group].append(duration)
        if not seconds:
            return None
        means = {group: sum(durations) / len(durations) for group, durations in seconds.items()}

        def expect(name: str) -> float:
            return next(means[group] for group in _groups(name) if group in means)

        running = [max(0.0, expect(cell.name) - cell.seconds) for cell in self.running]
        # Cells of one variant take equally long: each variant is looked up once.
        variants = Counter(name.rpartition("/")[0] for name in self.waiting)
        queued = sum(count * expect(f"{variant}/") for variant, count in variants.items())
        longest = max(running, default=0.0)
        mean_per_slot = (queued + sum(running)) / self.slots
        return max(longest, mean_per_slot)

    def summary(self) -> str:
        """Return `12 done, 2 running, 1 failed, 15 waiting, about 2:10 left`."""
        remaining = self.remaining_seconds()
        parts = [f"{self.done} done", f"{len(self.running)} running"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        parts.append(f"{len(self.waiting)} waiting")
        if remaining is not None:
            parts.append(f"about {format_seconds(remaining)} left")
        return ", ".join(parts)


class Display:
    """Output of a runner: one line per event, with the counts of the cells."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.pending: list[str] = []

    def close(self) -> None:
        """Write what is pending and end after the last cell, however the run ended."""
        self._flush("")

    def update(self, snapshot: Snapshot) -> None:
        """Show the state of the run; called several times a second."""
        if self.pending:
            self._flush(f"  [{snapshot.summary()}]")

    def add_event(self, text: str) -> None:
        """Report an event. Signal handlers may call this."""
        self.pending.append(escape_control(text))

    def _take_events(self) -> list[str]:
        """Return the pending events and forget them.

        This comes before their output, because a signal handler may add an event during it.
        """
        events = self.pending
        self.pending = []
        return events

    def _flush(self, counts: str) -> None:
        """Write the pending events, with the counts after the last one."""
        events = self._take_events()
        if events:
            write_line("\n".join(events) + counts, self.stream)


class LiveDisplay(Display):
    """Display with a table of the running cells that stays in place, below the events."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        super().__init__(sys.stdout)
        self.console = Console()
        self.live = RichLive(console=self.console, auto_refresh=False, transient=True)
        self.drawn = -math.inf

    # The terminal may disappear during a run, which then goes on without output.

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._flush("")
            self.live.stop()

    def update(self, snapshot: Snapshot) -> None:
        # The table shows whole seconds, and its estimate takes 0.1 s for 50,000 cells.
        if not self.pending and time.monotonic() - self.drawn < 1:
            return
        self.drawn = time.monotonic()
        with contextlib.suppress(OSError):
            self.live.start()
            self._flush("")
            self.live.update(render_table(snapshot), refresh=True)

    def _flush(self, counts: str) -> None:
        """Print the pending events; the table below them has the counts."""
        for text in self._take_events():
            style = "red" if text.startswith("FAILED") else ""
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def make_display(stream: TextIO) -> Display:
    """Return a live table if the output is a terminal, else plain lines on `stream`."""
    return LiveDisplay() if sys.stdout.isatty() else Display(stream)


def open_notebook_display() -> Callable[[Callable[[], str]], None]:
    """Return the function that shows a text in place in a notebook; elsewhere it does nothing."""
    from rich.console import Console

    if not Console().is_jupyter:
        return lambda describe: None
    # Every notebook has IPython. Rich needs ipywidgets to replace a text.
    from IPython.display import display

    handle = display({"text/plain": "starting"}, raw=True, display_id=True)
    return lambda describe: handle.update({"text/plain": describe()}, raw=True)


def draw_bar(share: float) -> str:
    """Return a progress bar for a share of the work from 0 to 1, with the percentage."""
    done = int(BAR_WIDTH * share)
    return f"[{'#' * done}{'-' * (BAR_WIDTH - done)}] {share:.0%}"


def write_line(text: str, stream: TextIO | None = None) -> None:
    """Write a line at once. Ignore a full disk, and ignore a closed pipe from then on."""
    try:
        print(escape_control(text), file=stream, flush=True)
    except BrokenPipeError:
        silence(stream or sys.stdout)
    except OSError:
        # The disk may have space again for the next line.
        _discard_output(stream or sys.stdout)


def _discard_output(stream: TextIO) -> None:
    """Drop what could not be written: Python would try again at its end, and exit with 120."""
    number = stream.fileno()
    kept = os.dup(number)
    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), number)
        stream.flush()
    os.dup2(kept, number)
    os.close(kept)


def render_table(snapshot: Snapshot) -> Any:
    """Return the counts, and below them the running cells; a long name takes several lines."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("cell", overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    for name, progress, seconds in snapshot.running:
        steps = f"{progress.step}/{progress.total}" if progress else "starting"
        table.add_row(Text(name), format_seconds(seconds), steps)
    summary = Text(snapshot.summary())
    return Group(summary, table) if snapshot.running else Group(summary)
