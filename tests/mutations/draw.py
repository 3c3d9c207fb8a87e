"""Draw small mistakes from the code of the package by `ast`.

A mistake replaces one expression of a file by another: an operator, a comparison, a constant, an
argument, an axis or a sign. Messages, docstrings, annotations and decorators are left alone.
"""

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
}
AXES = {"dim", "axis", "dims", "start_dim"}
"""Keywords whose numbers are axes of a tensor."""

# Calls whose arguments are words for people, or types.
WORDS = {"Field", "field", "TypeVar", "plural", "warn", "print", "format", "cast", "ConfigError"}


class Area(NamedTuple):
    """Patterns of the files of a part of the package, and the arguments of pytest of its tests."""

    files: list[str]
    tests: list[str]


FAST = ["-m", "not gpu and not process and not slow"]
AREAS = {
    "attention": Area(["lit_attn/attention/*.py"], [*FAST, "tests/attention"]),
    "statistics": Area(
        ["lit_attn/report/statistics/*.py", "lit_attn/report/verdicts/*.py"],
        [*FAST, "tests/report"],
    ),
    "data": Area(["lit_attn/data/*.py", "lit_attn/data/*/*.py"], [*FAST, "tests/data"]),
    "training": Area(
        ["lit_attn/training/*.py", "lit_attn/tasks/*.py", "lit_attn/optim/*.py"],
        [
            *FAST,
            "tests/training",
            "tests/optim",
            "tests/models/test_translation.py",
            "tests/config/test_metrics.py",
            "tests/ablate/test_cli.py",
        ],
    ),
    "runner": Area(
        ["lit_attn/ablate/*.py", "lit_attn/cells/*.py", "lit_attn/config/*.py"],
        [*FAST, "tests/ablate", "tests/cells", "tests/config", "tests/slurm"],
    ),
}


class Mistake(NamedTuple):
    """An expression of a file, by its places in the text, and the text that replaces it."""

    file: Path
    line: int
    start: int
    end: int
    kind: str
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Return the text of the file with the mistake."""
        return text[: self.start] + self.after + text[self.end :]

    @property
    def title(self) -> str:
        """Return file, line, kind and both expressions in one line."""
        before = " ".join(self.before.split())
        after = " ".join(self.after.split())
        return f"{self.file}:{self.line}: {self.kind}: {before}  ->  {after}"


def list_files(area: Area, root: Path) -> list[Path]:
    """Return the files of an area, relative to the repository `root`."""
    files = []
    for pattern in area.files:
        files += [path.relative_to(root) for path in sorted(root.glob(pattern))]
    return files


def draw_mistakes(files: list[Path], root: Path, number: int, seed: int) -> list[Mistake]:
    """Return `number` mistakes of the files: first a kind at random, then one of its places.

    So a kind with few places, such as axes, is tried as often as one with many.
    """
    by_kind: dict[str, list[Mistake]] = {}
    for file in files:
        for mistake in list_mistakes(file, root):
            by_kind.setdefault(mistake.kind, []).append(mistake)
    generator = random.Random(seed)
    drawn: list[Mistake] = []
    while len(drawn) < number and by_kind:
        kind = generator.choice(sorted(by_kind))
        places = by_kind[kind]
        drawn.append(places.pop(generator.randrange(len(places))))
        if not places:
            del by_kind[kind]
    return drawn


def list_mistakes(file: Path, root: Path) -> list[Mistake]:
    """Return all mistakes that can be made in a file of the folder `root`."""
    text = (root / file).read_text()
    # `ast` counts bytes of UTF-8 within a line.
    line_starts = [0]
    for line in text.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))

    def find_place(line: int, column: int) -> int:
        first = line_starts[line - 1]
        encoded = text[first : line_starts[line]].encode()
        return first + len(encoded[:column].decode())

    mistakes = []
    for node, kind, after in _walk(ast.parse(text)):
        assert isinstance(node, ast.expr)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = find_place(node.lineno, node.col_offset)
        end = find_place(node.end_lineno, node.end_col_offset)
        before = text[start:end]
        mistakes.append(Mistake(file, node.lineno, start, end, kind, before, after))
    return mistakes


def _walk(node: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield expressions below a node with the kind and the text of their replacement."""
    for child in _list_children(node):
        yield from _change(child)
        yield from _walk(child)


def _list_children(node: ast.AST) -> list[ast.AST]:
    """Return the parts of a node that compute something."""
    left_out: list[ast.AST] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        left_out += [*node.decorator_list, node.args]
        if node.returns is not None:
            left_out.append(node.returns)
    if isinstance(node, ast.ClassDef):
        left_out += node.decorator_list
    if isinstance(node, ast.AnnAssign):
        left_out.append(node.annotation)
    children = []
    for child in ast.iter_child_nodes(node):
        is_message = isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr)
        is_words = isinstance(child, ast.Call) and _find_name(child.func) in WORDS
        if child not in left_out and not is_message and not is_words:
            children.append(child)
    return children


def _find_name(function: ast.expr) -> str:
    """Return the last name of a called function, or an empty text."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _change(node: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield the replacements of one expression."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield node, "comparison", f"({left} {COMPARISONS[type(node.ops[0])]} {right})"
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _has_text(node):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        yield node, "operator", f"(({left}) {OPERATORS[type(node.op)]} ({right}))"
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        values = [f"({ast.unparse(value)})" for value in node.values]
        yield node, "and, or", f"({word.join(values)})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        kind = "sign" if isinstance(node.op, ast.USub) else "negation"
        yield node, kind, f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.IfExp):
        swapped = ast.IfExp(node.test, node.orelse, node.body)
        yield node, "choice", f"({ast.unparse(swapped)})"
    if isinstance(node, ast.Constant):
        yield from _change_constant(node)
    if isinstance(node, ast.Call):
        yield from _change_call(node)


def _has_text(node: ast.BinOp) -> bool:
    """True if an operand is visibly a text or a list, for which other operators are errors."""
    kinds = ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple
    for operand in (node.left, node.right):
        is_text = isinstance(operand, ast.Constant) and isinstance(operand.value, str)
        if is_text or isinstance(operand, kinds):
            return True
    return False


def _change_constant(node: ast.Constant) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield the replacement of a truth value or a number."""
    if isinstance(node.value, bool):
        yield node, "constant", str(not node.value)
    elif isinstance(node.value, int):
        yield node, "constant", str(node.value + 1)
    elif isinstance(node.value, float) and node.value:
        yield node, "constant", repr(node.value * 2)


def _change_call(node: ast.Call) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield calls with two arguments exchanged, without a keyword, or along another axis."""
    for place in range(len(node.args) - 1):
        arguments = list(node.args)
        arguments[place], arguments[place + 1] = arguments[place + 1], arguments[place]
        if not any(isinstance(argument, ast.Starred) for argument in arguments):
            yield node, "arguments", ast.unparse(ast.Call(node.func, arguments, node.keywords))
    for keyword in node.keywords:
        others = [other for other in node.keywords if other is not keyword]
        if keyword.arg in AXES and _is_number(keyword.value):
            before = ast.BinOp(keyword.value, ast.Sub(), ast.Constant(1))
            keywords = [*others, ast.keyword(keyword.arg, before)]
            yield node, "axis", ast.unparse(ast.Call(node.func, node.args, keywords))
        elif keyword.arg is not None and others:
            yield node, "keyword", ast.unparse(ast.Call(node.func, node.args, others))


def _is_number(node: ast.expr) -> bool:
    """True for a number with or without a sign."""
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, int)
