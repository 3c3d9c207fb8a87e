"""Verdicts against a target as plain text for a terminal."""

from lit_attn.judging.answers import JudgedTarget
from lit_attn.report.numbers import write_number
from lit_attn.report.tables.columns import NOTHING
from lit_attn.report.tables.judgement import MOST_UNDECIDED, draw_values, join_names
from lit_attn.report.tables.terminal import Column, Screen, draw_rows, find_form, wrap
from lit_attn.schema.errors import plural

RANKS = {
    "group": 0,
    "verdict": 0,
    "mean": 1,
    "runs": 2,
    "p": 0,
    "p (t test)": 0,
    "runs missing": 3,
}
"""Columns, of which those with a larger number are left out first."""


def draw_target(answer: JudgedTarget, screen: Screen) -> str:
    """Return the verdicts of all groups in words, what to run next, and a table that fits."""
    width = screen.width
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
        rows.append([*texts, _write_p(group.p), _write_p(group.p_t_test), missing])
    sign = "≥" if metric.goal == "max" else "≤"
    title = f"{answer.study}: is the mean of {metric.label} {sign} {answer.target:g}?"
    above = [wrap(title, width), wrap(_describe_verdicts(answer, form), width)]
    if answer.first_passing is not None:
        text = f"The smallest group from which on all pass is {answer.first_passing}"
        first = next(group for group in answer.groups if group.group == answer.first_passing)
        text += "." if first.seconds is None else f", with {first.seconds:.6g} s for each run."
        above.append(wrap(text, width))
    above.append(wrap(f"Next: {answer.next}", width))
    below = [wrap(f"Note: {note}", width) for note in answer.notes]
    lines = sum(part.count("\n") + 1 for part in [*above, *below])
    columns = []
    for (heading, rank), cells in zip(RANKS.items(), zip(*rows, strict=True), strict=True):
        columns.append(Column(heading, list(cells), rank))
    # Groups with a verdict matter most, and of these the last ones, which are the newest.
    places = range(len(rows))
    order = sorted(places, key=lambda k: (answer.groups[k].verdict == "undecided", -k))
    height = max(1, screen.height - lines - 1) if screen.height else 0
    drawing = draw_rows(columns, order, width, height)
    hidden = []
    if drawing.hidden:
        hidden.append(f"Hidden: {plural(drawing.hidden, 'group')}; --all shows them.")
    return "\n".join([*above, drawing.text, *hidden, *below])


def _write_p(p: float | None) -> str:
    """Return p with two digits, as records publish it."""
    return NOTHING if p is None else write_number(p, ".2g")


def _describe_verdicts(answer: JudgedTarget, form: str) -> str:
    """Return the verdicts in one sentence, with the values of the strongest group and the rule."""
    parts = []
    for verdict, one, several in (
        ("passes", "passes", "pass"),
        ("misses", "misses the target", "miss the target"),
        ("undecided", "is undecided", "are undecided"),
    ):
        groups = [group for group in answer.groups if group.verdict == verdict]
        if not groups:
            continue
        names = [group.group for group in groups]
        if verdict == "undecided" and len(groups) > MOST_UNDECIDED:
            parts.append(f"{len(groups)} groups {several}")
            continue
        if verdict == "passes":
            # The strongest group comes first, so that a shortened list has it.
            groups.sort(key=lambda group: 1.0 if group.p is None else group.p)
            names = [group.group for group in groups]
            names[0] += f" ({draw_values(groups[0].values, form)}, p {_write_p(groups[0].p)})"
        parts.append(f"{join_names(names)} {one if len(names) == 1 else several}")
    return (
        f"{answer.study}: {'; '.join(parts)} (p ≤ {answer.level:g} after any number of runs; the t"
        " test is valid at one look)."
    )
