"""Functions that a runner or a follower calls after the end of each cell."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lit_attn.ablate.plan import Job
from lit_attn.cells.decisions import Ending

Review = Callable[[Path], Mapping[Path, Ending]]
"""Function that returns the cells of a study's folder that need not run, by their folders."""


def review_nothing(study: Path) -> Mapping[Path, Ending]:
    """Return no cell: all cells of a study run."""
    return {}


Observer = Callable[[Job], str]
"""Function that gets every cell that has ended, and returns a line for the display or nothing."""


def observe_nothing(ended: Job) -> str:
    """Return no line."""
    return ""


def describe_dropped(dropped: Iterable[Job], ended: Mapping[Path, Ending]) -> list[str]:
    """Return a line for each variant whose waiting cells do not run."""
    endings = {job.variant: ended[job.folder] for job in dropped}
    return [f"ended    {variant}  {ending.describe()}" for variant, ending in endings.items()]
