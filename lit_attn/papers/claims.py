"""Claims of a paper, compared with our differences: paired over seeds, or of measured files."""

import itertools
import math
from typing import NamedTuple

from lit_attn.cells.records import Plan
from lit_attn.papers import layout
from lit_attn.papers import source as config
from lit_attn.papers.printed import count_decimals
from lit_attn.papers.published import (
    Entry,
    Records,
    choose_columns,
    find_cells,
    has_time_fault,
    is_busy,
    is_time,
    make_entries,
)
from lit_attn.report.records.timing import TIME_MARK
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.significance import OWN_TEST
from lit_attn.report.statistics.significance_base import Outcomes, Step
from lit_attn.report.tables.columns import BUSY_TEXT, DAGGER, format_difference, format_number
from lit_attn.report.verdicts.comparison import FAILURES
from lit_attn.report.verdicts.floors import BELOW_FLOOR, is_below_floor

JUDGEMENTS = ("agree", "disagree", "undecided", "not run", "not measured")
"""Judgements of a claim: an undecided one has an interval that contains 0, one that has not run has
no seed with both results, and for one that is not measured no study of this size has both cells."""

NORMAL_QUANTILE = 1.959963984540054
"""Quantile of the normal distribution for a two-sided 95 % interval."""


class Verdict(NamedTuple):
    """Claims, their tables and figures, the titles of our studies, and the differences by seed.

    Small models have other data. `judgement` is one of JUDGEMENTS, or "undecided: <reason>"; a
    dagger marks different code or data.
    """

    text: str
    places: str
    studies: str
    published: str
    ours: str
    pairs: int
    judgement: str


class Comparison(NamedTuple):
    """Our difference with its 95 % interval, None without one, and the number of pairs.

    `reason` says why there is no interval.
    """

    difference: float | None
    low: float | None
    high: float | None
    pairs: int
    reason: str = ""

    def judge(self, published: float) -> str:
        """Return the judgement of a claim with a published difference of this sign."""
        if self.difference is None:
            return "not run"
        if self.low is None or self.high is None:
            return f"undecided: {self.reason}"
        if self.low <= 0 <= self.high:
            return "undecided"
        return "agree" if self.difference * published > 0 else "disagree"


def judge_claims(
    source: config.PaperSource, items: dict[str, layout.Layout], records: Records
) -> list[Verdict]:
    """Compare the claims of tables and figures with our differences.

    Claims about the same difference between the same cells have one verdict.
    """
    verdicts: dict[tuple[object, ...], Verdict] = {}
    for number, item in items.items():
        if not item.claims:
            continue
        columns = choose_columns(source, item)
        grid = make_entries(source, item, records)
        cells = {(entry.row, entry.column): entry for entry in itertools.chain(*grid)}
        for claim in item.claims:
            heading = item.name_column(claim.column)
            pair = [cells[name, heading] for name in (claim.row, claim.against)]
            verdict = _judge_claim(claim, number, columns[heading], pair, records)
            measured = _identify(source, item, claim, columns)
            if not measured:
                verdict = verdict._replace(judgement="not measured")
            # Claims about cells that nothing measures stay apart.
            key = (*measured, verdict.judgement) if measured else (number, claim.text)
            first = verdicts.get(key)
            verdicts[key] = _merge(first, verdict, number) if first else verdict
    return list(verdicts.values())


def _merge(first: Verdict, verdict: Verdict, number: str) -> Verdict:
    """Return the verdict of two claims about the same difference."""
    return first._replace(
        text=f"{first.text} / {verdict.text}",
        places=f"{first.places} / {number}",
        published=f"{first.published} / {verdict.published}",
    )


def _identify(
    source: config.PaperSource,
    item: layout.Layout,
    claim: layout.Claim,
    columns: dict[str, layout.Column],
) -> tuple[object, ...]:
    """Return what a claim compares: variants, and the values, files and rows of its columns.

    Empty if one of the cells has no variant.
    """
    located = source.locate(item)
    heading = item.name_column(claim.column)
    parts = columns[heading].mean or (heading,)
    measured: list[object] = []
    for name in (claim.row, claim.against):
        for part in parts:
            reference = located.get((name, part))
            if reference is None:
                return ()
            column = columns[part]
            selected_rows = tuple(sorted(column.where.items()))
            measured += [reference, column.value, column.epoch, column.file, selected_rows]
    return tuple(measured)


def _judge_claim(
    claim: layout.Claim, number: str, column: layout.Column, pair: list[Entry], records: Records
) -> Verdict:
    """Compare a claim about a pair of cells with our difference."""
    plans: dict[str, Plan] = {}
    for entry in pair:
        for reference in entry.references:
            plans[reference.study] = records[reference.study].plan
    goals: set[str] = {plan.metric.goal for plan in plans.values()}
    published, published_text, digits = _read_published(claim, pair, goals)
    is_file = any(entry.is_file for entry in pair)
    comparison = _compare_files(pair) if is_file else _compare_seeds(pair)
    measured = comparison.judge(published)
    doubt = _find_doubt(measured, claim, column, pair, records, goals)
    judgement = f"undecided: {doubt}" if doubt else measured
    return Verdict(
        text=claim.text,
        places=number,
        studies="; ".join(plan.title for plan in plans.values()),
        published=published_text,
        ours=_format_comparison(comparison, digits, is_file),
        pairs=comparison.pairs,
        judgement=" ".join([judgement, *_find_marks(column, pair, records)]),
    )


