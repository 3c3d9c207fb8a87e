"""Status and logs of cells, as the commands `status` and `logs` print them.

They read the folders of the cells, so they work at any time on any machine with the disk. On a
machine with SLURM, `status` also asks for what the waiting jobs of a study wait.
"""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lit_attn.ablate.display import Snapshot, StartedCell, format_seconds
from lit_attn.cells import folder
from lit_attn.cells.failure import MEMORY_ADVICE
from lit_attn.cells.folder import CellStatus
from lit_attn.cells.inputs import change_finder
from lit_attn.cells.records import Plan, PlannedCell
from lit_attn.cells.screening import read_screening
from lit_attn.files import require_folder
from lit_attn.schema.errors import ConfigError, escape_control, program, require

if TYPE_CHECKING:
    from lit_attn.report.answers.runs import Cell

MAX_FAILED = 10  # Failed and stale cells that are described; further ones are counted.
LOG_BLOCK = 2**20  # Characters of a log that are printed at once.
LOG_LINES = 6  # Last lines of a failed cell's log that are shown.
LOG_WIDTH = 200  # Characters of such a line.
CRASH = "Fatal Python error: "
"""Start of what Python writes if the process crashes; the innermost call follows."""
PAUSE = 3.0  # Seconds between two statuses of `watch`.
QUEUE_PAUSE = 30.0
"""Seconds between two questions of `watch` to SLURM, whose controller serves all users."""
RETRY_TIME = 60.0
"""Seconds after a failure in which its runner may retry the cell; the longest delay is 40 s."""
CLEAR_SCREEN = "\x1b[H\x1b[2J"  # Escape sequences of a terminal.

ADVICE: dict[folder.State, str] = {
    "unreadable": "run the same command again; the cell starts again from its last checkpoint, "
    "unless a newer lit_attn has written its result",
    "out-of-memory": MEMORY_ADVICE,
    "diverged": "change optimizer.lr, schedule.warmup or training.clip, or it would diverge again",
    "killed": "run the same command again to resume; if nobody killed it, the memory was full",
    "timed-out": "run the same command again to resume; --stall sets the limit",
    "no-space": "free disk space, then run the same command again",
    "bad-configuration": "correct the key that the message names",
    "error": "read the whole log, then run the cell alone",
}


FIRST_STEP = re.compile(r"loss is \S+ at step 0\b")
"""Message of a loss that is not finite before the first update."""


def find_advice(status: CellStatus) -> str | None:
    """Return what a user can do about a failed cell, None for another cell."""
    if status.state == "diverged" and status.exit and FIRST_STEP.search(status.exit.message):
        # No rate has been used yet.
        return "correct the formula or the data: the loss is not finite before the first update"
    if status.state == "killed" and status.exit and "CANCELLED" in status.exit.message:
        return "its job was cancelled; run the same command again to submit it"
    return ADVICE.get(status.state)


class StudyCell(NamedTuple):
    """A planned cell with its folder and its status."""

    planned: PlannedCell
    folder: Path
    status: CellStatus

    @property
    def name(self) -> str:
        """Name of the cell within its study."""
        return f"{self.planned.variant}/{self.planned.seed}"


AskQueues = Callable[[list[Path]], Mapping[Path, Iterable[str]]]
"""Function that returns the lines about waiting jobs of each study's folder."""


def watch(where: Path, ask_queues: AskQueues) -> None:
    """Print the status of the studies in `where` every few seconds until every cell has ended.

    A terminal shows only the newest status. Other outputs get each status that differs from the one
    before. Raises ConfigError without a study.
    """
    previous = ""
    queues: Mapping[Path, Iterable[str]] = {}
    next_question = -math.inf
    while True:
        plans, unreadable = load_plans(where)
        if time.monotonic() >= next_question:
            queues = ask_queues([place for _, place in plans])
            next_question = time.monotonic() + QUEUE_PAUSE
        studies = []
        cells: list[StudyCell] = []
        for plan, place in plans:
            study_cells = read_cells(plan, place)
            screening = describe_screening(place)
            studies.append(f"{describe(plan, study_cells, queues.get(place, ()), screening)}\n")
            cells += study_cells
        skipped = [f"{error} (skipped)\n" for error in unreadable]
        text = "".join(studies + skipped)
        if text != previous:
            start = CLEAR_SCREEN if sys.stdout.isatty() else ""
            print(start + text, end="", flush=True)
        if all(has_ended(cell) for cell in cells):
            return
        previous = text
        time.sleep(PAUSE)


def has_ended(cell: StudyCell) -> bool:
    """Return True if a cell has a result, or has failed and its runner does not retry it."""
    status = cell.status
    if status.state == "done":
        return True
    if status.state not in ADVICE:
        return False
    if status.state in folder.FINAL_FAILURES or status.exit is None or status.attempt is None:
        return True
    seconds_since_end = time.time() - (status.attempt / "exit.json").stat().st_mtime
    return seconds_since_end > RETRY_TIME


