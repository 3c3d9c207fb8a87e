"""Power laws, equal costs and effective speed-ups of the runs of any program.

The baseline's runs at several costs C (FLOPs, steps or seconds) follow L = E + A C^-b. The
asymptote E is given, and a line is fitted to the logarithms of L - E and C of all runs. The
residuals, which contain the noise of runs and the lack of fit, have n - 2 degrees of freedom.

A variant with the mean loss L at the cost C is compared in two ways:

- at equal cost: with the baseline's runs at C or, without any, with the law between its costs;
- by its effective speed-up: the cost with which the baseline reaches L, divided by C. If the
  baseline has runs at C, the law passes through them, so a variant that equals the baseline has the
  speed-up 1 however the law is curved.

Intervals are Student's, with variances by the delta method and degrees of freedom by Welch and
Satterthwaite. docs/laws.md has their simulated coverage.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lit_attn.judging.answers import CostComparison, Law, LawsAnswer
from lit_attn.judging.conditions import select_rows
from lit_attn.judging.directions import find_goal, parse_metric
from lit_attn.judging.prepare import Choices, find_baseline
from lit_attn.judging.run_table import RunTable, join_factors
from lit_attn.judging.runs import read_runs
from lit_attn.judging.states import read_states
from lit_attn.judging.values import read_number, read_values
from lit_attn.report.answers.judged import Interval
from lit_attn.report.statistics.means import Mean, add_means, combine_means, find_ends, find_p
from lit_attn.report.statistics.power_laws import SIZES_FOR_ASYMPTOTE, fit_asymptote
from lit_attn.schema.errors import ConfigError, plural, require

if TYPE_CHECKING:
    import pandas as pd

SAME_COST = 1e-6
"""Relative difference below which two costs are equal."""


LARGEST_LOGARITHM = 600.0
"""Logarithm beyond which an exponential, times a loss, may have no floating-point value."""


class Run(NamedTuple):
    """A run: its variant, its cost, its loss, and the cost that it does in a second."""

    variant: str
    cost: float
    loss: float
    rate: float | None


class _Line(NamedTuple):
    """Line y = height - exponent (x - centre) through n logarithms, and its residual variance.

    The variance has `freedom` degrees of freedom, 0 if it is not known.
    """

    centre: float
    height: float
    exponent: float
    width: float
    variance: float
    runs: int
    freedom: int

    def mean_at(self, x: float) -> Mean:
        """Return the height of the line at x."""
        value = self.height - self.exponent * (x - self.centre)
        share = 1 / self.runs + (x - self.centre) ** 2 / self.width
        return Mean(value, self.variance * share, self.freedom, is_residual=True)


def find_laws(
    runs: "str | Path | pd.DataFrame",
    metric: str = "",
    *,
    cost: str,
    baseline: str = "",
    variant: str = "",
    rate: str = "",
    asymptote: float | None = 0.0,
    confidence: float = 0.95,
    where: Sequence[str] = (),
    states: Sequence[str] = (),
    reader: str = "",
) -> LawsAnswer:
    """Return the laws of the runs of any program, and the effective speed-up of every variant.

    `runs` is a path that `lit_attn.judge` reads, or a pandas frame with one row for each run.
    Runs that have failed or not ended are left out, with a warning in the answer. `cost` is the
    column that the law is about, and `rate` a column with cost per second, such as
    tokens per second. `asymptote` is E, the loss that no cost reaches; None fits it to a baseline
    with four costs or more, and no number that depends on it then has an interval. PyTorch is not
    needed. Raises
    ConfigError for columns or values that no law can have.
    """
    table = join_factors(select_rows(read_runs(runs, reader), where), variant)
    warnings = list(table.notes)
    name, goal = parse_metric(metric or table.metric)
    column = variant or table.variant
    for needed in [name, cost, column, *([rate] if rate else [])]:
        require(f"{table.source}: has no column", needed, table.columns)
    if (goal or find_goal(name, f"{table.source}: {name}")) == "max":
        raise ConfigError(
            f"{table.source}: {name}: a law is about a loss, which falls with cost; for an"
            " accuracy use a column with the error"
        )
    table = _leave_out_open_runs(table, name, states, warnings)
    if asymptote is not None and not math.isfinite(asymptote):
        raise ConfigError(f"asymptote: needs a finite number, not {asymptote:g}")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence: needs a number between 0 and 1, not {confidence:g}")
    read = _read_runs(table, name, cost, column, rate, asymptote or 0.0)
    variants = list(dict.fromkeys(run.variant for run in read))
    chosen = find_baseline(table, Choices(baseline=baseline), variants)
    is_fitted = asymptote is None
    if asymptote is None:
        asymptote = _fit_asymptote(table.source, cost, read, chosen)
        warnings.append(
            "The asymptote is fitted, so no number that depends on it has an interval or a p."
        )
    lines = {}
    laws = []
    for one in variants:
        group = [run for run in read if run.variant == one]
        line = _fit_line(group, asymptote, is_fitted=is_fitted)
        if line is not None:
            lines[one] = line
            laws.append(_describe_law(one, read, line, asymptote, confidence))
    if chosen not in lines:
        raise ConfigError(
            f"{table.source}: the baseline '{chosen}' has runs at one value of '{cost}' only; a law"
            " needs two or more"
        )
    base = [run for run in read if run.variant == chosen]
    comparisons = []
    for one in variants:
        if one != chosen:
            group = [run for run in read if run.variant == one]
            comparisons += _compare(one, group, base, lines[chosen], asymptote, confidence)
    return LawsAnswer(
        metric=name,
        cost=cost,
        baseline=chosen,
        confidence=confidence,
        laws=laws,
        comparisons=comparisons,
        warnings=warnings,
    )


def _leave_out_open_runs(
    table: RunTable, metric: str, states: Sequence[str], warnings: list[str]
) -> RunTable:
    """Return the table without runs that have failed or not ended, whose losses are not final.

    They are those that have failed or not ended for `judge`. `warnings` gets sentences about them.
    Raises ConfigError if no run is left.
    """
    values = read_values(table, metric, read_states(table, warnings, states), warnings)
    ended = []
    for number, value in enumerate(values):
        if value is not None and math.isfinite(value):
            ended.append(number)
    count = len(values) - len(ended)
    if not count:
        return table
    if not ended:
        raise ConfigError(f"{table.source}: no run has ended without a failure, so none has a law")
    warnings.append(f"{plural(count, 'run')} without a final loss: left out of all laws.")
    rows = [table.rows[number] for number in ended]
    places = [table.places[number] for number in ended]
    return RunTable(**{**vars(table), "rows": rows, "places": places})


def _read_runs(
    table: RunTable, metric: str, cost: str, variant: str, rate: str, asymptote: float
) -> list[Run]:
    """Return the runs of a table. Raises ConfigError for values without a logarithm."""
    runs = []
    for row, place in zip(table.rows, table.places, strict=True):
        numbers = {}
        for name in [metric, cost, *([rate] if rate else [])]:
            number = read_number(row.get(name))
            if not isinstance(number, float) or not math.isfinite(number):
                raise ConfigError(
                    f"{place}: {name}: '{row.get(name)}' is no number; leave the run out, with"
                    " --where or in the file"
                )
            numbers[name] = number
        if numbers[metric] <= asymptote:
            raise ConfigError(
                f"{place}: {metric}: {numbers[metric]:g} is not above the asymptote {asymptote:g}"
            )
        for name in (cost, rate):
            if name and numbers[name] <= 0:
                raise ConfigError(f"{place}: {name}: {numbers[name]:g} is not above 0")
        label = str(row.get(variant, "")).strip()
        runs.append(Run(label, numbers[cost], numbers[metric], numbers.get(rate)))
    return runs


def _fit_asymptote(source: str, cost: str, runs: Sequence[Run], baseline: str) -> float:
    """Return the asymptote of the baseline as studies of sizes fit it.

    Raises ConfigError for a baseline with too few costs.
    """
    chosen = [run for run in runs if run.variant == baseline]
    count = len(_group_by_cost(chosen))
    if count < SIZES_FOR_ASYMPTOTE:
        raise ConfigError(
            f"{source}: the baseline '{baseline}' has {plural(count, 'value')} of '{cost}', and an"
            f" asymptote is fitted to {SIZES_FOR_ASYMPTOTE} or more; give it with --asymptote E"
        )
    costs = np.array([[run.cost for run in chosen]])
    losses = np.array([[run.loss for run in chosen]])
    return fit_asymptote(costs, losses, min(run.loss for run in runs))


def _fit_line(runs: Sequence[Run], asymptote: float, *, is_fitted: bool) -> _Line | None:
    """Return the line through the logarithms of runs, None if all have one cost.

    The variance around it is that of a known asymptote. With a fitted one it is not known: an
    interval that took it as known covered the true exponent in 18 of 100 cases.
    """
    x = np.log([run.cost for run in runs])
    y = np.log([run.loss - asymptote for run in runs])
    if len(runs) < 2 or float(np.ptp(x)) <= SAME_COST:
        return None
    centre = math.fsum(x) / len(x)
    height = math.fsum(y) / len(y)
    width = math.fsum((x - centre) ** 2)
    slope = math.fsum((x - centre) * (y - height)) / width
    residuals = y - height - slope * (x - centre)
    freedom = len(runs) - 2
    variance = math.fsum(residuals**2) / freedom if freedom else 0.0
    known_freedom = 0 if is_fitted else freedom
    return _Line(centre, height, -slope, width, variance, len(runs), known_freedom)


def _describe_law(
    variant: str, runs: Sequence[Run], line: _Line, asymptote: float, confidence: float
) -> Law:
    """Return the law of a line in costs and losses."""
    logarithm = line.height + line.exponent * line.centre
    slope = Mean(line.exponent, line.variance / line.width, line.freedom)
    exponent = _make_interval(slope, confidence)
    distances = []
    for run in runs:
        # No distance is relative to a loss of 0.
        if run.variant == variant and run.loss:
            predicted = asymptote + math.exp(line.mean_at(math.log(run.cost)).value)
            distances.append(abs(predicted / run.loss - 1))
    return Law(
        variant=variant,
        runs=line.runs,
        asymptote=asymptote,
        exponent=exponent,
        factor=math.exp(min(logarithm, LARGEST_LOGARITHM)),
        misfit=max(distances, default=0.0),
    )


def _compare(
    variant: str,
    group: Sequence[Run],
    baseline: Sequence[Run],
    line: _Line,
    asymptote: float,
    confidence: float,
) -> list[CostComparison]:
    """Return the comparison of a variant at each of its costs."""
    comparisons = []
    for runs in _group_by_cost(group):
        cost = runs[0].cost
        same = [run for run in baseline if abs(run.cost / cost - 1) < SAME_COST]
        loss = math.fsum(run.loss for run in runs) / len(runs)
        difference, p = _find_difference(runs, same, baseline, line, asymptote, confidence)
        logarithm = _find_speedup(runs, same, line, asymptote)
        rate_factor = _find_rate_factor(runs, same or baseline)
        speedup = None
        time_speedup = None
        is_extrapolated = False
        if logarithm is not None:
            speedup = _transform(_make_interval(logarithm, confidence), math.exp)
            reached = cost * speedup.mean
            is_extrapolated = reached > max(run.cost for run in baseline) * (1 + SAME_COST)
        if logarithm is not None and rate_factor is not None:
            in_time = logarithm._replace(value=logarithm.value + math.log(rate_factor))
            time_speedup = _transform(_make_interval(in_time, confidence), math.exp)
        comparisons.append(
            CostComparison(
                variant=variant,
                cost=cost,
                runs=len(runs),
                loss=loss,
                basis="runs" if same else "law",
                difference=difference,
                p=p,
                speedup=speedup,
                time_speedup=time_speedup,
                is_extrapolated=is_extrapolated,
            )
        )
    return comparisons


def _group_by_cost(runs: Sequence[Run]) -> list[list[Run]]:
    """Return groups of runs with equal costs, in the order of costs."""
    groups: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run.cost):
        if groups and abs(run.cost / groups[-1][0].cost - 1) < SAME_COST:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _find_difference(
    runs: Sequence[Run],
    same: Sequence[Run],
    baseline: Sequence[Run],
    line: _Line,
    asymptote: float,
    confidence: float,
) -> tuple[Interval | None, float | None]:
    """Return the difference of the losses at equal cost and its p, None if nothing shows it."""
    losses = [run.loss for run in runs]
    if min(len(runs), len(same)) > 1:
        mean = combine_means([(1, losses), (-1, [run.loss for run in same])])
        return _make_interval(mean, confidence), find_p(mean)
    cost = runs[0].cost
    costs = [run.cost for run in baseline]
    if not same and not min(costs) <= cost <= max(costs):
        return None, None
    # A single run has the spread of the baseline around its law, in logarithms.
    x = math.log(cost)
    variant = _mean_of_logs(runs, line, asymptote)
    reference = _mean_of_logs(same, line, asymptote) if same else line.mean_at(x)
    scale = math.exp(reference.value)
    lead = add_means([variant, reference._replace(value=-reference.value)])
    interval = _make_interval(lead, confidence)
    return _transform(interval, lambda end: scale * math.expm1(end)), find_p(lead)


def _find_speedup(
    runs: Sequence[Run], same: Sequence[Run], line: _Line, asymptote: float
) -> Mean | None:
    """Return the logarithm of the effective speed-up, None if the baseline's loss does not fall."""
    if line.exponent <= 0:
        return None
    x = math.log(runs[0].cost)
    variant = _mean_of_logs(runs, line, asymptote)
    reference = _mean_of_logs(same, line, asymptote) if same else line.mean_at(x)
    # The baseline's runs at this cost, and its line, vary together with its exponent.
    covariance = -line.variance * (x - line.centre) / line.width
    lead = reference.value - variant.value
    value = lead / line.exponent
    slope_variance = line.variance / line.width
    spread = add_means([variant, reference._replace(value=0.0)])
    variance = spread.variance + value**2 * slope_variance - 2 * value * covariance
    return Mean(value, max(variance, 0.0) / line.exponent**2, min(spread.freedom, line.freedom))


