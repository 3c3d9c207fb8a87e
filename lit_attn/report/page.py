"""HTML pages: one per study, and an index of them. No scripts, nothing fetched from elsewhere."""

import html
import re
from pathlib import Path

import pandas as pd

from lit_attn.report import diagnostics
from lit_attn.report.caption import Caption
from lit_attn.report.figures import FIGURES
from lit_attn.report.read import StudyRecord

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
/* The count, with the cells that failed. */
table.results td:nth-child(3) { white-space: normal; min-width: 6.5em; }
tbody tr:hover { background: var(--hover); }
.wide + .wide, figure + .wide, h2 + .wide { margin-top: 2.4rem; }
h2 { font-size: 1.2rem; margin: 3rem 0 -.8rem; }
figure { margin: 2.4rem 0 0; }
figure img { display: block; width: 100%; max-width: 62rem; height: auto; background: #fff;
  border-radius: 6px; }
figcaption { color: var(--soft); font-size: .84rem; margin-top: .5rem; max-width: 62rem; }
"""

# Columns of a study's table.csv whose variants the index names.
TOLD = ("best", "significant")


def study_page(
    study: StudyRecord,
    tables: list[str],
    files: list[str],
    caption: Caption,
    figures: list[str],
    mixture: str = "",
) -> str:
    """The study's main table, its figures and its other tables, with links to `files`.

    What was recorded of attention layers has a section, with the table of `mixture` at its end.
    """
    links = " · ".join(f'<a href="{name}">{name}</a>' for name in files)
    alerts = "".join(
        f'<p class="alert">Warning: {html.escape(warning)}</p>\n' for warning in caption.warnings
    )
    first, *others = (f'<div class="wide">\n{table}</div>\n' for table in tables)
    looked_at = [name for name in figures if name in diagnostics.FIGURES]
    images = "".join(_figure(name) for name in figures if name not in looked_at)
    section = ""
    if looked_at or mixture:
        section = "<h2>Attention layers</h2>\n" + "".join(map(_figure, looked_at))
    if mixture:
        section += f'<div class="wide">\n{mixture}</div>\n'
    title = caption.title.rstrip(".")
    body = (
        f"<h1>{html.escape(title)}</h1>\n"
        f'<p class="links"><a href="../index.html">all studies</a> · '
        f"{html.escape(study.plan.study)} · {links}</p>\n"
        f"{alerts}{first}{images}{''.join(others)}{section}"
    )
    return _document(title, body)


def _figure(name: str) -> str:
    words = html.escape(FIGURES[name])
    links = [f'<a href="{name}.{kind}">{kind.upper()}</a>' for kind in ("svg", "png")]
    if table := diagnostics.TABLES.get(name):
        links.append(f'<a href="{table}">{table}</a>')
    return (
        f'<figure><img src="{name}.svg" alt="{words}">\n'
        f"<figcaption>{words} {' · '.join(links)}</figcaption></figure>\n"
    )


def index_page(reports: Path) -> str:
    """All studies that have a page in `reports`, by name; what it says is in their own files."""
    rows = "".join(_index_row(page.parent) for page in sorted(reports.glob("*/table.html")))
    body = (
        '<h1>Studies</h1>\n<div class="wide">\n<table>\n<thead><tr><th scope="col">study</th>'
        '<th scope="col" class="text">title</th><th scope="col">cells done</th>'
        '<th scope="col" class="text">best mean</th>'
        '<th scope="col" class="text">differs, p Holm ≤ 0.05</th></tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )
    return _document("Studies", body)


def _index_row(folder: Path) -> str:
    found = re.search("<title>(.*)</title>", (folder / "table.html").read_text(encoding="utf-8"))
    title = found[1] if found else ""
    cells = pd.read_csv(folder / "per_seed.csv")
    variants = pd.read_csv(folder / "table.csv", dtype={"variant": str})
    best, differ = (", ".join(variants.loc[variants[of], "variant"]) for of in TOLD)
    name = html.escape(folder.name)
    return (
        f'<tr><th scope="row"><a href="{name}/table.html">{name}</a></th>'
        f'<td class="text">{title}</td>'
        f"<td>{(cells['status'] == 'done').sum()} / {len(cells)}</td>"
        f'<td class="text">{html.escape(best)}</td>'
        f'<td class="text">{html.escape(differ) or "none"}</td></tr>\n'
    )


def _document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )
