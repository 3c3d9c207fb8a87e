"""YAML of users and of records, read and written by ruamel.yaml, with the line of every key.

Only scalars, lists and mappings with text keys are allowed. Scalars follow YAML 1.2: `1e-4` is a
number, `no` and `on` are text, and `010` is ten. A key that is written twice is an error.

A few lines can stand for billions of values (aliases of aliases), contain themselves, or be nested
more deeply than Python's stack. Such a text is one ConfigError.
"""

import io
import math
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lit_attn.schema.errors import ConfigError
from lit_attn.schema.limits import MAX_DEPTH, MAX_NODES, beyond_limits, check_integer

SHIPPED = Path(__file__).parents[1] / "shipped"  # Studies inside an installed wheel.

TAG = "tag:yaml.org,2002:"
TEXT_TAGS = ("str", "timestamp", "value", "merge")
"""Tags of scalars that are text here: a date, `=` and `<<` have no meaning as values."""


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
    """Return the value of a YAML text, in which every key has its line.

    Raises ConfigError for a text that is not YAML, and for a number that is not finite. Without
    `has_lines` all lines are 0.
    """
    reader = YAML(typ="safe", pure=True)
    reader.max_depth = MAX_DEPTH
    reader.composer.warn_double_anchors = False
    try:
        root = reader.compose(text)
    except MaxDepthExceededError as error:
        raise beyond_limits(file) from error
    except YAMLError as error:
        line, problem = _describe_problem(error, text)
        where = Where(file, line if has_lines else 0)
        raise ConfigError(f"{where}: not YAML: {problem}") from error
    return _TreeBuilder(file, has_lines, reader.constructor).build(root)


def parse_plain(text: str, file: str) -> Any:
    """Return the value of a YAML text in dictionaries and lists without lines."""
    return _to_plain(parse_tree(text, file))


def format_yaml(value: Any) -> str:
    """Return a plain value as YAML, with the keys in their order."""
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.representer.sort_base_mapping_type_on_output = False
    stream = io.StringIO()
    writer.dump(value, stream)
    return stream.getvalue()


def _to_plain(tree: Any) -> Any:
    """Return dictionaries and lists for mappings and sequences."""
    if isinstance(tree, Mapping):
        return {key: _to_plain(value) for key, value in tree.items()}
    if isinstance(tree, Sequence):
        return [_to_plain(item) for item in tree]
    return tree


def _describe_problem(error: YAMLError, text: str) -> tuple[int, str]:
    """Return the line of an error of ruamel.yaml, 0 if it has none, and what is wrong in words."""
    if not isinstance(error, MarkedYAMLError):
        return 0, " ".join(str(error).split())
    problem = " ".join(str(error.problem or error.context).split())
    problem = problem.replace("'<stream end>'", "the end of the text")
    mark = error.problem_mark
    lines = text.splitlines()
    if error.context == "while scanning a quoted scalar" and error.context_mark is not None:
        # The quote ends where the file ends, or where another one begins.
        line = error.context_mark.line + 1
        return line, f"the quote that begins in this line has no end ({problem})"
    if mark is None or mark.line >= len(lines):
        # The parser misses the end of a list or mapping behind the last line.
        mark = error.context_mark or mark
    if mark is None:
        return 0, problem
    if problem == "but found another document":
        return mark.line + 1, "a second document; remove the line `---`"
    if mark.line < len(lines) and lines[mark.line][mark.column :].startswith("\t"):
        return mark.line + 1, "a tab stands before the text; write spaces"
    return min(mark.line + 1, len(lines)), problem


