"""Conditions of a comparison: equal cost, equal tuning, and the cost of reaching the baseline."""

import statistics
from typing import Any

import pandas as pd

from lit_attn.report.columns import NOTHING, STAR, Record, format_difference, format_spread
from lit_attn.report.formats import Cell, Table, named_table
from lit_attn.report.read import StudyRecord


def make_criteria_table(study: StudyRecord, summary: pd.DataFrame, digits: int) -> Table:
    """Return value and difference of every variant under each criterion of `match`, side by side.

    The table has no rows for a study with one criterion.
    """
    plan, rows = study.plan, summary.set_index("variant")
    criteria = plan.criteria if len(plan.criteria) > 1 else []
    headings = [
        f"{text} (equal {c})" for c in criteria for text in (plan.metric.label, "difference")
    ]
    planned = {(v.variant or v.name, v.criterion): v for v in plan.variants}
    cells = []
    for name in dict.fromkeys(v.variant or v.name for v in plan.variants if criteria):
        line = [Cell(name)]
        for criterion in criteria:
            variant = planned.get((name, criterion))
            if name == plan.baseline:
                variant = next(v for v in plan.variants if v.name == plan.baseline)
            row = rows.loc[variant.name] if variant else None
            if row is None or not row["n"]:
                line += [Cell(NOTHING), Cell(NOTHING)]
                continue
            difference = format_difference(row["difference"], row["low"], row["high"], digits)
            line.append(Cell(format_spread(row["mean"], row["sd"], digits)))
            line.append(Cell(difference, mark=STAR if row["significant"] else ""))
        cells.append(line)
    return named_table("criteria", cells, headings, baseline=plan.baseline)


def make_tuning_table(study: StudyRecord) -> Table:
    """Return the values that tuning chose for every variant, and its leads over all trials."""
    tuning = study.tuning
    if tuning is None:
        return named_table("tuning", [], label="", trials=0, seeds="", keys="", sampler="")
    means = {
        tuned.variant: {str(trial.values): trial.mean for trial in tuned.trials}
        for tuned in tuning.variants
    }
    baseline = means.get(study.plan.baseline, {})
    rows = []
    for tuned in tuning.variants:
        leads = [
            mean - other
            for values, mean in means[tuned.variant].items()
            if mean is not None and (other := baseline.get(values)) is not None
        ]
        best = means[tuned.variant].get(str(tuned.chosen))
        lead = NOTHING
        if leads and tuned.variant != study.plan.baseline:
            lead = f"{min(leads):+.3g} to {max(leads):+.3g} ({len(leads)})"
        texts = [
            tuned.variant,
            ", ".join(f"{key}={value}" for key, value in (tuned.chosen or {}).items()) or NOTHING,
            ", ".join(tuned.at_edge) or "no",
            NOTHING if best is None else f"{best:.4g}",
            lead.replace("-", "\N{MINUS SIGN}"),
            str(sum(trial.mean is None for trial in tuned.trials)),
        ]
        rows.append([Cell(text) for text in texts])
    return named_table(
        "tuning",
        rows,
        label=tuning.select.label,
        trials=tuning.trials,
        seeds=", ".join(map(str, tuning.seeds)),
        keys="; ".join(f"{key} from {values}" for key, values in tuning.keys.items()),
        sampler=tuning.sampler,
    )


def measure_targets(study: StudyRecord) -> dict[str, Record]:
    """Return the steps and seconds after which each mean curve reaches the baseline's final value.

    Seconds are steps times the step time, without evaluations. Variants that never reach it are
    left out.
    """
    final = list(study.values(study.plan.baseline).values())
    records: dict[str, dict[str, Any]] = {}
    if not final:
        return records
    sign = 1 if study.plan.metric.goal == "max" else -1
    for name, rows in study.curves.groupby("variant"):
        means = rows.groupby("step")["value"].mean()
        reached = means.index[sign * means >= sign * statistics.fmean(final)]
        if len(reached) and len(means) > 2:
            steps = int(reached.min())
            time = study.step_time(str(name))
            seconds = None if time is None else steps * time
            records[str(name)] = {"target_steps": steps, "target_seconds": seconds}
    return records
