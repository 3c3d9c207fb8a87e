"""Status and logs of cells, as the commands `status` and `logs` print them.

They only read the folders of the cells, so they work at any time on any machine with the disk.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lit_attn.ablate.display import Snapshot, StartedCell, format_seconds
from lit_attn.cells import folder
from lit_attn.cells.folder import CellStatus
from lit_attn.cells.inputs import change_finder
from lit_attn.cells.records import Plan, PlannedCell
from lit_attn.files import require_folder
from lit_attn.schema.errors import ConfigError, escape_control, program, require

MAX_FAILED = 10  # Failed and stale cells that are described; further ones are counted.
LOG_BLOCK = 2**20  # Characters of a log that are printed at once.
LOG_LINES = 6  # Last lines of a failed cell's log that are shown.

ADVICE: dict[folder.State, str] = {
    "unreadable": "run the same command again; the cell starts again from its last checkpoint",
    "out-of-memory": "run fewer cells at once (--jobs), or increase training.devices",
    "diverged": "change optimizer.lr, schedule.warmup or training.clip, or it would diverge again",
    "killed": "run the same command again to resume; if nobody stopped it, the memory was full",
    "timed-out": "run the same command again to resume; --stall sets the limit",
    "no-space": "free disk space, then run the same command again",
    "bad-configuration": "correct the key that the message names",
    "error": "read the whole log, then run the cell alone",
}


class StudyCell(NamedTuple):
    """A planned cell with its folder and its status."""

    planned: PlannedCell
    folder: Path
    status: CellStatus

    @property
    def name(self) -> str:
        """Name of the cell within its study."""
        return f"{self.planned.variant}/{self.planned.seed}"


def read_plans(where: Path) -> list[tuple[Plan, Path]]:
    """Return the plans and folders of the studies in the folder `where`, or of the study `where`.

    A plan that cannot be read is reported and skipped. Raises ConfigError if there is no other.
    """
    require_folder(where)
    paths = sorted(where.glob("plan.json")) or sorted(where.glob("*/plan.json"))
    if not paths:
        for place in filter(Path.is_dir, (where, *where.glob("*/"))):
            next(place.iterdir(), None)  # `glob` skips what cannot be read.
        raise ConfigError(f"{where}: contains no study (no */plan.json)")
    plans, errors = [], []
    for path in paths:
        try:
            plans.append((Plan.load(path), path.parent))
        except ConfigError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    print("".join(f"{error} (skipped)\n" for error in errors), end="", file=sys.stderr)
    return plans


def read_cells(plan: Plan, place: Path) -> list[StudyCell]:
    """Return the status of every cell of a plan, in the order of the plan."""
    cells = [(planned, place / planned.path) for planned in (*plan.trials, *plan.cells)]
    return [StudyCell(p, path, folder.read_cell(path, p.identity)) for p, path in cells]


def describe(plan: Plan, cells: list[StudyCell]) -> str:
    """Return counts, the time left, the running cells, and the failed cells with advice."""
    states = [cell.status.state for cell in cells]
    at_once = max(1, states.count("running"))
    counts = folder.count_states(states)
    if seconds := estimate_seconds(plan.study, cells, at_once):
        counts += f"; about {format_seconds(seconds)} left with {at_once} at once"
    lines = [f"{plan.study}: {plan.title}", f"  {counts}"]
    for cell in (cell for cell in cells if cell.status.state == "running"):
        steps = "starting"
        if progress := cell.status.progress:
            seconds = progress.remaining_seconds
            rest = "" if seconds is None else f", about {format_seconds(seconds)} left"
            steps = f"{progress.step}/{progress.total} steps{rest}"
        lines.append(f"  running  {cell.name}  {steps}")
    failed = [cell for cell in cells if cell.status.state in ADVICE]
    for cell in failed[:MAX_FAILED]:
        lines += _describe_failure(cell)
    if len(failed) > MAX_FAILED:
        lines.append(f"  and {len(failed) - MAX_FAILED} more failed cells")
    changes = map(change_finder(), (cell.status.result for cell in cells))
    stale = [f"{c.name}: {change}" for c, change in zip(cells, changes, strict=True) if change]
    lines += [f"  stale    {text}" for text in stale[:MAX_FAILED]]
    if stale:
        lines.append(f"  {len(stale)} stale cells; see `{program('rerun')} stale`")
    results = [cell.status.result for cell in cells if cell.status.result is not None]
    unknown = {name for result in results for name, stamp in result.inputs.items() if not stamp}
    lines += [f"  unchecked {name}: absent when cells ran" for name in sorted(unknown)]
    return escape_control("\n".join(lines) + "\n")


def estimate_seconds(study: str, cells: list[StudyCell], at_once: int) -> float | None:
    """Return the seconds until all cells but the diverged ones have a result, or None."""
    finished, started, waiting = [], [], []
    for cell in cells:
        name = f"{study}/{cell.name}"
        state, result, _, _, progress = cell.status
        if result is not None:
            finished.append((name, result.wall_time))
        elif progress is not None and state != "diverged":
            started.append(StartedCell(name, progress, progress.step * (progress.step_time or 0.0)))
        elif state != "diverged":
            waiting.append(name)
    return Snapshot(0, 0, waiting, started, finished, at_once).remaining_seconds()


def _describe_failure(cell: StudyCell) -> Iterator[str]:
    state, _, attempt, end, _ = cell.status
    rank = f" on rank {end.rank}" if end is not None and end.rank else ""
    message = end.message if end is not None else "result.json is torn or of another identity"
    yield f"  FAILED   {cell.name}  {state}{rank}: {message}"
    log = "" if attempt is None else folder.read_log_tail(attempt)
    log_lines = [line for line in log.splitlines() if line.strip()]
    yield from (f"      | {line}" for line in log_lines[-LOG_LINES:])
    yield f"      advice:    {ADVICE[state]}"
    yield f"      log:       {program('logs', cell.folder)}"
    yield f"      run alone: {program('train', cell.folder)}"


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
    """Return the folder of a cell. Of several identities, return the one that changed last."""
    if (Path(text) / "config.yaml").exists():
        return Path(text)
    runs = Path("runs")
    variant, _, seed = text.rpartition("/")
    if folders := [path for path in (runs / variant).glob("*-*") if path.match(f"{seed}-*")]:
        return max(folders, key=lambda path: path.stat().st_mtime)
    plans = read_plans(runs)
    names = [f"{plan.study}/{cell.variant}/{cell.seed}" for plan, _ in plans for cell in plan.cells]
    require(f"{runs}: has no cell", text, names)
    raise ConfigError(f"{text}: has no log, because the cell was not started")
