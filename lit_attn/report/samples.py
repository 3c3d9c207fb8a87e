"""Uncertainty from the test samples: values of each image, sequence or window, from `units.npz`."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_attn.report import stats
from lit_attn.report.read import LOG, CellRecord, StudyRecord, read_arrays

COUNTED = {"accuracy": "correct", "aAcc": "correct", "loss": "loss", "bits_per_byte": "loss"}
"""Array of `units.npz` whose mean over all targets is a metric, up to a constant factor."""


class Samples(NamedTuple):
    """Sums of the metric over the targets of each sample, (n, U) for n seeds; targets (U,)."""

    seeds: list[int]
    sums: stats.Floats
    targets: stats.Floats


def measure_test_errors(study: StudyRecord) -> dict[str, dict[str, Any]]:
    """Return, by variant and CSV field, standard errors over test samples and joint intervals.

    `test_error` belongs to the mean value, `test_error_difference` to the difference from the
    baseline, both with the seeds held fixed; `both_low` and `both_high` are the 95 % interval of
    the difference over seeds and samples. Variants without recorded samples are left out.
    """
    variants = {variant.name: _read_samples(study, variant.name) for variant in study.plan.variants}
    baseline = variants.get(study.plan.baseline)
    records: dict[str, dict[str, Any]] = {}
    for name, samples in variants.items():
        if samples is None:
            continue
        record: dict[str, Any] = {
            "units": len(samples.targets),
            "test_error": stats.test_error(samples.sums, samples.targets),
        }
        if baseline and name != study.plan.baseline:
            record |= _compare(samples, baseline)
        records[name] = record
    return records


def _compare(samples: Samples, baseline: Samples) -> dict[str, Any]:
    """Return the fields about the difference, for the seeds and samples that both have."""
    if not np.array_equal(samples.targets, baseline.targets):
        return {}
    seeds = [seed for seed in samples.seeds if seed in baseline.seeds]
    if not seeds:
        return {}
    ours, theirs = ([s.seeds.index(seed) for seed in seeds] for s in (samples, baseline))
    differences = samples.sums[ours] - baseline.sums[theirs]
    record = {"test_error_difference": stats.test_error(differences, samples.targets)}
    if interval := stats.crossed_interval(differences, samples.targets):
        record |= zip(("both_low", "both_high"), interval, strict=True)
    return record


def _read_samples(study: StudyRecord, variant: str) -> Samples | None:
    """Return the samples of a variant's finished cells, or None if any cell has none."""
    cells = study.finished_cells(variant)
    read = [_read_cell(study, cell) for cell in cells]
    pairs = [pair for pair in read if pair is not None]
    if len(pairs) < max(1, len(cells)):
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
    split, _, name = study.plan.metric.name.partition("/")
    prefix = f"{split}/{'ema-' * study.plan.metric.averaged}"
    array = COUNTED.get(name.removeprefix("ema-"))
    if array is None or cell.folder is None or cell.value is None:
        return None
    path = cell.folder / "units.npz"
    unreadable: list[Path] = []
    arrays = read_arrays(path, unreadable)
    sums, targets = (arrays.get(f"{prefix}{key}") for key in (array, "targets"))
    if sums is None or targets is None or not targets.sum():
        if arrays or unreadable:
            LOG.warning("%s: unreadable or empty and skipped", path)
        return None
    mean = float(sums.sum(dtype=float) / targets.sum())
    # Bits per byte differ from the loss by a factor that depends on the tokenizer.
    factor = cell.value / mean if name.endswith("bits_per_byte") else study.plan.metric.scale
    if abs(factor * mean - cell.value) > 1e-3 * abs(cell.value):
        LOG.warning("%s: does not belong to the cell's result and is skipped", path)
        return None
    return sums.astype(float) * factor, targets.astype(float)
