"""Answers of the dry run, `status` and `report` with --json: the models of their keys."""

from typing import Literal

from lit_attn.cells.screening import Screening
from lit_attn.report.answers.entry import Entry
from lit_attn.schema.error_answer import FORMAT


class Cell(Entry):
    """State of a planned cell; `step` and `steps` are those of a running cell."""

    variant: str
    seed: int
    identity: str
    state: str
    step: int | None = None
    steps: int | None = None
    message: str | None = None
    advice: str | None = None
    stale: str | None = None
    folder: str


class EndedVariant(Entry):
    """Idea of a stream that is not kept after `seeds` of `planned` runs, also in words.

    `rule` is the step that ended it: screening or confirmation.
    """

    variant: str
    rule: str
    seeds: int
    planned: int
    text: str


class PlannedScreening(Entry):
    """Screening that costs at most as many trainings and has a larger `power` (designs.py)."""

    screen: int
    keep: int
    confirm: int
    trainings: int
    power: float


class ScreenedEntry(Entry):
    """Value of a variant in a screening, in printed units; nothing is claimed from it.

    `mean` is null before all seeds have ended, and if one of them has diverged. `is_kept` is null
    before the screening has ended, and for the baseline.
    """

    variant: str
    label: str
    n: int
    mean: float | None
    has_diverged: bool
    is_kept: bool | None


class StudyDesign(Entry):
    """Screening and confirmation of a study with `design`, and the state of the screening.

    `trainings` are those of both stages. `metric` ranks the variants. `kept` is null before the
    screening has ended.
    """

    screen: int
    keep: int
    confirm: int
    trainings: int
    metric: str
    seeds: list[int]
    kept: list[str] | None
    variants: list[ScreenedEntry]

    @classmethod
    def describe(cls, screening: Screening | None) -> "StudyDesign | None":
        """Return the entry of a recorded screening, None for a study with `seeds`."""
        if screening is None:
            return None
        entries = []
        for entry in screening.variants:
            is_kept = None
            if screening.kept is not None and entry.variant != screening.baseline:
                is_kept = entry.variant in screening.kept
            screened = ScreenedEntry.from_record(
                entry,
                label=entry.label or entry.variant,
                n=sum(value is not None for value in entry.by_seed.values()),
                is_kept=is_kept,
            )
            entries.append(screened)
        return cls.from_record(
            screening,
            trainings=screening.count_trainings(),
            metric=screening.select.name,
            variants=entries,
        )


class PlannedStudy(Entry):
    """Study of a dry run; `to_run` is the number of cells that `run` would train.

    `floors` are the rules without attention whose values the table will have the best of.
    `power` is the probability of a star for one variant that is better by two standard deviations.
    It is null for a product of several axes, which estimates their effects from all cells.
    `screening` is null if no screening finds clearly more. `design` is null for a study with
    `seeds`. In a study with `design`, `seeds` are those of the confirmation, and `cells` has the
    known cells of both stages.
    """

    study: str
    title: str
    experiment: str
    baseline: str
    variants: list[str]
    seeds: list[int]
    floors: list[str]
    warnings: list[str]
    counts: dict[str, int]
    trials: dict[str, int]
    to_run: int
    power: float | None
    screening: PlannedScreening | None
    design: StudyDesign | None
    cells: list[Cell]


class DryRunAnswer(Entry):
    """Answer of `run --dry-run --json`."""

    format: int = FORMAT
    command: Literal["dry-run"] = "dry-run"
    studies: list[PlannedStudy]


class StudyStatus(Entry):
    """Status of a study; `seconds_left` is null before the first cell has been measured.

    `design` is null for a study with `seeds`.
    """

    study: str
    title: str
    counts: dict[str, int]
    seconds_left: float | None
    design: StudyDesign | None
    cells: list[Cell]


class StatusAnswer(Entry):
    """Answer of `status --json`."""

    format: int = FORMAT
    command: Literal["status"] = "status"
    studies: list[StudyStatus]


class WrittenReport(Entry):
    """Report of a study: its page and the table with every number."""

    name: str
    page: str
    table: str | None


class ReportAnswer(Entry):
    """Answer of `report --json`; `skipped` are studies whose records cannot be reported."""

    format: int = FORMAT
    command: Literal["report"] = "report"
    reports: list[WrittenReport]
    skipped: list[str]
    index: str | None
