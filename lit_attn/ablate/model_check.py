"""Check of the models and data of variants before the first cell, in processes of its own.

Each process checks a share of the variants (`train.check_cells`). What they find is put together as
one process would find it: the first wrong variant in the order of the study, and each warning once.
A step for which the machine had no room beside the other processes is made again alone, and so is
one with an error: only a process without others refuses a study.
"""

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_attn import train
from lit_attn.ablate.display import format_seconds, write_line
from lit_attn.ablate.signals import block_interrupts
from lit_attn.checks.apart import count_gpu_processes
from lit_attn.config.cell import Cell

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

CHECK_LIMIT = 1800.0  # Seconds of a check after which cells start without it.
PROGRESS_SECONDS = 10.0  # Seconds between two lines about how far a check is.

STEPS_OF_PROCESS = 4
"""Training steps of small models on a CPU for which a further process gains time."""

Mistake = tuple[int, str, str, bool]
"""Values of `first_step.Mistake`."""


class Check(NamedTuple):
    """Result of a check of cells: a wrong cell, and all warnings."""

    mistake: Mistake | None
    warnings: list[str]


@dataclass(eq=False)
class Share:
    """Process that checks the cells with the `numbers`, and the number that it has reached."""

    numbers: list[int]
    is_alone: bool
    process: BaseProcess
    receiver: "Connection"
    reached: int = field(init=False)

    def __post_init__(self) -> None:
        self.reached = self.numbers[0]


class Findings:
    """Mistake and warnings from the processes of a check, by numbers of all cells."""

    def __init__(self) -> None:
        self.mistake: Mistake | None = None
        self.warnings: list[tuple[int, str]] = []
        self.started: set[int] = set()
        self.ended: set[int] = set()

    def add(self, share: Share, message: Any) -> bool:
        """Add a message of a process. Return True if it was the last one."""
        if isinstance(message, int):
            share.reached = share.numbers[message]
            self.started.add(share.reached)
            return False
        for warning in message.warnings:
            self.warnings.append((share.reached, warning))
        if isinstance(message, train.CheckedCell):
            if not message.is_crowded:
                self.ended.add(share.reached)
            return False
        if message.mistake is not None:
            _, *rest = message.mistake
            if self.concerns(share.reached):
                self.mistake = (share.reached, *rest)
        return True

    def concerns(self, number: int) -> bool:
        """Return True if a cell comes before the wrong one."""
        return self.mistake is None or number < self.mistake[0]

    def list_open(self, numbers: Sequence[int]) -> list[int]:
        """Return those of `numbers` before the wrong cell whose check has not ended."""
        return [n for n in numbers if n not in self.ended and self.concerns(n)]

    def make_check(self) -> Check:
        """Return the result, with the warnings in the order of the cells."""
        warnings = []
        for number, warning in sorted(self.warnings, key=lambda entry: entry[0]):
            is_before = self.mistake is None or number <= self.mistake[0]
            if is_before and warning not in warnings:
                warnings.append(warning)
        return Check(self.mistake, warnings)


