"""HTML pages of a report: sections with figures and tables, rendered by assets/page.html."""

from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lit_attn.report import drawing
from lit_attn.report.formats import ASSETS, Table, read_asset

FIGURES: dict[str, dict[str, str]] = read_asset("figures.yaml")
"""Caption, section and CSV file of every figure, in the order of the page."""


@dataclass(frozen=True)
class Section:
    """Part of a page: figures of FIGURES by name, then tables."""

    heading: str = ""
    figures: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def render_page(title: str, sections: list[Section], notes: list[str], **values: Any) -> str:
    """Return an HTML page of the sections that have any content.

    Captions of FIGURES end with `notes`. `values` are further variables of the template: `name`,
    `links`, `warnings`, `images` by name and kind, and `captions` of other figures.
    """
    limits = {"rows": drawing.MOST_ROWS, "panels": drawing.MOST_PANELS}
    texts = {name: entry["caption"].format(**limits) for name, entry in FIGURES.items()}
    captions = {name: " ".join([text, *notes]) for name, text in texts.items()}
    shown = [
        Section(part.heading, part.figures, tables)
        for part in sections
        if (tables := [table for table in part.tables if table.rows]) or part.figures
    ]
    loader = FileSystemLoader(ASSETS)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    page = environment.get_template("page.html")
    files = {n: (ASSETS / f"report.{n}").read_text(encoding="utf-8") for n in ("css", "js")}
    entries = {"captions": captions, "figures": FIGURES, "links": [], "warnings": [], **files}
    return page.render(entries | {"title": title, "sections": shown} | values)
