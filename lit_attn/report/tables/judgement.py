"""Verdicts of a study as text for a terminal: the answer in words, what to run next, a table."""

from collections.abc import Sequence
from typing import NamedTuple

from lit_attn.report.answers.judged import (
    SCREEN_RUNS,
    Interval,
    JudgedStudy,
    JudgedVariant,
    StreamStep,
    Values,
    Verdict,
)
from lit_attn.report.numbers import DIGITS, write_number
from lit_attn.report.statistics.significance import TESTS
from lit_attn.report.tables.columns import (
    NOTHING,
    format_difference,
    format_median,
    format_number,
    format_p,
)
from lit_attn.report.tables.effects import Effect
from lit_attn.report.tables.labels import name_block
from lit_attn.report.tables.provenance import SENTENCES
from lit_attn.report.tables.terminal import Column, Screen, draw_rows, find_form, wrap
from lit_attn.report.verdicts.floors import BELOW_FLOOR, BestFloor
from lit_attn.schema.errors import plural

MOST_UNDECIDED = 6  # Largest number of undecided variants that a sentence names.
LONGEST_HEADING = 20  # Characters of a metric's label that heads a column.
VERDICTS: tuple[Verdict, ...] = ("better", "worse", "equivalent", "undecided")


class Judged(NamedTuple):
    """Variant or main effect as the sentence of an answer names it."""

    label: str
    verdict: Verdict
    difference: Interval | None
    p: float | None


class Extras(NamedTuple):
    """Parts of the table of a study on a terminal beside its verdicts.

    `effects` are those of a product of factors, `floor` is the best rule without attention, and
    `remedy` says how to see rows that did not fit.
    """

    effects: Sequence[Effect] = ()
    floor: BestFloor | None = None
    remedy: str = "--all shows them"


NO_EXTRAS = Extras()


def draw_judgement(study: JudgedStudy, screen: Screen, extras: Extras = NO_EXTRAS) -> str:
    """Return the answer, the next action, and a table that fits `screen`.

    The table of a product of factors has its main effects. The variants, and interactions that are
    undecided, follow if `screen` has any number of lines.
    """
    width = screen.width
    above = [wrap(_describe_metric(study), width)]
    answer = describe_answer(study, extras.effects)
    above.append(wrap(answer, width))
    above.append(wrap(f"Next: {study.next.text}{_describe_cost(study)}", width))
    if study.next.command is not None:
        above.append(f"  {study.next.command}")
    below = _describe_screening(study, width)
    below += _describe_endings(study.variants, width)
    below += [wrap(f"Note: {note}", width) for note in study.notes]
    # The answer about a smoke run is its warning.
    warnings = [warning for warning in study.warnings if warning not in answer]
    below += [wrap(f"Warning: {warning}", width) for warning in warnings]
    if study.is_smoke:
        # It has no value that a table could show.
        return "\n".join([*above, *below])
    lines = sum(part.count("\n") + 1 for part in [*above, *below])
    # One more line counts the rows that do not fit.
    height = max(1, screen.height - lines - 1) if screen.height else 0
    tables = []
    hidden = []
    if extras.effects:
        drawn = [effect for effect in extras.effects if _is_shown(effect, study) or not height]
        columns = _make_effect_columns(study, drawn)
        drawing = draw_rows(columns, range(len(drawn)), width, height)
        tables.append(drawing.text)
        rest = drawing.hidden + len(extras.effects) - len(drawn)
        if rest:
            hidden.append(plural(rest, "effect"))
        if height:
            hidden.append(plural(len(study.variants), "variant"))
    if not extras.effects or not height:
        columns, order = _make_variant_columns(study, extras.floor)
        drawing = draw_rows(columns, order, width, height)
        tables.append(drawing.text)
        if drawing.hidden:
            hidden.append(plural(drawing.hidden, "variant"))
    if hidden:
        tables.append(wrap(f"Hidden: {' and '.join(hidden)}; {extras.remedy}.", width))
    return "\n".join([*above, *tables, *below])


def _is_shown(effect: Effect, study: JudgedStudy) -> bool:
    """Return True for a main effect, and for an interaction with a star."""
    return effect.is_main or effect.p <= study.level


