"""Pages of a paper: every table and figure as printed, with published values and ours."""

import csv
import io
from pathlib import Path
from typing import NamedTuple

from lit_attn.config.papers import Figure, Layout, PaperSource
from lit_attn.config.papers import Table as PaperTable
from lit_attn.files import write_atomic
from lit_attn.report.formats import ASSETS, Cell, Table, templates, to_latex, to_markdown
from lit_attn.report.papers import Entry, Records, judge_claims, make_entries, read_records

SMALL_WARNING = (
    "Small models on small data: their values cannot be compared with the published ones, "
    "only the directions of differences can."
)
READING = (
    "A value is the mean over n seeds ± the sample standard deviation. Empty: not run. "
    "docs/parity.md says how closely each set-up agrees with the released code."
)


class Section(NamedTuple):
    """A section of the page, in the form that assets/page.html reads."""

    heading: str
    figures: list[str]
    tables: list[Table]


def write_paper(
    source: PaperSource, runs: Path, reports: Path, numbers: list[str] | None = None
) -> Path:
    """Write reports/paper-NAME/ (NAME-small for small models) and return its index.html.

    Each table becomes table-N.csv, .md and .tex, each figure figure-N.svg and .png; index.html and
    index.md have all of them. Raises ConfigError for a number that the paper does not have.
    """
    items = source.items(numbers or ())
    records = read_records(source, items.values(), runs)
    suffix = {"": "", "embedded": "-small", "data": "-small-data"}[source.size]
    folder = reports / f"paper-{source.name}{suffix}"
    files: dict[str, str | bytes] = {}
    claims = make_claims_table(source, items, records)
    sections, captions = [Section("Claims", [], [claims])] if claims.rows else [], {}
    for number, item in items.items():
        name = (
            number.replace("figure-", "Figure ") if isinstance(item, Figure) else f"Table {number}"
        )
        reason = f" Not measured: {item.absent}" if item.absent else ""
        caption = f"{name}. {item.caption}.{reason}"
        drawings = []
        if isinstance(item, PaperTable):
            tables = make_tables(source, item, records, caption)
            files[f"table-{number}.csv"] = _to_csv(make_entries(source, item, records))
            files[f"table-{number}.md"] = "\n".join(map(to_markdown, tables))
            labels = (f"{source.name}-{number}{place or ''}" for place in range(len(tables)))
            texts = [to_latex(table, label) for table, label in zip(tables, labels, strict=False)]
            files[f"table-{number}.tex"] = "\n".join(texts)
        else:
            tables = []
            for drawing, kinds in _draw(source, item, records).items():
                stem = f"{number}-{drawing}"
                files |= {f"{stem}.{kind}": image for kind, image in kinds.items()}
                captions[stem] = f"{caption} {item.note}".strip()
                drawings.append(stem)
            if not drawings:
                tables = [Table([""], [[Cell("not drawn")]], caption)]
        sections.append(Section(name, drawings, tables))
    title = source.paper.title + (" (small models)" if source.size else "")
    warnings = [SMALL_WARNING] if source.size else []
    page = templates().get_template("page.html")
    files["index.html"] = page.render(
        title=title,
        sections=sections,
        captions=captions,
        figures={stem: {} for stem in captions},
        style=(ASSETS / "report.css").read_text(encoding="utf-8"),
        links=[name for name in files if name.endswith(".csv")],
        name=folder.name,
        warnings=warnings,
    )
    lines = [f"# {title}", *(f"**{warning}**" for warning in warnings)]
    for section in sections:
        lines.append(f"## {section.heading}")
        lines += [f"![{captions[stem]}]({stem}.svg)" for stem in section.figures]
        lines += [to_markdown(table).rstrip("\n") for table in section.tables]
    files["index.md"] = "\n\n".join([*lines, ""])
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
    notes = [note for note in (item.note, READING) if note]
    if source.size:
        tables = [
            _lay_out(item, grid, f"{caption} Published.", [], is_published=True),
            _lay_out(item, grid, f"{caption} Small models.", notes, is_ours=True),
        ]
    else:
        tables = [_lay_out(item, grid, caption, notes, is_published=True, is_ours=True)]
    for pattern in () if source.size else item.readings:
        lines = make_entries(source, item, records, pattern)
        if shown := [line for line in lines if any(entry.ours for entry in line)]:
            title = f"{caption} Alternative reading: variants {pattern}."
            tables.append(_lay_out(item, shown, title, [], is_ours=True))
    return tables


def _lay_out(
    item: PaperTable,
    grid: list[list[Entry]],
    title: str,
    notes: list[str],
    is_published: bool = False,
    is_ours: bool = False,
) -> Table:
    """Return the entries in the paper's arrangement of rows and columns."""
    lines = [[line[i] for line in grid] for i in range(len(grid[0]))] if item.transposed else grid
    rows = []
    for line in lines:
        name = line[0].column if item.transposed else line[0].row
        if is_published:
            rows.append([Cell(name), *(Cell(entry.published) for entry in line)])
        if is_ours and (not is_published or any(entry.ours for entry in line)):
            rows.append([Cell("ours" if is_published else name)])
            rows[-1] += [Cell(entry.ours) for entry in line]
    headings = [entry.row if item.transposed else entry.column for entry in lines[0]]
    return Table(["", *headings], rows, title, notes=notes)


def make_claims_table(source: PaperSource, items: dict[str, Layout], records: Records) -> Table:
    """Return the paper's claims with the published difference, ours and the judgement."""
    rows = []
    for number, item in items.items():
        for verdict in judge_claims(source, item, records):
            claim, judgement = verdict.claim, verdict.judgement
            texts = (claim.text, number, verdict.published, verdict.ours, str(verdict.pairs))
            cells = [Cell(text) for text in texts]
            rows.append([*cells, Cell(judgement, is_bold=judgement in ("agree", "disagree"))])
    headings = ["claim", "table or figure", "published", "ours [95 %]", "n", "verdict"]
    note = (
        "A difference is the first-named row minus the second, paired by seed, with its 95 % "
        "paired t interval. Agree: the interval lies on the side of the published difference. "
        "Disagree: it lies on the other side. Undecided: it contains 0. The intervals are not "
        "corrected for the number of claims."
    )
    return Table(headings, rows, "Claims of the paper.", notes=[note])


def _draw(source: PaperSource, item: Layout, records: Records) -> dict[str, dict[str, bytes]]:
    """Return the drawings of a figure; pandas and matplotlib are imported only for records."""
    if not isinstance(item, Figure) or not any(
        reference.study in records for reference in source.references(item)
    ):
        return {}
    from lit_attn.report.papers_figures import draw_figure

    return draw_figure(source, item, records)


def _to_csv(grid: list[list[Entry]]) -> str:
    """Return one line for each cell: row, column, published text, and our value of each seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "published", "seed", "ours"])
    for entry in (entry for line in grid for entry in line):
        # An apostrophe keeps a spreadsheet from reading a name such as +all as a formula.
        names = [
            f"'{name}" if name.startswith(("=", "+", "-", "@")) else name
            for name in (entry.row, entry.column, entry.published)
        ]
        for seed, value in entry.values.items() or [("", "")]:
            writer.writerow([*names, seed, value])
    return text.getvalue()
