"""Runner: runs cells, several at once, until each has a result or has failed."""

import contextlib
import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

from lit_attn.ablate.display import Display, Snapshot, StartedCell
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import CellProcess, Launcher
from lit_attn.ablate.outcomes import (
    Observer,
    Outcome,
    Summary,
    describe_exception,
    describe_same_failures,
    make_os_failure,
    observe_nothing,
)
from lit_attn.ablate.signals import handle_signals
from lit_attn.ablate.slots import Slot, Slots
from lit_attn.cells import failure, folder, lock
from lit_attn.cells.records import Exit, FailureClass, Result
from lit_attn.schema.errors import plural

TICK = 0.25  # Seconds between two checks of the running cells and two updates of the display.
GRACE = 15.0
"""Seconds that a cell has to write its last checkpoint after it was told to stop, if nothing tells
when this process will be killed."""
RETRIES: dict[FailureClass, int] = {"killed": 3, "timed-out": 1, "no-space": 2}
"""Retries of a cell within one run by failure class; other classes would fail again."""
BACKOFF = 10.0  # Seconds before the first retry of a cell; each further retry doubles the delay.
SAME_FAILURES = 2  # Cells that fail in the same way before the others are skipped.
STOP = 2
"""Urgency at which running cells are stopped: an interrupt adds 1, SIGTERM and SIGHUP add 2."""
REPEAT = 1.0  # Seconds in which interrupts count as one: GNU timeout and `Study.run` send two.