def read_plans(where: Path) -> list[tuple[Plan, Path]]:
    """Return the plans and folders of the studies in the folder `where`, or of the study `where`.

    A plan that cannot be read is reported and skipped. Raises ConfigError if there is no other.
    """
    plans, unreadable = load_plans(where)
    for error in unreadable:
        print(f"{error} (skipped)", file=sys.stderr)
    return plans


def load_plans(where: Path) -> tuple[list[tuple[Plan, Path]], list[ConfigError]]:
    """Return the plans and folders of the studies in `where`, and the errors of unreadable plans.

    `where` can be the folder of one study. Raises ConfigError if no plan can be read.
    """
    require_folder(where)
    paths = sorted(where.glob("plan.json")) or sorted(where.glob("*/plan.json"))
    if not paths:
        for place in (where, *where.glob("*/")):
            if place.is_dir():
                # `glob` skips a folder that cannot be read; this raises the error.
                next(place.iterdir(), None)
        raise ConfigError(f"{where}: contains no study (no */plan.json)")
    plans = []
    errors = []
    for path in paths:
        try:
            plans.append((Plan.load(path), path.parent))
        except ConfigError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    return plans, errors


def read_cells(plan: Plan, place: Path) -> list[StudyCell]:
    """Return the status of every cell of a plan, in the order of the plan.

    A cell that is a part of two variants, such as one under two criteria of `match`, comes once.
    """
    cells = []
    paths = set()
    for planned in (*plan.trials, *plan.cells):
        path = place / planned.path
        if path in paths:
            continue
        paths.add(path)
        cells.append(StudyCell(planned, path, folder.read_cell(path, planned.identity)))
    return cells


def describe_screening(place: Path) -> list[str]:
    """Return the line about the screening of the study in `place`, if it has one."""
    screening = read_screening(place)
    return [] if screening is None else [f"  screening  {screening.describe_state()}"]


def measure_share(cells: list[StudyCell]) -> float:
    """Return the share of the steps of all cells that are done, with equally long cells."""
    share = 0.0
    for cell in cells:
        progress = cell.status.progress
        if cell.status.state == "done":
            share += 1
        elif progress is not None:
            share += progress.step / progress.total
    return share / max(1, len(cells))


def describe(
    plan: Plan, cells: list[StudyCell], queue: Iterable[str] = (), screening: Iterable[str] = ()
) -> str:
    """Return counts, the time left, the running cells, and the failed cells with advice.

    `queue` are lines about jobs of the study that wait, and `screening` those of its screening.
    """
    states = [cell.status.state for cell in cells]
    at_once = max(1, states.count("running"))
    counts = folder.count_states(states)
    seconds = estimate_seconds(plan.study, cells, at_once)
    if seconds:
        counts += f"; about {format_seconds(seconds)} left with {at_once} at once"
    lines = [f"{plan.study}: {plan.title}", f"  {counts}"]
    running = [cell for cell in cells if cell.status.state == "running"]
    lines += [f"  running  {cell.name}  {_describe_progress(cell)}" for cell in running]
    lines += [f"  {line}" for line in queue]
    failed = [cell for cell in cells if cell.status.state in ADVICE]
    for cell in failed[:MAX_FAILED]:
        lines += _describe_failure(cell)
    if len(failed) > MAX_FAILED:
        lines.append(f"  and {len(failed) - MAX_FAILED} more failed cells")
    lines += screening
    lines += _describe_inputs(cells)
    return escape_control("\n".join(lines) + "\n")


def make_answer(plans: list[tuple[Plan, Path]]) -> str:
    """Return the status of every study and cell as JSON."""
    # Imported here, because the text of the status needs no models of answers.
    from lit_attn.report.answers.entry import write_answer
    from lit_attn.report.answers.runs import StatusAnswer, StudyDesign, StudyStatus

    studies = []
    for plan, place in plans:
        cells = read_cells(plan, place)
        states = [cell.status.state for cell in cells]
        at_once = max(1, states.count("running"))
        study = StudyStatus(
            study=plan.study,
            title=plan.title,
            counts=dict(Counter(states)),
            seconds_left=estimate_seconds(plan.study, cells, at_once),
            design=StudyDesign.describe(read_screening(place)),
            cells=make_cell_answers(cells),
        )
        studies.append(study)
    return write_answer(StatusAnswer(studies=studies))


def make_cell_answers(cells: list[StudyCell]) -> "list[Cell]":
    """Return state, progress, failure and change of each cell for an answer in JSON."""
    from lit_attn.report.answers.runs import Cell

    find_change = change_finder()
    answers = []
    for cell in cells:
        status = cell.status
        progress = status.progress if status.state == "running" else None
        message = None if status.exit is None else status.exit.message
        answer = Cell.from_record(
            cell.planned,
            state=status.state,
            step=None if progress is None else progress.step,
            steps=None if progress is None else progress.total,
            message=message if status.state in ADVICE else None,
            advice=find_advice(status),
            stale=find_change(status.result) or None,
            folder=str(cell.folder),
        )
        answers.append(answer)
    return answers


