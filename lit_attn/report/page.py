"""HTML pages: one per study, and an index of them. No scripts, nothing fetched from elsewhere."""

import html

from lit_attn.report.caption import MIXED
from lit_attn.report.read import StudyRecord

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0;
  --paper: #ffffff; --alert: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --paper: #0d1117; --alert: #ff7b72; } figure img { background: #fff; border-radius: 4px; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1180px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } a { color: inherit; }
p.links, p.soft { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
caption { caption-side: bottom; text-align: left; color: var(--soft); padding-top: .8rem;
  font-size: .85rem; line-height: 1.45; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: 500; }
thead th { border-top: 2px solid var(--ink); border-bottom: 1px solid var(--ink);
  font-weight: 600; }
tbody tr:last-child > * { border-bottom: 2px solid var(--ink); }
tbody tr:hover { background: color-mix(in srgb, var(--line) 35%, transparent); }
.alert { color: var(--alert); font-weight: 600; }
figure { margin: 1.6rem 0; } figure img { max-width: 100%; }
figcaption { color: var(--soft); font-size: .85rem; }
"""

FIGURES = {
    "curves": "Learning curves: mean over seeds, band of one standard deviation.",
    "seeds": "Every seed: dots of one seed are joined, the bar is the mean.",
    "cost": "Value against cost: FLOPs of a forward pass, and measured time of a training step.",
}


def study_page(study: StudyRecord, table: str, caption: str, figures: list[str]) -> str:
    """The study's table and figures."""
    plan = study.plan
    files = ("table.csv", "table.md", "table.tex", "per_seed.csv")
    links = " · ".join(f'<a href="{name}">{name}</a>' for name in files)
    alert = ""
    if caption.startswith(MIXED):
        alert = f'<p class="alert">{html.escape(caption.split(".")[0])}.</p>\n'
    images = "".join(
        f'<figure><img src="{name}.svg" alt="{html.escape(FIGURES[name])}">'
        f"<figcaption>{html.escape(FIGURES[name])}</figcaption></figure>\n"
        for name in figures
    )
    body = (
        f"<h1>{html.escape(plan.title)}</h1>\n"
        f'<p class="links"><a href="../index.html">all studies</a> · {links}</p>\n'
        f'{alert}<div class="wide">\n{table}</div>\n{images}'
    )
    return _document(f"{plan.study}: {plan.title}", body)


def index_page(studies: list[tuple[str, str, str]]) -> str:
    """All studies: (folder, title, one line of progress)."""
    rows = "".join(
        f'<tr><th><a href="{html.escape(folder)}/table.html">{html.escape(folder)}</a></th>'
        f"<td>{html.escape(progress)}</td>"
        f'<td style="text-align:left">{html.escape(title)}</td></tr>\n'
        for folder, title, progress in studies
    )
    body = (
        "<h1>Studies</h1>\n<table>\n<thead><tr><th>study</th><th>cells done</th>"
        f'<th style="text-align:left">title</th></tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n'
    )
    return _document("Studies", body)


def _document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )
