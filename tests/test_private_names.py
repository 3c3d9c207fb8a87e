"""Private names of other packages: each exists, has its reason, and is used in one folder."""

import argparse
import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import ROOT

from lit_attn.private_names import NAMES, PrivateName

FOLDER = ROOT / "lit_attn" / "private_names"
DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Names with an underscore that Python's documentation describes."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def find_owner(name: str) -> tuple[Any, str]:
    """Return the module or class with a name, and the last word of the name."""
    *words, last = name.split(".")
    owner: Any = importlib.import_module(words[0])
    for number, word in enumerate(words[1:], start=2):
        if not hasattr(owner, word):
            importlib.import_module(".".join(words[:number]))
        owner = getattr(owner, word)
    return owner, last


def make_example(owner: Any) -> Any:
    """Return an object of a class whose objects alone have the name."""
    examples = {
        "DataLoader": lambda: torch.utils.data.DataLoader([0]),
        "ArgumentParser": lambda: argparse.ArgumentParser(),
        "Module": lambda: torch.nn.Linear(1, 1),
        "Metric": lambda: importlib.import_module("torchmetrics").MeanMetric(),
        "OpOverload": lambda: torch.ops.aten.relu.default,
    }
    return examples[owner.__name__]()


@pytest.mark.parametrize("private", NAMES, ids=lambda private: private.name)
def test_a_private_name_exists_and_has_its_reason(private: PrivateName, tmp_path: Path) -> None:
    assert private.versions
    assert len(private.without.split()) > 1
    if private.name.startswith("tensorboard."):
        # TensorBoard's writer needs a folder.
        owner, last = find_owner(private.name)
        writer = owner(str(tmp_path))
        assert hasattr(writer, last)
        writer.close()
        return
    owner, last = find_owner(private.name)
    assert hasattr(owner, last) or hasattr(make_example(owner), last)


def list_uses(path: Path, defined: set[str]) -> set[str]:
    """Return the private names in a file but those of `self` and those that are `defined` here."""
    uses = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and node.attr not in defined and not is_of_self(node):
                uses.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("lit_attn"):
            words = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            uses.update(word for word in words if is_private(word))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                uses.update(word for word in alias.name.split(".") if is_private(word))
    return uses - DOCUMENTED


def list_own_names(paths: list[Path]) -> set[str]:
    """Return the private names that the package itself defines."""
    defined = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.update({node.attr} if is_of_self(node) else ())
    return defined


def test_private_names_are_used_in_one_folder() -> None:
    paths = sorted((ROOT / "lit_attn").rglob("*.py"))
    defined = list_own_names(paths)
    for path in paths:
        if path.parent != FOLDER:
            uses = list_uses(path, defined)
            where = path.relative_to(ROOT)
            assert not uses, f"{where}: {uses}: move the use to lit_attn/private_names"


def test_every_used_private_name_is_listed_and_every_listed_one_used() -> None:
    used: set[str] = set()
    for path in FOLDER.glob("of_*.py"):
        used |= list_uses(path, set())
    listed = set()
    for private in NAMES:
        listed.update(word for word in private.name.split(".") if is_private(word))
    # A class through whose objects a method is reached.
    listed.discard("_MultiProcessingDataLoaderIter")
    assert used == listed - {"_ops"}
