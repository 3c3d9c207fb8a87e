"""Values, costs and differences of a variant, as verdicts and next actions need them."""

import statistics

import numpy as np

from lit_attn.report.answers.judged import Cost, Values
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.significance_base import Sample


def describe_values(study: StudyRecord, name: str) -> Values:
    """Return number, mean and sample standard deviation of a variant's values, or their median."""
    values = list(study.values(name).values())
    center = study.center(name)
    events = study.count_events(name)
    if not study.test.has_means:
        return Values(n=len(values), mean=None, sd=None, median=center, events=events)
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Values(n=len(values), mean=center, sd=sd, events=events)


def measure_cost(study: StudyRecord, name: str) -> Cost:
    """Return what the runs of a variant cost, None where it was not measured."""
    times = [float(seconds) for seconds in study.measurements("wall_time", name)]
    step_time = study.step_time(name)
    baseline_time = study.step_time(study.plan.baseline)
    ratio = None
    if step_time is not None and baseline_time:
        ratio = step_time / baseline_time
    return Cost(
        seconds_per_seed=statistics.median(times) if times else None,
        seconds_spent=sum(times) if times else None,
        step_time=step_time,
        step_time_ratio=ratio,
        peak_memory=_find_median(study, "peak_memory", name),
        parameters=_find_median(study, "parameters", name),
        flops=_find_median(study, "flops", name),
        cache_bytes=_find_median(study, "cache_bytes", name),
    )


def _find_median(study: StudyRecord, measurement: str, name: str) -> float | None:
    values = study.measurements(measurement, name)
    return float(statistics.median(values)) if values else None


def list_values(study: StudyRecord, name: str) -> stats.Floats:
    return np.array(list(study.values(name).values()))


def make_sample(study: StudyRecord, name: str) -> Sample:
    """Return what the comparison of a variant with the baseline computes with."""
    return study.test.make_sample(study.values(name), study.values(study.plan.baseline))


def list_unplanned(study: StudyRecord) -> list[str]:
    """Return the variants whose search or screening has not ended, so that no cell is planned."""
    screening = study.screening
    if screening is not None:
        is_open = screening.kept is None
        return [entry.variant for entry in screening.compared] if is_open else []
    searched = []
    for entry in () if study.tuning is None else study.tuning.variants:
        has_diverged = bool(entry.trials) and all(trial.mean is None for trial in entry.trials)
        if entry.chosen is None and not has_diverged:
            searched.append(entry.variant)
    return searched
