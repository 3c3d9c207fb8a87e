"""The printed table: one frame of text, written as Markdown, LaTeX (booktabs) and HTML.

`Text` marks what stands out in every format alike: bold is the best mean, a star passes the
corrected test, grey is missing.
"""

import html
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lit_attn.records import Metric

Row = dict[str, Any]

NOTHING = "\N{EN DASH}"
STAR = "*"


@dataclass(frozen=True)
class Table:
    """Columns with their headings, rows of cells, and which rows are bold or starred."""

    headings: list[str]
    rows: list[list[str]]
    bold: list[bool]
    starred: list[bool]
    caption: str


def make_table(summary: pd.DataFrame, metric: Metric, caption: str) -> Table:
    """The rows of `summary` as text; columns that would be empty in every row are left out."""
    rows: list[Row] = [{str(k): v for k, v in row.items()} for row in summary.to_dict("records")]
    columns = {
        "variant": [row["variant"] for row in rows],
        metric.label: [_plus_minus(row["mean"], row["sd"]) for row in rows],
        "n": [_count(row) for row in rows],
        "difference [95 %]": [_difference(row) for row in rows],
        "p": [_p(row["p"]) for row in rows],
        "p Holm": [_p(row["p_holm"]) for row in rows],
        "seeds needed": [_needed(row) for row in rows],
        "published": [_plus_minus(row["published"], row["published_sd"]) for row in rows],
        "ours - published": [_number(row["published_difference"], "+.2f") for row in rows],
        "parameters": [_number(row["parameters"], ",d") for row in rows],
        "MFLOPs": [_number(row["flops"], ",.1f", 1e-6) for row in rows],
        "ms / step": [_number(row["step_time"], ".1f", 1e3) for row in rows],
        "memory (MB)": [_number(row["peak_memory"], ",.0f", 1e-6) for row in rows],
    }
    used = {name: cells for name, cells in columns.items() if set(cells) != {NOTHING}}
    return Table(
        list(used),
        [list(row) for row in zip(*used.values(), strict=True)],
        summary["best"].tolist(),
        summary["significant"].tolist(),
        caption,
    )


def to_markdown(table: Table) -> str:
    """A pipe table with its caption below."""
    lines = [
        "| " + " | ".join(_markdown(h) for h in table.headings) + " |",
        "|" + "|".join("---" if i == 0 else "---:" for i in range(len(table.headings))) + "|",
    ]
    for row, bold, star in zip(table.rows, table.bold, table.starred, strict=True):
        cells = [_markdown(cell) for cell in row]
        cells[1] = f"**{cells[1]}**" if bold else cells[1]
        cells[1] += f" {_markdown(STAR)}" if star else ""
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _markdown(table.caption), ""])


def to_latex(table: Table, label: str) -> str:
    """A booktabs table that compiles with `\\usepackage{booktabs,graphicx}`."""
    lines = [
        r"\begin{table}",
        r"\centering",
        r"\resizebox{\textwidth}{!}{%",
        r"\begin{tabular}{l" + "r" * (len(table.headings) - 1) + "}",
        r"\toprule",
        " & ".join(latex(heading) for heading in table.headings) + r" \\",
        r"\midrule",
    ]
    for row, bold, star in zip(table.rows, table.bold, table.starred, strict=True):
        cells = [latex(cell) for cell in row]
        cells[1] = rf"\textbf{{{cells[1]}}}" if bold else cells[1]
        cells[1] += r"\textsuperscript{*}" if star else ""
        lines.append(" & ".join(cells) + r" \\")
    lines += [
        r"\bottomrule",
        r"\end{tabular}}",
        rf"\caption{{{latex(table.caption)}}}",
        rf"\label{{tab:{''.join(c if c.isalnum() else '-' for c in label)}}}",
        r"\end{table}",
    ]
    return "\n".join([*lines, ""])


def to_html(table: Table) -> str:
    """A `<table>` element with its caption."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in table.headings)
    body = []
    for row, bold, star in zip(table.rows, table.bold, table.starred, strict=True):
        cells = [html.escape(cell) for cell in row]
        cells[1] = f"<strong>{cells[1]}</strong>" if bold else cells[1]
        cells[1] += "<sup>*</sup>" if star else ""
        first, *rest = cells
        body.append(f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>")
    rows = "\n".join(body)
    return (
        f"<table>\n<caption>{html.escape(table.caption)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n"
    )


def latex(text: str) -> str:
    """Text that stands for itself in LaTeX, whatever characters it has."""
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        NOTHING: "--",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "≤": r"$\le$",
        **{character: rf"\{character}" for character in "&%$#_{}"},
    }
    # pdflatex stops at letters beyond Latin ones; those become question marks.
    return "".join(special.get(c, c if ord(c) < 0x180 and c.isprintable() else "?") for c in text)


def _markdown(text: str) -> str:
    return "".join(rf"\{c}" if c in r"\|*_`<>[]" else c for c in text)


def _count(row: Row) -> str:
    if not row["failures"]:
        return str(row["n"])
    return f"{row['n']}/{row['planned']}, {row['failures']}"


def _difference(row: Row) -> str:
    if pd.isna(row["difference"]):
        return NOTHING
    text = f"{row['difference']:+.2f}"
    if not pd.isna(row["low"]):
        text += f" [{row['low']:+.2f}, {row['high']:+.2f}]"
    return text if row["pairs"] == row["n"] else f"{text} ({row['pairs']} pairs)"


def _needed(row: Row) -> str:
    if not pd.isna(row["seeds_needed"]):
        return str(row["seeds_needed"])
    return "> 1000" if row["pairs"] > 1 and row["difference"] else NOTHING


def _plus_minus(mean: Any, sd: Any) -> str:
    if pd.isna(mean):
        return NOTHING
    return f"{mean:.2f}" if pd.isna(sd) else f"{mean:.2f} ± {sd:.2f}"


def _p(value: Any) -> str:
    if pd.isna(value):
        return NOTHING
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def _number(value: Any, form: str, scale: float = 1) -> str:
    if pd.isna(value):
        return NOTHING
    return format(value * scale if scale != 1 else value, form)
