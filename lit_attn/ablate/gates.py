"""Rule `gates` of a study: the order of its sizes, and the variants that do not run at the next.

The rule follows from the results of the smaller sizes alone (`lit_attn.report.gates`).
"""

from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.cells.decisions import GATE, Ending
from lit_attn.cells.folder import RETRIED
from lit_attn.cells.records import Gate, Plan
from lit_attn.config.study import StudySource
from lit_attn.schema.errors import ConfigError, plural

if TYPE_CHECKING:
    from lit_attn.report.study_record import StudyRecord


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


def find_open_size(gate: Gate | None, runs: Path) -> str | None:
    """Return the first smaller size that has cells to run, in words; None if there is none.

    The study must wait for it. `runs` is the folder of the studies.
    """
    if gate is None:
        return None
    for name in gate.before:
        study = _read_size(runs, name)
        if study is None:
            return f"{name} has no results"
        count = _count_open(study)
        if count:
            return f"{name} has {plural(count, 'cell')} to run"
    return None


def find_gated(plan: Plan, folder: Path) -> dict[str, Ending]:
    """Return the variants of the study in `folder` that are worse at a smaller size, by name.

    A size decides after all of its cells have ended.
    """
    gate = plan.gate
    if gate is None or not gate.before:
        return {}
    # Imported here, because a study without the rule needs no statistics.
    from lit_attn.report.gates import find_worse

    identities: dict[str, str] = {}
    for cell in plan.cells:
        identities.setdefault(cell.variant, cell.identity)
    names = {variant.name for variant in plan.variants}
    endings: dict[str, Ending] = {}
    for before in gate.before:
        study = _read_size(folder.parent, before)
        if study is None or _count_open(study):
            break
        size = study.plan.gate.size if study.plan.gate is not None else study.plan.level
        for name, p in find_worse(study, gate.level).items():
            if name in names and name not in endings:
                endings[name] = Ending(
                    variant=name,
                    # A variant that is not tuned yet has no cell.
                    identity=identities.get(name, ""),
                    rule=GATE,
                    seeds=0,
                    planned=len(plan.seeds),
                    size=f"{gate.axis} {size}",
                    p=p,
                )
    return endings


def _read_size(runs: Path, name: str) -> "StudyRecord | None":
    """Read the study of a smaller size, None if it has no plan that can be read."""
    from lit_attn.report.read import read_studies

    if not (runs / name / "plan.json").is_file():
        return None
    try:
        return next(read_studies(runs, [name]))
    except ConfigError:
        return None


def _count_open(study: "StudyRecord") -> int:
    """Return the number of cells that run, are still to run or are retried.

    A variant without cells whose search has not ended counts as one cell.
    """
    count = 0
    for cell in study.cells:
        if cell.is_open or cell.status in RETRIED:
            count += 1
    searched = [] if study.tuning is None else study.tuning.variants
    for entry in searched:
        has_ended = entry.variant in study.endings or entry.chosen is not None
        all_diverged = bool(entry.trials) and all(trial.mean is None for trial in entry.trials)
        if not has_ended and not all_diverged:
            count += 1
    return count
