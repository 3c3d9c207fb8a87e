"""A table as Markdown, LaTeX (booktabs) and HTML."""

import html

from lit_attn.report.caption import DAGGER, STAR
from lit_attn.report.latex import latex
from lit_attn.report.table import Row, Table


def to_markdown(table: Table) -> str:
    """A pipe table with its caption below."""
    lines = [
        "| " + " | ".join(_markdown(heading) for heading in table.headings) + " |",
        "|" + "|".join("---" if i == 0 else "---:" for i in range(len(table.headings))) + "|",
    ]
    for row in table.rows:
        name, value, *rest = (_markdown(cell) for cell in row.cells)
        name += f" {DAGGER}" if row.daggered else ""
        value = f"**{value}**" if row.bold else value
        value += f" {_markdown(STAR)}" if row.starred else ""
        lines.append("| " + " | ".join([name, value, *rest]) + " |")
    caption = table.caption
    lines += ["", f"**{_markdown(caption.title)}**"]
    lines += [f"**Warning: {_markdown(warning)}**" for warning in caption.warnings]
    lines += [_markdown(note) for note in caption.notes]
    return "\n".join([*lines, ""])


def to_latex(table: Table, label: str) -> str:
    """A table that shrinks to the width of the text where it is wider, named `tab:label`."""
    lines = [
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table}",
        r"\centering",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        r"\begin{tabular}{l" + "r" * (len(table.headings) - 1) + "}",
        r"\toprule",
        " & ".join(latex(heading) for heading in table.headings) + r" \\",
        r"\midrule",
        *(_latex_row(row) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}}",
    ]
    caption = table.caption
    words = [
        rf"\textbf{{{latex(caption.title)}}}",
        *(rf"\textbf{{Warning: {latex(warning)}}}" for warning in caption.warnings),
        *(latex(note) for note in caption.notes),
    ]
    lines += [
        rf"\caption[{{{latex(caption.title)}}}]{{%",
        *words,
        "}",
        rf"\label{{tab:{''.join(c if c.isascii() and c.isalnum() else '-' for c in label)}}}",
        r"\end{table}",
    ]
    return "\n".join([*lines, ""])


def to_html(table: Table) -> str:
    """A `<table>` element with its caption."""
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in table.headings)
    body = "\n".join(_html_row(row) for row in table.rows)
    caption = table.caption
    words = [
        f"<strong>{html.escape(caption.title)}</strong>",
        *(f'<span class="alert">Warning: {html.escape(w)}</span>' for w in caption.warnings),
        *(f"<span>{html.escape(note)}</span>" for note in caption.notes),
    ]
    return (
        '<table class="results">\n<caption>\n' + "\n".join(words) + "\n</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n"
    )


def _latex_row(row: Row) -> str:
    name, value, *rest = (latex(cell) for cell in row.cells)
    name += rf"\textsuperscript{{{latex(DAGGER)}}}" if row.daggered else ""
    value = rf"\textbf{{{value}}}" if row.bold else value
    value += rf"\textsuperscript{{{STAR}}}" if row.starred else ""
    # The end of the row before would take these two for its own argument and its star.
    guard = "{}" if name.startswith(("[", "*")) else ""
    return guard + " & ".join([name, value, *rest]) + r" \\"


def _html_row(row: Row) -> str:
    name, value, *rest = (html.escape(cell) for cell in row.cells)
    name += f"<sup>{DAGGER}</sup>" if row.daggered else ""
    value = f"<strong>{value}</strong>" if row.bold else value
    value += f"<sup>{STAR}</sup>" if row.starred else ""
    cells = "".join(f"<td>{cell}</td>" for cell in (value, *rest))
    return f'<tr><th scope="row">{name}</th>{cells}</tr>'


def _markdown(text: str) -> str:
    """Text that no Markdown reader takes for markup, on one line."""
    return "".join(rf"\{c}" if c in r"\|*_`<>[]#~$&" else c for c in " ".join(text.split()))
