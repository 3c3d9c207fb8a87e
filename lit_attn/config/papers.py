"""Papers: the keys of an `experiments/papers/NAME.yaml`, which lays out every table and figure.

    tables:
      "1":
        caption: Test accuracy on the Long Range Arena
        columns:
          ListOps: {study: mgk-listops}        # the study's metric
          Text: {study: mgk-text}
          Average: {mean: [ListOps, Text]}
        rows:
          Softmax 12 heads: {variant: softmax-12, published: 36.64 | 65.62 | 51.13}
        readings: [released-*]                 # further variants of the same rows
    figures:
      "1":
        caption: Training loss
        lines: {Softmax 12 heads: mgk-listops/softmax-12}         # study/variant
        panels: [{x: step, y: train/loss, log: [x]}]

A published cell is a text, exactly as the paper prints it; a bar separates the cells of a row.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, FiniteFloat, PositiveInt, ValidationError, field_validator

from lit_attn.config.source import Mapping, load, locate
from lit_attn.schema.base import Config
from lit_attn.schema.errors import ConfigError, find_problem, suggest

FOLDER = Path("experiments/papers")
"""Folder of the papers' files, relative to the working directory."""
SIZES = ("embedded", "data")
"""Kinds of data of small models: data that needs no download, or real files."""
COSTS = ("parameters", "flops", "step_time", "epoch_time", "evaluation_time", "peak_memory")
"""Values that every cell records: counts, FLOPs of one sample, seconds, bytes."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


class Reference(NamedTuple):
    """A variant of a study."""

    study: str
    variant: str


class Column(Config):
    """A column of a table: a measured value, arithmetic on other columns, or printed settings."""

    study: str | None = Field(None, description="study of the cells; null: printed settings")
    variant: str = Field("{}", description="variant of a cell; {} is the variant of its row")
    value: str = Field(
        "metric",
        description=f"metric (the study's own), the name of a metric, {', '.join(COSTS)}, or "
        "diagnostics/LAYER/NAME",
    )
    epoch: PositiveInt | None = Field(
        None, description="epoch of the value; null: the selected epoch"
    )
    scale: FiniteFloat = Field(1.0, description="factor from the recorded to the printed value")
    digits: int | None = Field(None, ge=0, description="decimals; null: as in the paper")
    mean: tuple[str, ...] = Field((), description="columns whose mean this column is")
    relative: str | None = Field(
        None, description="column that this column divides by its value in the first row"
    )
    overhead: bool = Field(
        False, description="print the percentage above the first row behind the value"
    )
    absent: str | None = Field(None, description="reason why no study measures this column")


class Row(Config):
    """A row of a table with the published cells, `|` between them."""

    variant: str | None = Field(None, description="variant of the row; null: not measured")
    published: str = Field(description="cells exactly as printed")

    @property
    def cells(self) -> list[str]:
        """Published cells in the order of the columns."""
        return [cell.strip() for cell in self.published.split("|")]

    @field_validator("published", mode="before")
    @classmethod
    def _require_text(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            raise ValueError("put the cell in quotation marks, which keep it as it is printed")
        return value


class Claim(Config):
    """A statement of the paper: one row (or line) differs from another one in a column.

    Without published numbers (a figure), `sign` is the direction of the difference.
    """

    text: str = Field(description="the statement, one sentence")
    row: str = Field(description="row or line that the paper favours")
    against: str = Field(description="row or line that it is compared with")
    column: str | None = Field(None, description="column; null: the first, or the study's metric")


class Layout(Config):
    """Keys that tables and figures have in common."""

    caption: str = Field(description="caption, shortened")
    note: str = Field("", description="sentences about the comparison with the paper")
    absent: str | None = Field(None, description="reason why no study measures this")
    claims: tuple[Claim, ...] = Field((), description="statements that the numbers support")
    small: dict[str, str] = Field(
        {}, description="studies of the small size that differ from the paper's `small.studies`"
    )


class Table(Layout):
    """A table as printed: columns, rows and published cells."""

    columns: dict[str, Column] = Field(min_length=1, description="columns by heading")
    rows: dict[str, Row] = Field(min_length=1, description="rows by name")
    transposed: bool = Field(False, description="the paper prints the columns as rows")
    readings: tuple[str, ...] = Field(
        (), description="patterns of further variants, in which * is the variant of a row"
    )
    slips: dict[str, str] = Field(
        {}, description="cells (ROW | COLUMN) that contradict the paper's other cells, and why"
    )


class Panel(Config):
    """A panel of a figure."""

    y: str = Field("metric", description="metric, the name of a metric, or one of the costs")
    x: Literal["epoch", "step", "seconds", "variant"] = Field(
        "epoch", description="horizontal axis; variant: one bar for each line"
    )
    label: str | None = Field(None, description="label of the vertical axis; null: the metric's")
    log: tuple[Literal["x", "y"], ...] = Field((), description="logarithmic axes")
    lines: dict[str, str] = Field({}, description="lines of this panel only")
    scale: FiniteFloat = Field(1.0, description="factor from the recorded to the drawn value")


class Figure(Layout):
    """A figure as printed: panels of curves or bars, or drawings of recorded diagnostics."""

    lines: dict[str, str] = Field({}, description="study/variant by the label of the line")
    panels: tuple[Panel, ...] = Field((), description="panels from left to right")
    draw: tuple[Literal["norms", "angles", "ranks", "maps", "heads"], ...] = Field(
        (), description="drawings of diagnostics that the cells record"
    )
    last_step: PositiveInt | None = Field(None, description="last step of these drawings")

    @property
    def all_lines(self) -> dict[str, str]:
        """Lines of the figure and of its panels."""
        merged = dict(self.lines)
        for panel in self.panels:
            merged |= panel.lines
        return merged


class Small(Config):
    """Studies at a size for two CPU cores."""

    file: str = Field(description="file of the studies, relative to the paper's file")
    studies: dict[str, str] = Field(
        description="small study for a study, or study/variant for study/variant"
    )
    data: dict[str, str] = Field(
        {}, description="the same with real data, for `--small data` (docs/papers.md)"
    )


class Paper(Config):
    """All tables and figures of a paper."""

    title: str = Field(description="title of the paper")
    link: str = Field(description="address of the paper")
    studies: str = Field(description="file of the studies, relative to this file")
    small: Small = Field(description="studies at a small size")
    samples: dict[str, PositiveInt] = Field(
        {}, description="training samples of the studies whose data only the files can count"
    )
    tables: dict[str, Table] = Field(description="tables by number")
    figures: dict[str, Figure] = Field({}, description="figures by number")


@dataclass(frozen=True)
class PaperSource:
    """A paper, its file, and the size at which it is reproduced ("", "embedded" or "data")."""

    name: str
    paper: Paper
    path: Path
    size: str
    tree: Mapping

    @property
    def studies_path(self) -> Path:
        """File of the studies that the tables need."""
        file = self.paper.small.file if self.size else self.paper.studies
        return (self.path.parent / file).resolve()

    def items(self, numbers: Iterable[str]) -> dict[str, Layout]:
        """Return the tables ("1") and figures ("figure-1") with `numbers`, or all of them.

        Raises ConfigError for a number that the paper does not have.
        """
        figures = {f"figure-{name}": figure for name, figure in self.paper.figures.items()}
        items: dict[str, Layout] = {**self.paper.tables, **figures}
        for number in numbers:
            if number not in items:
                hint = suggest(number, items)
                raise ConfigError(f"{self.path}: no table or figure '{number}'{hint}")
        chosen = list(numbers) or list(items)
        return {number: items[number] for number in items if number in chosen}

    def locate(self, item: Layout, reference: Reference) -> Reference | None:
        """Return the variant that is run for `reference`, or None if this size has none."""
        if not self.size:
            return reference
        small = self.paper.small
        studies = small.studies | (small.data if self.size == "data" else {}) | item.small
        study, variant = reference
        if other := studies.get(f"{study}/{variant}"):
            return split_line(other)
        return Reference(studies[study], variant) if study in studies else None

    def locate_lines(self, item: Layout, lines: dict[str, str]) -> Iterator[tuple[str, Reference]]:
        """Yield label and variant of the lines that this size has."""
        for label, line in lines.items():
            if located := self.locate(item, split_line(line)):
                yield label, located

    def references(self, item: Layout) -> set[Reference]:
        """Return the variants that a table or figure needs."""
        if item.absent and not self.size:
            return set()
        if isinstance(item, Figure):
            return {reference for _, reference in self.locate_lines(item, item.all_lines)}
        assert isinstance(item, Table)
        cells = itertools.product(item.rows.values(), item.columns.values())
        written = {reference for row, column in cells if (reference := refer(row, column))}
        return {located for one in written if (located := self.locate(item, one))}

    @cached_property
    def known_variants(self) -> dict[str, list[str] | None]:
        """Variants of every study in the file, None for a study with axes."""
        studies = load(self.studies_path).get("studies")
        known: dict[str, list[str] | None] = {}
        for name, study in studies.items() if isinstance(studies, Mapping) else ():
            cells = study.get("cells", {}) if isinstance(study, Mapping) else {}
            is_product = isinstance(study, Mapping) and ("axes" in study or "include" in study)
            known[name] = None if is_product or not isinstance(cells, Mapping) else list(cells)
        return known


def split_line(line: str) -> Reference:
    """Return the variant that `study/variant` names."""
    study, _, variant = line.partition("/")
    return Reference(study, variant)


def refer(row: Row, column: Column, pattern: str = "*") -> Reference | None:
    """Return the variant behind a cell, or None for a cell without a measurement.

    In `pattern` the star is the variant of the row.
    """
    if row.variant is None or column.study is None or column.absent:
        return None
    variant = pattern.replace("*", row.variant)
    return Reference(column.study, column.variant.replace("{}", variant))


def find_numbers(cell: str) -> list[float]:
    """Return the numbers of a published cell: `0.284 (3.6%)` has 0.284 and 3.6."""
    return [float(text) for text in NUMBER.findall(cell.replace("\N{MINUS SIGN}", "-"))]


def read_paper(name: str, size: str = "", folder: Path = FOLDER) -> PaperSource:
    """Read the paper with this name in `folder`. Raises ConfigError for the first mistake.

    A study or variant that does not exist is a mistake too. The variants of a study with axes are
    known only to the runner.
    """
    path = folder / f"{name}.yaml"
    if not path.is_file():
        papers = sorted(file.stem for file in folder.glob("*.yaml") if file.stem != "small")
        raise ConfigError(f"{path}: no such paper{suggest(name, papers)}")
    tree = load(path)
    try:
        paper = Paper.model_validate(tree)
    except ValidationError as error:
        keys, message = find_problem(error)
        key = ".".join(str(part) for part in keys)
        raise ConfigError(f"{locate(tree, keys)}: {key}: {message}") from error
    source = PaperSource(name, paper, path, size, tree)
    for number, item in source.items(()).items():
        keys = ("figures", number[7:]) if isinstance(item, Figure) else ("tables", number)
        try:
            _check(source, item)
        except ValueError as error:
            place = locate(tree, keys)
            raise ConfigError(f"{place}: {'.'.join(keys)}: {error}") from error
    return source


def _check(source: PaperSource, item: Layout) -> None:
    """Raise ValueError for a wrong count of cells or a name that does not exist."""
    rows: Iterable[str] = ()
    columns: Iterable[str] = ()
    if isinstance(item, Table):
        rows, columns = item.rows, item.columns
        for name, row in item.rows.items():
            if len(row.cells) != len(item.columns):
                count = f"{len(row.cells)} cells for {len(item.columns)} columns"
                raise ValueError(f"row '{name}': {count}")
        for column in item.columns.values():
            for other in (*column.mean, column.relative):
                _require("column", other, columns)
    elif isinstance(item, Figure):
        rows = item.all_lines
    for claim in item.claims:
        _require("row or line", claim.row, rows)
        _require("row or line", claim.against, rows)
        _require("column", claim.column, columns)
    known = source.known_variants
    for study, variant in sorted(source.references(item)):
        _require(f"{source.studies_path}: study", study, known)
        _require(f"study '{study}': variant", variant, known[study])


def _require(kind: str, name: str | None, names: Iterable[str] | None) -> None:
    """Raise ValueError, which suggests the nearest name, if `names` are known and lack `name`."""
    if name is not None and names is not None and name not in names:
        raise ValueError(f"{kind}: no '{name}'{suggest(name, names)}")
