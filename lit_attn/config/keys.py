"""`python -m lit_attn.config.keys > docs/keys.md`: every key of an experiment, and its default."""

import inspect
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lit_attn.config.experiment import TASKS, Experiment
from lit_attn.schema.base import Config, Kind

HEAD = """\
# Every key of an experiment

What a file of `experiments/` may say, and what a variant may change (dotted, as `training.epochs`).
`python -m lit_attn.config.keys > docs/keys.md` writes this page from the code, and a test fails
where it is out of date. A key without a default is required. A key marked ° says where or how fast
a cell runs and not what it computes: it leaves the cell's identity alone.
"""

WORDS = {int: "whole number", float: "number", str: "text", bool: "true, false"}


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD, *_section("An experiment", Experiment)]
    parts.append("| task | data | model |\n|---|---|---|")
    for task, needs in TASKS.items():
        kinds = (
            ", ".join(f"`{kind}`" for kind, member in family.items() if issubclass(member, classes))
            for family, classes in zip(_families_of_tasks(), needs, strict=True)
        )
        parts[-1] += "\n| " + " | ".join([f"`{task}`", *kinds]) + " |"
    for config in _inside(Experiment, set()):
        if issubclass(config, Kind) and "family" in config.__dict__:
            parts.append(f"## {config.__name__}\n\n{_said(config)}")
            for kind, member in config.family.items():
                parts += _section(f"`kind: {kind}`", member, level=3)
        else:
            parts += _section(config.__name__, config)
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _families_of_tasks() -> list[dict[str, type[Kind]]]:
    fields = Experiment.model_fields
    families = []
    for name in ("data", "model"):
        of = fields[name].annotation
        assert isinstance(of, type)
        assert issubclass(of, Kind)
        families.append(of.family)
    return families


def _inside(config: type[Config], seen: set[type]) -> Iterator[type[Config]]:
    """The configurations that the fields of one hold, and theirs, each once."""
    for field in config.model_fields.values():
        for found in _configs(field.annotation):
            if found in seen:
                continue
            seen.add(found)
            yield found
            members = [found]
            if issubclass(found, Kind) and "family" in found.__dict__:
                members = list(found.family.values())
            for member in members:
                yield from _inside(member, seen)


def _configs(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [found for part in get_args(annotation) for found in _configs(part)]


def _section(title: str, config: type[Config], level: int = 2) -> list[str]:
    rows = ["| key | value | default | |", "|---|---|---|---|"]
    for name, field in config.model_fields.items():
        if name == "kind":
            continue
        extra = field.json_schema_extra
        aside = "°" if isinstance(extra, dict) and extra.get("identity") is False else ""
        cells = [f"`{name}`{aside}", _type(field.annotation), _default(field)]
        rows.append(f"| {' | '.join([*cells, field.description or ''])} |")
    table = ["\n".join(rows)] if len(rows) > 2 else []
    return [f"{'#' * level} {title}", *([said] if (said := _said(config)) else []), *table]


def _said(config: type[Config]) -> str:
    """The docstring of a class itself, without what it inherits."""
    return inspect.cleandoc(config.__doc__ or "")


def _type(annotation: Any) -> str:
    if annotation in WORDS:
        return WORDS[annotation]
    if annotation is types.NoneType:
        return "null"
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list: {_type(parts[0])}" + (
            f", {len(parts)} of it" if parts[-1] is not ... else ""
        )
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in parts)
    if parts:
        # Annotated: the limits are said by the error.
        return _type(parts[0])
    assert isinstance(annotation, type)
    if issubclass(annotation, Config):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return "path"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return f"`{_plain(field.default)}`"


def _plain(value: Any) -> str:
    if isinstance(value, Config):
        own = {k: v for k, v in value.identity().items() if k != "kind"}
        kind = getattr(value, "kind", "")
        inner = ", ".join(f"{k}: {_plain(v)}" for k, v in own.items())
        return f"{{{f'kind: {kind}, ' if kind else ''}{inner}}}" if own else str(kind or "{}")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_plain(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(page(), end="")
