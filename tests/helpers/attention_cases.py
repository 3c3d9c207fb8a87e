"""Specifications for the attention tests, generated from the registry of parts.

Every registered part is covered. Its choices (Literal and bool fields) are covered
pairwise: every two choices stand together in some case, and so do every two parts of different
families.
"""

import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from lit_attn.attention.bias import BiasConfig, T5BiasConfig
from lit_attn.attention.compose import ComposeConfig
from lit_attn.attention.convolution import ConvolutionConfig
from lit_attn.attention.filters import FilterConfig
from lit_attn.attention.first_values import ValuesConfig
from lit_attn.attention.gate import GateConfig, HeadGateConfig
from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.mixture import MixtureConfig
from lit_attn.attention.multi_token import MultiTokenConfig
from lit_attn.attention.normaliser import NormaliserConfig
from lit_attn.attention.pairs import PairConfig
from lit_attn.attention.residual import ResidualConfig
from lit_attn.attention.scale import ScaleConfig
from lit_attn.attention.similarity import SimilarityConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.attention.transform import TransformConfig
from lit_attn.schema.base import Kind


def members(family: type[Kind]) -> Iterator[Kind]:
    """Yield every member of a family with pairwise combinations of its choices, if valid."""
    for member in family.family.values():
        choices: dict[str, Sequence[Any]] = {}
        for name, field in member.model_fields.items():
            if name != "kind" and get_origin(field.annotation) is Literal:
                choices[name] = get_args(field.annotation)
            elif field.annotation is bool:
                choices[name] = (False, True)
            elif name == "keys":
                choices[name] = (2, 3)
        for case in pairwise(choices):
            yield from sensible(member, case)


def sensible(member: type[Kind], case: dict[str, Any]) -> Iterator[Kind]:
    """Yield the member that `case` describes, without up to two choices that it refuses."""
    for dropped in itertools.chain([()], *(itertools.combinations(case, n) for n in (1, 2))):
        try:
            yield member(**{name: case[name] for name in case if name not in dropped})
        except ValidationError:
            continue
        return