def _make_effect_columns(study: JudgedStudy, effects: Sequence[Effect]) -> list[Column]:
    """Return the columns of a table of main effects and interactions."""
    form = _choose_effect_form(effects)
    names = []
    verdicts = []
    differences = []
    for effect in effects:
        names.append(effect.label if effect.is_main else f"interaction: {effect.label}")
        verdicts.append(_judge_effect(study, effect))
        differences.append(format_difference(effect.difference, effect.low, effect.high, form))
    return [
        Column("main effect", names),
        Column("verdict", list(verdicts)),
        Column(f"{study.metric.label} [95 %]", differences),
        Column("p", [format_p(effect.p) for effect in effects]),
        Column("pairs of variants", [str(effect.combinations) for effect in effects], 2),
    ]


def _make_variant_columns(
    study: JudgedStudy, floor: BestFloor | None
) -> tuple[list[Column], list[int]]:
    """Return the columns of a table of the baseline and all variants, and the order of its rows.

    The rows that matter most are the baseline and its floor, then decided variants, then those with
    the smallest p; variants that were screened out come last. Several criteria of `match` have a
    block each.
    """
    form = _choose_form(study.variants, study.baseline_values)
    baseline = study.baseline_values
    rows = [
        [study.baseline_label, "baseline", draw_values(baseline, form), NOTHING, NOTHING],
    ]
    rows[0] += [str(baseline.n), _write_time(study.baseline_cost.step_time), NOTHING]
    importance: list[tuple[float, float]] = [(0, 0)]
    if floor is not None:
        value = format_number(floor.value, form if baseline.events is None else ".0f")
        rows.append([f"floor: {floor.rule}", NOTHING, value, *[NOTHING] * 5])
        importance.append((0, 1))
    has_blocks = len({variant.criterion for variant in study.variants}) > 1
    criterion: str | None = None
    for variant in study.variants:
        if has_blocks and variant.criterion and variant.criterion != criterion:
            criterion = variant.criterion
            rows.append([f"{name_block(criterion)}:", *[""] * 7])
            importance.append((0, 2))
        rows.append(_make_row(variant, form))
        importance.append(_rank_variant(variant))
    order = sorted(range(len(rows)), key=lambda place: importance[place])
    test = TESTS[study.pairs]
    unit = f"{test.words['unit']}s"
    last = "stage" if study.stream is not None else f"{unit} missing"
    # The first line has the label, and beside a short heading the values stay.
    metric = study.metric
    value_heading = metric.label if len(metric.label) <= LONGEST_HEADING else metric.name
    headings = [
        ("variant", 0),
        ("verdict", 0),
        (value_heading, 1),
        ("difference [95 %]" if test.has_means else "difference", 0),
        ("p", 0),
        (unit, 2),
        ("ms / step", 3),
        (last, 4 if study.stream is None else 0),
    ]
    columns = []
    for (heading, rank), texts in zip(headings, zip(*rows, strict=True), strict=True):
        if heading != "ms / step" or not set(texts) <= {NOTHING, ""}:
            columns.append(Column(heading, list(texts), rank))
    return columns, order


def _make_row(variant: JudgedVariant, form: str) -> list[str]:
    """Return the texts of a variant's row."""
    difference = NOTHING
    if variant.difference is not None:
        interval = variant.difference
        difference = format_difference(interval.mean, interval.low, interval.high, form)
    missing = NOTHING
    if variant.seeds_missing is not None:
        needed = variant.seeds_missing
        missing = f"{needed.low} to {needed.high if needed.high is not None else '> 1000'}"
    if variant.stream is not None:
        missing = _describe_stage(variant.stream)
    return [
        variant.label,
        variant.verdict,
        draw_values(variant.values, form),
        difference,
        format_p(variant.p),
        f"{variant.seeds.done}/{variant.seeds.planned}",
        _write_time(variant.cost.step_time),
        missing,
    ]


def _rank_variant(variant: JudgedVariant) -> tuple[float, float]:
    """Return how early a variant is shown if a table does not fit, the smallest one first."""
    p = 2.0 if variant.p is None else variant.p
    if variant.verdict != "undecided":
        return 1, p
    is_screened_out = variant.stream is not None and variant.stream.stage == "screened-out"
    return (3 if is_screened_out else 2), p


