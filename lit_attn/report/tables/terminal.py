"""Tables and verdicts as plain text for a terminal."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lit_attn.report.answers.judged import (
    Interval,
    JudgedStudy,
    JudgedVariant,
    LawsAnswer,
    StreamStep,
    Values,
)
from lit_attn.report.figures.drawing import short_names
from lit_attn.report.numbers import DIGITS, find_magnitude, write_number
from lit_attn.report.tables.columns import NOTHING, STAR, format_difference, format_p
from lit_attn.report.tables.formats import Cell, Table
from lit_attn.report.verdicts.floors import BELOW_FLOOR
from lit_attn.report.verdicts.stream import SCREEN_RUNS
from lit_attn.schema.errors import plural

FILE_WIDTH = 80
"""Characters of a line of table.txt, which fits every terminal and is the same everywhere."""
LONGEST = 120  # Most characters of a line of words, however wide the terminal is.
MOST_UNDECIDED = 6  # Largest number of undecided variants that a sentence names.
FEW_DIGITS = 4  # Zeros behind the point before which a number has a power of ten.
MOST_DIGITS = 16  # Digits of a 64-bit floating-point number.
FEWEST_LETTERS = 16  # Letters of a name that are drawn in any case.
MOST_ROWS = 12  # Rows up to which a table is drawn with all of them.
# A rule below the headings, and no other line; terminals of every encoding have this character.
RULE = Box("    \n    \n----\n    \n    \n    \n    \n    \n", ascii=True)


def find_width() -> int:
    """Return the characters of a line of the terminal, or FILE_WIDTH without a terminal.

    The variable COLUMNS is 0 in some containers and jobs of CI.
    """
    return Console().width or FILE_WIDTH


def draw_table(table: Table, width: int = 0) -> str:
    """Return the headings and rows of a table in aligned columns, without its caption.

    The first column is aligned on the left, the others on the right. In a table that is wider than
    `width` (0: any width) the names in the first column are shortened, to FEWEST_LETTERS at least,
    or have several lines.
    """
    drawn = RichTable(box=RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    first, *others = table.headings
    drawn.add_column(Text(first), no_wrap=True)
    for heading in others:
        drawn.add_column(Text(heading), justify="right", no_wrap=True)
    names = [f"{row[0].text}{row[0].mark}" for row in table.rows]
    if width:
        columns = list(zip(*table.rows, strict=True))[1:]
        taken = 0
        for heading, cells in zip(others, columns, strict=True):
            texts = [heading, *(f"{cell.text}{cell.mark}" for cell in cells)]
            taken += 2 + max(map(cell_len, texts))
        names = _fit_names(names, max(width - taken, FEWEST_LETTERS))
    for name, row in zip(names, table.rows, strict=True):
        drawn.add_row(Text(name), *[Text(f"{cell.text}{cell.mark}") for cell in row[1:]])
    file = io.StringIO()
    # Wider than any table, because a narrower console would cut the cells.
    console = Console(file=file, width=100_000, color_system=None, legacy_windows=False)
    console.print(drawn)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join(lines)


def _fit_names(names: list[str], letters: int) -> list[str]:
    """Return the names with at most `letters` letters a line, broken at commas if possible."""
    shortened = short_names(names, letters)
    if len(set(shortened)) == len(set(names)):
        return shortened
    wrapped = []
    for name in names:
        lines = textwrap.wrap(name.replace(",", ", "), letters, break_on_hyphens=False)
        wrapped.append("\n".join(lines).replace(", ", ","))
    return wrapped


def draw_results(table: Table, verdicts: str) -> str:
    """Return the brief table of results with its title, its warnings and the verdicts in words.

    Of many variants the table has the first one, those with a star, and the next ones; a line
    counts the others.
    """
    brief = table.brief()
    shown = choose_rows(brief)
    parts = [wrap(table.title.rstrip("."), FILE_WIDTH), draw_table(shown, FILE_WIDTH)]
    screened_out = brief.screened_out - shown.screened_out
    left_out = len(brief.rows) - len(shown.rows) - screened_out
    if left_out:
        rest = plural(left_out, "undecided variant")
        parts.append(wrap(f"{rest} more: table.md has all rows.", FILE_WIDTH))
    if screened_out:
        rest = plural(screened_out, "screened-out variant")
        parts.append(wrap(f"{rest} more: table.md has all rows.", FILE_WIDTH))
    parts += [wrap(f"Warning: {warning}", FILE_WIDTH) for warning in table.warnings]
    parts.append(wrap(verdicts, FILE_WIDTH))
    return "\n".join(parts) + "\n"


def choose_rows(table: Table) -> Table:
    """Return a table with at most MOST_ROWS rows, or with more if more rows have a mark.

    The first two rows and the rows with a star are always among them.
    """
    if len(table.rows) <= MOST_ROWS:
        return table
    # The baseline, and the best floor below it.
    chosen = {0, 1}
    for place, row in enumerate(table.rows):
        if any(cell.mark == STAR for cell in row):
            chosen.add(place)
    for place in range(len(table.rows)):
        if len(chosen) < MOST_ROWS:
            chosen.add(place)
    first_screened_out = len(table.rows) - table.screened_out
    screened_out = sum(place >= first_screened_out for place in chosen)
    rows = [table.rows[place] for place in sorted(chosen)]
    return replace(table, rows=rows, screened_out=screened_out)


def draw_judgement(study: JudgedStudy, width: int = 0) -> str:
    """Return the verdicts of a study as a table and a sentence, and the next action.

    `width` are the characters of a line; 0: those of the terminal.
    """
    width = width or find_width()
    baseline = study.baseline_values
    form = _choose_form(study.variants, baseline)
    rows = [[Cell(study.baseline_label), Cell("baseline"), Cell(draw_values(baseline, form))]]
    rows[0] += [Cell(NOTHING), Cell(NOTHING), Cell(str(baseline.n)), Cell(NOTHING)]
    for variant in study.variants:
        difference = NOTHING
        if variant.difference is not None:
            interval = variant.difference
            difference = format_difference(interval.mean, interval.low, interval.high, form)
        seeds = f"{variant.seeds.done}/{variant.seeds.planned}"
        needed = NOTHING
        if variant.seeds_missing is not None:
            missing = variant.seeds_missing
            needed = f"{missing.low} to {missing.high if missing.high is not None else '> 1000'}"
        if variant.stream is not None:
            needed = _describe_stage(variant.stream)
        values = draw_values(variant.values, form)
        texts = [variant.label, variant.verdict, values, difference, format_p(variant.p)]
        rows.append([Cell(text) for text in [*texts, seeds, needed]])
    unit = "seeds" if study.pairs == "seed" else "runs"
    value = (
        f"{study.metric.label} ({'higher' if study.metric.goal == 'max' else 'lower'} is better)"
    )
    last = "stage" if study.stream is not None else f"{unit} missing"
    headings = ["variant", "verdict", value, "difference [95 %]", "p", unit, last]
    parts = [f"{study.study}: {study.title}", draw_table(Table(headings, rows), width)]
    parts.append(wrap(describe_verdicts(study), width))
    parts += _describe_screening(study, width)
    parts += _describe_endings(study.variants, width)
    parts += [wrap(f"Note: {note}", width) for note in study.notes]
    parts += [wrap(f"Warning: {warning}", width) for warning in study.warnings]
    parts.append(wrap(f"Next: {study.next.text}{_describe_cost(study)}", width))
    if study.next.command is not None:
        parts.append(f"  {study.next.command}")
    return "\n".join(parts)


def _describe_stage(step: StreamStep) -> str:
    """Return the stage of an idea, and how many runs of it have ended."""
    if step.stage == "screening":
        return f"screening {step.screening_runs}/{SCREEN_RUNS}"
    if step.stage == "confirming":
        return f"confirming {step.confirmed_runs}/{step.confirm_runs}"
    return step.stage.replace("-", " ")


def draw_values(values: Values, form: str) -> str:
    """Return mean and standard deviation of a variant, as far as there are any."""
    if values.mean is None:
        return NOTHING
    # A mean of exact sums has all of its digits on every processor.
    has_many = len(format(values.mean, form).strip("-0.")) > DIGITS
    mean = format(values.mean, form) if has_many else write_number(values.mean, form)
    return mean if values.sd is None else f"{mean} ± {write_number(values.sd, form)}"


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
        if verdict == "undecided" and len(names) > MOST_UNDECIDED:
            # A long list of names without a verdict says nothing.
            are_all = len(names) == len(study.variants)
            subject = f"all {len(names)} variants" if are_all else f"{len(names)} variants"
        else:
            subject = join_names(names)
        parts.append(f"{subject} {verb} {verdict}")
    if not parts:
        return f"{study.study}: there is no variant to compare with {study.baseline_label}."
    name = study.study
    if study.validity == "below-floor":
        name += f" {BELOW_FLOOR}"
    margin = study.metric.margin
    against = study.baseline_label
    if margin is not None:
        against += f" and with the margin ± {margin:g}"
    sentence = f"{name}: against {against}, {'; '.join(parts)}."
    if study.is_interim and study.stream is not None:
        open_count = sum(not variant.is_final for variant in study.variants)
        sentence += f" Not final: {plural(open_count, 'idea')}."
    elif study.is_interim:
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


def _describe_screening(study: JudgedStudy, width: int) -> list[str]:
    """Return a line about the screening of a study with `design`."""
    design = study.design
    if design is None:
        return []
    screen = plural(design.screen, "seed")
    if design.kept is None:
        text = f"The screening ({screen} by {design.metric}) has not ended."
        return [wrap(text, width)]
    names = [entry.label for entry in design.variants if entry.is_kept is False]
    if not names:
        return []
    text = f"Screened out with {screen} by {design.metric}, nothing claimed: {join_names(names)}."
    return [wrap(text, width)]


def _describe_endings(variants: Sequence[JudgedVariant], width: int) -> list[str]:
    """Return a line for each idea that its confirmation has ended."""
    endings = {}
    for variant in variants:
        # Most ideas of a stream are screened out, and the table says so.
        is_screened_out = variant.stream is not None and variant.stream.stage == "screened-out"
        if not is_screened_out:
            endings[variant.label] = variant.ended
    return [wrap(f"{label}: {ending.text}.", width) for label, ending in endings.items() if ending]


def _describe_cost(study: JudgedStudy) -> str:
    """Return the cells and hours of the next action, as the end of a line."""
    action = study.next
    if not action.cells:
        return ""
    cells = plural(action.cells, "cell" if study.pairs == "seed" else "run")
    if action.seconds is None:
        return f" ({cells})"
    return f" ({cells}, about {action.seconds / 3600:.2g} hours one after another)"


def _choose_form(variants: Sequence[JudgedVariant], baseline: Values) -> str:
    """Return the format of numbers in which the narrowest interval has two digits."""
    halves = []
    for variant in variants:
        interval = variant.difference
        if interval is not None and interval.low is not None and interval.high is not None:
            half = (interval.high - interval.low) / 2
            if half > 0:
                halves.append(half)
    groups = [*(variant.values for variant in variants), baseline]
    return find_form([abs(values.mean) for values in groups if values.mean], halves)


def find_form(sizes: Sequence[float], halves: Sequence[float]) -> str:
    """Return the format in which the smallest of `halves` has two digits, as ".4f" or ".3e".

    `sizes` are those of the means. Without halves a mean has four digits, and six decimals at most.
    No number has more digits than a 64-bit floating-point number.
    """
    first = find_magnitude(max(sizes)) if sizes else 0
    last = 1 - first
    if halves:
        last = find_magnitude(min(halves)) - 1
    elif sizes:
        last = find_magnitude(sizes[0]) - 3
    decimals = max(2, -last)
    if not halves:
        decimals = min(decimals, 6)
    if first < -FEW_DIGITS or first >= MOST_DIGITS:
        return f".{min(max(1, first - last), MOST_DIGITS - 1)}e"
    return f".{max(0, min(decimals, MOST_DIGITS - 1 - max(first, 0)))}f"


def wrap(text: str, width: int) -> str:
    """Return a text in lines of at most `width` characters; further lines are indented."""
    return textwrap.fill(text, min(width, LONGEST), subsequent_indent="  ", break_on_hyphens=False)


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
        texts = [
            entry.variant,
            f"{entry.cost:.6g}",
            str(entry.runs),
            f"{entry.loss:.5g}",
            _write_interval(entry.difference, "+.4f"),
            NOTHING if entry.p is None else format_p(entry.p),
            _write_interval(entry.speedup, ".3f") + mark,
            _write_interval(entry.time_speedup, ".3f"),
        ]
        rows.append([Cell(text) for text in texts])
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
        lines.append(draw_table(Table(headings, rows)))
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
