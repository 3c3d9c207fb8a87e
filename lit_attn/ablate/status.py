"""What has become of the cells of studies: `python -m lit_attn.ablate status`.

It reads folders alone, and so tells the same on another machine that shares the disk, while a run
goes on and after it. It imports no torch.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from lit_attn.ablate.display import clock
from lit_attn.ablate.plan import expand
from lit_attn.cells import folder
from lit_attn.cells.folder import Progress, State
from lit_attn.cells.records import Exit, FailureClass, Plan, PlannedCell, Result
from lit_attn.config.study import choose, read_studies
from lit_attn.schema.errors import ConfigError

SHOWN = 10
"""Failed cells of a study that are written out; the others are counted."""
LINES = 6
"""Last lines of a failed cell's log."""

ADVICE: dict[FailureClass, str] = {
    "out-of-memory": "fewer cells at once (--jobs), training.devices or data.accumulate; "
    "none of them changes what it computes",
    "diverged": "it would again; optimizer.lr, schedule.warmup and training.clip are the study's "
    "to change, --retry runs it as it is",
    "killed": "the same command goes on from its last checkpoint; where nobody killed it, the "
    "machine was out of memory",
    "timed-out": "the same command goes on from its last checkpoint; --stall and --time are the "
    "limits, the log says where it stood",
    "no-space": "make room, then the same command",
    "bad-configuration": "correct the key that it names",
    "error": "the whole log, then the cell alone",
}


@dataclass(frozen=True)
class Seen:
    """A planned cell as its folder shows it."""

    planned: PlannedCell
    folder: Path
    state: State
    result: Result | None
    progress: Progress | None

    @property
    def name(self) -> str:
        """As it is called below its study."""
        return f"{self.planned.variant}/{self.planned.seed}"

    def last_end(self) -> tuple[Path, Exit] | None:
        """The last attempt and how it ended, where it has failed."""
        begun = folder.list_attempts(self.folder)
        ended = folder.read_exit(begun[-1]) if begun else None
        return None if ended is None else (begun[-1], ended)


def plans(where: Path, out: Path, names: list[str]) -> list[tuple[Plan, Path]]:
    """The plans of a file of studies, whose runs are below `out`, or of a folder of runs.

    With their folders. `names` are the studies; without any, the file's default ones, or all of the
    folder. Raises ConfigError where there is none.
    """
    if not where.is_dir():
        studies = choose(read_studies(where), names, where)
        matrices = [expand(study, out) for study in studies]
        return [(matrix.plan(), matrix.folder) for matrix in matrices]
    found = [path for path in sorted(where.glob("*/plan.json")) if not names or _of(path, names)]
    if not found:
        what = f"no study {', '.join(names)}" if names else "no study"
        raise ConfigError(f"{where}: holds {what} (no */plan.json)")
    return [(_read(path), path.parent) for path in found]


def look(plan: Plan, place: Path) -> list[Seen]:
    """Every cell of a plan, in its order."""
    return [_look(cell, place / cell.path) for cell in plan.cells]


def report(plan: Plan, place: Path, cells: list[Seen]) -> str:
    """Counts and time left, what runs, what has failed and what to do about it."""
    counts = Counter(cell.state for cell in cells)
    said = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    lines = [f"{plan.study}: {plan.title}", f"  {len(cells)} cells: {said}{_left(cells)}"]
    lines += [_running(cell) for cell in cells if cell.state == "running"]
    failed = [cell for cell in cells if cell.state in ADVICE]
    for cell in failed[:SHOWN]:
        lines += _failed(cell, plan.study, place.parent)
    if len(failed) > SHOWN:
        lines.append(f"  and {len(failed) - SHOWN} more that failed")
    return "\n".join(lines) + "\n"


def costs(cells: list[Seen]) -> dict[str, float]:
    """Seconds of a whole cell of each variant; none where no cell tells.

    They are what its finished cells took, or what its steps take, or else the mean over the study.
    """
    done: dict[str, list[float]] = {}
    paces: dict[str, list[float]] = {}
    for cell in cells:
        if cell.result is not None:
            done.setdefault(cell.planned.variant, []).append(cell.result.wall_time)
        elif cell.progress is not None and cell.progress.step_time is not None:
            pace = cell.progress.step_time * cell.progress.total
            paces.setdefault(cell.planned.variant, []).append(pace)
    known = {name: _mean(seconds) for name, seconds in (paces | done).items()}
    every = [seconds for several in (done or paces).values() for seconds in several]
    if not every:
        return {}
    return {c.planned.variant: known.get(c.planned.variant, _mean(every)) for c in cells}


def remaining(cells: list[Seen]) -> float | None:
    """Seconds of work that are left, one cell after the other; None where nothing tells."""
    known = costs(cells)
    if not known:
        return None
    left = 0.0
    for cell in cells:
        # What has diverged is left alone.
        if cell.result is None and cell.state != "diverged":
            made = cell.progress.step / cell.progress.total if cell.progress else 0.0
            left += known[cell.planned.variant] * (1 - made)
    return left


def _left(cells: list[Seen]) -> str:
    left = remaining(cells)
    if not left:
        return ""
    running = sum(cell.state == "running" for cell in cells)
    if not running:
        return f"; about {clock(left)} left, one after the other"
    return f"; about {clock(left / running)} left at {running} at once"


def _running(cell: Seen) -> str:
    if cell.progress is None:
        return f"  running  {cell.name}  starting"
    step, total, step_time, _ = cell.progress
    pace = "" if step_time is None else f", {step_time * 1e3:.4g} ms each"
    left = "" if step_time is None else f", about {clock(step_time * (total - step))} left"
    return f"  running  {cell.name}  {step}/{total} steps{pace}{left}"


def _failed(cell: Seen, study: str, runs: Path) -> Iterator[str]:
    found = cell.last_end()
    if found is None:
        return
    attempt, ended = found
    rank = f" on rank {ended.rank}" if ended.rank else ""
    yield f"  FAILED   {cell.name}  {ended.failure}{rank}: {ended.message}"
    said = [line for line in folder.read_log_tail(attempt).splitlines() if line.strip()]
    yield from (f"      | {line}" for line in said[-LINES:])
    below = "" if runs == Path("runs") else f" --runs {runs}"
    yield f"      to do: {ADVICE[ended.failure]}"
    yield f"      log:   python -m lit_attn.ablate logs {study}/{cell.name}{below}"
    yield f"      alone: {folder.rerun_command(cell.folder)}"


def _look(planned: PlannedCell, place: Path) -> Seen:
    result = folder.read_result(place, planned.identity)
    state = "done" if result is not None else folder.read_state(place, planned.identity)
    progress = None if result is not None or state == "missing" else folder.read_progress(place)
    return Seen(planned, place, state, result, progress)


def _read(path: Path) -> Plan:
    try:
        return Plan.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path}: is not a plan: {str(error).splitlines()[0]}") from error


def _of(path: Path, names: list[str]) -> bool:
    return path.parent.name in names


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
