"""Pages of a paper: every table and figure as printed, with published values and ours."""

from pathlib import Path

import pandas as pd

from lit_attn.config.papers import Figure, Layout, PaperSource
from lit_attn.config.papers import Table as PaperTable
from lit_attn.files import write_atomic
from lit_attn.report import formats
from lit_attn.report.formats import Cell, Table
from lit_attn.report.papers import Entry, Records, judge_claims, make_entries, read_records
from lit_attn.report.papers_figures import draw_figure
from lit_attn.report.write import Section, render_page

SMALL: dict[str, str] = formats.read_asset("tables.yaml")["small"]
"""Title of the tables of small models, and the warning of their page."""


def write_paper(
    source: PaperSource, runs: Path, reports: Path, numbers: list[str] | None = None
) -> Path:
    """Write reports/paper-NAME/ (NAME-small for small models) and return its index.html.

    Each table becomes table-N.csv and .tex, each figure figure-N.svg and .png; index.html and
    index.md have all of them. Raises ConfigError for a number that the paper does not have.
    """
    items = source.items(numbers or ())
    records = read_records(source, items.values(), runs)
    suffix = {"": "", "embedded": "-small", "real": "-small-data"}[source.size]
    folder = reports / f"paper-{source.name}{suffix}"
    files: dict[str, str | bytes] = {}
    sections = [Section("Claims", [], [make_claims_table(source, items, records)])]
    captions: dict[str, str] = {}
    for number, item in items.items():
        name = "Figure " + number[7:] if isinstance(item, Figure) else f"Table {number}"
        reason = f" Not measured: {item.absent}" if item.absent else ""
        caption = f"{name}. {item.caption}.{reason}"
        drawings: list[str] = []
        tables: list[Table] = []
        if isinstance(item, PaperTable):
            tables = make_tables(source, item, records, caption)
            files[f"table-{number}.csv"] = _to_csv(make_entries(source, item, records))
            texts = [
                formats.to_latex(t, f"{source.name}-{number}-{i}") for i, t in enumerate(tables)
            ]
            files[f"table-{number}.tex"] = "\n".join(texts)
        elif isinstance(item, Figure):
            for drawing, kinds in draw_figure(source, item, records).items():
                stem = f"{number}-{drawing}"
                files |= {f"{stem}.{kind}": image for kind, image in kinds.items()}
                captions[stem] = f"{caption} {item.note}".strip()
                drawings.append(stem)
            if not drawings:
                tables = [Table([""], [[Cell("not drawn")]], caption)]
        sections.append(Section(name, drawings, tables))
    title = source.paper.title + (" (small models)" if source.size else "")
    warnings = [SMALL["note"]] if source.size else []
    parts = [f"# {title}", *(f"**{warning}**" for warning in warnings)]
    for section in sections:
        images = (f"![{captions[stem]}]({stem}.svg)" for stem in section.figures)
        parts += [f"## {section.heading}", *images, *map(formats.to_markdown, section.tables)]
    files["index.html"] = render_page(
        title,
        sections,
        captions=captions,
        figures={stem: {} for stem in captions},
        links=[name for name in files if name.endswith(".csv")],
        name=folder.name,
        warnings=warnings,
    )
    files["index.md"] = "\n\n".join(parts)
    for name, content in files.items():
        write_atomic(folder / name, content)
    return folder / "index.html"


def make_tables(
    source: PaperSource, item: PaperTable, records: Records, caption: str
) -> list[Table]:
    """Return the table as printed, and below it the alternative readings that have run.

    Below each row of published values stands a row of ours. Small models stand in a table of their
    own.
    """
    grid = make_entries(source, item, records)
    studies = {study for study, _ in source.references(item)}
    titles = [f"{study}: {records[study].plan.title}." for study in sorted(studies & set(records))]
    notes = [item.note] if item.note else []
    if source.size:
        return [
            _lay_out(item, grid, f"{caption} Published.", notes, "p"),
            _lay_out(item, grid, f"{caption} {SMALL['title']}", titles, "o"),
        ]
    tables = [_lay_out(item, grid, caption, [*notes, *titles], "po")]
    for pattern in item.readings:
        lines = make_entries(source, item, records, pattern)
        if shown := [line for line in lines if any(entry.ours for entry in line)]:
            title = f"{caption} Alternative reading: variants {pattern}."
            tables.append(_lay_out(item, shown, title, [], "o"))
    return tables


def _lay_out(
    item: PaperTable, grid: list[list[Entry]], title: str, notes: list[str], content: str
) -> Table:
    """Return the entries in the paper's arrangement: published ("p"), ours ("o") or both ("po")."""
    lines = [list(line) for line in zip(*grid, strict=True)] if item.transposed else grid
    rows = []
    for line in lines:
        name = line[0].column if item.transposed else line[0].row
        if "p" in content:
            rows.append([Cell(name), *(Cell(entry.published) for entry in line)])
        if content == "o" or ("o" in content and any(entry.ours for entry in line)):
            first = Cell(name if content == "o" else "ours")
            rows.append([first, *(Cell(entry.ours) for entry in line)])
    headings = [entry.row if item.transposed else entry.column for entry in lines[0]]
    note = formats.read_asset("tables.yaml")["paper"]["note"]
    return Table(["", *headings], rows, title, notes=[*notes, note] if "o" in content else notes)


def make_claims_table(source: PaperSource, items: dict[str, Layout], records: Records) -> Table:
    """Return the paper's claims with the published difference, ours and the judgement."""
    rows = []
    for number, item in items.items():
        for verdict in judge_claims(source, item, records):
            measured = (verdict.studies, verdict.published, verdict.ours, str(verdict.pairs))
            is_bold = verdict.judgement in ("agree", "disagree")
            cells = map(Cell, (verdict.text, number, *measured))
            rows.append([*cells, Cell(verdict.judgement, is_bold)])
    return formats.named_table("claims", rows)


def _to_csv(grid: list[list[Entry]]) -> str:
    """Return one line for each seed of each cell; a cell without results has one line."""
    rows = [
        (entry.row, entry.column, entry.published, seed, value)
        for line in grid
        for entry in line
        for seed, value in entry.values.items() or [("", None)]
    ]
    return formats.to_csv(
        pd.DataFrame(rows, columns=["row", "column", "published", "seed", "ours"])
    )
