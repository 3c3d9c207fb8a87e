"""YAML of users and of records: one reader with YAML 1.2's scalars, limits, and the writer.

Only scalars, lists and mappings with text keys are allowed. Scalars follow YAML 1.2's core schema:
`1e-4` is a number, `no` and `on` are text, and `010` is ten. A key that is written twice is an
error; YAML itself would keep the last key without a word.

A few lines can stand for billions of values (aliases of aliases), contain themselves, or be nested
more deeply than Python's stack. Such a text is one ConfigError, before any value is built.
"""

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_attn.schema.errors import ConfigError
from lit_attn.schema.limits import MAX_DEPTH, MAX_NODES, beyond_limits, check_integer, list_children

SHIPPED = Path(__file__).parents[1] / "shipped"  # Studies inside an installed wheel.

# The parser in C is about ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

TAG = "tag:yaml.org,2002:"

FORMS = {
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
    "null": re.compile(r"~|null|Null|NULL|"),
    "merge": re.compile(r"<<"),
}
"""Forms of the plain scalars that are no text, by type."""


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


def parse_tree(text: str, file: str, has_lines: bool = True) -> Any:
    """Return the value of a user's YAML text, in which every key has its line.

    Raises ConfigError for a text that is not YAML, and for a number that is not finite. Without
    `has_lines` all lines are 0.
    """
    return _read(text, file, has_lines=has_lines, is_record=False)


def parse_plain(text: str, file: str) -> Any:
    """Return the value of a YAML text of this package, in dictionaries and lists without lines."""
    return _to_plain(parse_tree(text, file))


def parse_record(text: str, place: str) -> Any:
    """Return the plain value of a YAML text that `format_yaml` or PyYAML has written.

    PyYAML writes by the rules of YAML 1.1, where `1e-05` is text, and a variant can have this name.
    So a number of a record is what both versions of YAML take for one. Raises ConfigError for a
    text that is not YAML.
    """
    return _to_plain(_read(text, place, has_lines=True, is_record=True))