class ModelCheck:
    """Check of one cell of each variant; `names` are those of the variants.

    `is_local`: the data of the cells are on this machine. `untried` are the numbers of the cells
    that make a step. The processes use the `gpus` in turn.
    """

    def __init__(
        self,
        create_process: Callable[..., BaseProcess],
        cells: Sequence[Cell],
        names: Sequence[str],
        is_local: bool,
        untried: Sequence[int],
        gpus: Sequence[str | None] = (None,),
    ) -> None:
        self.create_process = create_process
        # Not in files, which a killed runner could not remove.
        self.contents = [cell.model_dump(mode="json") for cell in cells]
        self.names = names
        self.is_local = is_local
        self.untried = set(untried)
        self.gpus = gpus
        self.findings = Findings()
        self.start = time.monotonic()
        self.next_line = self.start + PROGRESS_SECONDS

    def run(self, processes: int) -> Check:
        """Check all cells in several processes, and some again alone.

        There is only a warning if a process dies or the check needs too long.
        """
        numbers = list(range(len(self.contents)))
        shared_numbers = share_numbers(numbers, self.untried, processes)
        self._run_shares(shared_numbers)
        if len(shared_numbers) > 1 and self._remaining_seconds() > 0:
            # Other processes on a device can be the reason of any error.
            self.findings.mistake = None
            again = self.findings.list_open(numbers)
            if again:
                self._run_shares([again])
        return self.findings.make_check()

    def _remaining_seconds(self) -> float:
        """Return the seconds until the limit of the check."""
        return self.start + CHECK_LIMIT - time.monotonic()

    def _run_shares(self, shared_numbers: list[list[int]]) -> None:
        """Check each list of numbers in a process."""
        shares: list[Share] = []
        try:
            for place, numbers in enumerate(shared_numbers):
                gpu = self.gpus[place % len(self.gpus)]
                share = self._start(numbers, len(shared_numbers), gpu)
                shares.append(share)
            for share in self._await_shares(shares):
                # A killed process would leave the semaphores of its libraries behind.
                share.process.join(10)
        except (EOFError, OSError):
            self._warn(0, "the process of the check has ended")
        finally:
            for share in shares:
                share.process.kill()
                share.process.join()

    def _start(self, numbers: list[int], processes: int, gpu: str | None) -> Share:
        """Start one of several processes."""
        receiver, sender = multiprocessing.Pipe(duplex=False)
        contents = [self.contents[number] for number in numbers]
        untried = [place for place, number in enumerate(numbers) if number in self.untried]
        is_alone = processes == 1
        arguments = (contents, sender, self.is_local, untried, is_alone, gpu)
        process = self.create_process(target=train.check_cells, args=arguments)
        with block_interrupts():
            process.start()
        sender.close()
        self.findings.started.add(numbers[0])
        return Share(numbers, is_alone, process, receiver)

    def _await_shares(self, shares: list[Share]) -> list[Share]:
        """Add what the processes send, and return those that have sent their last message.

        A process that can only find a later mistake than is known is not awaited.
        """
        waiting = {share.receiver: share for share in shares}
        complete = []
        while waiting:
            seconds = min(self._remaining_seconds(), self.next_line - time.monotonic())
            for receiver in wait(list(waiting), max(0.0, seconds)):
                share = waiting[receiver]  # type: ignore[index]
                try:
                    is_last = self.findings.add(share, share.receiver.recv())
                except (EOFError, OSError):
                    if share.is_alone:
                        self._warn(share.reached, "the process of the check has ended")
                    del waiting[share.receiver]
                    continue
                if is_last:
                    complete.append(share)
                    del waiting[share.receiver]
            waiting = {
                receiver: share
                for receiver, share in waiting.items()
                if self.findings.concerns(share.reached)
            }
            if self._remaining_seconds() <= 0:
                self._warn(len(self.names), f"no answer within {CHECK_LIMIT:,.0f} s")
                break
            self._write_progress(list(waiting.values()))
        return complete

    def _warn(self, number: int, reason: str) -> None:
        """Add the warning that cells were not checked, in the place of the cell `number`."""
        self.findings.warnings.append((number, f"{train.NOT_CHECKED}: {reason}"))

    def _write_progress(self, waiting: list[Share]) -> None:
        """Write which variants the check has reached, every PROGRESS_SECONDS."""
        if not waiting or time.monotonic() < self.next_line:
            return
        seconds = format_seconds(time.monotonic() - self.start)
        names = ", ".join(self.names[share.reached] for share in waiting)
        started = len(self.findings.started)
        write_line(f"  {started} of {len(self.names)}: {names} ({seconds})")
        self.next_line = time.monotonic() + PROGRESS_SECONDS


def share_numbers(numbers: Sequence[int], untried: set[int], processes: int) -> list[list[int]]:
    """Return the numbers of each process in order, with equally many cells that make a step."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    for place, number in enumerate(sorted(numbers, key=lambda number: number not in untried)):
        shares[place % processes].append(number)
    return [sorted(share) for share in shares if share]


def list_untried(cells: Sequence[Cell], is_proven: Sequence[bool]) -> list[int]:
    """Return the numbers of the cells that make a step: the first of those with equal steps."""
    steps: set[str] = set()
    untried = []
    for number, cell in enumerate(cells):
        step = describe_step(cell)
        if not is_proven[number] and step not in steps:
            steps.add(step)
            untried.append(number)
    return untried


def describe_step(cell: Cell) -> str:
    """Return a text that is equal for cells whose first steps compute the same, but for rates."""
    contents = cell.experiment.model_dump(mode="json", exclude={"schedule"})
    for key in ("lr", "weight_decay"):
        contents["optimizer"].pop(key, None)
    without_effect = ("diagnostics", "histograms", "loggers", "log_every", "profiler")
    for key in ("epochs", "stretch", "max_steps", "stop", *without_effect):
        contents["training"].pop(key, None)
    match_to = None if cell.match_to is None else cell.match_to.model_dump(mode="json")
    return json.dumps([contents, match_to], sort_keys=True)


def count_processes(untried: Sequence[Cell], cells_at_once: int, has_gpus: bool) -> int:
    """Return how many processes make the first steps of the cells `untried`.

    On a CPU as many cells will run at once with the same share of the cores and of the memory.
    """
    if has_gpus and any(cell.experiment.training.accelerator != "cpu" for cell in untried):
        return min(len(untried), count_gpu_processes())
    return max(1, min(math.ceil(len(untried) / STEPS_OF_PROCESS), cells_at_once))