def _format_comparison(comparison: Comparison, digits: int, is_file: bool) -> str:
    """Return our difference with its interval, or nothing without a difference."""
    if comparison.difference is None:
        return ""
    # Small differences keep two significant digits.
    smallest = 2 if round(abs(comparison.difference), 4) >= 0.1 else 4
    decimals = max(digits, smallest)
    low, high = comparison.low, comparison.high
    if is_file and low == high:
        # Counted values have no interval.
        low = high = None
    return format_difference(comparison.difference, low, high, f".{decimals}f")


def _find_marks(column: layout.Column, pair: list[Entry], records: Records) -> list[str]:
    """Return the marks of a floor, of different code or data, and of incomparable times."""
    marks = []
    studies = {reference.study for entry in pair for reference in entry.references}
    has_values = any(entry.values for entry in pair) and _shows_quality(column, pair, records)
    if has_values and any(is_below_floor(records[study]) for study in studies):
        marks.append(BELOW_FLOOR)
    for reference, other in zip(pair[0].references, pair[1].references, strict=False):
        if records[reference.study].is_mixed(reference.variant, other.variant):
            marks.append(DAGGER)
            break
    if any(has_time_fault(records, entry, column.value) for entry in pair):
        marks.append(TIME_MARK)
    return marks


def _shows_quality(column: layout.Column, pair: list[Entry], records: Records) -> bool:
    """Return True for a recorded metric; costs, times and diagnostics say nothing about it."""
    is_cost = column.value in layout.COSTS or any(is_time(records, e, column.value) for e in pair)
    is_diagnostic = column.value.startswith("diagnostics/")
    return not (column.file or is_cost or is_diagnostic)


def _read_published(
    claim: layout.Claim, pair: list[Entry], goals: set[str]
) -> tuple[float, str, int]:
    """Return the published difference (or its sign), its text and its decimals."""
    numbers = [layout.find_numbers(entry.published) for entry in pair]
    if not all(numbers):
        # The row of the claim has the better curve.
        aims = {claim.goal} if claim.goal else goals
        return (-1.0 if "min" in aims else 1.0), "curves only", 2
    digits = max(count_decimals(entry.published) for entry in pair)
    difference = numbers[0][0] - numbers[1][0]
    return difference, format_number(difference, f"+.{digits}f"), digits


def _compare_seeds(pair: list[Entry]) -> Comparison:
    """Return the mean of the paired differences over seeds with Student's interval."""
    ours, theirs = pair[0].values, pair[1].values
    sample = OWN_TEST.make_sample(ours, theirs)
    if not OWN_TEST.is_comparable(sample):
        return Comparison(None, None, None, 0)
    resolution = stats.find_resolution([*ours.values(), *theirs.values()])
    interval = OWN_TEST.find_interval(sample, 1 - stats.ALPHA, Step(resolution))
    if interval is None:
        return Comparison(float(sample[0][0]), None, None, 1, "one pair")
    return Comparison(*interval, len(sample[0]))


def _compare_files(pair: list[Entry]) -> Comparison:
    """Return the difference of two values of files, with the interval of their standard errors.

    The errors are taken as independent. Values on the same samples vary together, which makes the
    interval too wide rather than too narrow.
    """
    values = [list(entry.values.values()) for entry in pair]
    if not all(values):
        return Comparison(None, None, None, 0)
    if any(len(numbers) > 1 for numbers in values):
        first, second = (sum(numbers) / len(numbers) for numbers in values)
        return Comparison(first - second, None, None, 1, "several values in a cell")
    difference = values[0][0] - values[1][0]
    errors = [entry.error for entry in pair if entry.error is not None]
    if len(errors) < 2:
        return Comparison(difference, None, None, 1, "no standard error")
    half = NORMAL_QUANTILE * math.hypot(*errors)
    return Comparison(difference, difference - half, difference + half, 1)


def _find_doubt(
    measured: str,
    claim: layout.Claim,
    column: layout.Column,
    pair: list[Entry],
    records: Records,
    goals: set[str],
) -> str:
    """Return why busy machines or failed seeds leave a claim undecided, or nothing.

    `measured` is the judgement of the seeds with results.
    """
    if any(is_busy(records, entry, column.value) for entry in pair):
        return BUSY_TEXT
    failed: list[set[int]] = []
    for entry in pair:
        cells = find_cells(records, entry)
        failed.append({cell.seed for cell in cells if cell.status in FAILURES})
    if not any(failed):
        return ""
    # The side of a failed seed is known for the metric alone, not for other values.
    sides = goals if column.value == "metric" else {"min", "max"}
    is_confirmed = all(_confirm(pair, failed, goal) for goal in sides)
    if measured in ("agree", "disagree") and is_confirmed:
        return ""
    reasons = []
    for seeds, name in zip(failed, (claim.row, claim.against), strict=True):
        if seeds:
            reasons.append(f"{len(seeds)} failed ({name})")
    return ", ".join(reasons)


def _confirm(pair: list[Entry], failed: list[set[int]], goal: str) -> bool:
    """Return True if the test that ranks failed seeds last finds the same direction."""
    ours, theirs = pair[0].values, pair[1].values
    outcomes = Outcomes(
        baseline="theirs",
        values={"theirs": theirs, "ours": ours},
        failed={"theirs": failed[1], "ours": failed[0]},
        higher_is_better=goal == "max",
    )
    # Without pairs there is no p.
    p, favour = OWN_TEST.rank(outcomes).get("ours", (1.0, 0.0))
    difference = float(OWN_TEST.make_sample(ours, theirs)[0].sum())
    gain = difference if goal == "max" else -difference
    return p <= stats.ALPHA and gain * favour > 0
