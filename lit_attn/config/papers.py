"""Papers: the keys of the files in `experiments/papers` (docs/papers.md), one file a paper.

A published cell is a text, exactly as the paper prints it; a bar separates the cells of a row.
"""

import itertools
import re
from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, FiniteFloat, PositiveInt, ValidationError, model_validator

from lit_attn.config.source import load, locate
from lit_attn.schema.base import Config
from lit_attn.schema.errors import ConfigError, find_problem, suggest

FOLDER = Path("experiments/papers")
"""Folder of the papers' files, relative to the working directory."""
SMALL_FILE = "small.yaml"
SIZES = {"--small": "embedded", "--small-data": "real"}
"""Options of small models, and their data: data that needs no download, or files."""
COSTS = ("parameters", "flops", "step_time", "epoch_time", "evaluation_time", "peak_memory")
"""Values that every cell records: counts, FLOPs of one sample, seconds, bytes."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


class Reference(NamedTuple):
    """A variant of a study."""

    study: str
    variant: str


class Column(Config):
    """A column of a table: a measured value, arithmetic on other columns, or printed settings.

    Without `study` nothing is measured. In `variant`, {} is the variant of the row. `value` is the
    study's metric, the name of a metric, one of COSTS or diagnostics/LAYER/NAME, at `epoch` if that
    is given. `per` divides it by a count of the published set-up, so small models lack it. `mean`
    names columns whose mean this column is. `relative` divides by the value in the first row,
    `overhead` prints the percentage above it.
    """

    study: str | None = None
    variant: str = "{}"
    value: str = "metric"
    epoch: PositiveInt | None = None
    scale: FiniteFloat = 1.0
    per: PositiveInt = 1
    digits: int | None = Field(None, ge=0, description="decimals; null: as in the paper")
    mean: tuple[str, ...] = ()
    relative: bool = False
    overhead: bool = False
    absent: str | None = None


class Row(Config):
    """A row of a table with the published cells, `|` between them."""

    variant: str | None = None
    published: str

    @property
    def cells(self) -> list[str]:
        """Published cells in the order of the columns."""
        return [cell.strip() for cell in self.published.split("|")]


class Claim(Config):
    """A statement of the paper: `row` (or line) differs from the row `against` in `column`.

    Without a column it is the first one, or the study's metric. A line of a figure, which prints no
    number, is claimed to be better than the other one.
    """

    text: str
    row: str
    against: str
    column: str | None = None


class Layout(Config):
    """Keys that tables and figures have in common.

    `note` is about the comparison with the paper, `absent` the reason why no study measures this.
    `small` names studies of the small size that differ from the paper's `small`.
    """

    caption: str
    note: str = ""
    absent: str | None = None
    claims: tuple[Claim, ...] = ()
    small: dict[str, str] = Field({})


class Table(Layout):
    """A table as printed. With `transposed` the paper prints the columns as rows.

    `readings` are patterns of further variants, in which * is the variant of a row. `slips` are
    cells (ROW | COLUMN) that contradict the paper's other cells, and why.
    """

    columns: dict[str, Column] = Field(min_length=1)
    rows: dict[str, Row] = Field(min_length=1)
    transposed: bool = False
    readings: tuple[str, ...] = ()
    slips: dict[str, str] = Field({})

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name, row in self.rows.items():
            if (count := len(row.cells)) != len(self.columns):
                raise ValueError(f"row '{name}': {count} cells for {len(self.columns)} columns")
        for column in self.columns.values():
            _require("column", column.mean, self.columns)
        for claim in self.claims:
            _require("row", (claim.row, claim.against), self.rows)
            _require("column", (claim.column,) if claim.column else (), self.columns)
        return self


class Panel(Config):
    """A panel of a figure: the metric, named metric or cost `y`, times `scale`, over `x`.

    `x: variant` draws one bar for each line. `log` names logarithmic axes. Without `lines` the
    panel has those of the figure.
    """

    y: str = "metric"
    x: Literal["epoch", "step", "seconds", "variant"] = "epoch"
    label: str | None = None
    log: tuple[Literal["x", "y"], ...] = ()
    lines: dict[str, str] = Field({})
    scale: FiniteFloat = 1.0


class Figure(Layout):
    """A figure as printed: panels of curves or bars, or drawings of recorded diagnostics.

    `lines` has STUDY/VARIANT by label, `last_step` ends the drawings.
    """

    lines: dict[str, str] = Field({})
    panels: tuple[Panel, ...] = ()
    draw: tuple[Literal["norms", "angles", "ranks", "maps", "heads"], ...] = ()
    last_step: PositiveInt | None = None

    @property
    def all_lines(self) -> dict[str, str]:
        """Lines of the figure and of its panels."""
        return dict(ChainMap(*(panel.lines for panel in reversed(self.panels)), self.lines))

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for claim in self.claims:
            _require("line", (claim.row, claim.against), self.all_lines)
        return self


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
    """A paper, its file, and the data of its size ("" for the published size, or see SIZES)."""

    name: str
    paper: Paper
    path: Path
    size: str

    @property
    def studies_path(self) -> Path:
        """File of the studies that the tables need."""
        return (self.path.parent / (SMALL_FILE if self.size else self.paper.studies)).resolve()

    def items(self, numbers: Iterable[str]) -> dict[str, Layout]:
        """Return the tables ("1") and figures ("figure-1") with `numbers`, or all of them.

        Raises ConfigError for a number that the paper does not have.
        """
        figures = {f"figure-{name}": figure for name, figure in self.paper.figures.items()}
        items: dict[str, Layout] = {**self.paper.tables, **figures}
        try:
            _require("table or figure", numbers, items)
        except ValueError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        chosen = list(numbers) or list(items)
        return {number: items[number] for number in items if number in chosen}

    def locate_lines(self, item: Layout, lines: dict[Any, str]) -> dict[Any, Reference]:
        """Return the variants of those lines (STUDY/VARIANT by label) that this size has."""
        data = self.paper.small_data if self.size == "real" else {}
        small = self.paper.small | data | item.small
        located = {}
        for label, line in lines.items():
            study, _, variant = line.partition("/")
            if self.size:
                other = small.get(line, f"{small.get(study, '')}/{variant}")
                study, _, variant = other.partition("/")
            if study:
                located[label] = Reference(study, variant)
        return located

    def locate_cells(self, table: Table, pattern: str = "*") -> dict[tuple[str, str], Reference]:
        """Return the variant behind each cell (row, column) that this size measures.

        In `pattern` the star is the variant of the row.
        """
        lines = {}
        for (name, row), (heading, column) in itertools.product(
            table.rows.items(), table.columns.items()
        ):
            is_lost = column.absent or (self.size and column.per > 1)
            if row.variant and column.study and not is_lost:
                variant = column.variant.replace("{}", pattern.replace("*", row.variant))
                lines[name, heading] = f"{column.study}/{variant}"
        return self.locate_lines(table, lines)

    def references(self, item: Layout) -> set[Reference]:
        """Return the variants that a table or figure needs."""
        if item.absent and not self.size:
            return set()
        if isinstance(item, Figure):
            return set(self.locate_lines(item, item.all_lines).values())
        assert isinstance(item, Table)
        return set(self.locate_cells(item).values())

    def error(self, word: str, message: str) -> ConfigError:
        """Return an error that begins with the first line of the file that contains `word`."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        number = next((n for n, line in enumerate(lines, start=1) if word in line), 0)
        return ConfigError(f"{self.path}:{number}: {message}")


