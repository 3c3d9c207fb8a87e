"""YAML values with the line of every key, so that an error can name the file and the line.

Only scalars, lists and mappings with text keys are allowed. Scalars follow YAML 1.2's core schema:
`1e-4` is a number, `no` and `on` are text, and `010` is ten. A number that is not finite and a key
that is written twice are errors; YAML itself would keep the last key without a word.
"""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_attn.files import read_text
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.limits import MAX_DEPTH, MAX_NODES, beyond_limits, check_integer

SHIPPED = Path(__file__).parents[1] / "shipped"  # Studies inside an installed wheel.


class Where(NamedTuple):
    """Line of a file, or 0 for a value without lines, for example on a command line."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def folder(self) -> Path:
        """Folder to which a path in this line is relative.

        It is the folder of the file, or the working directory for a command line. Studies in
        SHIPPED name data of the working directory, as if they had been copied there.
        """
        folder = Path(self.file).parent if self.line else Path()
        if folder.is_relative_to(SHIPPED):
            return folder.relative_to(SHIPPED)
        return folder


class Mapping(dict[str, Any]):
    """Dictionary with the line of every key in `where`, and its own line in `at`."""

    def __init__(self, at: Where, items: "dict[str, Any] | None" = None) -> None:
        """`items` are all in the line `at`."""
        super().__init__(items or {})
        self.at = at
        self.where = dict.fromkeys(self, at)

    def put(self, key: str, value: Any, where: Where) -> None:
        """Set `key`, in the line `where`."""
        self[key] = value
        self.where[key] = where

    def copy(self) -> "Mapping":
        """Return a shallow copy with the same lines."""
        copied = Mapping(self.at, self)
        copied.where = dict(self.where)
        return copied


class Sequence(list[Any]):
    """List with the line of every item in `where`, and its own line in `at`."""

    def __init__(self, at: Where) -> None:
        super().__init__()
        self.at = at
        self.where: list[Where] = []

    def put(self, value: Any, where: Where) -> None:
        """Append an item, in the line `where`."""
        self.append(value)
        self.where.append(where)


def locate(tree: Any, keys: Iterable[str | int], file: str | None = None) -> Where | None:
    """Return the line of the deepest of `keys` in `tree`, or None if `tree` is not from YAML.

    The line of a mapping is that of its kind, because another file can have changed the kind.
    Returns None as well if the value of the key contains a line of `file`.
    """
    where = tree.at if isinstance(tree, Mapping | Sequence) else None
    for key in keys:
        if isinstance(tree, Mapping) and key in tree:
            name = str(key)
            where = tree.where[name]
            tree = tree[name]
        elif isinstance(tree, Sequence) and isinstance(key, int) and key < len(tree):
            where = tree.where[key]
            tree = tree[key]
        else:
            break
    if isinstance(tree, Mapping):
        where = tree.where.get("kind", where)
    return None if file in _files(tree) else where


def load(path: Path, text: str | None = None) -> Mapping:
    """Read the mapping in a YAML file or in its `text`; ConfigError if there is no mapping."""
    if text is None:
        text = read_text(path)
    tree = _parse(text, str(path))
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: needs a mapping of keys to values")
    return tree


def parse_value(text: str, file: str) -> Any:
    """Parse a YAML value of a command line: `3e-4`, `without`, `[0, 1]`, `{kind: adamw, lr: 1}`."""
    return _parse(text, file, lines=False)


def format_value(value: object) -> str:
    """Return a value as in a variant's name: `0.0003`, `split+activation=silu`, `flip+crop`."""
    if isinstance(value, Mapping):
        # The names of the part come first, and stand without their keys.
        terms = [str(value[key]) for key in ("kind", "preset") if key in value]
        for key, item in value.items():
            if key not in ("kind", "preset"):
                terms.append(f"{key}={format_value(item)}")
        return "+".join(terms)
    if isinstance(value, Sequence):
        return "+".join(format_value(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value)


def _files(tree: Any) -> set[str]:
    """Return the files whose lines a mapping contains."""
    files: set[str] = set()
    if isinstance(tree, Mapping):
        for where in tree.where.values():
            files.add(where.file)
        for value in tree.values():
            files |= _files(value)
    return files


def _parse(text: str, file: str, lines: bool = True) -> Any:
    """Return the value of a YAML text; without `lines` it has no lines."""
    try:
        loader = _Loader(text, file, lines)
        node = loader.get_single_node()
        return None if node is None else loader.build(node)
    except yaml.MarkedYAMLError as error:
        mark, problem = _describe_problem(error)
        line = mark.line + 1 if mark and lines else 0
        raise ConfigError(f"{Where(file, line)}: not YAML: {problem}") from error
    except RecursionError as error:
        raise ConfigError(
            f"{file}: not YAML: values are nested more than {MAX_DEPTH} levels deep;"
            " write a flatter file"
        ) from error
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{file}: not YAML: {problem}") from error


def _describe_problem(error: yaml.MarkedYAMLError) -> tuple[Any, str]:
    """Return the place of an error of PyYAML, and what is wrong in words."""
    problem = " ".join(str(error.problem or error.context).split())
    if "'\\t'" in problem:
        return error.problem_mark, "a tab stands before the text; write spaces"
    if error.context == "while scanning a quoted scalar":
        # The quote ends where the file ends, or where another one begins.
        return error.context_mark, f"the quote that begins in this line has no end ({problem})"
    return error.problem_mark, problem


class _Loader(yaml.SafeLoader):
    """Loader with the scalars of YAML 1.2's core schema and the line of every key.

    It copies aliases, up to MAX_NODES values in total.
    """

    def __init__(self, text: str, file: str, has_lines: bool) -> None:
        super().__init__(text)
        self.file = file
        self.has_lines = has_lines
        self.built = 0
        self.flattened: set[yaml.Node] = set()
        self.flattening: set[yaml.Node] = set()

    def build(self, node: Any, depth: int = 0) -> Any:
        """Return the value of a node."""
        self.built += 1
        if self.built > MAX_NODES or depth > MAX_DEPTH:
            raise beyond_limits(str(self.where(node)))
        if isinstance(node, yaml.CollectionNode) and node.tag not in COLLECTIONS:
            raise ConfigError(f"{self.where(node)}: the YAML tag '{node.tag}' is not supported")
        if isinstance(node, yaml.SequenceNode):
            items = Sequence(self.where(node))
            for item in node.value:
                items.put(self.build(item, depth + 1), self.where(item))
            return items
        if isinstance(node, yaml.MappingNode):
            self.flatten_mapping(node)
            mapping = Mapping(self.where(node))
            for key, value in node.value:
                mapping.put(key.value, self.build(value, depth + 1), self.where(key))
            return mapping
        return self.build_scalar(node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Check the keys of a mapping, and replace `<<` by the pairs that it merges."""
        if node in self.flattening:
            raise ConfigError(f"{self.where(node)}: `<<` merges a mapping into itself")
        # An alias visits a node again.
        if node in self.flattened:
            return
        self.flattened.add(node)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{self.where(key)}: a key must be text")
            if key.value in lines and key.tag != MERGE:
                raise ConfigError(
                    f"{self.where(key)}: '{key.value}' is written twice,"
                    f" first on line {lines[key.value]}"
                )
            lines[key.value] = self.where(key).line
        self.flattening.add(node)
        super().flatten_mapping(node)
        self.flattening.remove(node)
        # The merged pairs come first, and the mapping's own pairs replace them. Without this, the
        # pairs of nested merges of aliases would multiply.
        pairs = {}
        for key, value in node.value:
            pairs[key.value] = (key, value)
        node.value = list(pairs.values())

    def build_scalar(self, node: yaml.Node) -> Any:
        """Return the value of a scalar."""
        make = _SCALARS.get(node.tag.removeprefix("tag:yaml.org,2002:"))
        if make is None:
            raise ConfigError(f"{self.where(node)}: the YAML tag '{node.tag}' is not supported")
        if make is int:
            check_integer(node.value, str(self.where(node)))
        try:
            value = make(node.value)
        except ValueError as error:
            raise ConfigError(f"{self.where(node)}: {error}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{self.where(node)}: {node.value} is not a finite number")
        return value

    def where(self, node: yaml.Node) -> Where:
        """Return the line of a node."""
        line = node.start_mark.line + 1 if self.has_lines else 0
        return Where(self.file, line)


def _read_bool(text: str) -> bool:
    """Return a boolean; ValueError for another text, which an explicit tag can have."""
    if text.lower() not in ("true", "false"):
        raise ValueError(f"'{text}' is neither true nor false")
    return text.lower() == "true"


def _read_null(text: str) -> None:
    """Return None; ValueError for another text, which an explicit tag can have."""
    if text.lower() not in ("null", "~", ""):
        raise ValueError(f"'{text}' is not null")


MERGE = "tag:yaml.org,2002:merge"
COLLECTIONS = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


class _ScalarForm(NamedTuple):
    """Text form of the scalars of a tag, and the characters with which they can begin."""

    tag: str
    pattern: str
    first_characters: list[str]


_FORMS = (
    _ScalarForm("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    _ScalarForm("int", r"[-+]?[0-9]+", list("-+0123456789")),
    _ScalarForm(
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?",
        list("-+.0123456789"),
    ),
    _ScalarForm("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    _ScalarForm("merge", r"<<", ["<"]),
)
_Loader.yaml_implicit_resolvers = {}
for _form in _FORMS:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_form.tag}",
        re.compile(f"^(?:{_form.pattern})$"),
        _form.first_characters,
    )

_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _read_bool,
    "null": _read_null,
}
