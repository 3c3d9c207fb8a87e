"""Pages of a paper: every table and figure as printed, with published values and ours."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from lit_attn.cells.records import read_clock
from lit_attn.config.papers import AXES, Figure, Layout, Panel, PaperSource, Reading, Reference
from lit_attn.config.papers import Table as PaperTable
from lit_attn.files import write_atomic
from lit_attn.report import diagnostics, drawing, formats, papers
from lit_attn.report.claims import judge_claims
from lit_attn.report.formats import Cell, Table
from lit_attn.report.page import Section, render_page
from lit_attn.report.papers import Entry, Records, make_entries, measure
from lit_attn.report.read import (
    LOG,
    Outcome,
    describe_failure,
    drop_undefined_steps,
    read_or_skip,
)
from lit_attn.report.results import describe_origin, describe_records
from lit_attn.report.scaling import read_points

if TYPE_CHECKING:
    import matplotlib.figure

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

    parts = [contain("Claims", make_claims)]
    for number, item in items.items():
        make = partial(_make_part, source, number, item, records)
        parts.append(contain(_name_item(number), make))
    title = source.paper.title + (" (small models)" if source.size else "")
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
    values: dict[str, Any] = {"captions": captions, "images": images, "warnings": warnings}
    values["links"] = links
    files["index.html"] = render_page(title, sections, [], name=folder.name, **values)
    values |= {"title": title, "sections": sections, "to_markdown": formats.to_markdown}
    files["index.md"] = formats.PLAIN.get_template("page.md").render(values)
    for name, content in files.items():
        write_atomic(folder / name, content)
    return Outcome([folder / "index.html"], skipped)


def _list_warnings(source: PaperSource, records: Records) -> list[str]:
    """Return the warnings of the page: small models, a smoke run, and those of each study."""
    warnings = [SMALL["note"]] if source.size else []
    if any(record.plan.study.endswith(papers.SMOKE_SUFFIX) for record in records.values()):
        warnings.append(SMALL["smoke"])
    for name, record in records.items():
        _, study_warnings = describe_records(record)
        warnings += [f"{name}: {warning}" for warning in study_warnings]
    return warnings


def _name_item(number: str) -> str:
    """Return the name of a table ("4" is Table 4) or figure ("figure-4" is Figure 4)."""
    return f"Table {number}" if number[0].isdigit() else number.replace("-", " ", 1).title()


def _make_part(source: PaperSource, number: str, item: Layout, records: Records) -> Part:
    """Return the part of the page of a table or figure."""
    name = _name_item(number)
    is_absent = not source.references(item) and (source.size or not item.script)
    reason = f" Not measured: {item.absent or SMALL['absent']}" if is_absent else ""
    caption = f"{name}. {item.caption}.{reason}"
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
    note = item.small_note if source.size else item.note
    note = " ".join(filter(None, [note, *_describe_studies(source, item, records)]))
    readings: list[Reading] = ["*"]
    if not source.size:
        readings += item.readings
    files: dict[str, str | bytes] = {}
    images: dict[str, dict[str, bytes]] = {}
    captions: dict[str, str] = {}
    for place, reading in enumerate(readings):
        ending = f"-{place}" if place else ""
        reading_name = _name_reading(reading) if place else ""
        for kind, formats_of_image in _draw_figure(source, item, records, reading).items():
            stem = f"{number}-{kind}{ending}"
            images[stem] = formats_of_image
            captions[stem] = " ".join(filter(None, [caption, reading_name, note]))
            for extension, image in formats_of_image.items():
                files[f"{stem}.{extension}"] = image
    tables = []
    if not images:
        notes = [note] if note else []
        tables.append(Table(["figure"], [[Cell("not drawn")]], caption, notes=notes))
    return Part(Section(_name_item(number), list(images), tables), files, images, captions)


def make_tables(
    source: PaperSource, item: PaperTable, records: Records, caption: str
) -> list[Table]:
    """Return the table as printed with our values, and a table for each reading that has run."""
    grid = make_entries(source, item, records)
    titles = _describe_studies(source, item, records)
    notes = list(filter(None, [item.small_note if source.size else item.note]))
    if source.size:
        published = _lay_out(item, grid, caption, notes, "p")
        ours = _lay_out(item, grid, f"{caption} {SMALL['title']}", titles, "o")
        return [published, ours] if source.references(item) else [published]
    content = "po" if source.references(item) or item.script else "p"
    tables = [_lay_out(item, grid, caption, [*notes, *titles], content)]
    for reading in item.readings:
        lines = make_entries(source, item, records, reading)
        if shown := [line for line in lines if any(entry.ours for entry in line)]:
            tables.append(_lay_out(item, shown, f"{caption} {_name_reading(reading)}", titles, "o"))
    return tables


def _describe_studies(source: PaperSource, item: Layout, records: Records) -> list[str]:
    """Return the command of a script, and the title and the parity of each study of an item."""
    scripts = [f"Measured by `{item.script}`."] if item.script and not source.size else []
    names = sorted({reference.study for reference in source.references(item)} & set(records))
    return [*scripts, *(describe_origin(records[name].plan) for name in names)]


def _name_reading(reading: Reading) -> str:
    names = reading if isinstance(reading, str) else ", ".join(reading.values())
    return f"Alternative reading: variants {names}."


def _lay_out(
    item: PaperTable, grid: list[list[Entry]], title: str, notes: list[str], content: str
) -> Table:
    """Return the entries in the paper's arrangement: published ("p"), ours ("o") or both ("po")."""
    if item.side_by_side and len(grid) == len(item.rows):
        grid = _set_side_by_side(item, grid, "ours" if content == "po" else "")
    if item.one_row:
        entries = itertools.chain(*grid)
        grid = [[e._replace(row="", column=f"{e.row} / {e.column}") for e in entries]]
    if item.transposed:
        columns = zip(*grid, strict=True)
        grid = [[e._replace(row=e.column, column=e.row) for e in line] for line in columns]
    rows = []
    names = {key: key if row.name is None else row.name for key, row in item.rows.items()}
    for line in grid:
        name = names.get(line[0].row, line[0].row)
        published = [Cell(name or "published"), *(Cell(entry.published) for entry in line)]
        ours = [Cell(name if name and content == "o" else "ours"), *(Cell(e.ours) for e in line)]
        rows += [published] if "p" in content else []
        rows += [ours] if "o" in content else []
    headings = [item.corner, *(entry.column for entry in grid[0])]
    texts = formats.read_asset("tables.yaml")["paper"]
    notes = [*notes, *(texts[key] for key in texts if key in (content, content[-1]))]
    return Table(headings, rows, title, notes=notes, kind="paper", entry=len(content))


