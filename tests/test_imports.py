"""Imports between the modules of the package, also those in functions and for annotations alone."""

import ast
import graphlib
from collections.abc import Collection
from pathlib import Path

import pytest
from helpers.paths import ROOT

PACKAGE = ROOT / "lit_attn"


def name_module(path: Path) -> str:
    """Return the name of the module in a file of the package."""
    words = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def list_imports(tree: ast.AST, modules: Collection[str]) -> set[str]:
    """Return those of `modules` that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in modules else str(node.module))
    return names.intersection(modules)


def read_graph() -> dict[str, set[str]]:
    """Return the modules that each module of the package imports.

    Python imports the root before every other module, so the root is left out.
    """
    files = {name_module(path): path for path in PACKAGE.rglob("*.py")}
    del files["lit_attn"]
    graph = {}
    for name, path in files.items():
        graph[name] = list_imports(ast.parse(path.read_text()), files)
    return graph


def test_no_modules_import_each_other() -> None:
    graph = read_graph()
    # Imports in functions and imports for annotations are edges too.
    assert "lit_attn.ablate.commands.studies" in graph["lit_attn.ablate.commands.run"]
    assert "lit_attn.ablate.plan" in graph["lit_attn.ablate.commands.run"]
    graphlib.TopologicalSorter(graph).prepare()


def test_modules_that_import_each_other_are_found() -> None:
    graph = read_graph()
    graph["lit_attn.attention.parts"].add("lit_attn.attention.similarity")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()
