"""HTML pages of a report: sections with figures and tables, rendered by assets/page.html."""

from dataclasses import dataclass, field, replace
from typing import Any

from lit_attn.report import drawing
from lit_attn.report.formats import TEMPLATES, Table, read_asset, read_text

FIGURES: dict[str, dict[str, str]] = read_asset("figures.yaml")
"""Caption, section and CSV file of every figure, in the order of the page."""

SCRIPTS = [read_text(name) for name in ("datatables.min.js", "report.js")]
"""DataTables (assets/datatables.license.txt) and the page's own script: it works offline."""


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
    limits = {"rows": drawing.MOST_ROWS, "panels": drawing.MOST_PANELS, "costs": drawing.MOST_COSTS}
    captions = {}
    for figure, entry in FIGURES.items():
        captions[figure] = " ".join([entry["caption"].format(**limits), *notes])
    shown = []
    for section in sections:
        tables = [table for table in section.tables if table.rows]
        if tables or section.figures:
            shown.append(replace(section, tables=tables))
    entries = {"captions": captions, "figures": FIGURES, "title": title, "sections": shown}
    return TEMPLATES.get_template("page.html").render(entries | values, scripts=SCRIPTS)
