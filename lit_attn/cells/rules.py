"""Effects of the rule `stop` on the cells of a study, read from its records alone.

No function of this file computes a statistic, so `status` answers at once. The decisions themselves
are those of `endings.json` (lit_attn.ablate.stopping).
"""

from collections.abc import Mapping
from pathlib import Path

from lit_attn.cells.decisions import Ending, Endings
from lit_attn.cells.records import Plan


def list_ended_cells(plan: Plan, folder: Path, endings: Mapping[str, Ending]) -> dict[Path, Ending]:
    """Return the cells of ended variants that no other variant needs."""
    needed = {cell.path for cell in plan.cells if cell.variant not in endings}
    ended = {}
    for cell in plan.cells:
        if cell.variant in endings and cell.path not in needed:
            ended[folder / cell.path] = endings[cell.variant]
    return ended


def read_endings(plan: Plan, folder: Path) -> dict[str, Ending]:
    """Return the recorded endings that hold for `plan`, by variant."""
    recorded = None if plan.stop is None else Endings.read_valid(folder / "endings.json")
    return {} if recorded is None else recorded.of_plan(plan)


def read_ended_cells(plan: Plan, folder: Path) -> dict[Path, Ending]:
    """Return the cells that need not run by the recorded decisions of a study."""
    return list_ended_cells(plan, folder, read_endings(plan, folder))
