"""Screened-out variants in the table of results, and the table of a screening."""

import statistics
from collections.abc import Sequence

import pandas as pd

from lit_attn.cells.screening import ScreenedVariant, Screening, rank_variants
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.tables.columns import (
    NOTHING,
    choose_digits,
    format_seeds,
    format_spread,
)
from lit_attn.report.tables.formats import Cell, Table, named_table
from lit_attn.schema.errors import plural


def make_screened_out_rows(
    study: StudyRecord, keys: Sequence[str], digits: int
) -> list[list[Cell]]:
    """Return a row for each screened-out variant, the best one first, for columns with `keys`.

    `digits` are the decimals of the values in the table.
    """
    if study.screening is None:
        return []
    rows = []
    for entry in study.screening.screened_out:
        value = f"screened out, {_format_value(entry, digits)}"
        texts = {"variant": entry.variant, "value": value}
        rows.append([Cell(texts.get(key, NOTHING)) for key in keys])
    return rows


def _format_value(entry: ScreenedVariant, digits: int) -> str:
    """Return mean and sample standard deviation of a variant in the screening."""
    if entry.mean is None:
        return "diverged" if entry.has_diverged else NOTHING
    values = _list_values(entry)
    sd = statistics.stdev(values) if len(values) > 1 else None
    return format_spread(entry.mean, sd, digits)


def _list_values(entry: ScreenedVariant) -> list[float]:
    return [value for value in entry.by_seed.values() if value is not None]


def find_words(study: StudyRecord) -> dict[str, str]:
    """Return the words for the sentences about the screening of a study."""
    screening = study.screening
    if screening is None:
        return {}
    kept = screening.kept or []
    return {
        "variants": plural(len(screening.compared), "variant"),
        "screen": plural(screening.screen, "seed"),
        "kept": f"the best {len(kept)} of them" if len(kept) > 1 else "the best of them",
        "confirm": plural(len(study.plan.seeds), "seed"),
        "label": screening.select.label,
    }


def _describe_choice(screening: Screening) -> str:
    """Return the start of the sentence about the kept variants."""
    if screening.kept is None:
        return f"It keeps the {plural(screening.keep, 'variant')}"
    return f"It kept the {plural(len(screening.kept), 'variant')}"


def make_screening_table(screening: Screening) -> Table:
    """Return the value of every variant in the screening; the kept variants are bold."""
    baseline = screening.baseline
    means = [entry.mean for entry in screening.variants if entry.mean is not None]
    deviations = []
    for entry in screening.variants:
        values = _list_values(entry)
        if len(values) > 1:
            deviations.append(statistics.stdev(values))
    digits = choose_digits(pd.Series(deviations, dtype=float), pd.Series(means, dtype=float))
    rows = []
    for entry in rank_variants(screening.variants, screening.select):
        choice = ""
        if entry.variant == baseline:
            choice = "baseline"
        elif screening.kept is not None:
            choice = "kept" if entry.variant in screening.kept else "screened out"
        texts = [
            entry.variant,
            _format_value(entry, digits),
            str(len(_list_values(entry))),
            choice,
        ]
        rows.append([Cell(text, is_bold=choice == "kept") for text in texts])
    return named_table(
        "screening",
        rows,
        label=screening.select.label,
        baseline=baseline,
        seeds=format_seeds(screening.seeds),
        kept=_describe_choice(screening),
    )
