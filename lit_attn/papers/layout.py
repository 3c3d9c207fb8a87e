"""Tables and figures of papers as printed: the keys of the files in `experiments/papers`.

A published cell is a text, exactly as the paper prints it; a bar separates the cells of a row. The
paper merges a cell ^ with the one above it, and a cell < with the one on its left.
"""

import math
import re
from abc import abstractmethod
from typing import Literal

from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt

from lit_attn.schema.base import Config, consistency_check
from lit_attn.schema.errors import require

COSTS = ("parameters", "flops", "step_time", "epoch_time", "evaluation_time", "peak_memory")
"""Values that every cell records: counts, FLOPs of one sample, seconds, bytes."""
COUNTS = ("parameters", "flops")
"""Values of COSTS that are counted without training."""
AXES = {"seconds": "wall-clock time (s)", "compute": "training FLOPs", "variant": ""}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
VALUE = re.compile(rf"(?P<mean>{NUMBER.pattern})(?:\s*[±+]\s*(?P<deviation>{NUMBER.pattern}))?")
"""Number at the start of a cell with its deviation; some copies of papers print + for ±."""


class FileError(Config):
    """Standard error of a value of a file, from further columns of the file.

    Exactly one of the keys but `rounds` and `where` is set: `standard_error` names its column,
    `samples` that with the number of samples of a share, and `iqr` that with the interquartile
    range of as many rounds as the column `rounds` says. A value that is counted is `exact`.
    `where` replaces keys of the column's `where`.
    """

    standard_error: str | None = None
    samples: str | None = None
    iqr: str | None = None
    rounds: str = "rounds"
    exact: bool = False
    where: dict[str, str] = Field({})

    @property
    def columns(self) -> list[str]:
        """Columns of the file that the error is computed from."""
        if self.iqr:
            return [self.iqr, self.rounds]
        return [name for name in (self.standard_error, self.samples) if name]

    def compute(self, value: float, number: float, rounds: float = 0.0) -> float | None:
        """Return the standard error of `value` from the numbers in `columns`, None without one.

        That of a median is sqrt(pi / 2) times that of a mean, and an interquartile range is 1.349
        standard deviations, both of normal measurements.
        """
        if self.standard_error:
            return number
        if self.samples:
            return math.sqrt(value * (1 - value) / number) if number > 0 else None
        if rounds <= 1:
            return None
        error_of_one_round = math.sqrt(math.pi / 2) * number / 1.349
        return error_of_one_round / math.sqrt(rounds)

    @consistency_check
    def _check_one(self) -> None:
        """Refuse none or several sources of the error."""
        columns = [self.standard_error, self.samples, self.iqr]
        count = sum(column is not None for column in columns)
        if self.exact:
            count += 1
        if count != 1:
            raise ValueError("needs one of standard_error, samples, iqr and exact")


class Column(Config):
    """A column of a table: a measured value, arithmetic on other columns, or printed settings.

    Without `study` nothing is measured; an empty one is named by the row. In `variant`, {} is the
    variant of the row. `value` is the study's metric, the name of a metric, one of COSTS,
    diagnostics/LAYER/NAME or compute_multiplier, at `epoch` if that is given. `mean` names columns
    whose mean this column shows, `relative` a variant of the study by whose value it divides.
    `overhead` adds the % above the first row, `difference` the difference to the row `against`.

    `file` is a CSV file of a script in the folder STUDY of the results, and `value` its column in
    the rows that `where` selects (* is any text); {} in both is the variant. Several rows, or the
    columns "A/B", are printed with slashes. Small models have the metric instead.
    """

    study: str | None = None
    variant: str = "{}"
    value: str = "metric"
    epoch: PositiveInt | None = None
    scale: FiniteFloat = 1.0
    digits: int | None = Field(None, ge=0, description="decimals; null: as in the paper")
    mean: tuple[str, ...] = ()
    relative: str | None = None
    overhead: bool = False
    difference: bool = False
    file: str | None = None
    where: dict[str, str] = Field({})
    error: FileError | None = Field(None, description="null: the file has no standard error")
    small: bool = Field(True, description="false: small models lack this value")


Drawing = Literal[
    "first-norms",
    "first-angles",
    "norms",
    "angles",
    "ranks",
    "maps",
    "heads",
    "key-weights",
    "keys",
]
"""Drawings of recorded diagnostics; `first-` stands for the first token instead of all."""

Place = tuple[str, str]  # Row and column of a cell, or the label of a line and no column.
Reading = str | dict[str, str]
"""Further variants: a pattern in which * is the variant of a row or line, or variants by row."""