def _write_time(seconds: float | None) -> str:
    """Return the milliseconds of a training step."""
    return NOTHING if seconds is None else write_number(1000 * seconds, ".3g")


def _describe_stage(step: StreamStep) -> str:
    """Return the stage of an idea, and how many runs of it have ended."""
    if step.stage == "screening":
        return f"screening {step.screening_runs}/{SCREEN_RUNS}"
    if step.stage == "confirming":
        return f"confirming {step.confirmed_runs}/{step.confirm_runs}"
    return step.stage.replace("-", " ")


def draw_values(values: Values, form: str) -> str:
    """Return mean and standard deviation of a variant, or the median of times until an event.

    The runs with the event follow, as in "160 (11 of 12)".
    """
    if values.events is None:
        return _draw_spread(values, form)
    if values.mean is None:
        center = format_median(values.median, values.n)
    else:
        center = _draw_spread(values, form)
    return f"{center} ({values.events} of {values.n})"


def _draw_spread(values: Values, form: str) -> str:
    """Return mean and standard deviation, as far as there are any."""
    if values.mean is None:
        return NOTHING
    # A mean of exact sums has all of its digits on every processor.
    has_many = len(format(values.mean, form).strip("-0.")) > DIGITS
    mean = format(values.mean, form) if has_many else write_number(values.mean, form)
    return mean if values.sd is None else f"{mean} ± {write_number(values.sd, form)}"


def describe_answer(study: JudgedStudy, effects: Sequence[Effect] = ()) -> str:
    """Return the verdicts of a study in one or two sentences that a person reads.

    For example "digits: against standard, belief2 is better (+0.31 [+0.12, +0.50], p 0.031); mgk
    and xsa are undecided." `effects` are those of a product of factors, of which the sentence names
    the main ones, and counts the variants.
    """
    name = study.study
    if study.is_smoke:
        return f"{name}: {SENTENCES['smoke']}"
    if study.validity == "below-floor":
        name += f" {BELOW_FLOOR}"
    against = study.baseline_label
    if study.metric.margin is not None:
        against += f" and with the margin ± {study.metric.margin:g}"
    variants = [
        Judged(variant.label, variant.verdict, variant.difference, variant.p)
        for variant in study.variants
    ]
    main_effects = [effect for effect in effects if effect.is_main]
    if not variants:
        sentence = f"there is no variant to compare with {study.baseline_label}."
    elif main_effects:
        judged = []
        for effect in main_effects:
            interval = Interval(mean=effect.difference, low=effect.low, high=effect.high)
            judged.append(Judged(effect.label, _judge_effect(study, effect), interval, effect.p))
        form = _choose_effect_form(effects)
        sentence = f"main effects against {against}: {_list_verdicts(judged, form, 'effects')}."
        sentence += f" Of {plural(len(variants), 'variant')} {_count_verdicts(variants)}."
    else:
        form = _choose_form(study.variants, study.baseline_values)
        sentence = f"against {against}, {_list_verdicts(variants, form, 'variants')}."
    return f"{name}: {sentence}{_describe_looks(study)}"


def _describe_metric(study: JudgedStudy) -> str:
    """Return name and title of a study, its metric, which direction is better, and its seeds."""
    if study.is_smoke:
        return f"{study.study}: {study.title}"
    title = "" if study.title in (study.study, "") else f"{study.title.rstrip('.')}; "
    direction = "higher" if study.metric.goal == "max" else "lower"
    metric = f"{study.metric.label}, {direction} is better; {_count_runs(study)}"
    return f"{study.study}: {title}{metric}"


def _describe_looks(study: JudgedStudy) -> str:
    """Return the sentences about verdicts that are not final."""
    sentence = ""
    if study.is_interim and study.stream is not None:
        open_count = sum(not variant.is_final for variant in study.variants)
        sentence += f" Not final: {plural(open_count, 'idea')}."
    elif study.is_interim:
        sentence += " Planned seeds are missing, so no verdict is final."
    look = study.interim
    if look is not None:
        sentence += f" Interim: {look.seeds} of {look.planned} seeds, bound {look.level:.2g}."
    return sentence


