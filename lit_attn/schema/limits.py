"""Readers of YAML and JSON files that somebody else may have written, with limits.

A few lines of YAML can stand for billions of values (aliases of aliases), contain themselves, or be
nested more deeply than Python's stack. Such a text is one ConfigError, before any value is built.
"""

import json
from collections.abc import Iterable
from typing import Any

import yaml

from lit_attn.schema.errors import ConfigError

MAX_NODES = 200_000  # Largest number of values in a file, aliases included.
MAX_DEPTH = 50  # Largest depth of nested values.
MAX_INTEGER = 2**63 - 1  # Largest integer that tables and tensors can contain.

# The parser in C is about ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

SCALARS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("null", "bool", "int", "float", "str", "binary", "timestamp")
}
SEQUENCES = {None, "!", "tag:yaml.org,2002:seq"}
MAPPINGS = {None, "!", "tag:yaml.org,2002:map"}
MERGE = "tag:yaml.org,2002:merge"


def parse_yaml(text: str, place: str) -> Any:
    """Return the value of a YAML text; ConfigError, which begins with `place`, if it has none.

    Scalars are those of YAML 1.1, as `yaml.safe_load` reads them and `yaml.safe_dump` writes them.
    Tags of Python objects, keys that are written twice, values that contain themselves, and values
    beyond MAX_NODES, MAX_DEPTH and MAX_INTEGER are errors.
    """
    loader = None
    try:
        loader = _Loader(text)
        return _Reader(loader, place).read()
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = " ".join(str(error.problem or error.context).split())
        raise ConfigError(f"{place}: not YAML: {line}{problem}") from error
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{place}: not YAML: {problem}") from error
    finally:
        if loader is not None:
            loader.dispose()


def parse_json(text: str, place: str) -> Any:
    """Return the value of a JSON text; ConfigError, which begins with `place`, if it has none.

    Keys that are written twice, and values beyond MAX_NODES, MAX_DEPTH and MAX_INTEGER are errors.
    """

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated_keys = [key for key in keys if keys.count(key) > 1]
            raise ConfigError(
                f"{place}: the key '{repeated_keys[0]}' is written twice; remove one of them"
            )
        return value

    def read_integer(digits: str) -> int:
        return check_integer(digits, place)

    try:
        value = json.loads(text, object_pairs_hook=read_object, parse_int=read_integer)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    except RecursionError as error:
        raise beyond_limits(place) from error
    check_size(value, place)
    return value


def check_integer(digits: str, place: str) -> int:
    """Return the integer that `digits` spell; ConfigError if it is beyond MAX_INTEGER."""
    # Python itself refuses to read an integer of more than 4,300 digits.
    if len(digits) > 30:
        raise ConfigError(f"{place}: an integer of {len(digits)} characters is too large")
    try:
        value = int(digits)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
    if abs(value) > MAX_INTEGER:
        raise ConfigError(f"{place}: {digits} is too large for an integer of 64 bits")
    return value


def check_size(value: Any, place: str) -> None:
    """Raise ConfigError if a value exceeds MAX_NODES or MAX_DEPTH."""
    count = 0
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        count += len(level)
        if count > MAX_NODES:
            raise beyond_limits(place)
        next_level: list[Any] = []
        for parent in level:
            next_level.extend(_children(parent))
        if not next_level:
            return
        level = next_level
    raise beyond_limits(place)


def beyond_limits(place: str) -> ConfigError:
    """Return the error of a file with too many values or too many levels."""
    return ConfigError(
        f"{place}: too large or too deeply nested: "
        f"more than {MAX_NODES:,} values, aliases included, or {MAX_DEPTH} levels. "
        "Write a smaller or flatter file."
    )