class Runner:
    """Runs cells in slots, retries them, and stops them on signals.

    A first SIGINT lets the running cells finish. A second SIGINT, SIGTERM or SIGHUP lets them write
    a checkpoint and end. A third kills them. A cell without a step for `stall` seconds is killed.
    `observe` gets every cell that has ended, and its lines are displayed.
    """

    def __init__(
        self,
        launcher: Launcher,
        slots: Slots,
        display: Display,
        stall: float = 1800.0,
        observe: Observer = observe_nothing,
    ) -> None:
        self.launcher = launcher
        self.slots = slots
        self.display = display
        self.stall = stall
        self.observe = observe
        self.grace = GRACE  # Seconds that a stopped cell has to write its last checkpoint.
        self.overdue = ""  # Limit that stopped cells have exceeded, if it is not the user's stop.
        self.retries = RETRIES
        self.queue: deque[Job] = deque()
        self.before: dict[Path, int] = {}  # Number of attempts of each cell before this run.
        self.tries: Counter[tuple[Path, FailureClass]] = Counter()
        # Failures of each variant in this run; empty for a result or a passing failure.
        self.ends: defaultdict[str, list[str]] = defaultdict(list)
        # Variants of the cells of each study that have ended with an exception in this run.
        self.exceptions: defaultdict[tuple[Path, str], list[str]] = defaultdict(list)
        self.resting: list[tuple[float, Job]] = []  # Times of retries, and the cells that wait.
        self.running: dict[int, CellProcess] = {}
        self.announced: set[Path] = set()  # Cells whose foreign lock was reported.
        # Ends of attempts that could not be written, for example on a full disk, by cell.
        self.unrecorded: dict[Path, Exit] = {}
        self.has_warned = False  # True after the warning that cells train on the CPU.
        self.summary = Summary()
        self.urgency = 0
        self.last_interrupt = -REPEAT

    def run(self, jobs: Iterable[Job]) -> Summary:
        """Run `jobs` in order. Cells that another runner holds come last."""
        self.queue = deque(jobs)
        self.before = {job.folder: len(folder.list_attempts(job.folder)) for job in self.queue}
        self.launcher.share_cores(self.slots.processes_at_once(self.queue))
        with handle_signals(self._interrupt):
            try:
                while self.running or ((self.queue or self.resting) and not self.urgency):
                    if not self.urgency:
                        self._queue_retries()
                        self._start()
                    self._collect()
                    self._enforce()
                    self.display.update(self._snapshot())
            finally:
                if self.running:
                    # After an unforeseen error, the running cells write a checkpoint and end.
                    self.urgency = max(self.urgency, STOP)
                while self.running:
                    self._enforce()
                    self._collect()
                self._record_again()
                self.display.close()
        return self.summary

    def _queue_retries(self) -> None:
        """Move the cells whose delay is over to the end of the queue."""
        now = time.monotonic()
        self.queue.extend(job for due, job in self.resting if due <= now)
        self.resting = [(due, job) for due, job in self.resting if due > now]

    def _start(self) -> None:
        """Start cells in order while slots are free, and skip cells that another runner holds.

        A cell that waits for several devices blocks the cells after it, or it might never start.
        """
        for _ in range(len(self.queue)):
            if self.urgency or not self.queue:
                return
            slot = self.slots.reserve(self.queue[0])
            if slot is None:
                return
            job = self.queue.popleft()
            try:
                is_started = self._start_in(slot, job)
            except OSError as error:
                self._finish(make_os_failure(job, 0.0, error))
                is_started = False
            if not is_started:
                self.slots.release(slot)

    def _start_in(self, slot: Slot, job: Job) -> bool:
        """Start a cell unless it has ended or runs elsewhere. Return True if it started."""
        state = job.state()
        if state == "running":
            # A lock of this runner is left if it could not be removed after the last attempt.
            lock.release_lock(job.folder)
            self.queue.append(job)
            return False
        if state == "done":
            # Another runner has trained it, and its result may be the last that a table needed.
            self.summary.outcomes.append(Outcome(job, 0.0))
            self._note_end(job)
            return False
        # Another runner may have tried the cell in the meantime.
        final = folder.final_failure_since(job.folder, self.before[job.folder])
        if final is not None:
            self._finish(Outcome(job, 0.0, final.failure, final.message))
            return False
        return self._launch(slot, job)

    def _launch(self, slot: Slot, job: Job) -> bool:
        """Write the configuration of a cell and start its process. Return True if it started."""
        try:
            job.write_config()
        except FileNotFoundError:
            # The cell has just started for another runner, and removes unfinished files.
            self.queue.append(job)
            return False
        # Only this process has watched the heartbeat of a holder on another machine. If the lock
        # cannot be removed, the cell itself reports why.
        with contextlib.suppress(lock.LockError):
            lock.remove_stale(job.folder)
        try:
            cell = self.launcher.start(job, slot, self.before[job.folder])
        except OSError as error:
            lost = Outcome(
                job,
                0.0,
                "killed",
                f"could not be started: {error}",
                is_stopped=self.urgency > 0,
            )
            self._finish(lost)
            return False
        self.running[cell.process.sentinel] = cell
        return True

    def _collect(self) -> None:
        """Wait up to one tick for cells to end, and record the ends."""
        if not self.running and (self.queue or self.resting):
            # The other cells run elsewhere or wait for a retry.
            self._report_foreign_locks()
            time.sleep(TICK)
        timeout = TICK if self.running else 0
        for sentinel in wait(list(self.running), timeout):
            assert isinstance(sentinel, int)
            self._end(self.running.pop(sentinel))

    def _end(self, cell: CellProcess) -> None:
        """Free the slot and the lock of a cell whose process has ended, and record its outcome.

        A cell that another runner has locked in the meantime goes to the end of the queue.
        """
        job = cell.job
        code = cell.end()
        self.slots.release(cell.slot)
        outcome = None
        if code != lock.BUSY:
            try:
                outcome = self._record(cell, code)
            except OSError as error:
                outcome = make_os_failure(job, cell.seconds, error)
                assert outcome.failure is not None
                end = Exit(failure=outcome.failure, returncode=code, message=outcome.message)
                self.unrecorded[job.folder] = end
        with contextlib.suppress(OSError):
            lock.release_lock(job.folder)
        if outcome is None:
            self.queue.append(job)
        else:
            self._finish(outcome)

    def _report_foreign_locks(self) -> None:
        """Write a line about each cell that this run waits for because another process holds it."""
        for job in self.queue:
            if job.folder in self.announced:
                continue
            holder = lock.read_holder(job.folder)
            if holder is None:
                continue
            self.announced.add(job.folder)
            if holder.is_alive() is not None:
                self.display.add_event(f"waiting  {job.name}  {holder} runs this cell")
                continue
            minutes = lock.STALE_AFTER / 60
            self.display.add_event(
                f"waiting  {job.name}  {holder} holds {job.folder / 'lock'}, and this machine "
                f"cannot look it up. Without a heartbeat the cell starts after {minutes:.0f} "
                "minutes. If the folder was copied, or that process has ended, delete the file."
            )

    def _enforce(self) -> None:
        """Stop cells that exceed a limit or that a signal ends, and kill them after the grace."""
        now = time.monotonic()
        for cell in self.running.values():
            if cell.kill_at is not None:
                if self.urgency > STOP or now > cell.kill_at:
                    cell.signal(signal.SIGKILL)
            elif cell.idle_seconds() > self.stall:
                # On SIGABRT the worker's fault handler writes the stack of every thread to the log.
                cell.stop(signal.SIGABRT, GRACE, f"no step for {self.stall:.0f} s")
            elif self.urgency >= STOP:
                cell.stop(signal.SIGTERM, self.grace, self.overdue)

    def _record(self, cell: CellProcess, code: int) -> Outcome:
        """Return the outcome of a cell that has ended, and write a failure to its last attempt."""
        job = cell.job
        seconds = cell.seconds
        result = folder.read_result(job.folder, job.identity)
        if result is not None:
            self._warn_of_cpu(cell, result)
            return Outcome(job, seconds)
        attempts = folder.list_attempts(job.folder)
        # A process that ended before it created its attempt must not overwrite the previous one.
        is_new = bool(attempts) and folder.read_exit(attempts[-1]) is None
        log = folder.read_log_tail(attempts[-1]) if is_new else ""
        end = failure.describe_end(code, log, cell.overdue)
        if self.urgency >= STOP and end.failure == "killed":
            end = end.model_copy(update={"is_stopped": True})
        # An error here probably kept the cell from writing its log, too.
        attempt = attempts[-1] if is_new else folder.create_attempt(job.folder)
        end.write(attempt / "exit.json")
        self.unrecorded.pop(job.folder, None)
        return Outcome(job, seconds, end.failure, end.message, is_stopped=end.is_stopped)

    def _warn_of_cpu(self, cell: CellProcess, result: Result) -> None:
        """Warn once if a cell with a GPU has trained on the CPU without being told to."""
        is_automatic = cell.job.settings["experiment"]["training"]["accelerator"] == "auto"
        if cell.slot.gpus and is_automatic and result.device == "CPU" and not self.has_warned:
            self.has_warned = True
            gpus = ", ".join(cell.slot.gpus)
            self.display.add_event(
                f"warning: GPU {gpus}: torch finds no GPU, so cells train on the CPU"
            )

    def _record_again(self) -> None:
        """Write the ends of attempts that could not be written before; report those that fail."""
        for cell_folder, end in self.unrecorded.items():
            try:
                if (cell_folder / "result.json").exists():
                    continue
                attempts = folder.list_attempts(cell_folder)
                if not attempts or folder.read_exit(attempts[-1]) is not None:
                    attempts.append(folder.create_attempt(cell_folder))
                end.write(attempts[-1] / "exit.json")
            except OSError as error:
                self.display.add_event(
                    f"{cell_folder}: its failure is not recorded: {error.strerror};"
                    " status shows the cell as interrupted or missing"
                )
        self.unrecorded.clear()

    def _finish(self, outcome: Outcome) -> None:
        """Report an outcome, and schedule a retry if the failure allows one."""
        job = outcome.job
        delay = self._retry_delay(outcome)
        if delay is not None:
            self.resting.append((time.monotonic() + delay, job))
            reason = f"{outcome.failure}: {outcome.message}"
            self.display.add_event(f"retry    {job.name}  in {delay:.0f} s, after {reason}")
            return
        self.summary.outcomes.append(outcome)
        self.display.add_event(outcome.describe())
        self._skip_failing_variant(outcome)
        self._stop_failing_study(outcome)
        self._note_end(job)

    def _note_end(self, job: Job) -> None:
        """Report the end of `job` to `observe`, and display its line."""
        line = self.observe(job)
        if line:
            self.display.add_event(line)

    def _retry_delay(self, outcome: Outcome) -> float | None:
        """Return the seconds until the cell is retried, or None if it is not retried."""
        if outcome.failure is None or self.urgency:
            return None
        key = (outcome.job.folder, outcome.failure)
        self.tries[key] += 1
        if self.tries[key] > self.retries.get(outcome.failure, 0):
            return None
        return BACKOFF * 2.0 ** (self.tries[key] - 1)

    def _skip_failing_variant(self, outcome: Outcome) -> None:
        """Skip the seeds of a variant without results if its first seeds failed in the same way."""
        variant = f"{outcome.job.study}/{outcome.job.variant}"
        end = describe_same_failures(outcome)
        self.ends[variant].append(end)
        has_result = any(outcome.job.folder.parent.glob("*/result.json"))
        if not end or has_result or self.ends[variant] != [end] * SAME_FAILURES:
            return
        skipped = self._drop(lambda job: job.folder.parent == outcome.job.folder.parent)
        if skipped:
            seeds = plural(skipped, "more seed")
            self.display.add_event(
                f"skipped  {variant}  {seeds}: {SAME_FAILURES} seeds failed in the same way;"
                " the next run tries them again"
            )

    def _stop_failing_study(self, outcome: Outcome) -> None:
        """Skip the cells of a study after two of its cells have ended with the same exception.

        If both are of one variant and others have results, only the variant is wrong, and
        `_skip_failing_variant` skips it.
        """
        exception = describe_exception(outcome)
        if not exception:
            return
        study = outcome.job.folder.parents[1]
        variants = self.exceptions[study, exception]
        variants.append(outcome.job.variant)
        is_alone = len(set(variants)) == 1 and any(study.glob("*/*/result.json"))
        if len(variants) < SAME_FAILURES or is_alone:
            return
        skipped = self._drop(lambda job: job.folder.parents[1] == study)
        if skipped:
            cells = plural(skipped, "more cell")
            self.display.add_event(
                f"skipped  {study.name}  {cells}: {len(variants)} cells ended with the same"
                f" exception ({exception}); repair it, and the same command continues"
            )

    def _drop(self, is_dropped: Callable[[Job], bool]) -> int:
        """Remove the waiting cells for which `is_dropped` holds, and return their number."""
        waiting = len(self.queue) + len(self.resting)
        self.queue = deque(job for job in self.queue if not is_dropped(job))
        self.resting = [(due, job) for due, job in self.resting if not is_dropped(job)]
        return waiting - len(self.queue) - len(self.resting)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            previous = self.last_interrupt
            self.last_interrupt = time.monotonic()
            if self.last_interrupt - previous < REPEAT:
                return
        self.summary.stopped_by = signal.Signals(number)
        self.urgency += 1 if number == signal.SIGINT else STOP
        cells = plural(len(self.running), "running cell")
        if self.urgency == 1:
            self.display.add_event(
                f"finishing {cells}, starting no more; press Ctrl-C again to stop at once"
            )
        else:
            self.display.add_event(f"stopping {cells}; the same command continues")

    def _snapshot(self) -> Snapshot:
        """Return the state of the run."""
        cells = []
        for cell in self.running.values():
            steps = folder.read_progress(cell.job.folder)
            cells.append(StartedCell(cell.job.name, steps, cell.seconds))
        waiting: list[str] = []
        if not self.urgency:
            waiting += [job.name for job in self.queue]
            waiting += [job.name for _, job in self.resting]
        slots = max(self.slots.limit, len(self.running))
        return self.summary.snapshot(waiting, cells, slots)
