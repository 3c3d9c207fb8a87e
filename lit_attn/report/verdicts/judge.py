"""Verdicts of a study, and the next action that can change one of them.

Every number comes from the comparison that the table of results prints
(`lit_attn.report.verdicts.comparison`), so a verdict never differs from the table.
"""

from collections.abc import Sequence
from typing import Any, cast

from lit_attn.cells.decisions import Seals
from lit_attn.cells.records import Plan
from lit_attn.report.answers.judged import (
    Action,
    InterimLook,
    Interval,
    JudgedMetric,
    JudgedStudy,
    JudgedVariant,
    Power,
    Range,
    SealedPlan,
    SeedCounts,
    Stream,
    Verdict,
)
from lit_attn.report.answers.runs import StudyDesign
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics.significance_base import MOST_RUNS
from lit_attn.report.statistics.stats import ALPHA
from lit_attn.report.tables.labels import find_labels
from lit_attn.report.tables.provenance import describe_records
from lit_attn.report.verdicts.comparison import (
    POWERS,
    Comparisons,
    compare_variants,
    find_verdict,
)
from lit_attn.report.verdicts.evidence import (
    describe_values,
    list_unplanned,
    measure_cost,
)
from lit_attn.report.verdicts.floors import find_validity, is_below_floor, warn_of_floor
from lit_attn.report.verdicts.modes import warn_of_modes
from lit_attn.report.verdicts.needs import count_added_looks, find_forecast, find_needed
from lit_attn.report.verdicts.next_action import MakeCommand, find_action, is_undecided, make_action
from lit_attn.report.verdicts.spreads import warn_of_spreads


def judge_study(
    study: StudyRecord,
    make_command: MakeCommand = lambda *_: None,
    comparisons: Comparisons | None = None,
    notes: Sequence[str] = (),
) -> JudgedStudy:
    """Return the verdict of every variant but the baseline, and the next action.

    `make_command("run", "--seeds", 20)` returns the command line of an action. `comparisons` are
    those of `study`, if they are known already. `notes` are sentences about the records.
    """
    plan = study.plan
    if plan.is_smoke:
        action = make_action("run", "Run the study without --smoke.")
        name = study.test.name
        return describe_study(study, [], action, test=name, level=ALPHA, notes=[], warnings=[])
    if comparisons is None:
        comparisons = compare_variants(study)
    labels = find_labels(plan)
    variants = []
    for variant in plan.variants:
        if variant.name != plan.baseline:
            judged = judge_variant(study, variant.name, labels[variant.name], comparisons)
            variants.append(judged)
    return describe_study(
        study,
        variants,
        find_action(study, variants, make_command),
        test=study.test.describe(comparisons.pairs, len(study.values(plan.baseline))),
        level=comparisons.look_level,
        interim=_describe_interim(plan, comparisons),
        notes=list(notes),
        warnings=[*warn_of_spreads(study), *warn_of_modes(study)],
    )


def describe_study(
    study: StudyRecord,
    variants: list[JudgedVariant],
    action: Action,
    *,
    test: str,
    level: float,
    notes: list[str],
    warnings: list[str],
    interim: InterimLook | None = None,
    stream: Stream | None = None,
) -> JudgedStudy:
    """Return the answer about a study with the given verdicts and next action."""
    plan = study.plan
    metric = plan.metric
    _, record_warnings = describe_records(study)
    return JudgedStudy(
        study=plan.study,
        title=" ".join(plan.title.split()),
        is_smoke=plan.is_smoke,
        metric=JudgedMetric.from_record(metric),
        baseline=plan.baseline,
        baseline_label=find_labels(plan)[plan.baseline],
        baseline_values=describe_values(study, plan.baseline),
        baseline_cost=measure_cost(study, plan.baseline),
        pairs=study.test.pairs,
        test=test,
        validity=find_validity(study),
        notes=notes,
        rule="star" if metric.margin is None else "margin",
        level=level,
        interim=interim,
        design=StudyDesign.describe(study.screening),
        look=1 + count_added_looks(study),
        is_interim=any(cell.is_waiting for cell in study.cells) or bool(list_unplanned(study)),
        sealed=None if study.seals is None else _describe_seals(study.seals),
        warnings=[*warn_of_floor(study), *record_warnings, *warnings],
        variants=variants,
        stream=stream,
        next=action,
    )


