"""Generator of the page of all keys, run in the root of the repository:

    python docs/generators/write_keys.py > docs/keys.md

A test fails if docs/keys.md is out of date.
"""

import inspect
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from lit_attn.config.experiment import Experiment, is_fit
from lit_attn.data.base import Data
from lit_attn.models.base import Model
from lit_attn.schema.base import Config, Kind
from lit_attn.tasks.task import Task

HEAD = """\
<!-- python docs/generators/write_keys.py > docs/keys.md writes this page. -->

# Every key of an experiment

These keys can be written in a file of `experiments/` and changed by a variant (dotted, as
`training.epochs`). The page is written from the code. A key marked ° says where or how fast a cell
runs and not what it computes: it is not part of the cell's identity.
"""

TYPES = {int: "whole number", float: "number", str: "text", bool: "true, false"}
# pydantic's names of a limit; of two lower limits, as in PositiveInt with `ge=2`, the first counts.
LIMITS = ({"ge": ">=", "gt": ">"}, {"lt": "<", "le": "<="})


def write_page() -> str:
    """Return the page in Markdown."""
    parts = [HEAD, *_section("An experiment", Experiment), _task_table()]
    for config in _find_configs(Experiment, set()):
        if _is_family(config):
            parts.append(f"## {_title(config)}\n\n{_docstring(config)}")
            for kind, member in shipped_members(config).items():
                parts += _section(f"`kind: {kind}`", member, level=3)
        else:
            parts += _section(_title(config), config)
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def shipped_members(family: type[Kind]) -> dict[str, Any]:
    """Return the members of a family that this package defines, without those of plug-ins."""
    return {
        kind: member
        for kind, member in family.family.items()
        if member.__module__.startswith("lit_attn.")
    }


def iterate_fields(root: type[Config]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field of `root` and of the configurations below it as (class and key, field)."""
    for config in [root, *_find_configs(root, set())]:
        for member in shipped_members(config).values() if _is_family(config) else [config]:
            for name, field in member.model_fields.items():
                if name != "kind":
                    yield f"{member.__name__}.{name}", field


def _task_table() -> str:
    rows = ["| task | data | model |", "|---|---|---|"]
    for task, member in shipped_members(Task).items():
        data = {kind: d for kind, d in shipped_members(Data).items() if is_fit(d, member)}
        fits = {
            k: any(is_fit(d, m) for d in data.values()) for k, m in shipped_members(Model).items()
        }
        models = [kind for kind, has_data in fits.items() if has_data]
        row = [f"`{task}`", *(", ".join(f"`{kind}`" for kind in kinds) for kinds in (data, models))]
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def _find_configs(config: type[Config], visited: set[type]) -> Iterator[Any]:
    """Yield the configurations and families below `config` depth first, each once."""
    for field in config.model_fields.values():
        for child in _config_types(field.annotation):
            if child not in visited:
                visited.add(child)
                yield child
                for member in child.family.values() if _is_family(child) else [child]:
                    yield from _find_configs(member, visited)


def _config_types(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [config for part in get_args(annotation) for config in _config_types(part)]


def _title(config: type[Config]) -> str:
    return config.__name__.removesuffix("Config")


def _is_family(config: type[Config]) -> bool:
    return Kind in config.__bases__


def _section(title: str, config: type[Config], level: int = 2) -> list[str]:
    """Return the heading, the docstring and the table of a configuration."""
    rows = []
    for name, field in config.model_fields.items():
        if name != "kind":
            key = field.alias or name
            extra = field.json_schema_extra
            is_outside = isinstance(extra, dict) and extra.get("identity") is False
            default = "required" if field.is_required() else f"`{_format(field.default)}`"
            cells = [f"`{key}`{'°' if is_outside else ''}", _describe_type(field), default]
            rows.append(f"| {' | '.join([*cells, field.description or ''])} |")
    parts = [f"{'#' * level} {title}", _docstring(config)]
    if rows:
        parts.append("\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows]))
    return [part for part in parts if part]


def _docstring(config: type[Config]) -> str:
    """Return the docstring of the class itself, not an inherited one."""
    return inspect.cleandoc(config.__doc__ or "")


def _describe_type(field: FieldInfo) -> str:
    return _with_limits(_describe(field.annotation), field.metadata)


def _describe(annotation: Any) -> str:
    """Return the values that a type allows, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in TYPES:
        return TYPES[annotation]
    if annotation is types.NoneType:
        return "null"
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is Annotated:
        return _with_limits(_describe(arguments[0]), arguments[1:])
    if origin is tuple:
        count = "" if arguments[-1] is ... else f"{len(arguments)} of "
        return f"list: {count}{_describe(arguments[0])}"
    if origin is dict:
        return "mapping"
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(argument) for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Config):
        title = _title(annotation)
        return f"[{title}](#{title.lower()})"
    return "path"


def _with_limits(text: str, metadata: Any) -> str:
    """Return `text` with the limits of its number, for example `number >= 0, < 1`."""
    nested = [limit for item in metadata for limit in getattr(item, "metadata", [item])]
    limits = []
    for names in LIMITS:
        for name, sign in names.items():
            values = [getattr(limit, name) for limit in nested if hasattr(limit, name)]
            if values:
                limits.append(f"{sign} {values[0]:g}")
                break
    first, *alternatives = text.split(" or ")
    return " or ".join([f"{first} {', '.join(limits)}".rstrip(), *alternatives])


def _format(value: Any) -> str:
    """Return a default as YAML."""
    if isinstance(value, Config):
        changed = {key: item for key, item in value.identity().items() if key != "kind"}
        kind = getattr(value, "kind", "")
        if not changed:
            return kind or "{}"
        items = [f"{key}: {_format(item)}" for key, item in changed.items()]
        return f"{{{', '.join([f'kind: {kind}'] * bool(kind) + items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(write_page(), end="")
