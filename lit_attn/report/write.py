"""All files of a report: tables, figures and HTML pages. Equal records give equal bytes.

The pages run no scripts and load nothing from elsewhere.
"""

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from lit_attn.files import write_atomic
from lit_attn.report import diagnostics, figures, segmentation
from lit_attn.report.caption import make_caption
from lit_attn.report.diagnostics import Diagnostics
from lit_attn.report.drawing import appearance, render
from lit_attn.report.formats import make_table, to_html, to_latex, to_markdown
from lit_attn.report.read import LOG, StudyRecord, read_studies
from lit_attn.report.summary import make_seed_frame, make_variant_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = figures.CAPTIONS | segmentation.CAPTIONS | diagnostics.CAPTIONS
"""Caption of every figure, in the order of the page."""

OPTIONAL_TABLES = {"classes.csv", "diagnostics.csv", "ranks.csv"}
"""Tables that only some studies have."""


def write_reports(runs: Path, reports: Path, studies: list[str] | None = None) -> list[Path]:
    """Write reports/<study>/ for each study in `runs` (or in `studies`) and reports/index.html.

    The index lists every study in `reports`. A study that cannot be read is skipped with a warning.
    Returns the folders that were written. Raises ConfigError if there is nothing to report on.
    """
    folders = [_write_study(study, reports) for study in read_studies(runs, studies)]
    write_atomic(reports / "index.html", make_index_page(reports))
    return folders


def _write_study(study: StudyRecord, reports: Path) -> Path:
    folder = reports / study.plan.study
    recorded = diagnostics.read_study_diagnostics(study)
    images = draw_figures(study, recorded)
    shown = [name for name in CAPTIONS if (name, "svg") in images]
    files: dict[str, str | bytes] = {**make_tables(study, shown, recorded)}
    files |= {f"{name}.{kind}": image for (name, kind), image in images.items()}
    # Remove what an earlier report of other records left here.
    figure_names = {f"{name}.{kind}" for name in CAPTIONS for kind in ("svg", "png")}
    for name in (figure_names | OPTIONAL_TABLES) - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomic(folder / name, content)
    return folder


def draw_figures(
    study: StudyRecord, recorded: dict[str, Diagnostics]
) -> dict[tuple[str, str], bytes]:
    """Return every figure that the records can fill, by name and kind ("svg" or "png")."""
    if not study.results():
        return {}
    drawers: dict[str, Callable[[], Figure | None]] = {
        "seeds": lambda: figures.draw_seeds(study),
        "curves": lambda: figures.draw_curves(study),
        "cost": lambda: figures.draw_cost(study),
        "pictures": lambda: segmentation.draw_pictures(study),
        **diagnostics.make_drawers(recorded, study.plan.baseline),
    }
    images: dict[tuple[str, str], bytes] = {}
    with appearance():
        for name, draw in drawers.items():
            if figure := draw():
                images |= {(name, kind): render(figure, kind) for kind in ("svg", "png")}
    return images


def make_tables(
    study: StudyRecord, shown: list[str], recorded: dict[str, Diagnostics]
) -> dict[str, str]:
    """Return every file but the figures: content by file name. The page has the figures `shown`."""
    summary = make_variant_frame(study)
    table = make_table(summary, study.plan.metric, make_caption(study, summary))
    classes = segmentation.make_class_frame(study)
    optional = {
        "classes.csv": classes,
        "diagnostics.csv": diagnostics.make_values_table(recorded),
        "ranks.csv": diagnostics.make_ranks_table(recorded),
    }
    files = {
        "table.csv": to_csv(summary),
        "per_seed.csv": to_csv(make_seed_frame(study)),
        "table.md": to_markdown(table),
        "table.tex": to_latex(table, study.plan.study),
        **{name: to_csv(frame) for name, frame in optional.items() if len(frame)},
    }
    caption = table.caption
    attention_figures = [name for name in shown if name in diagnostics.CAPTIONS]
    mixture = diagnostics.make_mixture_table(recorded)
    links = " · ".join(f'<a href="{name}">{name}</a>' for name in files)
    title = caption.title.rstrip(".")
    body = [
        f"<h1>{html.escape(title)}</h1>\n"
        f'<p class="links"><a href="../index.html">all studies</a> · '
        f"{html.escape(study.plan.study)} · {links}</p>\n",
        *(f'<p class="alert">Warning: {html.escape(w)}</p>\n' for w in caption.warnings),
        _wide(to_html(table)),
        *(_figure(name) for name in shown if name not in attention_figures),
    ]
    if len(classes):
        body.append(_wide(segmentation.make_class_table(classes)))
    if attention_figures or mixture:
        body += ["<h2>Attention layers</h2>\n", *map(_figure, attention_figures)]
    if mixture:
        body.append(_wide(mixture))
    files["table.html"] = _document(title, "".join(body))
    return files