def _set_side_by_side(item: PaperTable, grid: list[list[Entry]], end: str) -> list[list[Entry]]:
    """Return each line of `side_by_side`; `end` replaces the names of its further rows in ours."""
    blank = [Entry("", heading, "", {}, "", []) for heading in item.columns]
    rows = {"": blank} | {line[0].row: line for line in grid}
    lines = [[*rows[names[0]]] for names in item.side_by_side]
    for line, names in zip(lines, item.side_by_side, strict=True):
        for name in names[1:]:
            line += [Entry("", item.corner, name, {}, name and (end or name), []), *rows[name]]
    return lines


def make_claims_table(source: PaperSource, items: dict[str, Layout], records: Records) -> Table:
    """Return the paper's claims with the published difference, ours and the judgement."""
    verdicts = judge_claims(source, items, records)
    names = ("agree", "disagree", "undecided", "not run")
    rows = [
        [*map(Cell, map(str, v[:-1])), Cell(v.judgement, is_bold=v.judgement in names[:2])]
        for v in verdicts
    ]
    totals = ", ".join(f"{sum(v.judgement.startswith(n) for v in verdicts)} {n}" for n in names)
    return formats.named_table("claims", rows, totals=totals)


def _to_csv(grid: list[list[Entry]]) -> str:
    rows = [
        (entry.row, entry.column, entry.published, seed, value)
        for entry in itertools.chain(*grid)
        for seed, value in entry.values.items() or [("", None)]
    ]
    frame = pd.DataFrame(rows, columns=["row", "column", "published", "seed", "ours"])
    published = frame["published"].mask(frame["published"].isin(["^", "<"]))
    frame["published"] = published.groupby(frame["column"]).ffill()
    return formats.to_csv(frame)


def _draw_figure(
    source: PaperSource, item: Figure, records: Records, reading: Reading
) -> dict[str, dict[str, bytes]]:
    """Return SVG and PNG of the drawings of a reading that have records, by name and kind."""
    located = {label: line for (label, _), line in source.locate(item, reading).items()}
    pictures = {} if source.size else _read_pictures(source, item)
    lines = {label: line for label, line in located.items() if item.file or line.study in records}
    cells = (records[study].finished_cells(name) for study, name in lines.values())
    if not item.file and not any(cells):
        return pictures
    values, arrays = [], {}
    for label, (study, variant) in lines.items():
        if item.draw and label in item.lines:
            recorded = diagnostics.read_study_diagnostics(records[study])
            chosen = recorded.values[recorded.values["variant"] == variant]
            chosen = chosen[chosen["step"] <= (item.last_step or math.inf)]
            values.append(chosen.assign(variant=label))
            if variant in recorded.arrays:
                arrays[label] = recorded.arrays[variant]
    with drawing.appearance():
        drawn: dict[str, Any] = {}
        if values:
            merged = diagnostics.Diagnostics(pd.concat(values), arrays)
            first = next(iter(item.lines))
            drawn |= {kind: diagnostics.DRAWERS[kind](merged, first) for kind in item.draw}
        drawn["panels"] = _draw_panels(source, item, lines, records) if item.panels else None
        return pictures | {name: drawing.render(figure) for name, figure in drawn.items() if figure}