def _count_runs(study: JudgedStudy) -> str:
    """Return the numbers of seeds or runs with a value, as "6 seeds" or "4 to 5 runs"."""
    unit = TESTS[study.pairs].words["unit"]
    counts = [variant.values.n for variant in study.variants if variant.stream is None]
    low, high = min([*counts, study.baseline_values.n]), max([*counts, study.baseline_values.n])
    return plural(high, unit) if low == high else f"{low} to {plural(high, unit)}"


def _list_verdicts(judged: Sequence[Judged], form: str, noun: str) -> str:
    """Return the clauses about better, worse, equivalent and undecided ones.

    The strongest one, a better one if there is any, has its difference and its p.
    """

    def find_strength(entry: Judged) -> tuple[int, float, float]:
        size = 0.0 if entry.difference is None else abs(entry.difference.mean)
        return VERDICTS.index(entry.verdict), 2.0 if entry.p is None else entry.p, -size

    strongest = min(judged, key=find_strength)
    numbers = _write_numbers(strongest, form)
    parts = []
    for verdict in VERDICTS:
        group = [entry for entry in judged if entry.verdict == verdict]
        if not group:
            continue
        if verdict == "undecided" and len(group) > MOST_UNDECIDED:
            # A long list of names without a verdict says nothing.
            subject = f"all {len(group)}" if len(group) == len(judged) else str(len(group))
            parts.append(f"{subject} {noun} are undecided")
            continue
        # The strongest one comes first, so that a shortened list has it.
        group.sort(key=lambda entry: entry is not strongest)
        names = [entry.label for entry in group]
        verb = "is" if len(names) == 1 else "are"
        if group[0] is strongest and len(names) == 1:
            parts.append(f"{names[0]} is {verdict}{numbers}")
            continue
        if group[0] is strongest:
            names[0] += numbers
        parts.append(f"{join_names(names)} {verb} {verdict}")
    if strongest.verdict == "undecided" and len(judged) > MOST_UNDECIDED and numbers:
        parts.append(f"the smallest p has {strongest.label}{numbers}")
    return "; ".join(parts)


def _write_numbers(entry: Judged, form: str) -> str:
    """Return difference, interval and p in parentheses after a blank, as far as there are any."""
    if entry.difference is None or entry.p is None:
        return ""
    interval = entry.difference
    difference = format_difference(interval.mean, interval.low, interval.high, form)
    p = format_p(entry.p)
    return f" ({difference}, p {p})"


def _count_verdicts(judged: Sequence[Judged]) -> str:
    """Return the number of variants with each verdict, as "1 is better and 3 are worse"."""
    parts = []
    for verdict in VERDICTS:
        count = sum(entry.verdict == verdict for entry in judged)
        if count:
            parts.append(f"{count} {'is' if count == 1 else 'are'} {verdict}")
    return join_names(parts)


def _judge_effect(study: JudgedStudy, effect: Effect) -> Verdict:
    """Return the verdict about an effect; an interaction changes a difference in this direction.

    Effects leave out failed runs, so none is decided beside them.
    """
    has_failed = any(variant.seeds.failed for variant in study.variants)
    if effect.p > study.level or effect.difference == 0 or has_failed:
        return "undecided"
    is_better = (effect.difference > 0) == (study.metric.goal == "max")
    if is_better and study.validity == "below-floor":
        return "undecided"
    return "better" if is_better else "worse"


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
    cells = plural(action.cells, TESTS[study.pairs].words["cell"])
    if action.seconds is None:
        return f" ({cells})"
    hours = action.seconds / 3600
    time = f"{hours:.2g} hours" if hours >= 0.1 else f"{action.seconds:,.0f} seconds"
    return f" ({cells}, about {time} one after another)"


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
    return find_form([abs(values.center) for values in groups if values.center], halves)


def _choose_effect_form(effects: Sequence[Effect]) -> str:
    """Return the format of numbers in which the narrowest interval of an effect has two digits."""
    widths = [
        effect.high - effect.low
        for effect in effects
        if effect.low is not None and effect.high is not None
    ]
    halves = [width / 2 for width in widths if width > 0]
    return find_form([abs(effect.difference) for effect in effects if effect.difference], halves)
