"""Pages of a paper: every table and figure as printed, with published values and ours."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lit_attn.files import write_atomic
from lit_attn.papers import published as papers
from lit_attn.papers.claims import JUDGEMENTS, judge_claims
from lit_attn.papers.figures import draw_figure, shows_counts
from lit_attn.papers.floors import FloorText, make_floor_rows, make_floors_table
from lit_attn.papers.layout import Figure, Layout, Reading
from lit_attn.papers.layout import Table as PaperTable
from lit_attn.papers.published import Entry, Records, make_entries
from lit_attn.papers.replications import make_replications_table
from lit_attn.papers.source import PaperSource
from lit_attn.report.pages.page import Section, render_page
from lit_attn.report.records.skipped import LOG, Outcome, describe_failure
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.tables import formats
from lit_attn.report.tables.formats import Cell, Table
from lit_attn.report.tables.provenance import describe_records
from lit_attn.report.tables.results import SENTENCES, describe_origin
from lit_attn.report.verdicts.floors import find_validity, warn_of_floors

PAPER: dict[str, str] = formats.read_asset("tables.yaml")["paper"]
"""Explanations of values: by the content of a table, of counts, and of bars that are counts."""

SMALL: dict[str, str] = formats.read_asset("tables.yaml")["small"]
"""Title of the tables of small models, and the warning of their page."""


class Part(NamedTuple):
    """A table or figure of a paper: its section of the page, files, images and captions."""

    section: Section
    files: dict[str, str | bytes]
    images: dict[str, dict[str, bytes]]
    captions: dict[str, str]


def write_paper(source: PaperSource, runs: Path, reports: Path) -> Path:
    """Write the page of a paper (see `write_parts`) and return its index.html."""
    return write_parts(source, runs, reports).written[0]


def write_parts(source: PaperSource, runs: Path, reports: Path) -> Outcome:
    """Write reports/paper-NAME/ (NAME-small for small models) with index.html and index.md.

    Each table becomes table-N.csv and .tex, each figure figure-N.svg and .png. A table or figure
    whose records lead to an error, whatever it is, is left out with a warning.
    """
    source = replace(source, runs=runs)
    items = source.items(())
    records = papers.read_records(source, items.values(), runs)
    suffix = {"": "", "embedded": "-small", "real": "-small-data"}[source.size]
    folder = reports / f"paper-{source.name}{suffix}"
    skipped: list[str] = []

    def contain(name: str, make: Callable[[], Part]) -> Part:
        try:
            return make()
        except Exception as error:
            LOG.warning("%s: %s: %s. It is left out.", folder.name, name, describe_failure(error))
            skipped.append(name)
            table = Table(["table or figure"], [[Cell("not drawn: see the warnings")]], f"{name}.")
            return Part(Section(name, [], [table]), {}, {}, {})

    def make_claims() -> Part:
        table = make_claims_table(source, items, records)
        return Part(Section("Claims", [], [table]), {}, {}, {})

    def make_replications() -> Part:
        table = make_replications_table(source, items, records)
        return Part(Section("Published numbers", [], [table]), {}, {}, {})

    parts = []
    if any(item.claims for item in items.values()):
        parts.append(contain("Claims", make_claims))
    if not source.size and any(item.replications for item in items.values()):
        parts.append(contain("Published numbers", make_replications))
    if any(find_validity(record) for record in records.values()):
        parts.append(contain("Floors", lambda: _make_floors_part(records)))
    for number, item in items.items():
        make = partial(_make_part, source, number, item, records)
        parts.append(contain(_name_item(number), make))
    title = f"{source.paper.title} (small models)" if source.size else source.paper.title
    files: dict[str, str | bytes] = {}
    images: dict[str, dict[str, bytes]] = {}
    captions: dict[str, str] = {}
    for part in parts:
        files |= part.files
        images |= part.images
        captions |= part.captions
    warnings = _list_warnings(source, records)
    links = [name for name in files if name.endswith(".csv")]
    sections = [part.section for part in parts]
    files["index.html"] = render_page(
        title,
        sections,
        [],
        name=folder.name,
        captions=captions,
        images=images,
        warnings=warnings,
        links=links,
    )
    files["index.md"] = formats.PLAIN.get_template("page.md").render(
        title=title,
        sections=sections,
        captions=captions,
        images=images,
        warnings=warnings,
        links=links,
        to_markdown=formats.to_markdown,
    )
    for name, content in files.items():
        write_atomic(folder / name, content)
    return Outcome([folder / "index.html"], skipped)


def _list_warnings(source: PaperSource, records: Records) -> list[str]:
    """Return the warnings of the page: small models, and those of each study."""
    warnings = [SMALL["note"]] if source.size else []
    warnings += warn_of_floors(records.values())
    for name, record in records.items():
        _, study_warnings = describe_records(record)
        warnings += [f"{name}: {warning}" for warning in study_warnings]
    return warnings


def _make_floors_part(records: Records) -> Part:
    """Return the table of the floors of all studies of the page."""
    return Part(Section("Floors", [], [make_floors_table(records.values())]), {}, {}, {})


def _name_item(number: str) -> str:
    """Return the name of a table ("4" is Table 4) or figure ("figure-4" is Figure 4)."""
    return f"Table {number}" if number[0].isdigit() else number.replace("-", " ", 1).title()


def _make_part(source: PaperSource, number: str, item: Layout, records: Records) -> Part:
    """Return the part of the page of a table or figure."""
    caption = f"{_name_item(number)}. {item.caption}."
    has_script = item.script and not source.size
    if not source.references(item) and not has_script:
        caption += f" Not measured: {item.absent or SMALL['absent']}"
    if isinstance(item, PaperTable):
        return _make_table_part(source, number, item, records, caption)
    assert isinstance(item, Figure)
    return _make_figure_part(source, number, item, records, caption)


def _make_table_part(
    source: PaperSource, number: str, item: PaperTable, records: Records, caption: str
) -> Part:
    """Return a table of the paper with its CSV and LaTeX files."""
    name = _name_item(number)
    tables = make_tables(source, item, records, caption)
    texts = []
    for place, table in enumerate(tables):
        # LaTeX numbers its tables itself.
        plain = replace(table, title=table.title.removeprefix(f"{name}. "))
        texts.append(formats.to_latex(plain, f"{source.name}-{number}-{place}"))
    files: dict[str, str | bytes] = {
        f"table-{number}.csv": _to_csv(make_entries(source, item, records)),
        f"table-{number}.tex": "\n".join(texts),
    }
    return Part(Section(name, [], tables), files, {}, {})


def _make_figure_part(
    source: PaperSource, number: str, item: Figure, records: Records, caption: str
) -> Part:
    """Return a figure of the paper, and a drawing of each reading, as SVG and PNG files."""
    notes = _list_notes(source, item) + _describe_studies(source, item, records)
    if shows_counts(item) and papers.read_counts(source):
        notes.append(PAPER["counted_bars"])
    if item.panels and not shows_counts(item):
        notes += warn_of_floors(_find_studies(source, item, records))
    readings: list[Reading] = ["*"]
    if not source.size:
        readings += item.readings
    files: dict[str, str | bytes] = {}
    images: dict[str, dict[str, bytes]] = {}
    captions: dict[str, str] = {}
    for place, reading in enumerate(readings):
        ending = f"-{place}" if place else ""
        texts = [caption, *notes]
        if place:
            texts.insert(1, _name_reading(reading))
        for kind, formats_of_image in draw_figure(source, item, records, reading).items():
            stem = f"{number}-{kind}{ending}"
            images[stem] = formats_of_image
            captions[stem] = " ".join(texts)
            for extension, image in formats_of_image.items():
                files[f"{stem}.{extension}"] = image
    tables = []
    if not images:
        note = " ".join(notes)
        tables.append(
            Table(
                ["figure"],
                [[Cell("not drawn")]],
                caption,
                notes=[note] if note else [],
            )
        )
    return Part(Section(_name_item(number), list(images), tables), files, images, captions)


def make_tables(
    source: PaperSource, item: PaperTable, records: Records, caption: str
) -> list[Table]:
    """Return the table as printed with our values, and a table for each reading that has run."""
    grid = make_entries(source, item, records)
    titles = _describe_studies(source, item, records)
    notes = _list_notes(source, item)
    is_measured = bool(source.references(item))
    if source.size:
        tables = [_lay_out(item, grid, caption, notes, "p")]
        if is_measured:
            ours = _lay_out(item, grid, f"{caption} {SMALL['title']}", titles, "o")
            tables.append(_warn_of_floors(ours, grid, records))
        return tables
    content = "po" if is_measured or item.script else "p"
    table = _lay_out(item, grid, caption, notes + titles, content)
    tables = [_warn_of_floors(table, grid, records)]
    for reading in item.readings:
        lines = make_entries(source, item, records, reading)
        measured_lines = [line for line in lines if any(entry.ours for entry in line)]
        if measured_lines:
            title = f"{caption} {_name_reading(reading)}"
            table = _lay_out(item, measured_lines, title, titles, "o")
            tables.append(_warn_of_floors(table, measured_lines, records))
    return tables


def _warn_of_floors(table: Table, grid: list[list[Entry]], records: Records) -> Table:
    """Return the table with a warning for each study below its floor whose metric it shows."""
    shown: set[str] = set()
    for entry in itertools.chain(*grid):
        shown |= entry.floors.keys()
    studies = [record for record in records.values() if record.plan.study in shown]
    return replace(table, warnings=warn_of_floors(studies))


def _list_floors(entries: Iterable[Entry]) -> list[Mapping[str, FloorText]]:
    """Return the floors of the entries of a column."""
    return [entry.floors for entry in entries]


def _list_notes(source: PaperSource, item: Layout) -> list[str]:
    """Return the notes of an item for this size of models."""
    notes = [item.small_note] if source.size else [item.note, item.lacks]
    return [note for note in notes if note]


def _describe_studies(source: PaperSource, item: Layout, records: Records) -> list[str]:
    """Return the command of a script, and the title and the parity of each study of an item."""
    scripts = []
    if item.script and not source.size:
        scripts.append(f"Measured by `{item.script}`.")
    studies = _find_studies(source, item, records)
    return [*scripts, *(describe_origin(study.plan) for study in studies)]


def _find_studies(source: PaperSource, item: Layout, records: Records) -> list[StudyRecord]:
    """Return the studies of an item that have started, by name."""
    needed = {reference.study for reference in source.references(item)}
    return [records[name] for name in sorted(needed & records.keys())]


def _name_reading(reading: Reading) -> str:
    """Return the sentence of a caption that names the variants of a reading."""
    names = reading if isinstance(reading, str) else ", ".join(reading.values())
    return f"Alternative reading: variants {names}."


def _lay_out(
    item: PaperTable, grid: list[list[Entry]], title: str, notes: list[str], content: str
) -> Table:
    """Return the entries in the paper's arrangement: published ("p"), ours ("o") or both ("po")."""
    # A reading may lack lines.
    if item.side_by_side and len(grid) == len(item.rows):
        grid = _set_side_by_side(item, grid, "ours" if content == "po" else "")
    if item.one_row:
        grid = [_set_in_one_row(grid)]
    if item.transposed:
        grid = _transpose(grid)
    names = {}
    for key, row in item.rows.items():
        names[key] = key if row.name is None else row.name
    rows = []
    for line in grid:
        name = names.get(line[0].row, line[0].row)
        if "p" in content:
            cells = [Cell(entry.published) for entry in line]
            rows.append([Cell(name or "published"), *cells])
        if "o" in content:
            # Below a published row ours have no name.
            heading = name if name and content == "o" else "ours"
            cells = [Cell(entry.ours) for entry in line]
            rows.append([Cell(heading), *cells])
    floor_rows: list[list[Cell]] = []
    if "o" in content:
        columns = zip(*grid, strict=True)
        floor_rows = make_floor_rows([_list_floors(column) for column in columns])
    headings = [item.corner, *(entry.column for entry in grid[0])]
    # "po" and "o" share the explanation of our values.
    explanations = [text for key, text in PAPER.items() if key in (content, content[-1])]
    if any(entry.is_counted for entry in itertools.chain(*grid)):
        explanations.append(PAPER["counted"])
    if any(entry.ours == papers.UNMEASURED for entry in itertools.chain(*grid)):
        explanations.append(PAPER["unmeasured"])
    if floor_rows:
        explanations.append(SENTENCES["best_floor"])
    return Table(
        headings,
        [*rows, *floor_rows],
        title,
        notes=[*notes, *explanations],
        kind="paper",
        entry=len(content),
    )