def find_numbers(cell: str) -> list[float]:
    """Return the numbers of a published cell: `0.284 (3.6%)` has 0.284 and 3.6."""
    return [float(text) for text in NUMBER.findall(cell.replace("\N{MINUS SIGN}", "-"))]


def read_paper(name: str, size: str = "", folder: Path = FOLDER) -> PaperSource:
    """Read the paper with this name in `folder`. Raises ConfigError for the first mistake.

    The runner checks the names of studies and variants.
    """
    path = folder / f"{name}.yaml"
    if not path.is_file():
        papers = sorted(file.stem for file in folder.glob("*.yaml") if file.name != SMALL_FILE)
        raise ConfigError(f"{path}: no such paper{suggest(name, papers)}")
    tree = load(path)
    try:
        return PaperSource(name, Paper.model_validate(tree), path, size)
    except ValidationError as error:
        keys, message = find_problem(error)
        key = ".".join(str(part) for part in keys)
        raise ConfigError(f"{locate(tree, keys)}: {key}: {message}") from error


def _require(kind: str, names: Iterable[str], choices: Iterable[str]) -> None:
    """Raise ValueError, which suggests the nearest choice, for a name that is no choice."""
    for name in names:
        if name not in choices:
            raise ValueError(f"no {kind} '{name}'{suggest(name, choices)}")
