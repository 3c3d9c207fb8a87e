"""Cells of a renamed study or variant: finding them by their identity, and moving them.

The identity of a cell does not depend on the names of its study and variant, but its folder does.
After a renaming, the finished cells lie in folders that no study uses any more. A dry run names
them, and `--adopt` moves them to the folders of the new names.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lit_attn.ablate import origin
from lit_attn.ablate.plan import Job, Matrix
from lit_attn.ablate.rerun import rename_aside
from lit_attn.cells.folder import read_result
from lit_attn.cells.inputs import change_finder
from lit_attn.cells.lock import CellLocked, LockError, hold_lock, read_holder
from lit_attn.cells.records import Result
from lit_attn.files import write_atomic
from lit_attn.schema.errors import ConfigError, plural
from lit_attn.schema.yaml_text import format_yaml, parse_plain
from lit_attn.training.provenance import code_hash

RETIRED = "aside-plan.json"  # Name of the plan of a study whose cells were adopted.


class Match(NamedTuple):
    """A cell without a result, and the folder of a finished cell that computes the same."""

    job: Job
    matrix: Matrix
    folder: Path

    @property
    def variant(self) -> str:
        """Study and variant of the finished cell."""
        return f"{self.folder.parents[1].name}/{self.folder.parent.name}"


def find_matches(matrices: list[Matrix], missing: list[Job]) -> list[Match]:
    """Return which of the cells without a result, `missing`, are finished in an unused folder."""
    if not missing:
        return []
    folders = {matrix.name: matrix for matrix in matrices}
    # Two studies may miss equal cells, but a folder can have only one of the names.
    wanted: dict[str, Job] = {}
    for job in missing:
        wanted.setdefault(job.folder.name, job)
    matches = []
    for out in dict.fromkeys(matrix.folder.parent for matrix in matrices):
        for folder in _list_unused(matrices, out):
            if folder.name not in wanted:
                continue
            job = wanted[folder.name]
            is_finished = read_result(folder, job.identity) is not None
            if is_finished and read_holder(folder) is None:
                matches.append(Match(job, folders[job.cell.study], folder))
                del wanted[folder.name]
    return matches


def _list_unused(matrices: list[Matrix], out: Path) -> Iterator[Path]:
    """Yield the folders of cells below `out` that belong to no study, in the order of the names."""
    planned: dict[Path, set[Path]] = {}
    for matrix in matrices:
        plan = matrix.plan()
        planned[matrix.folder] = {matrix.folder / c.path for c in (*plan.cells, *plan.trials)}
    for study in _list_folders(out):
        if study not in planned and _is_used(study, matrices):
            continue
        for variant in _list_folders(study):
            for cell in _list_folders(variant):
                if cell not in planned.get(study, set()):
                    yield cell


def _list_folders(folder: Path) -> list[Path]:
    """Return the folders in `folder` by name, without links and hidden folders."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    folders = [path for path in paths if path.is_dir() and not path.is_symlink()]
    return [path for path in folders if not path.name.startswith(".")]


def _is_used(study: Path, matrices: list[Matrix]) -> bool:
    """Return True if a file of studies has the study of a folder, or the study of this side study.

    The file is the one that the folder records. Without a record it is that of `matrices`.
    """
    name = study.name.partition("@")[0]
    recorded = origin.find_file(study)
    files = {matrix.source.path for matrix in matrices} if recorded is None else {recorded}
    return any(origin.has_study(file, name) for file in files)


def describe(matches: list[Match]) -> list[str]:
    """Return a line for each old variant whose finished cells can be adopted."""
    groups: dict[tuple[str, str], int] = defaultdict(int)
    for match in matches:
        groups[match.variant, match.job.variant] += 1
    lines = []
    for (before, now), count in groups.items():
        cells = plural(count, "missing cell")
        verb = "is" if count == 1 else "are"
        lines.append(f"{now}: {cells} {verb} finished in {before}; --adopt moves them")
    return lines


