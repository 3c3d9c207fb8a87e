"""Labels of variants: the texts of tables and figures in place of names, which are folder names."""

from dataclasses import replace
from typing import Any

from lit_attn.cells.records import Plan
from lit_attn.report.records.study_record import StudyRecord


def find_labels(plan: Plan) -> dict[str, str]:
    """Return the label of every variant by its name; a variant without one has its name."""
    return {variant.name: variant.label or variant.name for variant in plan.variants}


def name_block(criterion: str) -> str:
    """Return the heading of the variants under one criterion of `match`."""
    return f"equal {'steps' if criterion == 'none' else criterion}"


def find_blocks(plan: Plan) -> dict[str, str]:
    """Return the heading of the block of each variant in tables and figures, by name.

    The baseline belongs to every criterion, so it has none. Empty for a study with one criterion.
    """
    if len(plan.criteria) < 2:
        return {}
    headings = {}
    for variant in plan.variants:
        if variant.name != plan.baseline and variant.criterion is not None:
            headings[variant.name] = name_block(variant.criterion)
    return headings


def label_study(study: StudyRecord) -> StudyRecord:
    """Return `study` with labels as the names of its variants, or itself if it has no labels.

    `names` of the returned study leads from the labels back to the names.
    """
    plan = study.plan
    labels = find_labels(plan)
    screened = [] if study.screening is None else study.screening.variants
    for entry in screened:
        # The plan has the kept variants only.
        labels[entry.variant] = entry.label or entry.variant
    if all(label == name for name, label in labels.items()):
        return study
    variants = []
    for variant in plan.variants:
        written = variant.variant and labels.get(variant.variant, variant.variant)
        changes = {"name": labels[variant.name], "variant": written}
        variants.append(variant.model_copy(update=changes))
    renamed = plan.model_copy(update={"variants": variants, "baseline": labels[plan.baseline]})
    cells = [replace(cell, variant=labels.get(cell.variant, cell.variant)) for cell in study.cells]
    labelled = replace(
        study,
        plan=renamed,
        cells=cells,
        names={label: name for name, label in labels.items()},
    )
    if study.tuning is not None:
        tuned = [
            entry.model_copy(update={"variant": labels.get(entry.variant, entry.variant)})
            for entry in study.tuning.variants
        ]
        labelled = replace(labelled, tuning=study.tuning.model_copy(update={"variants": tuned}))
    if study.screening is not None:
        entries = [
            entry.model_copy(update={"variant": labels[entry.variant]}) for entry in screened
        ]
        screened_changes: dict[str, Any] = {
            "variants": entries,
            "baseline": labels[study.screening.baseline],
        }
        if study.screening.kept is not None:
            screened_changes["kept"] = [labels[name] for name in study.screening.kept]
        labelled = replace(labelled, screening=study.screening.model_copy(update=screened_changes))
    if study.step_times is not None:
        timed = [
            entry.model_copy(update={"variant": labels.get(entry.variant, entry.variant)})
            for entry in study.step_times.variants
        ]
        times = study.step_times.model_copy(update={"variants": timed})
        labelled = replace(labelled, step_times=times)
    return labelled