class _TreeBuilder:
    """Values with lines from the nodes of ruamel.yaml, in which an alias is the node it names."""

    def __init__(self, file: str, has_lines: bool, constructor: Any) -> None:
        self.file = file
        self.has_lines = has_lines
        self.makers = {
            "bool": constructor.construct_yaml_bool,
            "int": constructor.construct_yaml_int,
            "float": constructor.construct_yaml_float,
        }
        """Functions that return the value of a scalar node, by type."""
        self.count = 0
        """Number of values so far, where an alias counts as the values it stands for."""
        self.open: list[Node] = []
        """Lists and mappings around the current value."""

    def place(self, node: Node) -> Where:
        """Return the line of a node."""
        return Where(self.file, node.start_mark.line + 1 if self.has_lines else 0)

    def build(self, node: Node | None) -> Any:
        """Return the value of a node, None without one. Raises ConfigError."""
        if node is None:
            return None
        where = self.place(node)
        self.count += 1
        if self.count > MAX_NODES or len(self.open) > MAX_DEPTH:
            raise beyond_limits(str(where))
        if isinstance(node, ScalarNode):
            return self.build_scalar(node, where)
        if any(node is around for around in self.open):
            raise ConfigError(
                f"{where}: the alias '*{node.anchor}' stands in the value that it names"
            )
        if node.tag not in (f"{TAG}map", f"{TAG}seq"):
            raise ConfigError(f"{where}: the YAML tag '{node.tag}' is not supported")
        self.open.append(node)
        value: Mapping | Sequence
        if isinstance(node, MappingNode):
            value = self.build_mapping(node, where)
        else:
            assert isinstance(node, SequenceNode)
            value = self.build_list(node, where)
        self.open.pop()
        return value

    def build_scalar(self, node: ScalarNode, where: Where) -> Any:
        """Return the value of a scalar; ConfigError if the text is none of its type."""
        kind = str(node.tag).removeprefix(TAG)
        if kind in TEXT_TAGS:
            return str(node.value)
        if kind == "null":
            return None
        if kind not in self.makers:
            raise ConfigError(f"{where}: the YAML tag '{node.tag}' is not supported")
        try:
            value = self.makers[kind](node)
            shown = str(value)
        except (ValueError, LookupError) as error:
            # An explicit tag can stand before any text, and an integer can have too many digits.
            length = len(node.value)
            shown = f"'{node.value}'" if length <= 30 else f"a text of {length} characters"
            raise ConfigError(f"{where}: {shown} is no value of the type {kind}") from error
        if kind == "int":
            check_integer(shown, str(where))
        if kind == "float" and not math.isfinite(value):
            raise ConfigError(f"{where}: {node.value} is not a finite number")
        return value

    def build_list(self, node: SequenceNode, where: Where) -> Sequence:
        """Return the values of a list."""
        items = Sequence(where)
        for child in node.value:
            items.put(self.build(child), self.place(child))
        return items

    def build_mapping(self, node: MappingNode, where: Where) -> Mapping:
        """Return the values of a mapping: those after `<<`, then its own, which replace them."""
        written = Mapping(where)
        merged: list[Mapping] = []
        for key_node, value_node in node.value:
            key_where = self.place(key_node)
            if key_node.tag == f"{TAG}merge":
                merged.extend(self.build_merged(value_node, key_where))
                continue
            if not isinstance(key_node, ScalarNode):
                raise ConfigError(f"{key_where}: a key must be text")
            # A key is its text: `1: x` has the key "1".
            key = str(key_node.value)
            if key in written:
                first_line = f", first on line {written.where[key].line}" if self.has_lines else ""
                raise ConfigError(f"{key_where}: '{key}' is written twice{first_line}")
            written.put(key, self.build(value_node), key_where)
        complete = Mapping(where)
        for source in (*merged, written):
            for key, value in source.items():
                complete.put(key, value, source.where[key])
        return complete

    def build_merged(self, node: Node, where: Where) -> list[Mapping]:
        """Return the mapping after `<<`, or those of a list, of which the first one counts most."""
        value = self.build(node)
        mappings = value if isinstance(value, Sequence) else [value]
        if not all(isinstance(mapping, Mapping) for mapping in mappings):
            raise ConfigError(f"{where}: `<<` needs a mapping, or a list of mappings")
        return list(reversed(mappings))