def _describe_progress(cell: StudyCell) -> str:
    """Return the steps of a running cell, and the time that it still needs."""
    progress = cell.status.progress
    if progress is None:
        return "starting"
    steps = f"{progress.step}/{progress.total} steps"
    if progress.remaining_seconds is None:
        return steps
    return f"{steps}, about {format_seconds(progress.remaining_seconds)} left"


def _describe_inputs(cells: list[StudyCell]) -> Iterator[str]:
    """Yield lines about finished cells whose inputs have changed, and about unchecked inputs."""
    find_change = change_finder()
    stale = []
    unchecked: set[str] = set()
    for cell in cells:
        result = cell.status.result
        change = find_change(result)
        if change:
            stale.append(f"{cell.name}: {change}")
        if result is not None:
            # A file that was absent when the cell ran has an empty stamp.
            unchecked.update(name for name, stamp in result.inputs.items() if not stamp)
    for description in stale[:MAX_FAILED]:
        yield f"  stale    {description}"
    if stale:
        yield f"  {len(stale)} stale cells; see `{program('rerun')} stale`"
    for name in sorted(unchecked):
        yield f"  unchecked {name}: absent when cells ran"


def estimate_seconds(study: str, cells: list[StudyCell], at_once: int) -> float | None:
    """Return the seconds until all cells but the diverged ones have a result, or None."""
    finished = []
    started = []
    waiting = []
    for cell in cells:
        name = f"{study}/{cell.name}"
        status = cell.status
        if status.result is not None:
            finished.append((name, status.result.wall_time))
        elif status.state == "diverged":
            continue
        elif status.progress is not None:
            progress = status.progress
            seconds = progress.step * (progress.step_time or 0.0)
            started.append(StartedCell(name, progress, seconds))
        else:
            waiting.append(name)
    snapshot = Snapshot(
        done=0, failed=0, waiting=waiting, running=started, durations=finished, slots=at_once
    )
    return snapshot.remaining_seconds()


def _describe_failure(cell: StudyCell) -> Iterator[str]:
    """Yield the lines about a failed cell: its error, the end of its log, and what to do."""
    status = cell.status
    rank = ""
    message = "result.json is torn or of another identity"
    if status.exit is not None:
        message = status.exit.message
        if status.exit.rank:
            rank = f" on rank {status.exit.rank}"
    yield f"  FAILED   {cell.name}  {status.state}{rank}: {message}"
    log = "" if status.attempt is None else folder.read_log_tail(status.attempt)
    for line in _choose_log_lines(log):
        yield f"      | {line}"
    yield f"      advice:    {find_advice(status)}"
    yield f"      log:       {program('logs', cell.folder)}"
    yield f"      run alone: {program('train', cell.folder)}"


def _choose_log_lines(log: str) -> list[str]:
    """Return the last lines of a log, or the first ones about the crash of its process."""
    lines = [line for line in log.splitlines() if line.strip()]
    start = max(0, len(lines) - LOG_LINES)
    for number, line in enumerate(lines):
        if line.startswith(CRASH):
            start = number
    chosen = []
    for line in lines[start : start + LOG_LINES]:
        end = "..." if len(line) > LOG_WIDTH else ""
        chosen.append(line[:LOG_WIDTH] + end)
    return chosen


def print_log(name: str) -> None:
    """Print the log of the last attempt of a cell: STUDY/VARIANT/SEED, or the folder of a cell.

    Raises ConfigError without such a cell or log. A terminal shows control characters as text.
    """
    cell = _find_cell(name)
    attempts = folder.list_attempts(cell)
    if not attempts:
        raise ConfigError(f"{cell}: has no log, because the cell was not started")
    try:
        with (attempts[-1] / folder.log_name(0)).open(encoding="utf-8", errors="replace") as log:
            # In blocks, because a log can be larger than the memory.
            for block in iter(lambda: log.read(LOG_BLOCK), ""):
                print(escape_control(block) if sys.stdout.isatty() else block, end="")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{attempts[-1]}: its log cannot be read: {error.strerror}") from error
    sys.stdout.flush()


def _find_cell(text: str) -> Path:
    """Return the folder of a cell, and of several identities the one that changed last."""
    if (Path(text) / "config.yaml").exists():
        return Path(text)
    runs = Path("runs")
    variant, _, seed = text.rpartition("/")
    folders = [path for path in (runs / variant).glob("*-*") if path.match(f"{seed}-*")]
    if folders:
        return max(folders, key=lambda path: path.stat().st_mtime)
    names = []
    for plan, _ in read_plans(runs):
        names += [f"{plan.study}/{cell.variant}/{cell.seed}" for cell in plan.cells]
    require(f"{runs}: has no cell", text, names)
    raise ConfigError(f"{text}: has no log, because the cell was not started")
