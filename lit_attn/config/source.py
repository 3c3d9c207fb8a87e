"""YAML that remembers where every key stands, so that an error can name its file and line.

Safe-loaded: scalars, lists and mappings with text keys, nothing else. Scalars follow YAML 1.2's
core schema, so `1e-4` is a number, and `no`, `on` and `010` are not a surprise. A key written twice
is an error, where YAML itself would silently keep the last.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_attn.schema.errors import ConfigError

MAX_NODES = 200_000
MAX_DEPTH = 50


class Where(NamedTuple):
    """A line of a file; line 0 where there are no lines, as on a command line."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Mapping(dict[str, Any]):
    """A dict whose keys know their line; `at` is the line of the whole."""

    def __init__(self, at: Where) -> None:
        super().__init__()
        self.at = at
        self.where: dict[str, Where] = {}

    def put(self, key: str, value: Any, where: Where) -> None:
        self[key] = value
        self.where[key] = where

    def copy(self) -> "Mapping":
        """A shallow copy that keeps the lines."""
        copied = Mapping(self.at)
        copied.update(self)
        copied.where = dict(self.where)
        return copied


class Sequence(list[Any]):
    """A list whose items know their line."""

    def __init__(self, at: Where) -> None:
        super().__init__()
        self.at = at
        self.where: list[Where] = []

    def put(self, value: Any, where: Where) -> None:
        self.append(value)
        self.where.append(where)


def locate(tree: Any, keys: Iterable[str | int]) -> Where | None:
    """The line of the deepest of `keys` that `tree` holds; None for what was not read from YAML."""
    found = tree.at if isinstance(tree, Mapping | Sequence) else None
    for key in keys:
        if isinstance(tree, Mapping) and key in tree:
            found, tree = tree.where[str(key)], tree[str(key)]
        elif isinstance(tree, Sequence) and isinstance(key, int) and key < len(tree):
            found, tree = tree.where[key], tree[key]
        else:
            break
    return found


def load(path: Path) -> Mapping:
    """The mapping that a YAML file holds; ConfigError where it cannot be read or is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error
    tree = _parse(text, str(path))
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: needs a mapping of keys to values")
    return tree


def parse_value(text: str, file: str) -> Any:
    """One YAML value, as on a command line: `3e-4`, `without`, `[0, 1]`, `{kind: adamw, lr: 1}`."""
    return _parse(text, file, lines=False)


def format_value(value: object) -> str:
    """A value as a name shows it: `0.0003`, `with`, `split+activation=silu`, `flip+crop`."""
    if isinstance(value, Mapping):
        own = [str(value[key]) for key in ("kind", "preset") if key in value]
        rest = [f"{k}={format_value(v)}" for k, v in value.items() if k not in ("kind", "preset")]
        return "+".join([*own, *rest])
    if isinstance(value, Sequence):
        return "+".join(format_value(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _parse(text: str, file: str, lines: bool = True) -> Any:
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark and lines else 0
        problem = " ".join(str(error.problem or error.context).split())
        raise ConfigError(f"{Where(file, line)}: not YAML: {problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    return None if node is None else _Builder(file, lines).build(node, 0)


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars by YAML 1.2's core schema."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )

_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text.lower() == "true",
    "null": lambda text: None,
}


class _Builder:
    """Builds values from YAML nodes. Aliases are copied out, within a limit on the whole."""

    def __init__(self, file: str, lines: bool) -> None:
        self.file = file
        self.lines = lines
        self.built = 0

    def build(self, node: yaml.Node, depth: int) -> Any:
        self.built += 1
        if self.built > MAX_NODES or depth > MAX_DEPTH:
            raise ConfigError(f"{self.where(node)}: too large or too deeply nested")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, depth)
        if isinstance(node, yaml.SequenceNode):
            items = Sequence(self.where(node))
            for item in node.value:
                items.put(self.build(item, depth + 1), self.where(item))
            return items
        return self.scalar(node)

    def mapping(self, node: yaml.MappingNode, depth: int) -> Mapping:
        """Merged keys (`<<`) stand where the merge stands, and give way to the mapping's own."""
        found = Mapping(self.where(node))
        merged: set[str] = set()
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for source in self.merged(key_node, value_node, depth):
                    for key, value in source.items():
                        if key not in found:
                            merged.add(key)
                            found.put(key, value, source.where[key])
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{self.where(key_node)}: a key has to be text")
            key = key_node.value
            if key in found and key not in merged:
                first = found.where[key].line
                raise ConfigError(
                    f"{self.where(key_node)}: '{key}' is written twice, first on line {first}"
                )
            merged.discard(key)
            found.put(key, self.build(value_node, depth + 1), self.where(key_node))
        return found

    def merged(self, key: yaml.Node, value: yaml.Node, depth: int) -> list[Mapping]:
        """What `<<` takes from: a mapping, or a list of them."""
        built = self.build(value, depth + 1)
        sources = built if isinstance(built, Sequence) else [built]
        if not all(isinstance(source, Mapping) for source in sources):
            raise ConfigError(f"{self.where(key)}: '<<' needs a mapping to take from")
        return sources

    def scalar(self, node: yaml.Node) -> Any:
        make = _SCALARS.get(node.tag.removeprefix("tag:yaml.org,2002:"))
        if make is None:
            raise ConfigError(f"{self.where(node)}: the YAML tag '{node.tag}' is not supported")
        try:
            return make(node.value)
        except ValueError as error:
            raise ConfigError(f"{self.where(node)}: {error}") from error

    def where(self, node: yaml.Node) -> Where:
        return Where(self.file, node.start_mark.line + 1 if self.lines else 0)
