"""All files of a report: tables, figures and HTML pages. Equal records give equal bytes.

The pages run no scripts and load nothing from elsewhere.
"""

import html
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from lit_attn.files import write_atomic
from lit_attn.report import diagnostics, figures, segmentation, stats
from lit_attn.report.caption import make_caption
from lit_attn.report.comparison import ALPHA, Comparisons, compare_variants
from lit_attn.report.diagnostics import Diagnostics
from lit_attn.report.drawing import appearance, render
from lit_attn.report.formats import html_table, make_table, to_html, to_latex, to_markdown
from lit_attn.report.read import LOG, StudyRecord, read_studies
from lit_attn.report.settings import make_settings_frame, make_settings_table
from lit_attn.report.summary import make_seed_frame, make_variant_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = figures.CAPTIONS | segmentation.CAPTIONS | diagnostics.CAPTIONS
"""Caption of every figure, in the order of the page."""

OPTIONAL_TABLES = {"settings.csv", "classes.csv", "diagnostics.csv", "ranks.csv"}
"""Tables that only some studies have."""


def write_reports(runs: Path, reports: Path, studies: list[str] | None = None) -> list[Path]:
    """Write reports/<study>/ for each study in `runs` (or in `studies`) and reports/index.html.

    The index lists every study in `reports`. A study that cannot be read is skipped with a warning.
    Returns the folders that were written. Raises ConfigError if there is nothing to report on.
    """
    return write_studies(read_studies(runs, studies), reports)


def write_studies(studies: Iterable[StudyRecord], reports: Path) -> list[Path]:
    """Write the report of each study, and reports/index.html. Returns the reports' folders."""
    folders = [_write_study(study, reports) for study in studies]
    write_atomic(reports / "index.html", make_index_page(reports))
    return folders


def _write_study(study: StudyRecord, reports: Path) -> Path:
    folder = reports / study.plan.study
    recorded = diagnostics.read_study_diagnostics(study)
    comparisons = compare_variants(study)
    images = draw_figures(study, comparisons, recorded)
    shown = [name for name in CAPTIONS if (name, "svg") in images]
    files: dict[str, str | bytes] = {**make_tables(study, comparisons, shown, recorded)}
    files |= {f"{name}.{kind}": image for (name, kind), image in images.items()}
    # Remove what an earlier report of other records left here.
    figure_names = {f"{name}.{kind}" for name in CAPTIONS for kind in ("svg", "png")}
    for name in (figure_names | OPTIONAL_TABLES) - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomic(folder / name, content)
    return folder


def draw_figures(
    study: StudyRecord, comparisons: Comparisons, recorded: dict[str, Diagnostics]
) -> dict[tuple[str, str], bytes]:
    """Return every figure that the records can fill, by name and kind ("svg" or "png")."""
    if not study.finished_cells():
        return {}
    drawers: dict[str, Callable[[], Figure | None]] = {
        "seeds": lambda: figures.draw_seeds(study, comparisons),
        "curves": lambda: figures.draw_curves(study),
        "cost": lambda: figures.draw_cost(study),
        "pictures": lambda: segmentation.draw_pictures(study),
        **diagnostics.make_drawers(recorded, study.plan.baseline),
    }
    images: dict[tuple[str, str], bytes] = {}
    with appearance():
        for name, draw in drawers.items():
            if figure := draw():
                images |= {(name, kind): image for kind, image in render(figure).items()}
    return images