def format_yaml(value: Any) -> str:
    """Return a plain value as YAML that versions 1.1 and 1.2 read alike."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False)
    return text


def _to_plain(tree: Any) -> Any:
    """Return dictionaries and lists for mappings and sequences."""
    if isinstance(tree, Mapping):
        return {key: _to_plain(value) for key, value in tree.items()}
    if isinstance(tree, Sequence):
        return [_to_plain(item) for item in tree]
    return tree


def _read(text: str, file: str, *, has_lines: bool, is_record: bool) -> Any:
    """Return the value of a text; ConfigError if it has none."""
    loader = None
    try:
        loader = _Loader(text)
        return _Reader(loader, file, has_lines=has_lines, is_record=is_record).read()
    except yaml.MarkedYAMLError as error:
        line, problem = _describe_problem(error, text)
        where = Where(file, line if has_lines else 0)
        raise ConfigError(f"{where}: not YAML: {problem}") from error
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{file}: not YAML: {problem}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _describe_problem(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str]:
    """Return the line of an error of PyYAML, 0 if it has none, and what is wrong in words."""
    problem = " ".join(str(error.problem or error.context).split())
    mark = error.problem_mark
    if error.context == "while scanning a quoted scalar" and error.context_mark is not None:
        # The quote ends where the file ends, or where another one begins.
        line = error.context_mark.line + 1
        return line, f"the quote that begins in this line has no end ({problem})"
    if mark is None:
        return 0, problem
    lines = text.splitlines()
    if mark.line >= len(lines):
        # The parser misses the end of a list or mapping behind the last line.
        begin = error.context_mark or mark
        return min(begin.line + 1, len(lines)), problem
    if lines[mark.line][mark.column :].startswith("\t"):
        return mark.line + 1, "a tab stands before the text; write spaces"
    return mark.line + 1, problem


class _Container:
    """List or mapping whose end has not been read yet."""

    def __init__(self, at: Where, anchor: str | None, *, is_mapping: bool) -> None:
        self.at = at
        self.anchor = anchor
        self.is_mapping = is_mapping
        self.items = Sequence(at)
        self.pairs = Mapping(at)
        self.merged: list[Mapping] = []
        """Mappings after `<<`; the keys of a later one replace those of an earlier one."""
        self.key: str | None = None
        self.key_where = at
        self.is_merge = False

    @property
    def expects_key(self) -> bool:
        """True if the next value is a key of a mapping."""
        return self.is_mapping and self.key is None and not self.is_merge


class _Reader:
    """Value of a text from the events of its parser, without recursion."""

    def __init__(self, loader: Any, file: str, *, has_lines: bool, is_record: bool) -> None:
        self.loader = loader
        self.file = file
        self.has_lines = has_lines
        self.is_record = is_record
        self.where = Where(file)
        """Place of the current event."""
        self.count = 0
        """Number of values that were read, where an alias counts as the values it stands for."""
        self.open: list[_Container] = []
        self.anchors: dict[str, Any] = {}
        """Values of the anchors."""
        self.result: Any = None
        self.documents = 0

    def read(self) -> Any:
        """Return the value of the text."""
        while self.loader.check_event():
            event = self.loader.get_event()
            self.where = Where(self.file, event.start_mark.line + 1 if self.has_lines else 0)
            match event:
                case yaml.DocumentStartEvent():
                    self.documents += 1
                    if self.documents > 1:
                        raise self.error("contains a second document; remove the line `---`")
                case yaml.AliasEvent():
                    self.read_alias(str(event.anchor))
                case yaml.ScalarEvent():
                    self.read_scalar(event)
                case yaml.SequenceStartEvent():
                    self.start(event, f"{TAG}seq", is_mapping=False)
                case yaml.MappingStartEvent():
                    self.start(event, f"{TAG}map", is_mapping=True)
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    self.end()
        return self.result

    def error(self, problem: str) -> ConfigError:
        """Return an error in the line of the current event."""
        return ConfigError(f"{self.where}: {problem}")

    def add_count(self, number: int) -> None:
        """Count values; ConfigError beyond MAX_NODES."""
        self.count += number
        if self.count > MAX_NODES:
            raise beyond_limits(str(self.where))

    def check_depth(self, depth: int) -> None:
        """Raise ConfigError if a value of so many levels is nested beyond MAX_DEPTH."""
        if len(self.open) + depth > MAX_DEPTH:
            raise beyond_limits(str(self.where))

    def read_alias(self, name: str) -> None:
        """Put a copy of the value of an anchor in the place of an alias."""
        if any(container.anchor == name for container in self.open):
            raise self.error(f"the alias '*{name}' stands in the value that it names")
        if name not in self.anchors:
            raise self.error(f"the alias '*{name}' has no anchor '&{name}' before it")
        value = self.anchors[name]
        size, depth = _measure(value)
        self.add_count(size)
        self.check_depth(depth)
        self.put(copy.deepcopy(value))

    def read_scalar(self, event: Any) -> None:
        """Put the value of a scalar, or note that the next value is merged after `<<`."""
        self.add_count(1)
        kind = self.find_kind(event)
        expects_key = bool(self.open) and self.open[-1].expects_key
        if kind == "merge":
            if not expects_key:
                raise self.error("`<<` is not the key of a mapping; write it in quotes")
            self.open[-1].is_merge = True
            return
        # A key is its text: `1: x` has the key "1".
        value = event.value if expects_key else self.make_scalar(event.value, kind)
        if event.anchor is not None:
            self.anchors[event.anchor] = value
        self.put(value)

    def find_kind(self, event: Any) -> str:
        """Return the type of a scalar: a key of FORMS, or "str"."""
        is_plain, _ = event.implicit
        if event.tag not in (None, "!"):
            kind = str(event.tag).removeprefix(TAG)
            if kind not in MAKERS and kind != "merge":
                raise self.error(f"the YAML tag '{event.tag}' is not supported")
            return kind
        if event.tag == "!" or not is_plain:
            return "str"
        if self.is_record:
            tag = self.loader.resolve(yaml.ScalarNode, event.value, (True, False))
            if tag == f"{TAG}str":
                return "str"
        for kind, form in FORMS.items():
            if form.fullmatch(event.value):
                return kind
        return "str"

    def make_scalar(self, text: str, kind: str) -> Any:
        """Return the value of a scalar; ConfigError if the text is none of its type."""
        if kind == "int":
            check_integer(text, str(self.where))
        try:
            value = MAKERS[kind](text)
        except ValueError as error:
            raise self.error(str(error)) from error
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if not is_finite and not self.is_record:
            raise self.error(f"{text} is not a finite number")
        return value

    def start(self, event: Any, tag: str, *, is_mapping: bool) -> None:
        """Begin a list or a mapping."""
        if event.tag not in (None, "!", tag):
            raise self.error(f"the YAML tag '{event.tag}' is not supported")
        if self.open and self.open[-1].expects_key:
            raise self.error("a key must be text")
        self.check_depth(1)
        self.add_count(1)
        self.open.append(_Container(self.where, event.anchor, is_mapping=is_mapping))

    def end(self) -> None:
        """End the innermost list or mapping, and put its value."""
        container = self.open.pop()
        value: Mapping | Sequence = container.items
        if container.is_mapping:
            value = Mapping(container.at)
            for mapping in (*container.merged, container.pairs):
                for key, item in mapping.items():
                    value.put(key, item, mapping.where[key])
        if container.anchor is not None:
            self.anchors[container.anchor] = value
        self.where = container.at
        self.put(value)

    def put(self, value: Any) -> None:
        """Add a complete value to the container around it, as a key or as a value."""
        if not self.open:
            self.result = value
            return
        container = self.open[-1]
        if not container.is_mapping:
            container.items.put(value, self.where)
        elif container.is_merge:
            container.is_merge = False
            self.merge(container, value)
        elif container.key is None:
            self.put_key(container, value)
        else:
            container.pairs.put(container.key, value, container.key_where)
            container.key = None

    def put_key(self, container: _Container, key: Any) -> None:
        """Note the key of the next value of a mapping."""
        if not isinstance(key, str):
            raise self.error("a key must be text")
        if key in container.pairs:
            line = container.pairs.where[key].line
            first_line = f", first on line {line}" if line else ""
            raise self.error(f"'{key}' is written twice{first_line}")
        container.key = key
        container.key_where = self.where

    def merge(self, container: _Container, value: Any) -> None:
        """Note the mapping after `<<`, or a list of mappings, of which the first one counts."""
        mappings = value if isinstance(value, list) else [value]
        for mapping in reversed(mappings):
            if not isinstance(mapping, Mapping):
                raise self.error("`<<` needs a mapping, or a list of mappings")
            container.merged.append(mapping)


def _measure(value: Any) -> tuple[int, int]:
    """Return the number of values in a value, and its levels of nested values."""
    count = 0
    depth = -1
    level = [value]
    while level:
        count += len(level)
        depth += 1
        next_level: list[Any] = []
        for parent in level:
            next_level.extend(list_children(parent))
        level = next_level
    return count, depth


def _read_bool(text: str) -> bool:
    """Return a boolean; ValueError for another text, which an explicit tag can have."""
    if text.lower() not in ("true", "false"):
        raise ValueError(f"'{text}' is neither true nor false")
    return text.lower() == "true"


def _read_float(text: str) -> float:
    """Return a number; ValueError for another text, which an explicit tag can have."""
    if not FORMS["float"].fullmatch(text):
        raise ValueError(f"'{text}' is not a number")
    return float(text.replace(".", "") if text[-1].isalpha() else text)


def _read_null(text: str) -> None:
    """Return None; ValueError for another text, which an explicit tag can have."""
    if text.lower() not in ("null", "~", ""):
        raise ValueError(f"'{text}' is not null")


MAKERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": _read_float,
    "bool": _read_bool,
    "null": _read_null,
}
"""Functions that make the value of a scalar from its text, by type."""


class _Dumper(yaml.SafeDumper):
    """Writer that quotes a text which YAML 1.2 would read as another value."""


for _kind, _form in FORMS.items():
    _Dumper.add_implicit_resolver(f"{TAG}{_kind}", re.compile(f"^(?:{_form.pattern})$"), None)