def is_decided(study: JudgedStudy) -> bool:
    """Return True if every verdict is final, and none but those of ended ideas is undecided."""
    is_open = study.is_smoke or any(is_undecided(variant) for variant in study.variants)
    return not study.is_interim and not is_open


def _describe_interim(plan: Plan, comparisons: Comparisons) -> InterimLook | None:
    """Return the bound of the running variant with the fewest pairs, None without one."""
    for pairs, level in comparisons.interim.items():
        return InterimLook(seeds=pairs, planned=len(plan.seeds), level=level)
    return None


def _describe_seals(seals: Seals) -> SealedPlan:
    """Return the first seal and the changes after results had been seen."""
    first = seals.entries[0]
    added = sorted(seed for seeds in seals.added_seeds for seed in seeds)
    return SealedPlan(
        hash=first.hash,
        time=first.time,
        is_before_results=seals.is_before_results,
        added_seeds=added,
        **seals.changes(),
    )


def judge_variant(
    study: StudyRecord, name: str, label: str, comparisons: Comparisons
) -> JudgedVariant:
    """Return the verdict of a variant and its numbers."""
    record = comparisons.records[name]
    cells = study.variant_cells(name)
    pairs = record["pairs"]
    is_below = is_below_floor(study)
    # A variant without pairs is undecided.
    tested = find_verdict(record, study.plan, is_below_floor=is_below)
    verdict = cast("Verdict", tested or "undecided")
    needed = None
    forecast = None
    # No number of seeds lifts the baseline above its floor.
    if verdict == "undecided" and not is_below:
        needed = find_needed(study, name)
        if not record["failed"]:
            forecast = find_forecast(study, name, comparisons)
    criteria = {variant.name: variant.criterion for variant in study.plan.variants}
    return JudgedVariant(
        variant=name,
        label=label,
        criterion=criteria[name],
        verdict=verdict,
        is_final=not any(cell.is_waiting for cell in cells) and name not in list_unplanned(study),
        ended=None,
        level=record["level"],
        values=describe_values(study, name),
        difference=_find_interval(record),
        p=record.get("p_adjusted"),
        is_significant=record["significant"],
        seeds=SeedCounts(
            done=len(study.values(name)),
            planned=len(cells),
            failed=record["failed"],
            pairs=study.test.count_pairs(pairs),
        ),
        power=_list_powers(record, pairs),
        seeds_needed=_make_range(needed, 0),
        seeds_missing=_make_range(needed, pairs),
        pairs_for_verdict=forecast,
        cost=measure_cost(study, name),
    )


def _find_interval(record: dict[str, Any]) -> Interval | None:
    """Return the mean difference with its interval, None without pairs."""
    if record.get("difference") is None:
        return None
    return Interval(mean=record["difference"], low=record.get("low"), high=record.get("high"))


def _list_powers(record: dict[str, Any], pairs: int) -> list[Power]:
    """Return the simulated powers that the table prints."""
    powers = []
    for field, factor in POWERS.items():
        if record.get(field) is not None:
            powers.append(Power(pairs=factor * pairs, probability=record[field]))
    return powers


def _make_range(needed: tuple[int, int | None] | None, done: int) -> Range | None:
    """Return a range of numbers of seeds without the first `done` ones."""
    if needed is None:
        return None
    low, high = needed
    missing_high = None
    if high is not None and high <= MOST_RUNS:
        missing_high = max(0, high - done)
    return Range(low=max(0, low - done), high=missing_high)
