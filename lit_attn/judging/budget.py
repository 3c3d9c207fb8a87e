"""The next runs within a budget: the plan of most expected verdicts, or none if nothing is decided.

Two plans are considered: further runs of what is there, and a confirmation, in which the best
variants and the baseline get fresh runs that are judged alone. The probability of a verdict is
predicted from the effects and spreads that the measured values leave possible (predictive power;
Spiegelhalter, Freedman and Blackburn, "Monitoring clinical trials: conditional or predictive
power?", Controlled Clinical Trials 7, 1986), by a t test at the level of the plan. Where a variant
has too few runs for a spread, it is the power for an idea that is better by EFFECT, as in a dry
run.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import special

from lit_attn.cells.budget import Budget, parse_budget
from lit_attn.report.answers.judged import Action, BudgetPlan, JudgedStudy, JudgedVariant
from lit_attn.report.numbers import write_number
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import designs, stats
from lit_attn.report.statistics.stats import Floats
from lit_attn.report.verdicts.evidence import list_values, make_sample
from lit_attn.report.verdicts.needs import find_added_level
from lit_attn.report.verdicts.next_action import (
    MakeCommand,
    add_runs,
    add_seeds,
    describe_runs,
    expect_seconds,
    is_undecided,
    make_action,
)
from lit_attn.schema.errors import ConfigError, plural

ENOUGH = 0.9
"""Probability of a verdict of each variant above which no more runs are planned."""

FUTILITY = 0.05  # Expected verdicts of the best plan below which no run is suggested.
MOST_RUNS = 200  # Most further runs of a variant in a plan.
DRAWS = 2000  # Simulated continuations of a plan.


class Plan(NamedTuple):
    """Action within a budget, and the probability of a verdict by variant.

    `power` is empty, and `expected` the power for an idea that is better by EFFECT, where a variant
    has too few runs for a spread.
    """

    action: Action
    power: dict[str, float]
    expected: float


class _Group(NamedTuple):
    """Number of runs, and in each simulation their mean and their squared deviations."""

    runs: int
    mean: Floats
    squares: Floats


def read_budget(text: str) -> Budget:
    """Return the budget of `--budget`. Raises ConfigError for another text."""
    try:
        return parse_budget(text)
    except ValueError as error:
        raise ConfigError(f"--budget {text}: {error}") from error


def plan_within(
    study: StudyRecord,
    judged: JudgedStudy,
    budget: Budget,
    make_command: MakeCommand = lambda *_: None,
) -> JudgedStudy:
    """Return the answer about a study with the next action within a budget.

    Raises ConfigError for a budget of time if no run has a measured cost.
    """
    if budget.seconds is not None and expect_seconds(study, [study.plan.baseline]) is None:
        raise ConfigError(
            f"--budget: no run of {study.plan.study} has a cost in seconds; write a number of"
            " trainings, as in --budget 40"
        )
    action = judged.next
    power: dict[str, float] = {}
    undecided = [variant for variant in judged.variants if is_undecided(variant)]
    is_planned = judged.stream is not None or action.kind in ("run", "rerun", "none")
    if is_planned and not _is_within(study, action.runs, budget):
        needed = _describe_cost(study, action.runs)
        action = _stop(undecided, f"the next step needs {needed}", budget)
    elif not is_planned:
        action, power = _choose_plan(study, judged, undecided, budget, make_command)
    described = BudgetPlan(seconds=budget.seconds, trainings=budget.trainings, power=power)
    return judged.model_copy(update={"next": action, "budget": described})


def _choose_plan(
    study: StudyRecord,
    judged: JudgedStudy,
    undecided: list[JudgedVariant],
    budget: Budget,
    make_command: MakeCommand,
) -> tuple[Action, dict[str, float]]:
    """Return the affordable plan with the most expected verdicts, or stop."""
    plans = _confirm_best(study, judged, undecided, budget)
    plans += _continue(study, judged, undecided, budget, make_command)
    best = max(plans, key=lambda plan: plan.expected, default=None)
    if best is None:
        return _stop(undecided, "no plan has enough runs for a verdict", budget), {}
    if best.expected < FUTILITY:
        runs = _describe_cost(study, best.action.runs)
        text = f"{runs} would bring {best.expected:.2g} verdicts on average"
        return _stop(undecided, text, budget), best.power
    if best.power:
        chances = [f"{name} {write_number(power, '.2g')}" for name, power in best.power.items()]
        chance = f" Probability of a verdict: {', '.join(chances)}."
    else:
        chance = (
            f" An idea that is better by {designs.EFFECT:g} standard deviations is among them and"
            f" gets a star with a probability of {best.expected:.2g}."
        )
    return best.action.model_copy(update={"text": best.action.text + chance}), best.power


def _stop(undecided: list[JudgedVariant], reason: str, budget: Budget) -> Action:
    text = f"Stop: nothing can be decided with this budget ({budget.describe()}): {reason}."
    return make_action("stop", text, [variant.variant for variant in undecided])


def _is_within(study: StudyRecord, runs: dict[str, int], budget: Budget) -> bool:
    """Return True if the further runs by variant cost at most the budget."""
    if budget.trainings is not None:
        return sum(runs.values()) <= budget.trainings
    seconds = expect_seconds(study, _list_trained(runs)) or 0.0
    return seconds <= (budget.seconds or 0.0)


def _list_trained(runs: dict[str, int]) -> list[str]:
    return [name for name, count in runs.items() for _ in range(count)]


def _describe_cost(study: StudyRecord, runs: dict[str, int]) -> str:
    """Return `12 trainings (about 2 hours)`."""
    seconds = expect_seconds(study, _list_trained(runs))
    trainings = plural(sum(runs.values()), "training")
    return trainings if seconds is None else f"{trainings} (about {seconds / 3600:.2g} hours)"


def _count_affordable(study: StudyRecord, names: list[str], budget: Budget) -> int:
    """Return how many runs of each of these variants the budget pays."""
    if budget.trainings is not None:
        return min(MOST_RUNS, budget.trainings // len(names))
    price = expect_seconds(study, names) or 0.0
    if price <= 0:
        return MOST_RUNS
    return min(MOST_RUNS, math.floor((budget.seconds or 0.0) / price))


def _confirm_best(
    study: StudyRecord, judged: JudgedStudy, undecided: list[JudgedVariant], budget: Budget
) -> list[Plan]:
    """Return the plans that give the best variants and the baseline fresh runs."""
    sign = 1.0 if study.plan.metric.goal == "max" else -1.0
    valued = [variant for variant in undecided if variant.values.center is not None]
    valued.sort(key=lambda variant: sign * (variant.values.center or 0.0), reverse=True)
    smallest = study.test.find_fewest(stats.ALPHA)
    plans = []
    for keep in range(1, min(designs.MOST_KEPT, len(valued)) + 1):
        kept = [variant.variant for variant in valued[:keep]]
        most = _count_affordable(study, [study.plan.baseline, *kept], budget)
        if most < smallest:
            break
        has_spread = all(_has_spread(study, name) for name in kept)
        if not has_spread:
            power: dict[str, float] = {}
            expected = _find_design_power(study, judged, keep, most)
            runs = most
        else:
            runs = smallest
            power = _predict_all(study, kept, runs, stats.ALPHA, keep, is_fresh=True)
            while runs < most and sum(power.values()) < ENOUGH * keep:
                runs = min(most, runs + 1 + runs // 10)
                power = _predict_all(study, kept, runs, stats.ALPHA, keep, is_fresh=True)
            expected = sum(power.values())
        plans.append(Plan(_make_confirmation(study, kept, runs), power, expected))
    return plans


def _find_design_power(study: StudyRecord, judged: JudgedStudy, keep: int, runs: int) -> float:
    """Return the probability that an idea better by EFFECT is kept and gets a star."""
    counts = [variant.values.n for variant in judged.variants if variant.values.n]
    screening = designs.Screening(min(counts), keep, runs)
    return screening.power(len(counts), study.test)


def _make_confirmation(study: StudyRecord, kept: list[str], runs: int) -> Action:
    """Return the action that gives these variants and the baseline fresh runs."""
    names = [study.plan.baseline, *kept]
    counts = dict.fromkeys(names, runs)
    seeds: dict[str, list[int]] = {}
    place = "Judge them alone, in a file of their own"
    shown = describe_runs(counts)
    if study.test.has_seeds:
        first = 1 + max(study.plan.seeds, default=-1)
        fresh = list(range(first, first + runs))
        seeds = dict.fromkeys(names, fresh)
        shown = f"{', '.join(names)} with the seeds {first} to {fresh[-1]}"
        if any(cell.path for cell in study.cells):
            place = "Write a study of these variants with these seeds, and judge it alone"
    text = f"Confirm: run {shown}. {place}: the earlier runs have chosen these variants."
    trained = _list_trained(counts)
    return Action(
        kind="confirm",
        text=text,
        command=None,
        variants=kept,
        runs=counts,
        seeds=seeds,
        cells=len(trained),
        seconds=expect_seconds(study, trained),
    )


def _continue(
    study: StudyRecord,
    judged: JudgedStudy,
    undecided: list[JudgedVariant],
    budget: Budget,
    make_command: MakeCommand,
) -> list[Plan]:
    """Return the plans that add runs to those that are there."""
    spread = [variant for variant in undecided if _has_spread(study, variant.variant)]
    if not spread:
        return []
    compared = sum(variant.p is not None for variant in judged.variants)
    if not study.test.has_seeds:
        plans = []
        for variant in spread:
            plan = _continue_runs(study, variant, compared, budget)
            if plan is not None:
                plans.append(plan)
        return plans
    names = [variant.variant for variant in spread]
    most = _count_affordable(study, [variant.name for variant in study.plan.variants], budget)
    if most < 1:
        return []
    level = find_added_level(study)
    added = 1
    power = _predict_all(study, names, added, level, compared, is_fresh=False)
    while added < most and sum(power.values()) < ENOUGH * len(names):
        added = min(most, added + 1 + added // 10)
        power = _predict_all(study, names, added, level, compared, is_fresh=False)
    most_likely = max(spread, key=lambda variant: power[variant.variant])
    action = add_seeds(study, most_likely, added, make_command)
    return [Plan(action, power, sum(power.values()))]


def _continue_runs(
    study: StudyRecord, variant: JudgedVariant, compared: int, budget: Budget
) -> Plan | None:
    """Return the plan that adds independent runs of a variant and the baseline, or None."""
    baseline = len(list_values(study, study.plan.baseline))
    largest = max(variant.values.n, baseline)
    best = None
    for total in range(largest + 1, largest + MOST_RUNS):
        action = add_runs(study, variant, total)
        if not _is_within(study, action.runs, budget):
            break
        power = predict_verdict(
            study, variant.variant, total, stats.ALPHA, compared, is_fresh=False
        )
        best = Plan(action, {variant.variant: power}, power)
        if power >= ENOUGH:
            break
    return best


def _has_spread(study: StudyRecord, name: str) -> bool:
    """Return True if the spread of a variant and of the baseline is known."""
    sample = make_sample(study, name)
    return all(len(group) > 1 and float(np.ptp(group)) > 0 for group in sample)


def _predict_all(
    study: StudyRecord,
    names: list[str],
    runs: int,
    level: float,
    comparisons: int,
    *,
    is_fresh: bool,
) -> dict[str, float]:
    """Return the probability of a verdict of each variant."""
    power = {}
    for name in names:
        power[name] = predict_verdict(study, name, runs, level, comparisons, is_fresh=is_fresh)
    return power


def predict_verdict(
    study: StudyRecord, name: str, runs: int, level: float, comparisons: int, *, is_fresh: bool
) -> float:
    """Return the probability of a verdict about a variant.

    With `is_fresh` the test has `runs` fresh runs of variant and baseline. Otherwise it has `runs`
    more pairs of seeds, or enough independent runs that both have `runs`. Values are normal, with
    the prior 1 / variance for the common spread.
    """
    generator = np.random.default_rng(0)
    share = level / max(1, comparisons)
    margin = study.plan.metric.margin
    measured = make_sample(study, name)
    unit = stats.find_unit(np.concatenate(measured).tolist())
    groups = [group / unit for group in measured]
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    freedom = sum(len(group) for group in groups) - len(groups)
    spreads = np.sqrt(squares / generator.chisquare(freedom, size=DRAWS))
    completed = []
    for group in groups:
        further = runs if is_fresh or study.test.has_seeds else runs - len(group)
        completed.append(_complete(group, further, spreads, generator, is_fresh=is_fresh))
    # All groups now have the same number of runs.
    count = completed[0].runs
    difference = completed[0].mean
    total = completed[0].squares
    for other in completed[1:]:
        difference = difference - other.mean
        total = total + other.squares
    freedom = len(completed) * (count - 1)
    variance = total / freedom * len(completed) / count
    half = special.stdtrit(freedom, 1 - share / 2) * np.sqrt(variance)
    is_decided = (np.abs(difference) > half) & (study.test.find_smallest_p(count) <= level)
    if margin is not None:
        is_decided |= np.abs(difference) + half < margin / unit
    return float(is_decided.mean())


def _complete(
    group: Floats, further: int, spreads: Floats, generator: np.random.Generator, *, is_fresh: bool
) -> _Group:
    """Return the measured values with `further` simulated ones, or with `is_fresh` these alone."""
    means = group.mean() + spreads / math.sqrt(len(group)) * generator.normal(size=DRAWS)
    fresh_means = means + spreads / math.sqrt(max(1, further)) * generator.normal(size=DRAWS)
    fresh_squares = np.zeros(DRAWS)
    if further > 1:
        fresh_squares = spreads**2 * generator.chisquare(further - 1, size=DRAWS)
    if is_fresh:
        return _Group(further, fresh_means, fresh_squares)
    known = len(group)
    count = known + further
    if further < 1:
        fixed = np.full(DRAWS, group.mean())
        return _Group(known, fixed, np.full(DRAWS, ((group - group.mean()) ** 2).sum()))
    mean = (known * group.mean() + further * fresh_means) / count
    between = known * further / count * (group.mean() - fresh_means) ** 2
    squares = ((group - group.mean()) ** 2).sum() + fresh_squares + between
    return _Group(count, mean, squares)
