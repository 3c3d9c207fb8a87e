"""Origin of the results of a study, and warnings about results and unreadable files."""

import statistics

from lit_attn.cells.rows import read_unreadable
from lit_attn.report.numbers import fill
from lit_attn.report.records.skipped import read_or_skip
from lit_attn.report.records.study_record import StudyRecord, find_differences
from lit_attn.report.tables.formats import read_asset
from lit_attn.schema.errors import plural

SENTENCES: dict[str, str] = read_asset("sentences.yaml")  # Sentences of the caption.
UNREADABLE_NAMES = 5
"""Most names of unreadable images of a split that a warning lists."""


def find_chance_results(study: StudyRecord) -> list[str]:
    """Return the variants whose mean is no better than the mean of their chance levels."""
    sign = 1 if study.plan.metric.goal == "max" else -1
    variants = []
    for variant in study.plan.variants:
        levels = study.measurements("chance", variant.name)
        values = list(study.values(variant.name).values())
        # Results of earlier versions have no level.
        if levels and len(levels) == len(values):
            excess = statistics.fmean(values) - statistics.fmean(levels)
            if sign * excess <= 0:
                variants.append(variant.name)
    return variants


def _describe_unreadable(study: StudyRecord) -> str | None:
    """Return the sentence about images that could not be read; None if there were none."""
    by_split: dict[str, set[str]] = {}
    cells = study.finished_cells()
    affected = 0
    for cell in cells:
        images = read_or_skip(read_unreadable, cell.folder) or []
        affected += bool(images)
        for image in images:
            by_split.setdefault(image.split, set()).add(image.image)
    if not by_split:
        return None
    parts = []
    for split, names in by_split.items():
        listed = ", ".join(sorted(names)[:UNREADABLE_NAMES])
        others = len(names) - UNREADABLE_NAMES
        more = f" and {others} more" if others > 0 else ""
        parts.append(f"{len(names)} of {split} ({listed}{more})")
    return fill(
        SENTENCES["unreadable_images"],
        images=" and ".join(parts),
        affected=affected,
        cells=plural(len(cells), "result"),
    )


def _describe_kept_layers(study: StudyRecord) -> list[str]:
    """Return sentences about variants of which not all attention layers were replaced."""
    by_count: dict[str, list[str]] = {}
    for variant in study.plan.variants:
        for count in dict.fromkeys(study.measurements("replaced_layers", variant.name)):
            by_count.setdefault(str(count), []).append(variant.name)
    sentences = []
    without = by_count.pop("0 of 0", [])
    if without:
        sentences.append(fill(SENTENCES["no_layers"], variants=", ".join(without)))
    if by_count:
        counts = [f"{', '.join(names)}: {count}" for count, names in by_count.items()]
        sentences.append(fill(SENTENCES["layers"], counts="; ".join(counts)))
    return sentences


def describe_records(study: StudyRecord) -> tuple[list[str], list[str]]:
    """Return where the results come from, and warnings about results and unreadable files."""
    distinct = {}
    for name in ("code", "data", "versions", "device"):
        distinct[name] = sorted(set(study.measurements(name)))
    notes = []
    if distinct["device"]:
        # Each text of versions names all packages of a cell.
        packages = {package for text in distinct["versions"] for package in text.split("; ")}
        provenance = fill(
            SENTENCES["provenance"],
            code=", ".join(distinct["code"]),
            data=", ".join(distinct["data"]),
            versions=", ".join(sorted(packages)),
            device=", ".join(distinct["device"]),
        )
        notes.append(provenance)
    warnings = [SENTENCES["smoke"]] if study.plan.is_smoke else []
    mixed = []
    for name, hashes in find_differences(study.finished_cells()).items():
        mixed.append(f"{name} differs between runs ({', '.join(hashes)})")
    if mixed:
        warnings.append(fill(SENTENCES["mixed"], hashes=" and ".join(mixed)))
    untrained = find_chance_results(study)
    if untrained:
        variants = ", ".join(untrained)
        metric = study.plan.metric.name
        warnings.append(fill(SENTENCES["chance"], variants=variants, metric=metric))
    diverged = [v.name for v in study.plan.variants if study.measurements("diverged", v.name)]
    if diverged:
        warnings.append(fill(SENTENCES["diverged"], variants=", ".join(diverged)))
    warnings += _describe_kept_layers(study)
    left_out = _describe_unreadable(study)
    if left_out:
        warnings.append(left_out)
    differing = [name for name in ("versions", "device") if len(distinct[name]) > 1]
    warnings += [SENTENCES[name] for name in [*differing, *study.unreadable]]
    return notes, warnings
