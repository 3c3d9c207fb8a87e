"""Uncertainty from the test samples: values of each image, sequence or window, from `units.npz`."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_attn.report.records.skipped import LOG, read_arrays
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.statistics import stats

COUNTED = {"accuracy": "correct", "aAcc": "correct", "loss": "loss", "bits_per_byte": "loss"}
"""Array of `units.npz` whose mean over all targets is a metric, up to a constant factor."""


class Samples(NamedTuple):
    """Sums of the metric over the targets of each sample, (n, U) for n seeds; targets (U,)."""

    seeds: list[int]
    sums: stats.Floats
    targets: stats.Floats


def measure_test_errors(study: StudyRecord) -> dict[str, dict[str, Any]]:
    """Return, by variant and CSV field, standard errors over test samples and joint intervals.

    `test_error` (of the mean) and `test_error_difference` hold the seeds fixed; `both_low` and
    `both_high` are the 95 % interval of the difference over seeds and samples.
    """
    variants = {variant.name: _read_samples(study, variant.name) for variant in study.plan.variants}
    baseline = variants.get(study.plan.baseline)
    records: dict[str, dict[str, Any]] = {}
    for name, samples in variants.items():
        if samples is None:
            continue
        error, _, _ = stats.crossed_interval(samples.sums, samples.targets)
        records[name] = {"units": len(samples.targets), "test_error": error}
        if baseline is None or baseline is samples:
            continue
        seeds = [seed for seed in samples.seeds if seed in baseline.seeds]
        if seeds and np.array_equal(samples.targets, baseline.targets):
            differences = _select_sums(samples, seeds) - _select_sums(baseline, seeds)
            error, low, high = stats.crossed_interval(differences, samples.targets)
            records[name] |= {"test_error_difference": error, "both_low": low, "both_high": high}
    return records


def _select_sums(samples: Samples, seeds: list[int]) -> stats.Floats:
    """Return the sums of these seeds in their order, (seeds, U)."""
    places = [samples.seeds.index(seed) for seed in seeds]
    return samples.sums[places]


def _read_samples(study: StudyRecord, variant: str) -> Samples | None:
    """Return the samples of a variant's finished cells, or None if any cell has none."""
    cells = study.finished_cells(variant)
    pairs = []
    for cell in cells:
        pair = _read_cell(study, cell)
        if pair is not None:
            pairs.append(pair)
    if not pairs or len(pairs) < len(cells):
        return None
    targets = pairs[0][1]
    if not all(np.array_equal(targets, other) for _, other in pairs):
        LOG.warning("%s: %s: seeds have different test samples", study.plan.study, variant)
        return None
    is_used = targets > 0
    sums = np.stack([sums for sums, _ in pairs])
    return Samples([cell.seed for cell in cells], sums[:, is_used], targets[is_used])


def _read_cell(study: StudyRecord, cell: CellRecord) -> tuple[stats.Floats, stats.Floats] | None:
    """Return each sample's sum of the metric in printed units, and its number of targets."""
    metric = study.plan.metric
    split, _, name = metric.name.partition("/")
    prefix = f"{split}/averaged-" if metric.averaged else f"{split}/"
    array = COUNTED.get(name.removeprefix("averaged-"))
    if array is None or not cell.path or cell.value is None:
        return None
    path = Path(cell.path, "units.npz")
    arrays = read_arrays(path)
    sums = arrays.get(f"{prefix}{array}")
    targets = arrays.get(f"{prefix}targets")
    if sums is None or targets is None or not targets.sum():
        if arrays:
            LOG.warning("%s: has no values of the metric and is skipped", path)
        return None
    mean = float(sums.sum(dtype=float) / targets.sum())
    # Bits per byte differ from the loss by a factor that depends on the tokenizer.
    factor = cell.value / mean if name.endswith("bits_per_byte") else metric.scale
    if abs(factor * mean - cell.value) > 1e-3 * abs(cell.value):
        LOG.warning("%s: does not belong to the cell's result and is skipped", path)
        return None
    return sums.astype(float) * factor, targets.astype(float)
