"""Check the words of the project: `python .ci/check_words.py [FILES]`.

CONTRIBUTING.md, section "Style", has the rules. Without FILES all files of Python, YAML, TOML and
Markdown that git tracks are checked, except for the records of the past. Each mistake is one line,
and the exit code is 1 if there is one.

- A docstring, a comment and a description of a key or an option begin with a noun or a verb.
- A sentence, also one of a page, does not begin with "Of": its subject comes first.
- A name of a variable, an argument, an attribute, a function or a class says what the value is.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# A text that begins with one of these has no subject.
OPENINGS = {"Of", "What", "Whether", "Where", "Such", "So", "As", "How"}
# Pronouns of a docstring's first word stand for nothing. Those of a comment can stand for its line.
PRONOUNS = {"It", "Its", "They", "Their", "There", "That", "Those", "These"}
# These names say nothing about the value.
NAMES = {
    "alike",
    "asked",
    "found",
    "given",
    "happened",
    "here",
    "looked",
    "of",
    "own",
    "said",
    "seen",
    "there",
    "told",
    "what",
    "whole",
}
INVERSION = re.compile(r"[.!?] Of \w")
# Replays of published code keep the names of that code.
RELEASED = ROOT / "tests" / "released"
PATTERNS = ("*.py", "*.yaml", "*.yml", "*.toml", "*.md")
# These pages record the past in the words of their time.
RECORDS = (ROOT / "CHANGELOG.md", ROOT / "LOG.md", ROOT / "reports")


class Text(NamedTuple):
    """Docstring, comment or paragraph, with the line on which it begins."""

    line: int
    words: str

    @property
    def first_word(self) -> str:
        words = self.words.split(maxsplit=1)
        return words[0] if words else ""


def find_docstrings(tree: ast.Module) -> Iterator[Text]:
    """Yield each docstring of a module, class or function, and each one of a constant or field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Text(node.body[0].lineno, text)
        if isinstance(node, ast.Module | ast.ClassDef):
            for assignment, documentation in pairwise(node.body):
                text = read_string(documentation)
                if isinstance(assignment, ast.Assign | ast.AnnAssign) and text:
                    yield Text(documentation.lineno, text)


def read_string(node: ast.stmt) -> str:
    """Return the text of a statement that is a string, and an empty text for another one."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        value = node.value.value
        return value if isinstance(value, str) else ""
    return ""


def find_descriptions(tree: ast.Module) -> Iterator[Text]:
    """Yield each `description` of a key and each `help` of an option."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.keyword) or node.arg not in ("description", "help"):
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(node.value.lineno, node.value.value)


def find_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable, attribute, argument, function and class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def list_python_comments(source: str) -> Iterator[tuple[Text, bool]]:
    """Yield each comment of a Python file, and True if it has its line for itself."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.lstrip().startswith("#")
            yield Text(token.start[0], token.string.lstrip("#! ")), is_alone


def list_yaml_comments(source: str) -> Iterator[tuple[Text, bool]]:
    """Yield each comment of a YAML or TOML file, and True if it has its line for itself."""
    for number, line in enumerate(source.splitlines(), start=1):
        match = re.search(r"(?:^|\s)#\s(.*)", line)
        if match is not None:
            yield Text(number, match[1].strip()), line.lstrip().startswith("#")


def join_comments(comments: Iterable[tuple[Text, bool]]) -> Iterator[Text]:
    """Yield the text of each block of comments on lines that follow each other."""
    block: list[Text] = []
    for comment, is_alone in comments:
        follows = bool(block) and comment.line == block[-1].line + 1
        if block and not (is_alone and follows):
            yield join(block)
            block = []
        if is_alone:
            block.append(comment)
        else:
            yield comment
    if block:
        yield join(block)


def list_paragraphs(source: str) -> Iterator[Text]:
    """Yield each paragraph, item and row of a Markdown page, without blocks of code."""
    block: list[Text] = []
    is_code = False
    for number, line in enumerate(source.splitlines(), start=1):
        words = line.strip()
        is_fence = words.startswith("```")
        is_start = words.startswith(("- ", "* ", "|", "#"))
        if block and (not words or is_fence or is_start):
            yield join(block)
            block = []
        if is_fence:
            is_code = not is_code
        elif words and not is_code:
            block.append(Text(number, words.lstrip("-*|# ")))
    if block:
        yield join(block)


def join(lines: list[Text]) -> Text:
    """Return lines as one text, which begins on the first of them."""
    return Text(lines[0].line, " ".join(line.words for line in lines))


def check(path: Path) -> Iterator[str]:
    """Yield one line for each mistake in a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from check_python(path, source)
    elif path.suffix == ".md":
        yield from check_inversions(path, list_paragraphs(source))
    else:
        yield from check_comments(path, list_yaml_comments(source))


def check_python(path: Path, source: str) -> Iterator[str]:
    """Yield one line for each mistake in a Python file."""
    tree = ast.parse(source)
    docstrings = list(find_docstrings(tree))
    for text in docstrings:
        if text.first_word in OPENINGS | PRONOUNS:
            yield (
                f"{path}:{text.line}: a docstring begins with a noun or a verb, not with "
                f"{text.first_word}"
            )
    yield from check_inversions(path, docstrings)
    yield from check_comments(path, list_python_comments(source))
    for text in find_descriptions(tree):
        if text.first_word.capitalize() in OPENINGS:
            yield (
                f"{path}:{text.line}: a description begins with a noun or a verb, not with "
                f"{text.first_word}"
            )
    if RELEASED in path.resolve().parents:
        return
    for line, name in find_names(tree):
        if name in NAMES:
            yield f"{path}:{line}: the name '{name}' says nothing about the value"


def check_comments(path: Path, comments: Iterable[tuple[Text, bool]]) -> Iterator[str]:
    """Yield one line for each comment that has no subject."""
    blocks = list(join_comments(comments))
    for text in blocks:
        if text.first_word in OPENINGS:
            yield (
                f"{path}:{text.line}: a comment begins with its subject or a verb, not with "
                f"{text.first_word}"
            )
    yield from check_inversions(path, blocks)


def check_inversions(path: Path, texts: Iterable[Text]) -> Iterator[str]:
    """Yield one line for each text with a sentence that begins with "Of"."""
    for text in texts:
        if text.first_word == "Of" or INVERSION.search(text.words):
            yield f"{path}:{text.line}: a sentence begins with its subject, not with Of"


def list_tracked_files() -> list[Path]:
    """Return the files that git tracks and that can have mistakes."""
    command = ["git", "ls-files", *PATTERNS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


def is_record(path: Path) -> bool:
    """Return True for a page of the past."""
    place = path.resolve()
    return any(place.is_relative_to(record) for record in RECORDS)


def main(arguments: list[str]) -> int:
    """Print the mistakes of all files, and return 1 if there are any."""
    mistakes: list[str] = []
    for path in [Path(name) for name in arguments] or list_tracked_files():
        if path.exists() and not is_record(path):
            mistakes += check(path)
    for mistake in mistakes:
        print(mistake)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
