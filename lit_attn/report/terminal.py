"""Tables and verdicts as plain text for a terminal."""

import textwrap
from collections.abc import Sequence

from lit_attn.report.answers import JudgedStudy, JudgedVariant
from lit_attn.report.columns import NOTHING, format_difference, format_p
from lit_attn.report.formats import Cell, Table
from lit_attn.report.numbers import find_magnitude
from lit_attn.schema.errors import plural

WIDTH = 100  # Characters of a line of words.
GAP = "  "  # Between two columns.
MOST_UNDECIDED = 6  # Largest number of undecided variants that a sentence names.


def draw_table(table: Table) -> str:
    """Return the headings and rows of a table in aligned columns, without its caption.

    The first column is aligned on the left, the others on the right.
    """
    rows = [[f"{cell.text}{cell.mark}" for cell in row] for row in table.rows]
    lines = [table.headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = [_align(line, widths) for line in lines]
    rule = "-" * max(len(line) for line in drawn)
    return "\n".join([drawn[0], rule, *drawn[1:]])


def _align(texts: Sequence[str], widths: Sequence[int]) -> str:
    """Return the texts of a line, padded to the widths of their columns."""
    first = texts[0].ljust(widths[0])
    others = []
    for text, width in zip(texts[1:], widths[1:], strict=True):
        others.append(text.rjust(width))
    return GAP.join([first, *others]).rstrip()


def draw_results(table: Table, verdicts: str) -> str:
    """Return the brief table of results with its title, its warnings and the verdicts in words."""
    brief = table.brief()
    parts = [table.title.rstrip("."), draw_table(brief)]
    parts += [_wrap(f"Warning: {warning}") for warning in table.warnings]
    parts.append(_wrap(verdicts))
    return "\n".join(parts) + "\n"


def draw_judgement(study: JudgedStudy) -> str:
    """Return the verdicts of a study as a table and a sentence, and the next action."""
    rows = []
    digits = _choose_digits(study.variants)
    for variant in study.variants:
        difference = NOTHING
        if variant.difference is not None:
            interval = variant.difference
            difference = format_difference(interval.mean, interval.low, interval.high, digits)
        seeds = f"{variant.seeds.done}/{variant.seeds.planned}"
        needed = NOTHING
        if variant.seeds_missing is not None:
            missing = variant.seeds_missing
            needed = f"{missing.low} to {missing.high if missing.high is not None else '> 1000'}"
        texts = [variant.label, variant.verdict, difference, format_p(variant.p), seeds, needed]
        rows.append([Cell(text) for text in texts])
    headings = ["variant", "verdict", "difference [95 %]", "p", "seeds", "seeds missing"]
    parts = [f"{study.study}: {study.title}"]
    if rows:
        parts.append(draw_table(Table(headings, rows)))
    parts.append(_wrap(describe_verdicts(study)))
    parts += _describe_endings(study.variants)
    parts += [_wrap(f"Warning: {warning}") for warning in study.warnings]
    parts.append(_wrap(f"Next: {study.next.text}{_describe_cost(study)}"))
    if study.next.command is not None:
        parts.append(f"  {study.next.command}")
    return "\n".join(parts)


def describe_verdicts(study: JudgedStudy) -> str:
    """Return the verdicts of a study in one sentence that a person reads.

    For example "digits: against standard, belief2 is better; mgk and xsa are undecided."
    """
    parts = []
    for verdict in ("better", "worse", "equivalent", "undecided"):
        names = [variant.label for variant in study.variants if variant.verdict == verdict]
        if not names:
            continue
        verb = "is" if len(names) == 1 else "are"
        words = verdict
        if verdict == "equivalent":
            words = f"equivalent within ± {study.metric.margin:g}"
        if verdict == "undecided" and len(names) > MOST_UNDECIDED:
            # A long list of names without a verdict says nothing.
            are_all = len(names) == len(study.variants)
            subject = f"all {len(names)} variants" if are_all else f"{len(names)} variants"
        else:
            subject = join_names(names)
        parts.append(f"{subject} {verb} {words}")
    if not parts:
        return f"{study.study}: there is no variant to compare with {study.baseline_label}."
    sentence = f"{study.study}: against {study.baseline_label}, {'; '.join(parts)}."
    if study.is_interim:
        sentence += " Planned seeds are missing, so no verdict is final."
    look = study.interim
    if look is not None:
        sentence += f" Interim: {look.seeds} of {look.planned} seeds, bound {look.level:.2g}."
    return sentence


def join_names(names: Sequence[str], most: int = 6) -> str:
    """Return "a, b and c", or the first of more than `most` names and the number of the others."""
    if len(names) > most:
        rest = plural(len(names) - most + 1, "other")
        return f"{', '.join(names[: most - 1])} and {rest}"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _describe_endings(variants: Sequence[JudgedVariant]) -> list[str]:
    """Return a line for each variant that a rule of the plan has ended."""
    endings = {variant.label: variant.ended for variant in variants}
    return [_wrap(f"{label}: {ending.text}.") for label, ending in endings.items() if ending]


def _describe_cost(study: JudgedStudy) -> str:
    """Return the cells and hours of the next action, as the end of a line."""
    action = study.next
    if not action.cells:
        return ""
    cells = plural(action.cells, "cell")
    if action.seconds is None:
        return f" ({cells})"
    return f" ({cells}, about {action.seconds / 3600:.2g} hours one after another)"


def _choose_digits(variants: Sequence[JudgedVariant]) -> int:
    """Return the decimals with which the narrowest interval has two digits."""
    halves = []
    for variant in variants:
        interval = variant.difference
        if interval is not None and interval.low is not None and interval.high is not None:
            half = (interval.high - interval.low) / 2
            if half > 0:
                halves.append(half)
    if not halves:
        return 2
    return min(max(2, 1 - find_magnitude(min(halves))), 6)


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
