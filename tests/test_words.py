"""Tests of the words in the code; CONTRIBUTING.md, section "Style", has the rules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.paths import ROOT

GENERATORS = sorted((ROOT / "docs" / "generators").glob("*.py"))
PACKAGE = sorted((ROOT / "lit_attn").rglob("*.py")) + GENERATORS
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# A docstring that begins with one of these has no subject.
OPENINGS = {"Of", "That", "Those", "These", "What", "Whether", "Where", "Such", "So", "As", "How"}
# These names say nothing about the value.
NAMES = {
    "found",
    "said",
    "told",
    "looked",
    "asked",
    "alike",
    "given",
    "there",
    "what",
    "happened",
} | {"own", "of", "here", "whole", "seen"}
# Replays of published code keep the names of that code.
RELEASED = ROOT / "tests" / "released"
OWN_TESTS = [path for path in TESTS if RELEASED not in path.parents]


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PACKAGE + TESTS, ids=relative)
def test_docstrings_begin_with_a_noun_or_a_verb(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    first_lines = [text.splitlines()[0] for text in docstrings(tree)]
    assert [line for line in first_lines if line.split(maxsplit=1)[0] in OPENINGS] == []


@pytest.mark.parametrize("path", PACKAGE + OWN_TESTS, ids=relative)
def test_names_describe_values(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert sorted(NAMES.intersection(names(tree))) == []
