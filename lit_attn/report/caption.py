"""What a table says about itself: everything a reviewer would have to ask."""

from collections.abc import Iterable

import pandas as pd

from lit_attn.report import stats
from lit_attn.report.read import StudyRecord

MIXED = "ATTENTION:"


def caption(study: StudyRecord, summary: pd.DataFrame) -> str:
    """One paragraph: n, what ± is, which epoch, test, correction, machine, code and data."""
    plan = study.plan
    metric = plan.metric
    epoch = (
        "at the last epoch"
        if metric.selection == "last"
        else "at the epoch that is best on the validation split"
    )
    sentences = [
        *_warnings(study),
        f"{plan.title.rstrip('.')}.",
        f"{metric.label} ({metric.name}) {epoch}, mean ± sd (ddof 1) over n seeds "
        f"({_numbers(plan.seeds)}); {'higher' if metric.goal == 'max' else 'lower'} is better, "
        "bold is the best mean.",
        f"Difference to {plan.baseline}: mean over the seeds that both have, with the 95 % paired "
        "t interval.",
    ]
    pairs = summary["pairs"].max()
    if pairs > 0:
        floor = stats.sign_flip_floor(int(pairs))
        sentences.append(
            f"p: two-sided exact sign-flip test, which cannot go below {floor:.4g} with {pairs} "
            "pairs; p Holm: adjusted over the rows of this table; a star marks p Holm ≤ 0.05"
            + (", out of reach at this n." if floor * _compared(summary) > 0.05 else ".")
        )
        sentences.append(
            "Seeds needed: pairs for 80 % power of a paired t test, were the observed difference "
            "and its sd the true ones."
        )
    if summary["failures"].astype(bool).any():
        sentences.append(
            "Cells that are missing or failed are counted in column n and in no average."
        )
    if summary["published"].notna().any():
        sentences.append(f"Published values: {plan.source or 'as given in the study'}.")
    sentences += _machine(study)
    return " ".join(sentences)


def _compared(summary: pd.DataFrame) -> int:
    return int(summary["p"].notna().sum())


def _warnings(study: StudyRecord) -> list[str]:
    """Records that were not made by the same code on the same data do not compare."""
    mixed = [
        f"{name} differs between cells ({_few(found)})"
        for name, found in (
            ("code", _distinct(result.code for result in study.results)),
            ("data", _distinct(result.data for result in study.results)),
        )
        if len(found) > 1
    ]
    return [f"{MIXED} {' and '.join(mixed)}; the rows do not compare."] if mixed else []


def _machine(study: StudyRecord) -> list[str]:
    results = study.results
    if not results:
        return []
    devices = _distinct(result.device for result in results)
    codes = _distinct(result.code for result in results)
    data = _distinct(result.data for result in results)
    versions = _distinct(
        f"{name} {version}" for result in results for name, version in result.versions.items()
    )
    return [
        "FLOPs: forward pass of one sample, multiply-add = 2; step time and memory: medians over "
        "seeds (resident set on a CPU, allocator on a GPU).",
        f"{', '.join(devices)}; {', '.join(versions)}; code {_few(codes)}, data {_few(data)}.",
    ]


def _distinct(values: Iterable[str]) -> list[str]:
    return sorted(set(values))


def _few(hashes: list[str]) -> str:
    """All of up to three, else the first of them and how many there are; per_seed.csv has all."""
    return ", ".join(hashes) if len(hashes) <= 3 else f"{hashes[0]} and {len(hashes) - 1} others"


def _numbers(values: list[int]) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return shown if len(values) <= 8 else f"{shown}, … {values[-1]}"
