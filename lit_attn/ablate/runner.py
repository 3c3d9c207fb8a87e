"""Runs cells, several at once, until each has a result or has failed; no cell ends another."""

import contextlib
import datetime
import math
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

from lit_attn.ablate.display import Display, Snapshot
from lit_attn.ablate.launch import Launcher, Running, ServerLost
from lit_attn.ablate.plan import Job
from lit_attn.ablate.slots import Slot, Slots
from lit_attn.ablate.time_left import StartedCell
from lit_attn.cells import failure, folder, lock
from lit_attn.cells.records import Exit, FailureClass
from lit_attn.cells.worker import BUSY

TICK = 0.25
"""Seconds between looks at cells that other runners hold, and between updates of the display."""
GRACE = 15.0
"""Seconds that a cell told to stop has for its last checkpoint."""
RETRIES: dict[FailureClass, int] = {"killed": 3, "timed-out": 1, "no-space": 2}
"""How often a run tries a cell again, by how it failed last; what is not here would fail again."""
BACKOFF = 10.0
"""Seconds before a cell's first retry; each further one waits twice as long."""
STOP = 2
"""The urgency at which running cells are stopped; one interrupt makes 1, SIGTERM makes 2."""


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run."""


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


@dataclass(frozen=True)
class Outcome:
    """How a cell ended in this run; `failure` is None where it has a result.

    One that was `stopped` at the user's word has none either, and has not failed. One that was
    `crowded` ran out of memory on a device that others were on.
    """

    job: Job
    seconds: float
    failure: FailureClass | None = None
    message: str = ""
    stopped: bool = False
    crowded: bool = False


@dataclass
class Summary:
    """What became of the cells of a run; `stopped_by` is the signal that cut it short."""

    outcomes: list[Outcome] = field(default_factory=list)
    stopped_by: signal.Signals | None = None

    @property
    def failed(self) -> list[Outcome]:
        return [
            outcome
            for outcome in self.outcomes
            if outcome.failure is not None and not outcome.stopped
        ]


@dataclass(frozen=True)
class Limits:
    """Seconds that an attempt at a cell may go without a step, and that it may take in all."""

    stall: float = 1800.0
    time: float = math.inf


class Runner:
    """SIGINT drains: what runs is finished, nothing is started. A second one, or SIGTERM, stops:
    cells are told to save and go, and are killed after a grace period or at a third."""

    def __init__(
        self, launcher: Launcher, slots: Slots, display: Display, limits: Limits | None = None
    ) -> None:
        self.launcher = launcher
        self.slots = slots
        self.display = display
        self.limits = limits or Limits()
        self.queue: deque[Job] = deque()
        self.before: dict[Path, int] = {}
        self.tries: Counter[tuple[Path, FailureClass]] = Counter()
        self.resting: list[tuple[float, Job]] = []
        self.running: dict[int, Running] = {}
        self.summary = Summary()
        self.urgency = 0

    def run(self, jobs: Iterable[Job]) -> Summary:
        """Run `jobs` in order; cells that another runner holds are waited for at the end."""
        self.queue = deque(jobs)
        self.before = {job.folder: len(folder.list_attempts(job.folder)) for job in self.queue}
        self.launcher.share_cores(self.slots.at_once(job.cell for job in self.queue))
        with handle_signals(self._interrupt):
            self.display.open()
            try:
                while self.running or ((self.queue or self.resting) and not self.urgency):
                    if not self.urgency:
                        self._wake()
                        self._start()
                    self._collect()
                    self._watch()
                    self._enforce()
                    self.display.update(self._snapshot())
            finally:
                for cell in self.running.values():
                    cell.signal(signal.SIGKILL)
                self.display.close()
        return self.summary

    def _wake(self) -> None:
        """Put the cells whose rest is over back into the queue."""
        now = time.monotonic()
        self.queue.extend(job for until, job in self.resting if until <= now)
        self.resting = [(until, job) for until, job in self.resting if until > now]

    def _start(self) -> None:
        """Fill the free slots in order, passing over cells that another runner holds.

        A cell that needs more devices than are free is not overtaken: it might wait for ever.
        """
        for _ in range(len(self.queue)):
            if self.urgency or (slot := self.slots.take(self.queue[0].cell)) is None:
                return
            job = self.queue.popleft()
            match job.state():
                case "done":
                    self.summary.outcomes.append(Outcome(job, 0.0))
                case "running":
                    self.queue.append(job)
                case _ if ended := folder.final_failure_since(job.folder, self.before[job.folder]):
                    self._finish(Outcome(job, 0.0, ended.failure, ended.message))
                case _:
                    self._launch(job, slot)
                    continue
            self.slots.give_back(slot, job.cell)

    def _launch(self, job: Job, slot: Slot) -> None:
        try:
            job.cell.write(job.folder / "config.yaml")
        except OSError as error:
            message = f"{type(error).__name__}: {error}"
            self._finish(Outcome(job, 0.0, failure.classify_failure(1, message), message))
            self.slots.give_back(slot, job.cell)
            return
        try:
            cell = self.launcher.start(job, slot, self.before[job.folder])
        except ServerLost as error:
            self._finish(Outcome(job, 0.0, "killed", str(error), stopped=self.urgency > 0))
            self.slots.give_back(slot, job.cell)
            return
        self.running[cell.process.sentinel] = cell

    def _collect(self) -> None:
        """Wait a moment for cells to end, and record those that have."""
        if not self.running and (self.queue or self.resting):
            # Another runner holds what is left, or it rests before a retry.
            time.sleep(TICK)
        for sentinel in wait(list(self.running), timeout=TICK if self.running else 0):
            assert isinstance(sentinel, int)
            cell = self.running.pop(sentinel)
            code = cell.end()
            shared = self.slots.is_shared(cell.slot)
            self.slots.give_back(cell.slot, cell.job.cell)
            outcome = None if code == BUSY else self._outcome(cell, code)
            lock.release_lock(cell.job.folder)
            if outcome is None:
                self.queue.append(cell.job)
                continue
            if outcome.failure == "out-of-memory" and shared:
                # Not necessarily its own fault: once more, and alone.
                self.slots.give_whole(cell.job.cell)
                outcome = replace(outcome, crowded=True)
            self._finish(outcome)

    def _watch(self) -> None:
        """Give up cells that make no step, and end those that have had their time."""
        for cell in self.running.values():
            if cell.kill_at is not None:
                continue
            if cell.idle() > self.limits.stall:
                # The worker's fault handler answers with where every thread stands, in the log.
                cell.stop(signal.SIGABRT, GRACE, f"no step for {self.limits.stall:.0f} s")
            elif cell.seconds > self.limits.time:
                cell.stop(signal.SIGTERM, GRACE, f"took longer than {self.limits.time:.0f} s")

    def _outcome(self, cell: Running, code: int) -> Outcome:
        """The cell's end, recorded in its last attempt where there is no result."""
        job, seconds = cell.job, cell.seconds
        if folder.read_result(job.folder, job.identity) is not None:
            return Outcome(job, seconds)
        begun = folder.list_attempts(job.folder)
        # A process that died before it began an attempt of its own leaves the last one's record.
        attempt = begun[-1] if begun and folder.read_exit(begun[-1]) is None else None
        log = "" if attempt is None else folder.read_log_tail(attempt)
        ended = Exit(
            failure="timed-out" if cell.overdue else failure.classify_failure(code, log),
            returncode=code,
            message=cell.overdue or failure.describe_failure(code, log),
            rank=failure.first_failed_rank(log),
            finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        try:
            ended.write((attempt or folder.create_attempt(job.folder)) / "exit.json")
        except OSError as error:
            # What keeps this record from being written has kept the log from saying so.
            reason = f"{type(error).__name__}: {error}"
            return Outcome(job, seconds, failure.classify_failure(code, reason), reason)
        stopped = self.urgency >= STOP and ended.failure == "killed"
        return Outcome(job, seconds, ended.failure, ended.message, stopped)

    def _finish(self, outcome: Outcome) -> None:
        name, why = outcome.job.name, f"{outcome.failure}: {outcome.message}"
        if (rest := self._rest(outcome)) is not None:
            self.resting.append((time.monotonic() + rest, outcome.job))
            self.display.say(f"retry    {name}  in {rest:.0f} s, after {why}")
            return
        self.summary.outcomes.append(outcome)
        if outcome.failure is None:
            self.display.say(f"done     {name}  {outcome.seconds:.1f} s")
        elif outcome.stopped:
            self.display.say(f"stopped  {name}")
        else:
            alone = folder.rerun_command(outcome.job.folder, self.launcher.smoke)
            self.display.say(f"FAILED   {name}  {why}\n         alone: {alone}")

    def _rest(self, outcome: Outcome) -> float | None:
        """Seconds until the cell is tried again; None where it is not."""
        if outcome.failure is None or self.urgency or outcome.seconds > self.limits.time:
            return None
        key = (outcome.job.folder, outcome.failure)
        self.tries[key] += 1
        if self.tries[key] > (1 if outcome.crowded else RETRIES.get(outcome.failure, 0)):
            return None
        return BACKOFF * 2.0 ** (self.tries[key] - 1)

    def _enforce(self) -> None:
        """Carry out what signals and limits have asked for."""
        now = time.monotonic()
        for cell in self.running.values():
            if self.urgency >= STOP and cell.kill_at is None:
                cell.stop(signal.SIGTERM, GRACE)
            elif self.urgency > STOP or (cell.kill_at is not None and now > cell.kill_at):
                cell.signal(signal.SIGKILL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.summary.stopped_by = signal.Signals(number)
        self.urgency += 1 if number == signal.SIGINT else STOP
        count = len(self.running)
        self.display.say(
            f"finishing {count} running cells, starting no more; Ctrl-C again stops them"
            if self.urgency == 1
            else f"stopping {count} running cells; the same command goes on where they stopped"
        )

    def _snapshot(self) -> Snapshot:
        cells = []
        for cell in self.running.values():
            steps = folder.read_progress(cell.job.folder)
            cells.append(StartedCell(cell.job.name, steps, cell.seconds))
            if steps is not None and steps.memory is not None:
                self.slots.learn(cell.job.cell, steps.memory)
        done = [outcome for outcome in self.summary.outcomes if outcome.failure is None]
        resting = [job for _, job in self.resting]
        return Snapshot(
            done=len(done),
            failed=len(self.summary.failed),
            waiting=[] if self.urgency else [job.name for job in (*self.queue, *resting)],
            running=cells,
            durations=[(o.job.name, o.seconds) for o in done if o.seconds],
            slots=max(len(self.slots), len(self.running)),
        )