def _children(value: Any) -> Iterable[Any]:
    """Return the values in a mapping or a list; none for other values."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return ()


class _Container:
    """List or mapping whose end has not been read yet."""

    def __init__(self, anchor: str | None, *, is_mapping: bool, start: int) -> None:
        self.anchor = anchor
        self.is_mapping = is_mapping
        self.start = start
        """Number of values that were read before this one."""
        self.items: list[Any] = []
        self.pairs: dict[Any, Any] = {}
        self.merged: list[dict[Any, Any]] = []
        self.key: Any = None
        self.has_key = False
        self.is_merge = False


class _Reader:
    """Value of a text from the events of its parser, without recursion."""

    def __init__(self, loader: Any, place: str) -> None:
        self.loader = loader
        self.place = place
        self.line = 0
        self.count = 0
        """Number of values that were read, where an alias counts as the values it stands for."""
        self.open: list[_Container] = []
        self.anchors: dict[str, tuple[Any, int]] = {}
        """Value of each anchor and the number of values in it."""
        self.result: Any = None
        self.documents = 0

    def read(self) -> Any:
        """Return the value of the text."""
        while self.loader.check_event():
            event = self.loader.get_event()
            self.line = event.start_mark.line + 1
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
                    self.start(event, SEQUENCES, is_mapping=False)
                case yaml.MappingStartEvent():
                    self.start(event, MAPPINGS, is_mapping=True)
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    self.end()
        return self.result

    def error(self, problem: str) -> ConfigError:
        """Return an error in the line of the current event."""
        return ConfigError(f"{self.where()}: {problem}")

    def where(self) -> str:
        """Return the place of the current event."""
        return f"{self.place}:{self.line}"

    def add_count(self, number: int) -> None:
        """Count values; ConfigError beyond MAX_NODES."""
        self.count += number
        if self.count > MAX_NODES:
            raise beyond_limits(self.where())

    def read_alias(self, anchor: str) -> None:
        """Put the value of an anchor in the place of an alias."""
        if any(container.anchor == anchor for container in self.open):
            raise self.error(f"the alias '*{anchor}' stands in the value that it names")
        if anchor not in self.anchors:
            raise self.error(f"the alias '*{anchor}' has no anchor '&{anchor}' before it")
        value, size = self.anchors[anchor]
        self.add_count(size)
        self.put(value)

    def read_scalar(self, event: Any) -> None:
        """Put the value of a scalar, or note that the next value is merged after `<<`."""
        self.add_count(1)
        tag = event.tag
        if tag in (None, "!"):
            tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag == MERGE:
            if not self.expects_key():
                raise self.error("`<<` is not the key of a mapping; write it in quotes")
            self.open[-1].has_key = True
            self.open[-1].is_merge = True
            return
        value = self.construct_scalar(event, tag)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, 1)
        self.put(value)

    def construct_scalar(self, event: Any, tag: str) -> Any:
        """Return the value of a scalar with a tag; ConfigError if it has none."""
        if tag not in SCALARS:
            raise self.error(f"the YAML tag '{tag}' is not supported")
        node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        try:
            value = self.loader.construct_object(node)
        except (ValueError, OverflowError, KeyError, AttributeError) as error:
            # PyYAML's own exceptions for `!!int x`, `!!bool x` and `!!timestamp x`.
            type_name = tag.removeprefix("tag:yaml.org,2002:")
            raise self.error(f"'{event.value[:40]}' cannot be read as {type_name}") from error
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise self.error(f"an integer of {len(event.value)} characters is too large")
        return value

    def expects_key(self) -> bool:
        """Return True if the next value is a key of a mapping."""
        return bool(self.open) and self.open[-1].is_mapping and not self.open[-1].has_key

    def start(self, event: Any, tags: set[str | None], *, is_mapping: bool) -> None:
        """Begin a list or a mapping."""
        if event.tag not in tags:
            raise self.error(f"the YAML tag '{event.tag}' is not supported")
        if self.expects_key():
            raise self.error("a key must be text")
        if len(self.open) >= MAX_DEPTH:
            raise beyond_limits(self.where())
        self.open.append(_Container(event.anchor, is_mapping=is_mapping, start=self.count))
        self.add_count(1)

    def end(self) -> None:
        """End the innermost list or mapping, and put its value."""
        container = self.open.pop()
        value: Any = container.items
        if container.is_mapping:
            value = {}
            # The first of several merged mappings counts, and the keys beside `<<` replace it.
            for mapping in reversed(container.merged):
                value |= mapping
            value |= container.pairs
        if container.anchor is not None:
            self.anchors[container.anchor] = (value, self.count - container.start)
        self.put(value)

    def put(self, value: Any) -> None:
        """Add a complete value to the container around it, as a key or as a value."""
        if not self.open:
            self.result = value
            return
        container = self.open[-1]
        if not container.is_mapping:
            container.items.append(value)
        elif not container.has_key:
            self.put_key(container, value)
        else:
            self.put_value(container, value)

    def put_key(self, container: _Container, key: Any) -> None:
        """Note the key of the next value of a mapping."""
        if isinstance(key, list | dict):
            raise self.error("a key must be text")
        if key in container.pairs:
            raise self.error(f"the key '{key}' is written twice; remove one of them")
        container.key = key
        container.has_key = True

    def put_value(self, container: _Container, value: Any) -> None:
        """Add a value to a mapping: under the last key, or as a mapping to merge."""
        container.has_key = False
        if not container.is_merge:
            container.pairs[container.key] = value
            return
        container.is_merge = False
        mappings = value if isinstance(value, list) else [value]
        for mapping in mappings:
            if not isinstance(mapping, dict):
                raise self.error("`<<` needs a mapping, or a list of mappings")
            container.merged.append(mapping)
