"""docs/gpu.md: the path of every preset on a GPU."""

import re

import torch
from helpers.paths import ROOT

from lit_attn.attention.dispatch import Path, choose_path
from lit_attn.attention.spec import PRESETS
from lit_attn.checks.paths import OWN_SUMS, SHAPES, build_layer, read_properties


def choose_on_gpu(name: str) -> str:
    """Return the path of a preset where flex_attention supports its widths and type."""
    properties = read_properties(build_layer(name, SHAPES[0]), torch.device("cpu"), True)
    if properties is None:
        return OWN_SUMS
    return choose_path(**{**properties, "device": "flex"}).name


def test_the_page_names_the_path_of_every_preset() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    table = dict(re.findall(r"^\| ([A-Z_]+|sums) \| (.+) \|$", page, re.MULTILINE))
    assert set(table) == {OWN_SUMS, *Path.__members__} - {"MERGED"}
    written = {name: path for path, names in table.items() for name in names.split(", ")}
    assert written == {name: choose_on_gpu(name) for name in PRESETS}
