"""Presets for the parts of plug-ins, which `doctor` compares and `bench` measures."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from lit_attn.attention.parts import Part
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.schema.base import Kind
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts


def load_presets(files: Iterable[Path]) -> list[str]:
    """Import the plug-ins and return the names of their presets, one for each part of theirs."""
    # Presets of installed plug-ins are not those of `files`.
    load_parts([])
    kinds = list_kinds()
    presets = set(PRESETS)
    load_parts(files)
    add_presets(kinds)
    return [name for name in PRESETS if name not in presets]


def list_kinds() -> dict[str, set[str]]:
    """Return the names of the registered parts of each family."""
    kinds = {}
    for base in _list_families():
        kinds[base.family_name()] = set(base.family)
    return kinds


def add_presets(before: Mapping[str, Iterable[str]]) -> None:
    """Add a preset for each part that is not in `before`, as `residual=reflected`.

    The other parts of such a preset are those of the standard layer. Raises ConfigError if a part
    has a choice without a default and no preset has this part.
    """
    used: set[tuple[str, str]] = set()
    for spec in PRESETS.values():
        used |= {(family, part.kind) for family, part in spec.parts.items()}
    for base in _list_families():
        family = base.family_name()
        for kind in base.family:
            if kind in before[family]:
                continue
            try:
                spec = AttentionSpec.model_validate({family: kind})
            except ValueError as error:
                if (family, kind) in used:
                    continue
                raise ConfigError(
                    f"--parts: {family} '{kind}' is no layer with its defaults; add a preset with "
                    f"your choices to the file, as PRESETS['{kind}'] = AttentionSpec(...)"
                ) from error
            if spec not in PRESETS.values():
                PRESETS[f"{family}={kind}"] = spec


def _list_families() -> list[type[Kind]]:
    """Return the base classes of the families of parts."""
    return [base for base in Kind.__subclasses__() if issubclass(base, Part)]