def adopt(matches: list[Match]) -> Iterator[str]:
    """Move the folders of finished cells to their new names, and yield a line for each.

    The line says if the code or the data differ from those of the new study. A cell that another
    process holds stays in its place. Raises OSError if a folder cannot be renamed; then the cell is
    where it was.
    """
    describe_differences = _difference_finder()
    moved = []
    for match in matches:
        try:
            with hold_lock(match.folder):
                result = read_result(match.folder, match.job.identity)
                if result is None:
                    continue
                differences = describe_differences(match, result)
                _move(match)
        except (CellLocked, LockError) as error:
            yield f"not adopted  {match.job.name}: {error}"
            continue
        moved.append(match)
        yield f"adopted  {match.job.name}  from {match.folder}{differences}"
    yield from _retire_studies(moved)


def _move(match: Match) -> None:
    """Move a cell whose lock this process holds; the new folder must not have a result."""
    target = match.job.folder
    if target.exists():
        # Failed attempts of the new name are kept, but not in the way.
        with hold_lock(target):
            if read_result(target, match.job.identity) is not None:
                raise CellLocked(f"{target}: has a result already")
            rename_aside(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    match.folder.rename(target)
    # The lock was moved with the folder, and its holder would look for it in the old place.
    (target / "lock").unlink(missing_ok=True)
    _rename_in_records(target, match.job.cell.study, match.job.cell.variant)
    with contextlib.suppress(OSError):
        match.folder.parent.rmdir()


def _rename_in_records(folder: Path, study: str, variant: str) -> None:
    """Write the names of study and variant to a cell's result and configuration.

    The other values stay as the cell has recorded them.
    """
    path = folder / "result.json"
    names = {"study": study, "variant": variant}
    result = json.loads(path.read_text(encoding="utf-8")) | names
    write_atomic(path, json.dumps(result, indent=2) + "\n")
    path = folder / "config.yaml"
    # A cell counts by its result. The report warns of a configuration that cannot be read.
    with contextlib.suppress(OSError, ConfigError):
        config = parse_plain(path.read_text(encoding="utf-8"), str(path))
        if isinstance(config, dict):
            write_atomic(path, format_yaml(config | names))


def _difference_finder() -> Callable[[Match, Result], str]:
    """Return a function that describes other code and other data of a cell, or returns ""."""
    find_change = change_finder()

    def describe_differences(match: Match, result: Result) -> str:
        """Return the differences of code and data in brackets, or an empty text."""
        differences = []
        code = code_hash(match.job.cell.parts)
        if result.code != code:
            differences.append(f"its code was {result.code}, now {code}")
        change = find_change(result)
        if change:
            differences.append(change)
        data = _list_data(match)
        if data and result.data not in data:
            differences.append(f"its data are {result.data}, other cells have {', '.join(data)}")
        return f" ({'; '.join(differences)})" if differences else ""

    return describe_differences


def _list_data(match: Match) -> list[str]:
    """Return the hashes of the data of finished cells of the new study with equal data keys."""
    data = match.job.cell.experiment.data
    hashes = set()
    for job in match.matrix.jobs:
        if job.cell.experiment.data == data:
            result = read_result(job.folder, job.identity)
            if result is not None:
                hashes.add(result.data)
    return sorted(hashes)


def _retire_studies(moved: list[Match]) -> Iterator[str]:
    """Rename the plans of old studies without results, so that no table counts missing cells.

    If all cells of an old study went to one study without seals, the seals go there, too: they say
    when the same decisions were made.
    """
    heirs: dict[Path, set[Path]] = defaultdict(set)
    for match in moved:
        heirs[match.folder.parents[1]].add(match.matrix.folder)
    for study, targets in heirs.items():
        plan = study / "plan.json"
        if study in targets or not plan.exists() or any(study.glob("*/*/result.json")):
            continue
        (target, *others) = targets
        seals = study / "seals.json"
        if not others and seals.exists() and not (target / "seals.json").exists():
            seals.rename(target / "seals.json")
        plan.rename(study / RETIRED)
        yield f"{study}: has no result any more; its plan is now {RETIRED}, and no table lists it"
