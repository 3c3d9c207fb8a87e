"""Caption of a study's table: title, warnings about incomparable rows, meaning of each column."""

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from lit_attn.cells.records import Result
from lit_attn.report import stats
from lit_attn.report.columns import ALPHA, DAGGER, used_columns
from lit_attn.report.read import StudyRecord


@dataclass(frozen=True)
class Caption:
    """Title, reasons why rows are not comparable, and sentences that explain the table."""

    title: str
    warnings: list[str]
    notes: list[str]


def make_caption(study: StudyRecord, summary: pd.DataFrame) -> Caption:
    """Return the caption of the table of `summary`."""
    # A YAML title can span lines.
    title = " ".join(study.plan.title.split()).rstrip(".") + "."
    values = _template_values(study, summary)
    notes = [column.note.format(**values) for column in used_columns(summary) if column.note]
    if summary["failures"].astype(bool).any():
        notes.append("Seeds without a result are listed beside n and enter no mean.")
    if not study.values(study.plan.baseline):
        notes.append(f"The baseline {study.plan.baseline} has no result to compare with.")
    return Caption(title, _warnings(study), [*notes, *_provenance(study)])


def _template_values(study: StudyRecord, summary: pd.DataFrame) -> dict[str, object]:
    """Return the values of the placeholders in the columns' notes."""
    plan, metric, results = study.plan, study.plan.metric, study.results()
    is_last = metric.selection == "last"
    compared = int(summary["p"].notna().sum())
    pairs = int(summary["pairs"].max())
    peaks = []
    if any(result.device == "CPU" for result in results):
        peaks.append("the largest resident set of the process")
    if any(result.device != "CPU" for result in results):
        peaks.append("the largest allocation of CUDA's allocator")
    return {
        "label": metric.label,
        "metric": metric.name,
        "epoch": "at the last epoch" if is_last else "at the best epoch of the validation split",
        "direction": "higher" if metric.goal == "max" else "lower",
        "seeds": _numbers(plan.seeds),
        "baseline": plan.baseline,
        "alpha": ALPHA,
        "floor": f"{stats.sign_flip_floor(pairs):.4g}",
        "pairs": _plural(pairs, "pair"),
        "comparisons": _plural(compared, "comparison"),
        "star_pairs": stats.pairs_for_a_star(compared) if compared else 0,
        "source": " ".join(plan.source.split()).rstrip(".") or "the study file",
        "peaks": " or ".join(peaks),
    }


def _provenance(study: StudyRecord) -> list[str]:
    """Return the device, versions and hashes of the results."""
    results = study.results()
    if not results:
        return []
    devices = ", ".join(_distinct(map(_device, results)))
    versions = ", ".join(
        _distinct(
            f"{name} {version}" for result in results for name, version in result.versions.items()
        )
    )
    code = _few(_distinct(result.code for result in results))
    data = _few(_distinct(result.data for result in results))
    return [f"Device: {devices}. Versions: {versions}. Code {code}, data {data}."]


def _warnings(study: StudyRecord) -> list[str]:
    """Return the differences between records that make them incomparable."""
    results = study.results()
    hashes = {
        "code": _distinct(result.code for result in results),
        "data": _distinct(result.data for result in results),
    }
    mixed = [
        f"{name} differs between runs ({_few(found)})"
        for name, found in hashes.items()
        if len(found) > 1
    ]
    warnings = []
    if mixed:
        warnings.append(
            f"{' and '.join(mixed)}: rows with {DAGGER} do not compare with the baseline."
        )
    if len({tuple(sorted(result.versions.items())) for result in results}) > 1:
        warnings.append("package versions differ between runs.")
    if len(set(map(_device, results))) > 1:
        warnings.append("devices differ between runs: step time and memory do not compare.")
    return warnings


def _device(result: Result) -> str:
    return result.device if result.devices == 1 else f"{result.devices} x {result.device}"


def _distinct(values: Iterable[str]) -> list[str]:
    return sorted(set(values))


def _few(hashes: list[str]) -> str:
    """Return up to three hashes, or the first one and the number of others."""
    return ", ".join(hashes) if len(hashes) <= 3 else f"{hashes[0]} and {len(hashes) - 1} others"


def _numbers(values: list[int]) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return shown if len(values) <= 8 else f"{shown}, … {values[-1]}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
