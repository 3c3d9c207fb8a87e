"""What a run looks like: a live table on a terminal, plain lines everywhere else."""

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from lit_attn.cells.folder import Progress

if TYPE_CHECKING:
    from rich.console import Group

QUIET = 30.0
"""Seconds without a line after which plain output says that it still runs."""

TOLD = 0.1
"""Of a cell's steps, before its pace is taken for that of the others."""


@dataclass(frozen=True)
class Snapshot:
    """A moment of a run; running cells by name, seconds so far and steps where they are known.

    Names are `study/variant/seed`, those of what waits too; `durations` are of finished cells.
    """

    done: int
    failed: int
    waiting: list[str]
    running: list[tuple[str, float, Progress | None]]
    durations: list[tuple[str, float]]
    slots: int

    def eta(self) -> float | None:
        """Seconds to the end; None while nothing is known of how long a cell takes.

        A cell takes what finished ones of its variant took on average, or else of its study, or of
        the run. Before there are any, it takes what the running ones have taken and the steps that
        they have yet to make: of those alone that have made TOLD of their steps, as the first ones
        are slow.
        """
        paces = [
            (name, seconds + (steps.total - steps.step) * steps.step_time)
            for name, seconds, steps in self.running
            if steps is not None
            and steps.step_time is not None
            and steps.step >= TOLD * steps.total
        ]
        known = self.durations or paces
        if not known:
            return None
        took: dict[str, list[float]] = {}
        for name, seconds in known:
            for group in _groups(name):
                took.setdefault(group, []).append(seconds)
        means = {group: sum(each) / len(each) for group, each in took.items()}

        def takes(name: str) -> float:
            return next(means[group] for group in _groups(name) if group in means)

        left = [max(0.0, takes(name) - seconds) for name, seconds, _ in self.running]
        longest = max(left, default=0.0)
        return max(longest, (sum(map(takes, self.waiting)) + sum(left)) / self.slots)

    def line(self) -> str:
        """`12 done, 2 running, 1 failed, 15 waiting, about 2:10 left`."""
        eta = self.eta()
        parts = [
            f"{self.done} done",
            f"{len(self.running)} running",
            *([f"{self.failed} failed"] if self.failed else []),
            f"{len(self.waiting)} waiting",
            *([] if eta is None else [f"about {clock(eta)} left"]),
        ]
        return ", ".join(parts)


def _groups(name: str) -> tuple[str, str, str]:
    """What may tell of a cell, the nearest first: its variant, its study, everything."""
    variant = name.rpartition("/")[0]
    return variant, variant.rpartition("/")[0], ""


def clock(seconds: float) -> str:
    """`2:10`, `1:02:10`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Display(Protocol):
    """What a runner tells of itself."""

    def open(self) -> None:
        """Before the first cell."""

    def close(self) -> None:
        """After the last one, however the run ended."""

    def update(self, snapshot: Snapshot) -> None:
        """The state of the run, several times a second."""

    def say(self, text: str) -> None:
        """Something that happened, for good."""

    def ask(self, text: str) -> None:
        """Something for whoever sits at the terminal; called from a signal handler."""


class Lines:
    """A line for each thing that happens, with the counts behind it, and a sign of life."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.pending: list[str] = []
        self.last = time.monotonic()

    def open(self) -> None:
        self.last = time.monotonic()

    def close(self) -> None:
        self._flush("")

    def update(self, snapshot: Snapshot) -> None:
        if not self.pending and time.monotonic() - self.last > QUIET:
            self.pending.append("still at it")
        self._flush(f"  [{snapshot.line()}]")

    def say(self, text: str) -> None:
        self.pending.append(text)

    def ask(self, text: str) -> None:
        self.pending.append(text)

    def _flush(self, counts: str) -> None:
        """What happened at once shares one count, behind the last of it."""
        # Taken before it is printed: a signal during the printing may have more to say.
        said, self.pending = self.pending, []
        if said:
            print("\n".join(said) + counts, file=self.stream, flush=True)
            self.last = time.monotonic()


class Live:
    """A table of the running cells that stays in place, with what happened scrolling above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self.console = Console()
        self.live = RichLive(console=self.console, auto_refresh=False, transient=True)
        self.pending: list[str] = []

    def open(self) -> None:
        self.live.start()

    def close(self) -> None:
        self._scroll()
        self.live.stop()

    def update(self, snapshot: Snapshot) -> None:
        self._scroll()
        self.live.update(_table(snapshot), refresh=True)

    def say(self, text: str) -> None:
        self.pending.append(text)

    def ask(self, text: str) -> None:
        self.pending.append(text)

    def _scroll(self) -> None:
        said, self.pending = self.pending, []
        for text in said:
            style = "red" if text.startswith("FAILED") else ""
            self.console.print(text, style=style, markup=False, highlight=False)


def make_display(stream: TextIO = sys.stdout) -> Display:
    """The live table where `stream` is a terminal."""
    return Live() if stream.isatty() else Lines(stream)


def _table(snapshot: Snapshot) -> "Group":
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("cell", no_wrap=True)
    table.add_column("time", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("", width=24)
    for name, seconds, steps in snapshot.running:
        total, step = (steps.total, steps.step) if steps else (1, 0)
        said = f"{step}/{total}" if steps else "starting"
        bar = ProgressBar(total=total, completed=step, width=24)
        table.add_row(Text(name), clock(seconds), said, bar)
    return Group(table, Text(snapshot.line()))
