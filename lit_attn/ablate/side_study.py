"""Side studies: runs that do not compute what the study's file describes.

These are runs with `--set` and smoke runs. Their results and tables have their own folders next to
the study's, named after the changes (`digits@training.max_steps=20`; names of studies contain no
@), so the plan and report of the study do not change.
"""

import contextlib

from lit_attn.ablate.variants import Variant, make_label, resolve
from lit_attn.cells import records
from lit_attn.config.source import format_value
from lit_attn.config.study import StudySource
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import Mapping


def name_side_study(
    source: StudySource, written: list[Variant], changes: Mapping | None, smoke: bool
) -> tuple[str, str]:
    """Return the name of the folder and the title of a study, or of a side study of it."""
    settings = []
    title = source.study.title
    if changes is not None:
        settings = _list_settings(source, written, changes)
    if settings:
        title += f" (with {', '.join(settings)})"
    if smoke:
        settings.append(records.SMOKE)
    if not settings:
        return source.name, title
    label = make_label(",".join(settings), 80)
    return f"{source.name}@{label}", title


def _list_settings(source: StudySource, variants: list[Variant], changes: Mapping) -> list[str]:
    """Return the overrides that change an identity, as `key=value` strings."""
    identities = _list_identities(variants)
    needed = changes
    for key in changes:
        fewer = needed.copy()
        del fewer[key]
        # The study may be incomplete without this override.
        with contextlib.suppress(ConfigError):
            if _list_identities(resolve(source, fewer)) == identities:
                needed = fewer
    return sorted(f"{key}={format_value(value)}" for key, value in needed.items())


def _list_identities(variants: list[Variant]) -> list[str]:
    """Return the identity of the cell of each variant with seed 0."""
    return [variant.cell(variant.name, 0).fingerprint for variant in variants]


def find_changed(source: StudySource, variants: list[Variant], changes: Mapping | None) -> set[str]:
    """Return the names of the variants that do not compute what the study's file describes."""
    if not changes:
        return set()
    try:
        written = resolve(source)
    except ConfigError:
        # The file is not complete without `changes`.
        return {variant.name for variant in variants}
    names = [variant.name for variant in written]
    identities = dict(zip(names, _list_identities(written), strict=True))
    changed = set()
    for variant, identity in zip(variants, _list_identities(variants), strict=True):
        if identities.get(variant.name) != identity:
            changed.add(variant.name)
    return changed
