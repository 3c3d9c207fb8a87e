"""Tests of the public names: what docs/api.md promises is what `lit_attn` has."""

import inspect
import re
import subprocess
import sys

import pytest
from helpers.paths import ROOT

import lit_attn
from lit_attn.schema.base import Kind

PAGE = (ROOT / "docs" / "api.md").read_text()
NAME = re.compile(r"`(\w+)`")
TORCH_FREE = """
import sys
import lit_attn

loaded = [name for name in sys.modules if name.startswith("lit_attn.")]
assert not loaded, f"import lit_attn loads {loaded}"
# None makes every import of these packages fail.
sys.modules["torch"] = sys.modules["lightning"] = sys.modules["torchmetrics"] = None
for name in sys.argv[1:]:
    getattr(lit_attn, name)
"""


def read_tables() -> dict[str, bool]:
    """Return the names of the tables of docs/api.md, True if a name needs no PyTorch.

    Columns with keys of YAML or with words have other headings.
    """
    names = {}
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        rows = [split_row(line) for line in table.splitlines()]
        heading = rows[0]
        for row in rows[2:]:
            cells = dict(zip(heading, row, strict=True))
            is_light = cells.get("needs PyTorch") == "no"
            for title in ("name", "base class", "configuration", "module"):
                for name in NAME.findall(cells.get(title, "")):
                    names[name] = is_light
    return names


def split_row(line: str) -> list[str]:
    """Return the cells of a row of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


PROSE = {"AttentionSpec": False, "LayerShape": False, "Cache": False}
"""Names that stand in a sentence of docs/api.md, and whether they can be imported alone."""


def test_the_page_lists_every_public_name_and_no_other() -> None:
    assert set(read_tables()) | set(PROSE) == set(lit_attn.__all__)
    assert all(f"`{name}`" in PAGE for name in PROSE)


@pytest.mark.process
def test_names_without_pytorch_are_imported_where_there_is_none() -> None:
    names = [name for name, is_light in (read_tables() | PROSE).items() if is_light]
    assert len(names) >= 4
    subprocess.run([sys.executable, "-c", TORCH_FREE, *names], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", lit_attn.__all__)
def test_every_public_name_is_defined_and_documented(name: str) -> None:
    value = getattr(lit_attn, name)
    if name != "__version__":
        assert value.__name__ == name
        assert inspect.getdoc(value)
    assert name in dir(lit_attn)


def test_the_base_class_of_every_family_is_public() -> None:
    for name in lit_attn.__all__:
        getattr(lit_attn, name)
    families = [
        family for family in Kind.__subclasses__() if family.__module__.startswith("lit_attn.")
    ]
    assert len(families) > 15
    assert all(getattr(lit_attn, family.__name__) is family for family in families)


def test_the_types_have_the_same_names_as_the_code() -> None:
    stub = (ROOT / "lit_attn" / "__init__.pyi").read_text()
    typed = re.findall(r"^from ([\w.]+) import (\w+) as \w+$", stub, re.MULTILINE)
    assert {name: f"{module}:{name}" for module, name in typed} == lit_attn._PUBLIC
    assert (ROOT / "lit_attn" / "py.typed").exists()


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lit_attn' has no attribute 'attn_layers'"):
        lit_attn.attn_layers  # noqa: B018
