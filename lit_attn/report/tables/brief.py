"""Brief form of the table of results: its columns, and a caption of at most six sentences."""

import itertools
from collections.abc import Sequence

import pandas as pd

from lit_attn.report.numbers import fill
from lit_attn.report.records.study_record import BUSY_RATIO, StudyRecord
from lit_attn.report.records.timing import TIME_MARK
from lit_attn.report.tables import columns
from lit_attn.report.tables.captions import MOST_SENTENCES, split_sentences
from lit_attn.report.tables.formats import Cell, read_asset
from lit_attn.report.tables.screening import find_words

VALUE_COLUMNS = ("variant", "value", "n", "difference", "p", "step_time")
"""Columns of a table whose study chooses none."""

TIME_COLUMNS = ("variant", "value", "reached", "n", "difference", "p")
"""Columns of a study of times until an event, in which the runs without it count."""

PHONE = ("variant", "value", "n", "difference", "p", "verdict")
"""Columns of a narrow screen: those that a reader needs to decide."""

SETUP: dict[str, str] = read_asset("sentences.yaml")  # Has the words of each criterion.
FLAGS: dict[str, str] = read_asset("flags.yaml")
"""Clauses of the sentence about everything that changes how a table must be read."""


def choose_places(keys: Sequence[str], chosen: Sequence[str]) -> tuple[int, ...]:
    """Return the places of the `chosen` columns among `keys`; the name of a row is always shown."""
    shown = {"variant", *chosen}
    return tuple(place for place, key in enumerate(keys) if key in shown)


def write_brief_caption(
    study: StudyRecord,
    summary: pd.DataFrame,
    shown: Sequence[columns.Column],
    cells: Sequence[Sequence[Cell]],
    values: dict[str, object],
) -> list[str]:
    """Return the sentences about the `shown` columns, and one about everything unusual.

    `cells` are the printed cells of these columns, `values` fill the templates of the columns.
    """
    sentences = []
    for column in shown:
        template = column.note if column.brief is None else column.brief
        written = fill(template, **values).strip()
        sentences += split_sentences(written)[:1]
    flags = _find_flags(study, summary, cells)
    if not flags:
        return sentences[:MOST_SENTENCES]
    return [*sentences[: MOST_SENTENCES - 1], f"Note: {'; '.join(flags)}."]


def _find_flags(
    study: StudyRecord, summary: pd.DataFrame, cells: Sequence[Sequence[Cell]]
) -> list[str]:
    """Return the clauses that apply to a study, the most important one first."""
    if study.plan.is_smoke:
        return []
    applying = {
        "no_baseline": not study.values(study.plan.baseline),
        "interim": any(cell.is_open for cell in study.cells),
        "design": study.screening is not None and bool(study.screening.kept),
        "screening_open": study.screening is not None and study.screening.kept is None,
        "watched": study.looks is not None and study.looks.has_any(len(study.plan.seeds)),
        "failed": bool(summary["failed"].any()),
    }
    seals = study.seals
    if seals is not None:
        changes = {name: bool(names) for name, names in seals.changes().items()}
        applying |= {"looks": bool(seals.added_seeds), "sealed_late": not seals.is_before_results}
        applying |= changes
    printed = list(itertools.chain.from_iterable(cells))
    applying["time_mark"] = any(cell.mark == TIME_MARK for cell in printed)
    applying["busy"] = any(cell.mark == columns.BUSY_MARK for cell in printed)
    values = {
        "baseline": study.plan.baseline,
        "mark": TIME_MARK,
        "busy": columns.BUSY_MARK,
        "ratio": BUSY_RATIO,
        **find_words(study),
    }
    flags = [fill(FLAGS[name], **values) for name, applies in applying.items() if applies]
    for criterion in study.plan.criteria[1:]:
        words = SETUP.get(f"equal_{criterion}", criterion)
        flags.append(fill(FLAGS["equal"], criterion=criterion, words=words))
    return flags