class Row(Config):
    """A row of a table with the published cells, `|` between them, and its printed name."""

    name: str | None = Field(None, description="null: the key of the row; ^: merged")
    variant: str | None = None
    published: str
    against: str | None = Field(None, description="row above, for columns with `difference`")

    @property
    def cells(self) -> list[str]:
        """Published cells in the order of the columns."""
        return [cell.strip() for cell in self.published.split("|")]


class Claim(Config):
    """A statement of the paper: `row` differs from the row `against` in `column` (the first one).

    In a figure both are lines, and `row` has the better metric or the better value of `column`.
    """

    text: str
    row: str
    against: str
    column: str | None = None
    goal: Literal["min", "max"] | None = Field(None, description="null: the study's")


class Replication(Config):
    """A published number that our mean is compared with: that of `row` in `column` (the first one).

    The margin was chosen for this number alone: means that differ by less are called equal. It is
    in printed units, as `deviation`, the standard deviation of one published run. Without it the
    number's own ± is used, or else the deviation of our runs. `runs` counts the published runs.
    `study` is our study if it is not that of the column; its variants have the same names.
    """

    row: str
    column: str | None = None
    margin: PositiveFloat
    runs: PositiveInt = 1
    deviation: PositiveFloat | None = None
    remains: str = Field("", description="differences between both set-ups that remain")
    study: str | None = None


class Layout(Config):
    """Keys of tables and figures: `absent` is the reason why no study measures them.

    `note` compares our set-up with the paper's. `lacks` says in one sentence why the page cannot be
    complete, and is empty for a complete table or figure. `small` names studies of the small size
    that differ from the paper's `small`, and `small_note` stands on their pages instead of `note`.
    `script` is the command that writes the files of a table or figure.
    """

    caption: str
    note: str = ""
    lacks: str = ""
    small_note: str = ""
    script: str = ""
    absent: str | None = None
    claims: tuple[Claim, ...] = ()
    replications: tuple[Replication, ...] = ()
    readings: tuple[Reading, ...] = ()
    small: dict[str, str] = Field({})

    @abstractmethod
    def grid(self) -> tuple[dict[str, Column], dict[str, Row]]:
        """Return the columns and the rows; those of a figure are its final metric and its lines."""

    def name_column(self, column: str | None) -> str:
        """Return the name of a column, the first one for None."""
        return column or next(iter(self.grid()[0]))

    def is_counted(self, column: Column) -> bool:
        """Return True if a column shows counts of models, for which no cell has to train."""
        return column.file is None and column.value in COUNTS

    def variants(self, reading: Reading = "*", is_small: bool = False) -> dict[Place, str]:
        """Return STUDY/VARIANT by row and column; `is_small` leaves out what small models lack."""
        columns, rows = self.grid()
        patterns = {}
        for heading, column in columns.items():
            is_measured = column.study is not None and (column.small or not is_small)
            if is_measured:
                # The study of a figure is empty: its lines name study and variant.
                patterns[heading] = f"{column.study}/{column.variant}".removeprefix("/")
        lines: dict[Place, str] = {}
        for name, row in rows.items():
            line = _read_row(name, row, reading)
            if line is not None:
                for heading, pattern in patterns.items():
                    lines[name, heading] = pattern.replace("{}", line)
        return lines

    @consistency_check
    def _check_rows(self) -> None:
        """Refuse claims, replications and readings that name no row or column."""
        columns, rows = self.grid()
        for replication in self.replications:
            require("no row or line", replication.row, rows)
            heading = self.name_column(replication.column)
            require("no column", heading, columns)
            row = rows[replication.row]
            published = dict(zip(columns, row.cells, strict=True))[heading]
            if row.variant is None or parse_cell(published) is None:
                raise ValueError(
                    f"replications: '{replication.row} | {heading}' needs a variant and a published"
                    f" number, not '{published}'"
                )
        for claim in self.claims:
            require("no row or line", claim.row, rows)
            require("no row or line", claim.against, rows)
        for reading in self.readings:
            names = reading if isinstance(reading, dict) else ()
            for name in names:
                require("no row or line", name, rows)
        for claim in self.claims:
            if claim.column:
                require("no column", claim.column, columns)


def _read_row(name: str, row: Row, reading: Reading) -> str | None:
    """Return the variant, or STUDY/VARIANT, of a row under a reading; None if it has none."""
    if not row.variant:
        return None
    pattern = reading.get(name) if isinstance(reading, dict) else reading
    if pattern is None:
        return None
    study, slash, variant = row.variant.rpartition("/")
    return f"{study}{slash}{pattern.replace('*', variant)}"