def _set_in_one_row(grid: list[list[Entry]]) -> list[Entry]:
    """Return all entries in one line without a name; their columns are "ROW / COLUMN"."""
    entries = itertools.chain(*grid)
    return [entry._replace(row="", column=f"{entry.row} / {entry.column}") for entry in entries]


def _transpose(grid: list[list[Entry]]) -> list[list[Entry]]:
    """Return the grid with its rows as columns."""
    return [_swap_names(column) for column in zip(*grid, strict=True)]


def _swap_names(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries with their row as column and the other way round."""
    return [entry._replace(row=entry.column, column=entry.row) for entry in entries]


def _set_side_by_side(item: PaperTable, grid: list[list[Entry]], end: str) -> list[list[Entry]]:
    """Return each line of `side_by_side`; `end` replaces the names of its further rows in ours."""
    # An empty name leaves a gap.
    gap = [_make_label(heading, "", "") for heading in item.columns]
    rows = {"": gap} | {line[0].row: line for line in grid}
    lines = []
    for first, *further in item.side_by_side:
        line = [*rows[first]]
        for name in further:
            ours = (end or name) if name else ""
            line += [_make_label(item.corner, name, ours), *rows[name]]
        lines.append(line)
    return lines


def _make_label(column: str, published: str, ours: str) -> Entry:
    """Return a cell that has a text and no values."""
    return Entry(row="", column=column, published=published, values={}, ours=ours, references=[])


def make_claims_table(source: PaperSource, items: dict[str, Layout], records: Records) -> Table:
    """Return the paper's claims with the published difference, ours and the judgement."""
    verdicts = judge_claims(source, items, records)
    rows = []
    for verdict in verdicts:
        # With a mark or a reason it is no plain result.
        is_plain = verdict.judgement in ("agree", "disagree")
        row = [
            Cell(verdict.text),
            Cell(verdict.places),
            Cell(verdict.studies),
            Cell(verdict.published),
            Cell(verdict.ours),
            Cell(str(verdict.pairs)),
            Cell(verdict.judgement, is_bold=is_plain),
        ]
        rows.append(row)
    totals = []
    for name in JUDGEMENTS:
        count = sum(verdict.judgement.startswith(name) for verdict in verdicts)
        totals.append(f"{count} {name}")
    return formats.named_table("claims", rows, totals=", ".join(totals))


def _to_csv(grid: list[list[Entry]]) -> str:
    """Return one row for each cell and seed; merged cells have the published text of their cell."""
    rows: list[tuple[Any, ...]] = []
    for entry in itertools.chain(*grid):
        cell = (entry.row, entry.column, entry.published)
        if not entry.values:
            rows.append((*cell, "", None))
        for seed, value in entry.values.items():
            # A count belongs to no seed.
            rows.append((*cell, "" if entry.is_counted else seed, value))
    frame = pd.DataFrame(rows, columns=["row", "column", "published", "seed", "ours"])
    published = frame["published"].mask(frame["published"].isin(["^", "<"]))
    frame["published"] = published.groupby(frame["column"]).ffill()
    return formats.to_csv(frame)
