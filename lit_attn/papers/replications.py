"""Published numbers and ours: is the difference smaller than a margin that was chosen beforehand?

The published noise counts as ours does: a number of one run is known no better than one run of
ours. So a single published run often leaves a replication undecided, whatever we train.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from lit_attn.papers import layout
from lit_attn.papers import source as config
from lit_attn.papers.printed import count_decimals
from lit_attn.papers.published import Records, measure
from lit_attn.report.statistics.stats import student_quantile
from lit_attn.report.tables import formats
from lit_attn.report.tables.columns import format_difference, format_number
from lit_attn.report.tables.formats import Cell, Table
from lit_attn.schema.errors import plural

VERDICTS = ("reproduced", "not reproduced", "undecided", "not run")
SHARE = 0.975
"""Share of Student's t below the end of a 95 % interval."""


class Equivalence(NamedTuple):
    """Our mean minus the published number, its 95 % interval, and the verdict.

    The verdict is one of VERDICTS, or "undecided: <reason>".
    """

    difference: float | None
    low: float | None
    high: float | None
    verdict: str


def judge(
    ours: Sequence[float], published: float, deviation: float | None, runs: int, margin: float
) -> Equivalence:
    """Compare the values of our seeds with a published mean of `runs` runs.

    `deviation` is that of one published run, None if nobody knows it: then it is that of our seeds.
    The number is reproduced if the 95 % interval of the difference lies within ± `margin`, which is
    the test of two one-sided hypotheses (Schuirmann, 1987) at 0.025 each. It is not reproduced if
    the interval lies outside.
    """
    if not ours:
        return Equivalence(None, None, None, "not run")
    count = len(ours)
    difference = math.fsum(ours) / count - published
    if count < 2:
        return Equivalence(difference, None, None, "undecided: one seed")
    our_variance = statistics.variance(ours)
    our_square = our_variance / count
    freedom = float(count - 1)
    if deviation is None:
        square = our_square + our_variance / runs
    else:
        square = our_square + deviation**2 / runs
        if our_square > 0:
            # Welch and Satterthwaite: the published deviation counts as known.
            freedom *= (square / our_square) ** 2
    half = student_quantile(min(freedom, 1e6), SHARE) * math.sqrt(square)
    low, high = difference - half, difference + half
    if -margin <= low and high <= margin:
        verdict = "reproduced"
    elif low > margin or high < -margin:
        verdict = "not reproduced"
    else:
        verdict = "undecided"
    return Equivalence(difference, low, high, verdict)


def judge_text(
    published: str, replication: layout.Replication, ours: Sequence[float], waiting: int
) -> Equivalence:
    """Compare the values of our seeds with a published cell as printed: `18.60`, `72.01±0.20`.

    Nothing is decided while `waiting` planned seeds have no result, because the seeds that end
    first may be those that solve a task first.
    """
    number = layout.parse_cell(published)
    assert number is not None
    mean, printed = number
    deviation = replication.deviation or printed
    equivalence = judge(ours, mean, deviation, replication.runs, replication.margin)
    if ours and waiting:
        verdict = f"undecided: {plural(waiting, 'seed')} without a result"
        return equivalence._replace(verdict=verdict)
    return equivalence


def make_replications_table(
    source: config.PaperSource, items: dict[str, layout.Layout], records: Records
) -> Table:
    """Return the published numbers with ours and the verdicts."""
    rows = []
    verdicts = []
    for number, item in items.items():
        columns, _ = item.grid()
        for replication in item.replications:
            published, reference = source.find_replicated(item, replication)
            column_name = item.name_column(replication.column)
            column = columns[column_name]
            values = measure(records, reference, column.value, column.epoch)
            waiting = _count_without_result(records, reference)
            equivalence = judge_text(published, replication, list(values.values()), waiting)
            verdicts.append(equivalence.verdict)
            study = records.get(reference.study)
            rows.append(
                [
                    Cell(f"{replication.row}, {column_name}"),
                    Cell(number),
                    Cell("" if study is None else study.plan.title),
                    *format_replication(published, replication, values, equivalence),
                ]
            )
    totals = []
    for name in VERDICTS:
        count = sum(verdict.startswith(name) for verdict in verdicts)
        totals.append(f"{count} {name}")
    return formats.named_table("replications", rows, totals=", ".join(totals))


def format_replication(
    published: str,
    replication: layout.Replication,
    values: dict[int, float],
    equivalence: Equivalence,
) -> list[Cell]:
    """Return the cells of a replication: published, ours, n, difference, margin and verdict."""
    decimals = min(count_decimals(published) + 1, 4)
    mean = "" if not values else format_number(statistics.fmean(values.values()), f".{decimals}f")
    difference = ""
    if equivalence.difference is not None:
        ends = equivalence.low, equivalence.high
        difference = format_difference(equivalence.difference, *ends, f".{decimals}f")
    is_plain = equivalence.verdict in ("reproduced", "not reproduced")
    return [
        Cell(f"{published} ({replication.runs})"),
        Cell(mean),
        Cell(str(len(values))),
        Cell(difference),
        Cell(f"{replication.margin:g}"),
        Cell(equivalence.verdict, is_bold=is_plain),
    ]


def _count_without_result(records: Records, reference: config.Reference) -> int:
    """Return the number of our planned seeds that have not ended, or have failed."""
    study = records.get(reference.study)
    if study is None:
        return 0
    return sum(cell.status != "done" for cell in study.variant_cells(reference.variant))
