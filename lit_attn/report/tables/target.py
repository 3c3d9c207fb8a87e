"""Verdicts against a target as plain text for a terminal."""

from lit_attn.report.answers.judged import JudgedTarget
from lit_attn.report.numbers import write_number
from lit_attn.report.tables.columns import NOTHING
from lit_attn.report.tables.formats import Cell, Table
from lit_attn.report.tables.terminal import (
    draw_table,
    draw_values,
    find_form,
    find_width,
    join_names,
    wrap,
)

HEADINGS = ["group", "verdict", "mean", "runs", "p", "p (t test)", "runs missing"]


def draw_target(answer: JudgedTarget, width: int = 0) -> str:
    """Return the verdicts of all groups as a table and in words, and what to run next."""
    width = width or find_width()
    metric = answer.metric
    sizes = [abs(group.values.mean) for group in answer.groups if group.values.mean]
    spreads = sorted(group.values.sd for group in answer.groups if group.values.sd)
    form = find_form(sizes, spreads[len(spreads) // 2 :][:1])
    rows = []
    for group in answer.groups:
        runs = str(group.values.n)
        if group.failed:
            runs += f", {group.failed} failed"
        missing = NOTHING if group.runs_missing is None else str(group.runs_missing)
        texts = [group.group, group.verdict, draw_values(group.values, form), runs]
        texts += [_write_p(group.p), _write_p(group.p_t_test), missing]
        rows.append([Cell(text) for text in texts])
    sign = "≥" if metric.goal == "max" else "≤"
    title = f"{answer.study}: is the mean of {metric.label} {sign} {answer.target:g}?"
    parts = [wrap(title, width), wrap(_describe_verdicts(answer), width)]
    parts.append(draw_table(Table(HEADINGS, rows), width))
    if answer.first_passing is not None:
        text = f"The smallest group from which on all pass is {answer.first_passing}."
        parts.append(wrap(text, width))
    parts += [wrap(f"Note: {note}", width) for note in answer.notes]
    parts.append(wrap(f"Next: {answer.next}", width))
    return "\n".join(parts)


def _write_p(p: float | None) -> str:
    """Return p with two digits, as records publish it."""
    return NOTHING if p is None else write_number(p, ".2g")


def _describe_verdicts(answer: JudgedTarget) -> str:
    """Return the verdicts in one sentence, with the rule."""
    parts = []
    for verdict, words in (
        ("passes", "passes"),
        ("misses", "misses the target"),
        ("undecided", "is undecided"),
    ):
        names = [group.group for group in answer.groups if group.verdict == verdict]
        if len(names) > 1:
            words = words.replace("passes", "pass").replace("misses", "miss").replace("is ", "are ")
        if names:
            parts.append(f"{join_names(names)} {words}")
    return (
        f"{answer.study}: {'; '.join(parts)} (p ≤ {answer.level:g} after any number of runs; the t"
        " test is valid at one look)."
    )