def pairwise(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return few cases with every pair of values of different keys (greedy, deterministic)."""
    names = list(choices)
    if len(names) < 3:
        product = itertools.product(*choices.values())
        return [dict(zip(names, values, strict=True)) for values in product]
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(choices[names[a]]))
        for y in range(len(choices[names[b]]))
    }
    cases = []
    while missing:
        case = dict(min(missing))
        for i, name in enumerate(names):
            if i not in case:
                case[i] = max(
                    range(len(choices[name])),
                    key=lambda x, i=i: (
                        sum(tuple(sorted([(i, x), one])) in missing for one in case.items()),
                        -x,
                    ),
                )
        missing -= set(itertools.combinations(sorted(case.items()), 2))
        cases.append({names[i]: choices[names[i]][x] for i, x in sorted(case.items())})
    return cases


def label(spec: AttentionSpec) -> str:
    """Return a test id: the preset's name, or the choices that differ from the standard layer."""
    for name, preset in PRESETS.items():
        if spec == preset:
            return name
    chosen_parts = []
    for key, value in spec.identity().items():
        chosen = [str(v) for v in value.values()] if isinstance(value, dict) else [str(value)]
        chosen_parts.append(f"{key}-" + "-".join(chosen))
    return ",".join(chosen_parts)


def takes_window(spec: AttentionSpec) -> bool:
    """Return True if a layer can have a window: V itself and linear keys have no use for one.

    Filters need all earlier tokens.
    """
    has_weights = spec.similarity.has_logits and spec.residual.kind != "value"
    return has_weights and spec.filter.kind == "none"


def nearest_valid(cross: dict[str, Any]) -> AttentionSpec:
    """Return the specification of a cross, without the part that refuses the others."""
    cross = dict(cross)
    if cross["normaliser"] == "differential":
        # Both subtract heads.
        cross["pair"] = "none"
    # Linear keys form no logits that could be masked or composed.
    with_logits = {**cross, "similarity": "gaussian"}
    # V itself does not depend on the attention weights.
    with_heads = {**cross, "residual": "full"}
    both = {**with_logits, "residual": "full"}
    for choices in (cross, with_logits, with_heads, both):
        # A filter needs the logits of all earlier tokens.
        for windows in ({}, {"window": None}):
            try:
                return AttentionSpec.model_validate({**choices, **windows})
            except ValidationError:
                continue
    raise AssertionError(f"no valid specification is near {cross}")


def choices_of(spec: AttentionSpec) -> set[Hashable]:
    """Return the choices of a layer: its members, the values of their fields, and its own ones."""
    choices: set[Hashable] = set()
    for key in ("zz", "window", "kv_heads"):
        choices.add((key, getattr(spec, key)))
    for family, part in spec.parts.items():
        choices.add((family, part.kind))
        for name, value in part.model_dump().items():
            choices.add((family, part.kind, name, str(value)))
    return choices


def covering(specs: Iterable[AttentionSpec]) -> list[AttentionSpec]:
    """Return few of `specs` with every choice that occurs in them (greedy, deterministic).

    They are enough for what each part must do by itself, whatever stands beside it: what happens
    to a mask, a cache, a projection or a type. `all_specs` has the parts in pairs.
    """
    candidates = [(spec, choices_of(spec)) for spec in specs]
    missing: set[Hashable] = set()
    for _, choices in candidates:
        missing |= choices
    chosen = []
    while missing:
        best, covered = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        missing -= covered
        chosen.append(best)
    return chosen


@functools.cache
def covering_specs() -> tuple[AttentionSpec, ...]:
    """Return few layers with every choice of every part (about a quarter of `all_specs`)."""
    return tuple(covering(all_specs()))


@functools.cache
def all_specs() -> tuple[AttentionSpec, ...]:
    """Return presets, every choice of every family, and pairwise crosses of the families."""
    specs = list(PRESETS.values())
    specs += [AttentionSpec(residual=residual) for residual in members(ResidualConfig)]
    specs += [AttentionSpec(similarity=similarity) for similarity in members(SimilarityConfig)]
    specs += [AttentionSpec(compose=compose) for compose in members(ComposeConfig)]
    specs += [AttentionSpec(normaliser=normaliser) for normaliser in members(NormaliserConfig)]
    specs += [AttentionSpec(transform=transform) for transform in members(TransformConfig)]
    specs += [AttentionSpec(convolution=chosen) for chosen in members(ConvolutionConfig)]
    specs += [AttentionSpec(gate=gate) for gate in members(GateConfig)]
    specs.append(AttentionSpec(gate=HeadGateConfig(columns=5, bias=4.0, init="zeros", factor=2.0)))
    specs += [AttentionSpec(filter=chosen) for chosen in members(FilterConfig)]
    specs.append(AttentionSpec(filter=MultiTokenConfig(queries=3, keys=1, group=2)))
    specs.append(AttentionSpec(bias=T5BiasConfig(buckets=8, max_distance=6)))
    specs.append(AttentionSpec(similarity=MixtureConfig(keys=3, variance=(1, 3, 0.5))))
    specs.append(AttentionSpec(similarity=MixtureConfig(variance="learned")))
    of_heads = {"variance": "learned", "variance_scope": "head"}
    specs.append(AttentionSpec(similarity=MixtureConfig(**of_heads)))
    specs.append(AttentionSpec(similarity=MixtureConfig(**of_heads, keys=1), normaliser="sigmoid"))
    specs.append(AttentionSpec(similarity=MixtureConfig(**of_heads, assignment="hard"), kv_heads=1))
    specs.append(AttentionSpec(similarity=MixtureConfig(**of_heads, prior="m-step"), zz=True))
    specs.append(AttentionSpec(similarity=LinearConfig(keys=3)))
    crosses = pairwise(
        {
            "similarity": [
                *(kind for kind in SimilarityConfig.family if kind != "mixture"),
                MixtureConfig(),
                MixtureConfig(source="shifted", assignment="hard"),
                MixtureConfig(variance=(1, 3)),
            ],
            "zz": [False, True],
            "compose": list(ComposeConfig.family),
            "normaliser": list(NormaliserConfig.family),
            "residual": list(ResidualConfig.family),
            "transform": list(TransformConfig.family),
            "scale": list(ScaleConfig.family),
            "bias": list(BiasConfig.family),
            "gate": list(GateConfig.family),
            "filter": list(FilterConfig.family),
            "pair": list(PairConfig.family),
            "values": list(ValuesConfig.family),
            "window": [None, 3],
            "kv_heads": [None, 1],
            "convolution": list(ConvolutionConfig.family),
        }
    )
    specs += [nearest_valid(cross) for cross in crosses]
    return tuple(spec for i, spec in enumerate(specs) if spec not in specs[:i])
