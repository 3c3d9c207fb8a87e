"""Screening: `design:` of a study trains all variants with a few seeds and keeps the best.

The state of the screening is the results on disk, as that of a search (lit_attn.ablate.tune). The
first plan after its last cell records the kept variants in `screening.json`, and they stay the same
from then on: a result that is computed again must not choose other variants after the confirmation
has begun.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lit_attn.ablate.variants import Variant
from lit_attn.cells.folder import CellStatus
from lit_attn.cells.records import Metric
from lit_attn.cells.screening import (
    SCREENING_FILE,
    ScreenedVariant,
    Screening,
    rank_key,
    rank_variants,
)
from lit_attn.config.study import StudyConfig, StudySource
from lit_attn.config.study_design import FIRST_FRESH_SEED
from lit_attn.config.study_values import SeedChoice
from lit_attn.tasks.metrics import MetricChoice

ReadCells = Callable[[Variant, tuple[int, ...]], dict[int, CellStatus]]
"""Function that returns the state of the cell of a variant with each seed."""


@dataclass(frozen=True)
class Design:
    """Numbers of a screening and of its confirmation, and the metric that ranks the variants."""

    screen: int
    keep: int
    confirm: int
    metric: Metric

    @property
    def screening_seeds(self) -> tuple[int, ...]:
        """Seeds of all variants."""
        return tuple(range(self.screen))

    @property
    def fresh_seeds(self) -> tuple[int, ...]:
        """Seeds of the baseline and the kept variants, none of which the screening uses."""
        return tuple(range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + self.confirm))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of both stages."""
        return (*self.screening_seeds, *self.fresh_seeds)


def read_design(
    source: StudySource, seeds: SeedChoice | None, written: list[Variant]
) -> Design | None:
    """Return the design of a study, or None for a study with `seeds`.

    `seeds` come from `--seeds`. Raises ConfigError for a mistake.
    """
    config = source.study.design
    if config is None:
        return None
    if seeds is not None:
        raise source.error(
            ("design",),
            "decides the seeds, so leave out --seeds; `confirm` of `design` has more or fewer",
        )
    metric = _choose_metric(source, written)
    compared = len(written) - 1
    assert config.screen is not None
    assert config.keep is not None
    assert config.confirm is not None
    if config.keep >= compared:
        raise source.error(
            ("design", "keep"),
            f"{config.keep} keeps all {compared} variants beside the baseline; write `seeds`,"
            " or keep fewer",
        )
    return Design(config.screen, config.keep, config.confirm, metric)


def _choose_metric(source: StudySource, written: list[Variant]) -> Metric:
    """Return the validation metric that ranks the variants.

    Test results choose nothing: the comparison would use the samples that have chosen its variants.
    """
    for variant in written:
        if "val" not in variant.experiment.data.splits:
            raise source.error(
                ("design",),
                f"variant '{variant.name}': its data have no validation split, and test results"
                " choose no variants; set data.validation, or write `seeds`",
            )
    path, choice = _name_metric(source, written[0].metric)
    if not choice.name.startswith("val/"):
        raise source.error(path, "needs a validation metric: val/loss")
    for variant in written:
        try:
            resolved = choice.resolve(variant.experiment)
        except ValueError as error:
            raise source.error(path, f"{error}; design.select names another metric") from error
    return resolved.untested


def _name_metric(source: StudySource, compared: Metric) -> tuple[tuple[str, ...], MetricChoice]:
    """Return the key that names the metric which ranks the variants, and the metric.

    `compared` is the metric of the table.
    """
    study = source.study
    if study.design is not None and study.design.select is not None:
        return ("design", "select"), MetricChoice(name=study.design.select)
    if "select" in study.tune:
        return ("tune", "select"), MetricChoice(name=str(study.tune["select"]))
    name = compared.name.partition("/")[2]
    choice = MetricChoice(
        name=f"val/{name}",
        goal=compared.goal,
        scale=compared.scale,
        selection=compared.selection,
    )
    return ("design",), choice


def screen_variants(
    design: Design,
    written: list[Variant],
    screened: list[Variant],
    without_values: set[str],
    read_cells: ReadCells,
    study: StudyConfig,
) -> Screening:
    """Return the record of a screening from the cells of its variants.

    `screened` are the variants whose cells are known. They lack those whose search has not ended
    or whose step time is not measured, and `without_values`, in whose search every trial has
    diverged.
    """
    known = {variant.name: variant for variant in screened}
    entries = []
    for variant in written:
        label = variant.label(study.labels)
        if variant.name in known:
            ends = read_cells(known[variant.name], design.screening_seeds)
            identity = known[variant.name].cell("", design.screening_seeds[0]).fingerprint
            entries.append(_summarize(variant.name, label, identity, design.metric, ends))
        else:
            has_diverged = variant.name in without_values
            entries.append(
                ScreenedVariant(variant=variant.name, label=label, has_diverged=has_diverged)
            )
    kept: list[str] | None = None
    if all(entry.has_ended for entry in entries):
        compared = [entry for entry in entries if entry.variant != study.baseline]
        kept = keep_best(compared, design)
    return Screening(
        screen=design.screen,
        keep=design.keep,
        confirm=design.confirm,
        seeds=list(design.screening_seeds),
        select=design.metric,
        baseline=study.baseline,
        variants=entries,
        kept=kept,
    )


def _summarize(
    name: str, label: str | None, identity: str, metric: Metric, ends: dict[int, CellStatus]
) -> ScreenedVariant:
    """Return the values of a variant; a metric that is not finite counts as diverged."""
    by_seed: dict[str, float | None] = {}
    has_diverged = False
    for seed, status in ends.items():
        value = None if status.result is None else status.result.metrics.get(metric.name)
        if value is not None:
            value *= metric.scale
        if value is not None or status.result is not None or status.state == "diverged":
            by_seed[str(seed)] = value
            # A result leaves out the metrics that are not finite.
            has_diverged |= value is None
    values = [value for value in by_seed.values() if value is not None]
    mean = math.fsum(values) / len(values) if len(values) == len(ends) else None
    return ScreenedVariant(
        variant=name,
        label=label,
        identity=identity,
        mean=mean,
        by_seed=by_seed,
        has_diverged=has_diverged,
    )


def keep_best(compared: list[ScreenedVariant], design: Design) -> list[str]:
    """Return the names of the best variants, in the order of the study.

    Variants whose means are equal to that of the last kept one are kept, too, because the order of
    a file is no reason to drop one. A variant without a mean is never kept. So more variants than
    `keep` can remain, and fewer.
    """
    ranked = [entry for entry in rank_variants(compared, design.metric) if entry.mean is not None]
    kept = ranked[: design.keep]
    if kept:
        last = rank_key(kept[-1], design.metric)
        kept += [entry for entry in ranked[design.keep :] if rank_key(entry, design.metric) == last]
    names = {entry.variant for entry in kept}
    return [entry.variant for entry in compared if entry.variant in names]


def apply_recorded(screening: Screening, folder: Path) -> Screening:
    """Return `screening` with the values and the kept variants that the folder records.

    A record of other variants, or of a screening that has kept none yet, changes nothing. Raises
    ConfigError for a record that cannot be read: present results could keep other variants.
    """
    recorded = Screening.read(folder / SCREENING_FILE)
    if recorded is None or not recorded.kept or not recorded.has_same_question(screening):
        return screening
    labels = {entry.variant: entry.label for entry in screening.variants}
    variants = [
        entry.model_copy(update={"label": labels[entry.variant]}) for entry in recorded.variants
    ]
    return screening.model_copy(update={"variants": variants, "kept": recorded.kept})
