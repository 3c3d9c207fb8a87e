"""Rule `gates` of a study: the order of its sizes, and the variants that do not run at the next.

The rule follows from the results of the smaller sizes alone (`lit_attn.report.gates`).
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lit_attn.cells.decisions import GATE, Ending
from lit_attn.cells.folder import read_result
from lit_attn.cells.records import Gate, Plan, PlannedCell
from lit_attn.cells.rules import count_open
from lit_attn.config.study import StudySource
from lit_attn.schema.errors import ConfigError, plural

if TYPE_CHECKING:
    from lit_attn.report.study_record import StudyRecord


class Loss(NamedTuple):
    """Size at which a variant was worse than the baseline, in words, and its corrected p."""

    size: str
    p: float


def find_gate_level(source: StudySource) -> float:
    """Return the largest corrected p with which a variant of the study is worse at a size."""
    # Imported here, because a study without the rule needs no statistics.
    from lit_attn.report.gates import gate_level

    return gate_level(source.sizes)


def require_seeds_for_gates(source: StudySource, seeds: tuple[int, ...]) -> None:
    """Raise the study's error if it has too few seeds for any variant to be worse at a size."""
    if source.study.gates is None:
        return
    from lit_attn.report.stats import pairs_for_a_star

    planned = {*source.study.seeds, *seeds}
    needed = pairs_for_a_star(1, find_gate_level(source))
    if len(planned) < needed:
        raise source.error(
            ("gates",),
            f"with {plural(len(planned), 'planned seed')} and {source.sizes} sizes no variant can"
            f" be significantly worse; use at least {needed} seeds, or leave out `gates`",
        )


def find_gated(plan: Plan, folder: Path) -> dict[str, Ending]:
    """Return the variants of the study in `folder` that are worse at a smaller size, by name.

    A size decides after all of its cells have ended. A variant whose search has not ended stands
    for its rows under all criteria of `match`, so it is searched unless all of them are worse.
    """
    gate = plan.gate
    if gate is None or not gate.before:
        return {}
    worse: dict[str, Loss] = {}
    rows: dict[str, set[str]] = {}
    for before in gate.before:
        study = _read_complete_size(folder.parent, before)
        if study is None:
            break
        _add_losses(study, gate, worse, rows)
    cells: dict[str, list[PlannedCell]] = {}
    for cell in plan.cells:
        cells.setdefault(cell.variant, []).append(cell)
    endings: dict[str, Ending] = {}
    for variant in plan.variants:
        own_cells = cells.get(variant.name, [])
        names = [variant.name] if own_cells else sorted(rows.get(variant.name, ()))
        losses = [worse[name] for name in names if name in worse]
        if not losses or len(losses) < len(names):
            continue
        loss = max(losses, key=lambda entry: entry.p)
        results = [read_result(folder / cell.path, cell.identity) for cell in own_cells]
        endings[variant.name] = Ending(
            variant=variant.name,
            # A variant that is not tuned yet has no cell.
            identity=own_cells[0].identity if own_cells else "",
            rule=GATE,
            seeds=sum(result is not None for result in results),
            planned=len(plan.seeds),
            size=loss.size,
            p=loss.p,
        )
    return endings


def _add_losses(
    study: "StudyRecord", gate: Gate, worse: dict[str, Loss], rows: dict[str, set[str]]
) -> None:
    """Add the variants that are worse in `study`, and the rows of each variant as written."""
    # Imported here, because a study without the rule needs no statistics.
    from lit_attn.report.gates import find_worse

    plan = study.plan
    size = plan.level if plan.gate is None else plan.gate.size
    for name, p in find_worse(study, gate.level).items():
        worse.setdefault(name, Loss(f"{gate.axis} {size}", p))
    for variant in plan.variants:
        rows.setdefault(variant.variant or variant.name, set()).add(variant.name)


def _read_complete_size(runs: Path, name: str) -> "StudyRecord | None":
    """Read the study of a smaller size, None if it cannot be read or has cells to run."""
    from lit_attn.report.read import read_studies

    plan = Plan.read_valid(runs / name / "plan.json")
    if plan is None or count_open(plan, runs / name):
        return None
    try:
        return next(read_studies(runs, [name]))
    except ConfigError:
        return None