def _read_pictures(source: PaperSource, item: Figure) -> dict[str, dict[str, bytes]]:
    """Return the SVG and PNG files of the pictures that a script has drawn, by number."""
    paths = [{k: source.runs / f"{name}.{k}" for k in ("svg", "png")} for name in item.pictures]
    drawn = [files for files in paths if all(path.exists() for path in files.values())]
    contents = [{kind: path.read_bytes() for kind, path in files.items()} for files in drawn]
    return {f"picture-{number}": files for number, files in enumerate(contents, start=1)}


def _draw_panels(
    source: PaperSource, item: Figure, located: dict[str, Reference], records: Records
) -> "matplotlib.figure.Figure | None":
    """Draw the panels side by side with one legend; return None without any record."""
    styles = itertools.cycle(itertools.product(("-", "--", ":", "-."), drawing.COLOURS))
    names = dict.fromkeys(label.partition(" / ")[0] for label, _ in item.variants())
    styled = zip(names, styles, strict=False)
    key: drawing.Key = {name: (colour, dash) for name, (dash, colour) in styled}
    columns = 2 if len(item.panels) == 4 else min(3, len(item.panels))
    rows = -(-len(item.panels) // columns)
    figure = drawing.new_figure(2.4 * rows + 0.5)
    all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    frames = []
    for axes in all_axes[len(item.panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(all_axes, item.panels, strict=False):
        lines = {label: located[label] for label in panel.lines or item.lines if label in located}
        if item.file:
            frame = _read_points(source, item, panel, lines)
        else:
            frame = _read_panel(panel, lines, records)
        frames.append(frame)
        for label, part in frame.groupby("label", sort=False)["value"]:
            if panel.x == "variant":
                axes.bar(label, part.mean(), yerr=part.std() or None, color=key[str(label)][0])
            else:
                drawing.draw_band(axes, part, *key[str(label)], label=str(label))
        if panel.x in ("variant", "compute"):
            axes.tick_params(axis="x", which="both", rotation=60)
        elif item.file:
            axes.locator_params(axis="x", integer=True)
        metrics = [records[s].plan.metric.label for s, _ in lines.values() if s in records]
        axes.set_xlabel(AXES.get(panel.x, panel.x))
        axes.set_ylabel(panel.label or (metrics[0] if panel.y == "metric" and metrics else panel.y))
        for axis in panel.log:
            drawing.use_log_scale(axes, axis)
    if any(panel.x != "variant" for panel in item.panels):
        drawing.add_legend(figure, key)
    return None if all(frame.empty for frame in frames) else figure


def _read_points(
    source: PaperSource, item: Figure, panel: Panel, lines: dict[str, Reference]
) -> pd.DataFrame:
    """Return the label and value of every point in the files of scripts, indexed by the axis x."""
    column, read = item.grid()[0][""], papers.read_file
    points = {n: read(source, line, column, panel.x, panel.y) for n, line in lines.items()}
    rows = [(label, *point) for label, part in points.items() for point in part]
    return pd.DataFrame(rows, columns=["label", "x", "value"]).set_index("x")


def _read_panel(panel: Panel, lines: dict[str, Reference], records: Records) -> pd.DataFrame:
    """Return the label and value of every seed, indexed by epoch, step, seconds or variant."""
    rows: list[tuple[Any, ...]] = []
    for label, reference in lines.items():
        if panel.x == "variant":
            values = measure(records, reference, panel.y).values()
            rows += [(label, label, label, value) for value in values]
            continue
        if panel.x == "compute":
            name, _, size = label.partition(" / ")
            base = measure(records, lines.get(f"{panel.relative.get(name)} / {size}"), "metric")
            for x in read_points([records[reference.study]]):
                if x.variant == reference.variant and (x.seed in base or not panel.relative):
                    value = 100 * (1 - x.value / base[x.seed]) if base else x.value
                    rows.append((name, size, x.flops, value))
            continue
        study = records[reference.study]
        for cell in study.finished_cells(reference.variant):
            clock = read_or_skip(read_clock, cell.folder, "clock.csv") or {}
            for row in cell.curve(study.plan.metric if panel.y == "metric" else panel.y):
                # Epochs of the records count from 0.
                times = {"epoch": row.epoch + 1, "step": row.step, "seconds": clock.get(row.step)}
                rows.append((label, row.step, times[panel.x], row.value))
    frame = pd.DataFrame(rows, columns=["label", "step", "time", "value"])
    frame = drop_undefined_steps(frame, "label").dropna()
    frame["value"] *= panel.scale
    if panel.x == "seconds":
        # Seeds take different times for a step.
        frame["time"] = frame.groupby(["label", "step"])["time"].transform("mean")
    return frame.set_index("time")[["label", "value"]]