def _find_rate_factor(runs: Sequence[Run], baseline: Sequence[Run]) -> float | None:
    """Return the rate of a variant relative to the baseline's, None if one is unknown."""
    rates = []
    for group in (runs, baseline):
        known = [run.rate for run in group if run.rate is not None]
        if not known:
            return None
        rates.append(math.fsum(known) / len(known))
    return rates[0] / rates[1]


def _mean_of_logs(runs: Sequence[Run], line: _Line, asymptote: float) -> Mean:
    """Return the mean of log(L - E); a single run has the residual variance of the baseline."""
    logarithms = [math.log(run.loss - asymptote) for run in runs]
    if len(runs) > 1:
        return combine_means([(1, logarithms)])
    return Mean(logarithms[0], line.variance, line.freedom, is_residual=True)


def _make_interval(mean: Mean, confidence: float) -> Interval:
    """Return Student's interval of a mean, without ends if its variance is unknown."""
    low, high = find_ends(mean, confidence)
    return Interval(mean=mean.value, low=low, high=high)


def _transform(interval: Interval, function: Callable[[float], float]) -> Interval:
    """Return an increasing function of an interval."""
    ends = {}
    for name, end in interval:
        ends[name] = None if end is None else function(min(end, LARGEST_LOGARITHM))
    return Interval(**ends)