class Table(Layout):
    """A table as printed. With `transposed` the paper prints the columns as rows.

    With `one_row` it prints the rows side by side, as groups of columns; `side_by_side` names the
    rows of each printed line instead. A column or row named "GROUP / NAME" stands below the name of
    its group. `corner` is the heading of the first column.
    `slips` gives the reason why a cell (ROW | COLUMN) contradicts the paper's other cells.
    """

    columns: dict[str, Column] = Field(min_length=1)
    rows: dict[str, Row] = Field(min_length=1)
    transposed: bool = False
    one_row: bool = False
    side_by_side: tuple[tuple[str, ...], ...] = ()
    corner: str = ""
    slips: dict[str, str] = Field({})

    def grid(self) -> tuple[dict[str, Column], dict[str, Row]]:
        return self.columns, self.rows

    @consistency_check
    def _check_names(self) -> None:
        """Refuse rows of another length, and keys that name no row or column."""
        for name, row in self.rows.items():
            count = len(row.cells)
            if count != len(self.columns):
                raise ValueError(f"row '{name}': {count} cells for {len(self.columns)} columns")
            if row.against:
                require("no row", row.against, self.rows)
        for column in self.columns.values():
            for name in column.mean:
                require("no column", name, self.columns)
        self._check_lines()

    def _check_lines(self) -> None:
        """Refuse `side_by_side` if it does not arrange every row once."""
        if not self.side_by_side:
            return
        lengths = {len(line) for line in self.side_by_side}
        names: list[str] = []
        for line in self.side_by_side:
            # An empty name leaves a place free.
            names += [name for name in line if name]
        if len(lengths) > 1 or sorted(names) != sorted(self.rows):
            raise ValueError("side_by_side: needs every row once, in lines of the same length")


class Panel(Config):
    """A panel of a figure: the metric, named metric or cost `y`, times `scale`, over `x`.

    `x: variant` draws one bar for each line. With `x: compute` the line "NAME / SIZE" is one point
    of the curve NAME; with `relative: {NAME: OTHER}`, in percent below OTHER at the same size.
    `log` names logarithmic axes. `lines` default to the figure's; x and y are columns of its file.
    """

    y: str = "metric"
    x: str = Field("epoch", description="epoch, step, one of AXES, or a column of a file")
    label: str | None = None
    log: tuple[Literal["x", "y"], ...] = ()
    lines: dict[str, str] = Field({})
    relative: dict[str, str] = Field({})
    scale: FiniteFloat = 1.0


class Figure(Layout):
    """A figure as printed: panels of curves or bars, or drawings of recorded diagnostics.

    `lines` maps a label to STUDY/VARIANT, `last_step` is the last step that is drawn. `file` and
    `where` are as in a column. `pictures` are drawings of a script, without .svg and .png.
    """

    lines: dict[str, str] = Field({})
    panels: tuple[Panel, ...] = ()
    file: str | None = None
    where: dict[str, str] = Field({})
    pictures: tuple[str, ...] = ()
    draw: tuple[Drawing, ...] = ()
    last_step: PositiveInt | None = None

    def grid(self) -> tuple[dict[str, Column], dict[str, Row]]:
        columns = {"": Column(study="", file=self.file, where=self.where)}
        for claim in self.claims:
            if claim.column:
                columns[claim.column] = Column(study="", value=claim.column)
        # A figure prints no numbers, so every published cell is empty.
        published = "|" * (len(columns) - 1)
        lines = dict(self.lines)
        for panel in self.panels:
            lines.update(panel.lines)
        rows = {}
        for name, line in lines.items():
            rows[name] = Row(variant=line, published=published)
        return columns, rows

    def is_counted(self, column: Column) -> bool:
        """Return True if all panels show counts; the columns of a figure only name its lines."""
        if self.file is not None or not self.panels:
            return False
        return all(panel.y in COUNTS for panel in self.panels)

    @consistency_check
    def _check_axes(self) -> None:
        """Refuse axes that no cell records, and claims about values that no panel draws."""
        if self.file is None:
            for panel in self.panels:
                require("no axis", panel.x, ["epoch", "step", *AXES])
        if not self.draw:
            drawn_values = [panel.y for panel in self.panels]
            for claim in self.claims:
                require("no column", claim.column or "", ["", *drawn_values])


def find_numbers(cell: str) -> list[float]:
    """Return the numbers of a published cell: `0.284 (3.6%)` has 0.284 and 3.6."""
    with_hyphens = cell.replace("\N{MINUS SIGN}", "-")
    return [float(text) for text in NUMBER.findall(with_hyphens)]


def parse_cell(text: str) -> tuple[float, float | None] | None:
    """Return the mean and the deviation of a published cell, or None if it starts with no number.

    `72.01±0.20` has both. The deviation of `37.93 (1.3%)` is None.
    """
    match = VALUE.match(text.replace("\N{MINUS SIGN}", "-"))
    if match is None:
        return None
    deviation = match["deviation"]
    return float(match["mean"]), None if deviation is None else float(deviation)
