"""Every specification the attention tests run over, made from the registry of parts.

A part is covered the day it is registered: its choices (Literal and bool fields) are multiplied
out.
"""

import itertools
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from lit_attn.attention.spec import PRESETS, AttentionSpec, Residual, Similarity
from lit_attn.config.base import Kind


def members(family: type[Kind]) -> Iterator[Kind]:
    """Every member of a family with every combination of its finite choices."""
    for member in family.family.values():
        choices = {}
        for name, field in member.model_fields.items():
            if name != "kind" and get_origin(field.annotation) is Literal:
                choices[name] = get_args(field.annotation)
            elif field.annotation is bool:
                choices[name] = (False, True)
        for values in itertools.product(*choices.values()):
            yield member(**dict(zip(choices, values, strict=True)))


def label(spec: AttentionSpec) -> str:
    """A readable test id: the preset's name, or the choices that differ from the standard layer."""
    for name, known in PRESETS.items():
        if spec == known:
            return name
    found = []
    for key, value in spec.identity().items():
        chosen = [str(v) for v in value.values()] if isinstance(value, dict) else [str(value)]
        found.append(f"{key}-" + "-".join(chosen))
    return ",".join(found)


def all_specs() -> list[AttentionSpec]:
    """Presets, then every choice of every family alone, each with and without zz."""
    found = list(PRESETS.values())
    for residual in members(Residual):
        found += [AttentionSpec(residual=residual, zz=zz) for zz in (False, True)]
    for similarity in members(Similarity):
        found.append(AttentionSpec(similarity=similarity))
    return [spec for i, spec in enumerate(found) if spec not in found[:i]]
