"""Published numbers of a study's variants, from the tables of its paper (`experiments/papers`).

A number that a paper publishes is written once, in the paper's file. Its tables name the variant of
every row and the study of every column, so a study only names the file.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from lit_attn.config.study import StudySource
from lit_attn.config.study_values import Published
from lit_attn.papers import source as papers
from lit_attn.papers.layout import parse_cell
from lit_attn.schema.errors import ConfigError, suggest


class PublishedCell(NamedTuple):
    """A cell of a paper's table, and the variant whose value it publishes.

    `value` and `epoch` are those of the column; None is the last epoch. `is_reading` is True if the
    variant is an alternative reading of the row. `is_slip` is True if the variant is that of the
    row, and the paper's file explains why another cell has its number.
    """

    study: str
    variant: str
    value: str
    epoch: int | None
    table: str
    row: str
    column: str
    published: Published
    is_reading: bool
    is_slip: bool

    @property
    def place(self) -> str:
        """Table, row and column of the cell, for messages."""
        return f"tables.{self.table}: '{self.row} | {self.column}'"


def list_cells(paper: papers.Paper) -> Iterator[PublishedCell]:
    """Yield every cell with a number of a variant, once for each reading of its row.

    Values of files, percentages of another variant and cells without a number are left out.
    """
    for number, table in paper.tables.items():
        headings = list(table.columns)
        for reading in ("*", *table.readings):
            for (row, heading), line in table.variants(reading).items():
                column = table.columns[heading]
                text = table.rows[row].cells[headings.index(heading)]
                published = parse_cell(text)
                if published is None or column.file or column.relative:
                    continue
                study, _, variant = line.partition("/")
                yield PublishedCell(
                    study=study,
                    variant=variant,
                    value=column.value,
                    epoch=column.epoch,
                    table=number,
                    row=row,
                    column=heading,
                    published=published,
                    is_reading=reading != "*",
                    is_slip=reading == "*" and f"{row} | {heading}" in table.slips,
                )


def read_published(source: StudySource, variants: Sequence[str]) -> dict[str, Published]:
    """Return the published mean and deviation of `variants`, of those that have one.

    They come from the paper that the study names. Raises ConfigError if the paper has no number of
    the study, or if one of them stands in the study's key `published` too.
    """
    numbers = {}
    for variant, cell in _read_cells(source, variants).items():
        if variant in source.study.published:
            assert source.study.paper is not None
            raise source.error(
                ("published", variant),
                f"this number is in {source.study.paper.file}, too ({cell.place});"
                " write it in one place only",
            )
        numbers[variant] = cell.published
    return numbers


def _read_cells(source: StudySource, variants: Sequence[str]) -> dict[str, PublishedCell]:
    """Return the cell of each of `variants` in the tables of the study's paper."""
    reference = source.study.paper
    assert reference is not None
    path = source.path.parent / reference.file
    if not path.is_file():
        names = [other.name for other in path.parent.glob("*.yaml")]
        raise source.error(("paper", "file"), f"no file {path}{suggest(path.name, names)}")
    paper = papers.read_paper(path.stem, folder=path.parent).paper
    cells = [
        cell
        for cell in list_cells(paper)
        if (cell.study, cell.value, cell.epoch) == (source.name, reference.value, None)
        and not cell.is_slip
    ]
    if not cells:
        raise source.error(
            ("paper", "file"),
            f"{reference.file} has no column of the study '{source.name}' with the value"
            f" '{reference.value}'; correct the file, the name of the study or `value`",
        )
    known = [cell for cell in cells if cell.variant in variants]
    rows = [cell for cell in known if not cell.is_reading]
    readings = [cell for cell in known if cell.is_reading]
    chosen: list[PublishedCell] = []
    for position, pattern in enumerate(reference.readings):
        matching = [cell for cell in readings if fnmatchcase(cell.variant, pattern)]
        if not matching:
            choices = sorted({cell.variant for cell in readings})
            raise source.error(
                ("paper", "readings", position),
                f"{reference.file} has no reading '{pattern}'{suggest(pattern, choices)}",
            )
        chosen += matching
    # The number of a variant's row outranks that of another row that it is a reading of.
    return {**_choose(path.name, chosen), **_choose(path.name, rows)}


def _choose(file: str, cells: list[PublishedCell]) -> dict[str, PublishedCell]:
    """Return the first cell of each variant. Raises ConfigError if another one differs from it."""
    chosen: dict[str, PublishedCell] = {}
    for cell in cells:
        first = chosen.setdefault(cell.variant, cell)
        if first.published != cell.published:
            raise ConfigError(
                f"{file}: {cell.study}/{cell.variant}: {first.place} publishes"
                f" {first.published[0]:g}, and {cell.place} publishes {cell.published[0]:g};"
                " explain one of the two cells under `slips`"
            )
    return chosen
