"""What a table says about itself: everything a reviewer would have to ask."""

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from lit_attn.cells.records import Result
from lit_attn.report import stats
from lit_attn.report.read import StudyRecord
from lit_attn.report.summary import ALPHA

STAR = "*"
DAGGER = "†"


@dataclass(frozen=True)
class Caption:
    """A title, what makes the rows incomparable (if anything), and how to read the columns."""

    title: str
    warnings: list[str]
    notes: list[str]


def make_caption(study: StudyRecord, summary: pd.DataFrame) -> Caption:
    """The caption of the table that `summary` becomes."""
    # A YAML title may span lines.
    title = " ".join(study.plan.title.split()).rstrip(".") + "."
    notes = [
        _value(study),
        *_comparison(study, summary),
        *_failures(summary),
        *_published(study, summary),
        *_machine(study),
    ]
    return Caption(title, _warnings(study), notes)


def _value(study: StudyRecord) -> str:
    metric = study.plan.metric
    epoch = (
        "at the last epoch"
        if metric.selection == "last"
        else "at the epoch that is best on the validation split"
    )
    return (
        f"{metric.label}: {metric.name} {epoch}, mean ± standard deviation (ddof 1) over the n "
        f"seeds that finished (planned: {_numbers(study.plan.seeds)}); "
        f"{'higher' if metric.goal == 'max' else 'lower'} is better; bold: best mean."
    )


def _comparison(study: StudyRecord, summary: pd.DataFrame) -> list[str]:
    baseline = study.plan.baseline
    if not study.values(baseline):
        return [f"The baseline {baseline} has no result, so there is nothing to compare with."]
    compared = int(summary["p"].notna().sum())
    if not compared:
        return []
    most = int(summary["pairs"].max())
    notes = [
        f"Difference: to {baseline}, paired by seed, mean with the 95 % paired t interval.",
        "p: exact two-sided sign-flip test of the paired differences, which cannot go below "
        f"2/2ⁿ ({stats.sign_flip_floor(most):.4g} at {_pairs(most)}). "
        f"p Holm: adjusted for the {_comparisons(compared)} of this table. "
        f"{STAR}: p Holm ≤ {ALPHA}, better or worse; it takes at least "
        f"{stats.pairs_for_a_star(compared)} pairs.",
    ]
    if summary["seeds_needed"].notna().any():
        notes.append(
            "Seeds needed (t test): pairs for 80 % power of a two-sided paired t test at 0.05, "
            "uncorrected, were the observed mean and standard deviation of the difference the true "
            f"ones. A star is of another test: it takes {stats.pairs_for_a_star(compared)} pairs "
            "however large the difference, and where it is small more than stand here."
        )
    return notes


def _failures(summary: pd.DataFrame) -> list[str]:
    if not summary["failures"].astype(bool).any():
        return []
    return ["Cells without a result are counted under n (of those planned) and in no average."]


def _published(study: StudyRecord, summary: pd.DataFrame) -> list[str]:
    if not summary["published"].notna().any():
        return []
    source = " ".join(study.plan.source.split()).rstrip(".")
    return [f"Published: {source or 'as given in the study'}, ± as printed there."]


def _machine(study: StudyRecord) -> list[str]:
    results = study.results()
    if not results:
        return []
    devices = _distinct(_devices(result) for result in results)
    peaks = []
    if any(result.device == "CPU" for result in results):
        peaks.append("the process's largest resident set")
    if any(result.device != "CPU" for result in results):
        peaks.append("the largest allocation of CUDA's allocator")
    versions = _distinct(
        f"{name} {version}" for result in results for name, version in result.versions.items()
    )
    code = _few(_distinct(result.code for result in results))
    data = _few(_distinct(result.data for result in results))
    evaluations = ""
    if any(result.evaluation_time for result in results):
        evaluations = "evaluation: the same over a run's evaluations of all splits, reading the "
        evaluations += "data included, in float32; "
    return [
        "FLOPs: forward pass of one sample, multiply-add = 2, of matrix products, attention's "
        "among them, and convolutions; softmax, norms, epilogues and all other element-wise work "
        "are not counted. Step time: median over the training "
        f"steps of a run; {evaluations}memory: {' or '.join(peaks)}; medians over seeds.",
        f"Device: {', '.join(devices)}. Versions: {', '.join(versions)}. Code {code}, data {data}.",
    ]


def _warnings(study: StudyRecord) -> list[str]:
    """What differs between records that are to be compared."""
    results = study.results()
    warnings = []
    mixed = [
        f"{name} differs between runs ({_few(found)})"
        for name, found in (
            ("code", _distinct(result.code for result in results)),
            ("data", _distinct(result.data for result in results)),
        )
        if len(found) > 1
    ]
    if mixed:
        warnings.append(
            f"{' and '.join(mixed)}: rows with {DAGGER} do not compare with the baseline."
        )
    if len(_distinct(repr(sorted(result.versions.items())) for result in results)) > 1:
        warnings.append("package versions differ between runs.")
    if len(_distinct(_devices(result) for result in results)) > 1:
        warnings.append("devices differ between runs: step time and memory do not compare.")
    return warnings


def _devices(result: Result) -> str:
    return result.device if result.devices == 1 else f"{result.devices} x {result.device}"


def _distinct(values: Iterable[str]) -> list[str]:
    return sorted(set(values))


def _few(hashes: list[str]) -> str:
    """All of up to three, else the first of them and how many there are; per_seed.csv has all."""
    return ", ".join(hashes) if len(hashes) <= 3 else f"{hashes[0]} and {len(hashes) - 1} others"


def _numbers(values: list[int]) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return shown if len(values) <= 8 else f"{shown}, … {values[-1]}"


def _pairs(count: int) -> str:
    return f"{count} pair{'s' * (count != 1)}"


def _comparisons(count: int) -> str:
    return f"{count} comparison{'s' * (count != 1)}"
