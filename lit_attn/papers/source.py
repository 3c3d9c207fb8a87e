"""Papers: one file each in `experiments/papers`, with the studies that its tables need.

lit_attn.papers.layout has the keys of tables and figures; docs/papers.md is for readers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, PositiveInt, ValidationError

from lit_attn.config.source import load, locate
from lit_attn.papers.layout import Figure, Layout, Place, Reading, Replication, Table
from lit_attn.schema.base import Config
from lit_attn.schema.errors import ConfigError, explain, find_problem, require, suggest
from lit_attn.schema.yaml_text import SHIPPED

FOLDER = Path("experiments/papers")
SMALL_FILE = "small.yaml"
COUNTS_FILE = Path("counts/costs.csv")
"""File of these counts, in the folder of the papers (experiments/papers/count_costs.py)."""


class Reference(NamedTuple):
    """A variant of a study."""

    study: str
    variant: str


class Paper(Config):
    """All tables and figures of a paper; the file `studies` is relative to the paper's file.

    `small` has the study in small.yaml for a study, or STUDY/VARIANT for STUDY/VARIANT, and
    `small_data` those with real data. `samples` counts the training samples of studies whose data
    only the files can count.
    """

    title: str
    link: str
    studies: str
    small: dict[str, str]
    small_data: dict[str, str] = Field({})
    samples: dict[str, PositiveInt] = Field({})
    tables: dict[str, Table]
    figures: dict[str, Figure] = Field({})


@dataclass(frozen=True)
class PaperSource:
    """A paper, its file, the kind of data of its size ("" if published), and its results."""

    name: str
    paper: Paper
    path: Path
    size: str
    runs: Path = Path("runs")

    @property
    def studies_path(self) -> Path:
        """File of the studies that the tables need."""
        return (self.path.parent / (SMALL_FILE if self.size else self.paper.studies)).resolve()

    def items(self, numbers: Sequence[str]) -> dict[str, Layout]:
        """Return the tables ("1") and figures ("figure-1") with `numbers`, or all of them.

        Raises ConfigError for a number that the paper does not have.
        """
        items: dict[str, Layout] = dict(self.paper.tables)
        for name, figure in self.paper.figures.items():
            items[f"figure-{name}"] = figure
        for name in numbers:
            require(f"{self.path}: no table or figure", name, items)
        if not numbers:
            return items
        return {name: item for name, item in items.items() if name in numbers}

    def printed_items(self) -> dict[str, Layout]:
        """Return the items that the paper prints with this number and that measure something."""
        items = {}
        for name, item in self.items(()).items():
            is_printed = name.removeprefix("figure-").isdigit()
            if is_printed and not item.absent:
                items[name] = item
        return items

    def locate(self, item: Layout, reading: Reading = "*") -> dict[Place, Reference]:
        """Return the variants that this size measures; the keys are those of `Layout.variants`."""
        small = dict(self.paper.small)
        if self.size == "real":
            small.update(self.paper.small_data)
        small.update(item.small)
        is_small = self.size != ""
        located = {}
        for place, line in item.variants(reading, is_small).items():
            if is_small:
                line = _find_small(line, small)
            study, _, variant = line.partition("/")
            if study:
                located[place] = Reference(study, variant)
        return located

    def find_replicated(self, item: Layout, replication: Replication) -> tuple[str, Reference]:
        """Return the published cell that is replicated, and our variant."""
        columns, rows = item.grid()
        heading = item.name_column(replication.column)
        published = dict(zip(columns, rows[replication.row].cells, strict=True))[heading]
        reference = self.locate(item)[replication.row, heading]
        if replication.study is not None:
            reference = Reference(replication.study, reference.variant)
        return published, reference

    def references(self, item: Layout) -> set[Reference]:
        """Return the variants of studies that a table or figure needs.

        Counts need none, except those of small models.
        """
        if item.absent and not self.size:
            return set()
        columns, _ = item.grid()
        references = set()
        for (_, heading), reference in self.locate(item).items():
            column = columns[heading]
            if item.is_counted(column) and not self.size:
                continue
            if column.relative:
                references.add(Reference(reference.study, column.relative))
            # Small models have the metric of a study in place of a column of a file.
            if self.size or not column.file:
                references.add(reference)
        return references

    def require(self, kind: str, names: Iterable[str], choices: Iterable[str]) -> None:
        """Raise ConfigError at the first line that has the name if one of `names` is no choice."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        for name in names:
            numbers = [number for number, line in enumerate(lines, start=1) if name in line]
            first_number = numbers[0] if numbers else 0
            require(f"{self.path}:{first_number}: {kind}", name, choices)


def _find_small(line: str, small: dict[str, str]) -> str:
    """Return STUDY/VARIANT of the small size for STUDY/VARIANT; the study is empty if none is."""
    if line in small:
        return small[line]
    study, _, variant = line.partition("/")
    return f"{small.get(study, '')}/{variant}"


def read_paper(name: str, size: str = "", folder: Path = FOLDER) -> PaperSource:
    """Read the paper with this name in `folder`. Raises ConfigError for the first mistake.

    Without the default folder, the papers of an installed wheel are read. The runner checks the
    names of studies and variants.
    """
    if folder == FOLDER and not folder.is_dir() and (SHIPPED / FOLDER).is_dir():
        folder = SHIPPED / FOLDER
    path = folder / f"{name}.yaml"
    if not path.is_file():
        papers = sorted(file.stem for file in folder.glob("*.yaml") if file.name != SMALL_FILE)
        raise ConfigError(f"{path}: no such paper{suggest(name, papers)}")
    tree = load(path)
    try:
        return PaperSource(name, Paper.model_validate(tree), path, size)
    except ValidationError as error:
        keys, _ = find_problem(error)
        place = locate(tree, keys)
        raise explain(error, str(place)) from error
