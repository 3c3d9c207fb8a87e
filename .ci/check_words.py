"""Check the words in the code: `python .ci/check_words.py [FILES]`.

CONTRIBUTING.md, section "Style", has the rules. Without files all Python files that git tracks are
checked. Each mistake is one line, and the exit code is 1 if there is one.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A docstring that begins with one of these has no subject.
OPENINGS = {"Of", "That", "Those", "These", "What", "Whether", "Where", "Such", "So", "As", "How"}
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
# Replays of published code keep the names of that code.
RELEASED = ROOT / "tests" / "released"


def find_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def find_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable, argument and function that is defined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def check(path: Path) -> Iterator[str]:
    """Yield one line for each mistake in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for line, text in find_docstrings(tree):
        first_word = text.split(maxsplit=1)[0]
        if first_word in OPENINGS:
            yield f"{path}:{line}: a docstring begins with a noun or a verb, not with {first_word}"
    if RELEASED in path.resolve().parents:
        return
    for line, name in find_names(tree):
        if name in NAMES:
            yield f"{path}:{line}: the name '{name}' says nothing about the value"


def list_tracked_files() -> list[Path]:
    """Return all Python files that git tracks."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


def main(arguments: list[str]) -> int:
    """Print the mistakes of all files, and return 1 if there are any."""
    paths = [Path(name) for name in arguments] or list_tracked_files()
    mistakes = [mistake for path in paths if path.exists() for mistake in check(path)]
    for mistake in mistakes:
        print(mistake)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
