"""HTML pages of a report: sections with figures and tables, rendered by assets/page.html."""

from dataclasses import dataclass, field, replace
from typing import Any

from lit_attn.cells.samples import Sample
from lit_attn.report.figures import drawing
from lit_attn.report.tables.captions import shorten
from lit_attn.report.tables.formats import TEMPLATES, Table, read_asset, read_text

FIGURES: dict[str, dict[str, Any]] = read_asset("figures.yaml")
"""Caption, section and CSV file of every figure, in the order of the page."""

SCRIPTS = [read_text(name) for name in ("datatables.min.js", "report.js")]
"""DataTables (assets/datatables.license.txt) and the page's own script: it works offline."""


LIMITS = {
    "rows": drawing.MOST_ROWS,
    "panels": drawing.MOST_PANELS,
    "costs": drawing.MOST_COSTS,
    "lines": drawing.MOST_LINES,
}
"""Largest numbers of variants of a figure, for the templates of captions."""


@dataclass(frozen=True)
class Section:
    """Part of a page: figures of FIGURES by name, then tables, and texts with their caption.

    A part that `is_folded` shows its heading alone until a reader opens it.
    """

    heading: str = ""
    figures: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    caption: str = ""
    is_folded: bool = False


@dataclass(frozen=True)
class FigureCaption:
    """Complete caption of a figure, and its first sentences."""

    text: str

    @property
    def brief(self) -> str:
        """At most SENTENCES + 1 sentences (`lit_attn.report.tables.captions`)."""
        return " ".join(shorten([self.text]))


def describe_figures(pairs: str, notes: list[str]) -> dict[str, str]:
    """Return the captions that differ for the test with this value of `pairs`."""
    captions = {}
    for figure, entry in FIGURES.items():
        replaced = entry.get("tests", {}).get(pairs)
        if replaced:
            caption = replaced["caption"].format(**LIMITS)
            captions[figure] = " ".join([caption, *notes])
    return captions


def render_page(title: str, sections: list[Section], notes: list[str], **values: Any) -> str:
    """Return an HTML page of the sections that have any content.

    Captions of FIGURES end with `notes`. `values` are further variables of the template: `name`,
    `links`, `warnings`, `verdict` (a sentence), `images` by name and kind, and `captions` of other
    figures.
    """
    texts: dict[str, str] = values.pop("captions", {})
    captions = {}
    for figure, entry in FIGURES.items():
        captions[figure] = FigureCaption(" ".join([entry["caption"].format(**LIMITS), *notes]))
    for figure, text in texts.items():
        captions[figure] = FigureCaption(text)
    shown = []
    for section in sections:
        tables = [table for table in section.tables if table.rows]
        if tables or section.figures or section.samples:
            shown.append(replace(section, tables=tables))
    entries = {"captions": captions, "figures": FIGURES, "title": title, "sections": shown}
    return TEMPLATES.get_template("page.html").render(entries | values, scripts=SCRIPTS)
