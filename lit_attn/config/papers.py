"""Papers: the keys of an `experiments/papers/NAME.yaml`, which lays out every table and figure.

    title: Improving Transformers with Probabilistic Attention Keys
    link: https://proceedings.mlr.press/v162/nguyen22c.html
    studies: ../../ablations.yaml              # relative to this file
    small: {file: small.yaml, studies: {mgk-listops: small-mgk-listops}}      # for --small
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
        claims:
          - {text: ..., row: ..., against: ..., column: ListOps}
    figures:
      "1":
        caption: Training loss
        lines: {Softmax 12 heads: mgk-listops/softmax-12}         # study/variant
        panels: [{x: step, y: train/loss, log: [x]}]

A published cell is a text, exactly as the paper prints it; a bar separates the cells of a row. The
names of rows and columns are the paper's. `GROUP / NAME` is a name below a heading.
"""

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

    @property
    def is_derived(self) -> bool:
        """True if the column is computed from other columns."""
        return bool(self.mean) or self.relative is not None


class Row(Config):
    """A row of a table with the published cells, `|` between them."""

    variant: str | None = Field(None, description="variant of the row; null: not measured")
    study: str | None = Field(None, description="study in place of the study of each column")
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

    def find(self, item: Layout, reference: Reference) -> Reference | None:
        """Return the variant that is run for `reference`, or None if this size has none."""
        if not self.size:
            return reference
        small = self.paper.small
        studies = small.studies | (small.data if self.size == "data" else {}) | item.small
        study, variant = reference
        if (other := studies.get(f"{study}/{variant}")) is not None:
            return Reference(*other.split("/", 1))
        return Reference(studies[study], variant) if study in studies else None

    def references(self, item: Layout) -> Iterator[Reference]:
        """Yield the variants that a table or figure needs, some of them more than once."""
        if item.absent and not self.size:
            return
        if isinstance(item, Figure):
            written = [Reference(*line.split("/", 1)) for line in item.all_lines.values()]
        else:
            assert isinstance(item, Table)
            cells = [
                (row, column) for row in item.rows.values() for column in item.columns.values()
            ]
            written = [ref for row, column in cells if (ref := cell_reference(row, column))]
        for reference in written:
            if (located := self.find(item, reference)) is not None:
                yield located

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


def cell_reference(row: Row, column: Column) -> Reference | None:
    """Return the variant behind a cell, or None for a cell without a measurement."""
    study = row.study or column.study
    if row.variant is None or column.absent or column.is_derived or column.study is None:
        return None
    assert study is not None
    return Reference(study, column.variant.replace("{}", row.variant))


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
    for number, table in paper.tables.items():
        _check_table(source, number, table)
    for number, item in source.items(()).items():
        keys = ("figures", number[7:]) if isinstance(item, Figure) else ("tables", number)
        _check_references(source, keys, item)
    return source


def _check_table(source: PaperSource, number: str, table: Table) -> None:
    """Raise ConfigError for a wrong count of cells, or a name that is no row or no column."""

    def error(keys: tuple[str | int, ...], message: str) -> ConfigError:
        path = ("tables", number, *keys)
        place = locate(source.tree, path)
        return ConfigError(f"{place}: {'.'.join(map(str, path))}: {message}")

    for name, row in table.rows.items():
        if len(row.cells) != len(table.columns):
            text = f"{len(row.cells)} cells for {len(table.columns)} columns"
            raise error(("rows", name, "published"), text)
    for name, column in table.columns.items():
        for other in (*column.mean, *filter(None, [column.relative])):
            if other not in table.columns:
                hint = suggest(other, table.columns)
                raise error(("columns", name), f"no column '{other}'{hint}")
    for place, claim in enumerate(table.claims):
        for key, word, names in (
            ("row", claim.row, table.rows),
            ("against", claim.against, table.rows),
            ("column", claim.column or next(iter(table.columns)), table.columns),
        ):
            if word not in names:
                raise error(("claims", place, key), f"no {key} '{word}'{suggest(word, names)}")


def _check_references(source: PaperSource, keys: tuple[str, str], item: Layout) -> None:
    """Raise ConfigError if a table or figure names a study or variant that does not exist."""
    place, key = locate(source.tree, keys), ".".join(keys)
    if isinstance(item, Figure):
        for claim in item.claims:
            for line in (claim.row, claim.against):
                if line not in item.all_lines:
                    hint = suggest(line, item.all_lines)
                    raise ConfigError(f"{place}: {key}: claims: no line '{line}'{hint}")
        for line in item.all_lines.values():
            if "/" not in line:
                raise ConfigError(f"{place}: {key}: lines: '{line}': write STUDY/VARIANT")
    known = source.known_variants
    for study, variant in source.references(item):
        if study not in known:
            hint = suggest(study, known)
            raise ConfigError(f"{place}: {key}: no study '{study}' in {source.studies_path}{hint}")
        variants = known[study]
        if variants is not None and variant not in variants:
            hint = suggest(variant, variants)
            raise ConfigError(f"{place}: {key}: study '{study}' has no variant '{variant}'{hint}")
