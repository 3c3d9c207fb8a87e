"""Power laws as plain text for a terminal."""

from lit_attn.judging.answers import LawsAnswer
from lit_attn.report.answers.judged import Interval
from lit_attn.report.numbers import write_number
from lit_attn.report.tables.columns import NOTHING, format_p
from lit_attn.report.tables.terminal import Column, draw_table
from lit_attn.schema.errors import plural


def draw_laws(answer: LawsAnswer) -> str:
    """Return the laws of all variants, and a table of every variant at each of its costs."""
    lines = []
    for law in answer.laws:
        asymptote = f"{law.asymptote:g} + " if law.asymptote else ""
        exponent = _write_interval(law.exponent, ".4f")
        misfit = write_number(100 * law.misfit, ".2g")
        lines.append(
            f"{law.variant}: {answer.metric} = {asymptote}{law.factor:.4g} {answer.cost}^-b,"
            f" b = {exponent}, {plural(law.runs, 'run')}, misfit {misfit} %"
        )
    rows = []
    for entry in answer.comparisons:
        mark = "+" if entry.is_extrapolated else ""
        row = [
            entry.variant,
            f"{entry.cost:.6g}",
            str(entry.runs),
            f"{entry.loss:.5g}",
            _write_interval(entry.difference, "+.4f"),
            NOTHING if entry.p is None else format_p(entry.p),
            _write_interval(entry.speedup, ".3f") + mark,
            _write_interval(entry.time_speedup, ".3f"),
        ]
        rows.append(row)
    percent = f"[{100 * answer.confidence:g} %]"
    headings = [
        "variant",
        answer.cost,
        "runs",
        answer.metric,
        f"difference at equal cost {percent}",
        "p",
        f"speed-up {percent}",
        f"in time {percent}",
    ]
    if rows:
        texts = [list(column) for column in zip(*rows, strict=True)]
        columns = [Column(*column) for column in zip(headings, texts, strict=True)]
        lines.append(draw_table(columns))
    if any(entry.is_extrapolated for entry in answer.comparisons):
        lines.append(f"+: {answer.baseline} needs more than its largest {answer.cost}.")
    lines += [f"Warning: {warning}" for warning in answer.warnings]
    return "\n".join(lines)


def _write_interval(interval: Interval | None, form: str) -> str:
    """Return a number with its interval, as far as they are known."""
    if interval is None:
        return NOTHING
    text = write_number(interval.mean, form)
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{write_number(interval.low, form)}, {write_number(interval.high, form)}]"