def to_csv(frame: pd.DataFrame) -> str:
    """Return `frame` as CSV in which no text cell or heading can start a spreadsheet formula."""
    frame = frame.rename(columns=_neutralise)
    for name in frame.select_dtypes(include=["object", "string"]):
        frame[name] = frame[name].map(_neutralise)
    return frame.to_csv(index=False, lineterminator="\n")


def _neutralise(value: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would evaluate."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value


def make_index_page(reports: Path) -> str:
    """Return a page that lists all studies in `reports` by name, read from their own files."""
    rows = "".join(_index_row(page.parent) for page in sorted(reports.glob("*/table.html")))
    body = (
        '<h1>Studies</h1>\n<div class="wide">\n<table>\n<thead><tr><th scope="col">study</th>'
        '<th scope="col" class="text">title</th><th scope="col">cells done</th>'
        '<th scope="col" class="text">best mean</th>'
        '<th scope="col" class="text">differs from the baseline, p Holm ≤ 0.05</th></tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )
    return _document("Studies", body)


def _index_row(folder: Path) -> str:
    """Return the row of one study, or an empty string (and a warning) for a foreign folder."""
    try:
        page = (folder / "table.html").read_text(encoding="utf-8")
        cells = pd.read_csv(folder / "per_seed.csv")
        variants = pd.read_csv(folder / "table.csv", dtype={"variant": str})
        done = int((cells["status"] == "done").sum())
        best, differing = (
            ", ".join(variants.loc[variants[mark].astype(bool), "variant"])
            for mark in ("best", "significant")
        )
    except (OSError, ValueError, KeyError) as error:
        LOG.warning("%s: is not the report of a study and is left out: %r", folder, error)
        return ""
    title = re.search("<title>(.*)</title>", page)
    name = html.escape(folder.name)
    return (
        f'<tr><th scope="row"><a href="{name}/table.html">{name}</a></th>'
        f'<td class="text">{title[1] if title else ""}</td><td>{done} / {len(cells)}</td>'
        f'<td class="text">{html.escape(best)}</td>'
        f'<td class="text">{html.escape(differing) or "none"}</td></tr>\n'
    )


def _wide(table: str) -> str:
    """Return `table` in an element that scrolls sideways if the table is wider than the page."""
    return f'<div class="wide">\n{table}</div>\n'


def _figure(name: str) -> str:
    caption = html.escape(CAPTIONS[name])
    links = [f'<a href="{name}.{kind}">{kind.upper()}</a>' for kind in ("svg", "png")]
    if table := diagnostics.TABLES.get(name):
        links.append(f'<a href="{table}">{table}</a>')
    return (
        f'<figure><img src="{name}.svg" alt="{caption}">\n'
        f"<figcaption>{caption} {' · '.join(links)}</figcaption></figure>\n"
    )


def _document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4;
  --paper: #ffffff; --hover: #f6f8fa; --link: #0550ae; --alert: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --paper: #0d1117; --hover: #161b22; --link: #79b8ff; --alert: #ff8a80; } }
* { box-sizing: border-box; } sup { line-height: 0; }
td sup { position: absolute; margin-left: .1em; font-size: 1em; line-height: inherit;
  vertical-align: baseline; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink);
  background: var(--paper); max-width: 86rem; margin: 2.2rem auto 4rem; padding: 0 1.4rem; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: 0 0 .3rem; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
.links { color: var(--soft); margin: 0 0 1.4rem; font-size: .9rem; }
.alert { color: var(--alert); font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .84rem;
  min-width: 100%; }
caption { caption-side: bottom; text-align: left; color: var(--soft); padding-top: .9rem;
  font-size: .84rem; max-width: 62rem; }
caption strong { color: var(--ink); }
th, td { padding: .34rem .5rem; text-align: right; white-space: nowrap; font-weight: 400; }
th:first-child, .text { text-align: left; }
thead th { border-top: 2px solid var(--ink); border-bottom: 1px solid var(--ink);
  font-weight: 600; white-space: normal; vertical-align: bottom; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 2px solid var(--ink); }
/* The count of seeds, and the cells that failed. */
table.results td:nth-child(3) { white-space: normal; min-width: 6.5em; }
tbody tr:hover { background: var(--hover); }
.wide + .wide, figure + .wide, h2 + .wide { margin-top: 2.4rem; }
h2 { font-size: 1.2rem; margin: 3rem 0 -.8rem; }
figure { margin: 2.4rem 0 0; }
figure img { display: block; width: 100%; max-width: 62rem; height: auto; background: #fff;
  border-radius: 6px; }
figcaption { color: var(--soft); font-size: .84rem; margin-top: .5rem; max-width: 62rem; }
"""