def make_tables(
    study: StudyRecord,
    comparisons: Comparisons,
    shown: list[str],
    recorded: dict[str, Diagnostics],
) -> dict[str, str]:
    """Return every file but the figures: content by file name. The page has the figures `shown`."""
    summary = make_variant_frame(study, comparisons)
    caption = make_caption(study, summary, comparisons)
    table = make_table(summary, study.plan.metric, caption)
    classes = segmentation.make_class_frame(study)
    settings = make_settings_frame(study)
    optional = {
        "settings.csv": settings,
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
    attention_figures = [name for name in shown if name in diagnostics.CAPTIONS]
    mixture = diagnostics.make_mixture_table(recorded)
    links = " · ".join(f'<a href="{name}">{name}</a>' for name in files)
    title = caption.title.rstrip(".")
    body = [
        f"<h1>{html.escape(title)}</h1>\n"
        f'<p class="links"><a href="../index.html">all studies</a> · '
        f"{html.escape(study.plan.study)} · {links}</p>\n",
        *(f'<p class="alert">Warning: {html.escape(w)}</p>\n' for w in caption.warnings),
        to_html(table),
        *(_figure(name) for name in shown if name not in attention_figures),
    ]
    if len(classes):
        body.append(segmentation.make_class_table(classes))
    if len(settings):
        body.append(make_settings_table(settings, study.plan.baseline))
    if attention_figures or mixture:
        body += ["<h2>Attention layers</h2>\n", *map(_figure, attention_figures), mixture]
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


INDEX_HEADINGS = ["study", "title", "cells done", "n", "best mean", "differs from the baseline"]
INDEX_HEADINGS += ["finished", "machine"]


def make_index_page(reports: Path) -> str:
    """Return a page that lists all studies in `reports` by name, read from their own files.

    A variant differs from its baseline if it has a star in its study and its p is still at most
    ALPHA after the correction over all studies.
    """
    pages = sorted(reports.glob("*/table.html"))
    tables = [table for page in pages if (table := _read_report(page.parent))]
    p_values = [variants["p_adjusted"].dropna().tolist() for _, variants, _ in tables]
    rows = []
    for (folder, variants, cells), adjusted in zip(
        tables, stats.holm_over_studies(p_values), strict=True
    ):
        variants.loc[variants["p_adjusted"].notna(), "p_index"] = adjusted
        rows.append(_index_row(folder, variants, cells))
    sentence = (
        "A variant differs from the baseline if it has a star in its study and its p value, "
        f"corrected for the {len(tables)} studies of this page by Holm's method, is at most "
        f"{ALPHA}. n is the number of seeds; the best mean needs all planned seeds and claims no "
        "difference."
    )
    body = html_table(INDEX_HEADINGS, rows, [sentence], "index")
    return _document("Studies", f"<h1>Studies</h1>\n{body}")


def _read_report(folder: Path) -> tuple[Path, pd.DataFrame, pd.DataFrame] | None:
    """Return table.csv and per_seed.csv of a report, or None (and a warning) for other folders."""
    try:
        variants = pd.read_csv(folder / "table.csv", dtype={"variant": str})
        wanted = {"status", "finished", "device"}
        cells = pd.read_csv(folder / "per_seed.csv", usecols=lambda name: name in wanted, dtype=str)
    except (OSError, ValueError) as error:
        LOG.warning("%s: is not a report and is left out of the index: %s", folder, error)
        return None
    if not {"variant", "n", "best", "significant", "p_adjusted"} <= set(variants):
        LOG.warning("%s: is not a report of this version and is left out of the index", folder)
        return None
    # A study without any result has no date and no device.
    return folder, variants, cells.reindex(columns=sorted(wanted))


def _index_row(folder: Path, variants: pd.DataFrame, cells: pd.DataFrame) -> str:
    page = (folder / "table.html").read_text(encoding="utf-8")
    title = re.search("<title>(.*)</title>", page)
    done = cells[cells["status"] == "done"]
    fewest, most = int(variants["n"].min()), int(variants["n"].max())
    is_different = variants["significant"] & (variants["p_index"] <= ALPHA)
    texts = [
        f"{len(done)} / {len(cells)}",
        str(most) if fewest == most else f"{fewest} to {most}",
        ", ".join(variants.loc[variants["best"], "variant"]) or "none",
        ", ".join(variants.loc[is_different, "variant"]) or "none",
        max(done["finished"].dropna(), default="")[:10],
        ", ".join(sorted(set(done["device"].dropna()))),
    ]
    name = html.escape(folder.name)
    row = [f'<th scope="row"><a href="{name}/table.html">{name}</a></th>']
    # The title in the page is escaped already.
    row.append(f"<td>{title[1] if title else ''}</td>")
    row += [f"<td>{html.escape(text)}</td>" for text in texts]
    return f"<tr>{''.join(row)}</tr>"


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
.caption { color: var(--soft); font-size: .84rem; max-width: 62rem; margin: .9rem 0 0; }
.caption strong { color: var(--ink); }
th, td { padding: .34rem .5rem; text-align: right; white-space: nowrap; font-weight: 400; }
th:first-child, table.settings *, table.index * { text-align: left; }
table.index td:nth-child(2) { white-space: normal; min-width: 16rem; }
thead th { border-top: 2px solid var(--ink); border-bottom: 1px solid var(--ink);
  font-weight: 600; white-space: normal; vertical-align: bottom; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 2px solid var(--ink); }
/* The count of seeds, and the cells that failed. */
table.results td:nth-child(3) { white-space: normal; min-width: 6.5em; }
tbody tr:hover { background: var(--hover); }
.caption + .wide, figure + .wide, h2 + .wide { margin-top: 2.4rem; }
h2 { font-size: 1.2rem; margin: 3rem 0 -.8rem; }
figure { margin: 2.4rem 0 0; }
figure img { display: block; width: 100%; max-width: 62rem; height: auto; background: #fff;
  border-radius: 6px; }
figcaption { color: var(--soft); font-size: .84rem; margin-top: .5rem; max-width: 62rem; }
"""
