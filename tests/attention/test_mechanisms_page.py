"""The page of mechanisms is up to date, its examples are valid, and its table of paths is true."""

import re
from collections.abc import Iterator
from itertools import product

import pytest
import write_mechanisms
from helpers.paths import ROOT
from mechanism_entries import ENTRIES

from lit_attn.attention.dispatch import Path, choose_path
from lit_attn.attention.spec import PRESETS, attention_spec
from lit_attn.schema.yaml_text import parse_plain

PAGE = (ROOT / "docs" / "mechanisms.md").read_text()


def test_the_page_is_up_to_date() -> None:
    assert write_mechanisms.write_page() == PAGE, (
        "run python docs/generators/write_mechanisms.py > docs/mechanisms.md"
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_section_whose_example_is_a_new_choice(name: str) -> None:
    entry = ENTRIES[name]
    chosen = attention_spec(parse_plain(entry.cross, "text"), "page")
    assert chosen not in PRESETS.values()
    assert f"\n### {name}\n" in PAGE
    assert parse_plain(entry.cross, "text")["preset"] == name


def rows() -> Iterator[list[str]]:
    """Yield the cells of every row of the table of paths."""
    table = PAGE.split("## The kernel of a layer")[1]
    for line in re.findall(r"^\| (.*) \|$", table, re.MULTILINE)[1:]:
        yield [cell.strip() for cell in line.split("|")]


def matches(row: list[str], case: dict[str, object]) -> bool:
    """Return True if the conditions of a row of the table are true of a case."""
    similarity, weight, mask, dropout, device, _ = row
    several = case["keys"] > 1
    conditions = {
        "any": True,
        "hard mixture": case["is_hard"],
        "M > 1 keys": several,
        "hard mixture or z z": case["is_hard"] or case["has_z"],
        "M > 1 keys or z z": several or case["has_z"],
        "z z": case["has_z"],
    }
    weights = {
        "any": True,
        "blocks": case["chooses_blocks"],
        "formed": case["needs_weights"],
        "no sink": not case["has_sink"],
    }
    masks = {
        "any": True,
        "none": case["mask"] == "none",
        "causal": case["mask"] == "causal",
        "not none": case["mask"] != "none",
        "order": case["mask"] == "order",
    }
    devices = {"any": True, "not meta": case["device"] != "meta", "flex": case["device"] == "flex"}
    return bool(
        conditions[similarity]
        and weights[weight]
        and masks[mask]
        and {"any": True, "yes": case["dropout"], "no": not case["dropout"]}[dropout]
        and devices[device]
    )


def test_the_first_row_of_the_table_that_matches_is_the_path() -> None:
    values = {
        "keys": [1, 2],
        "is_hard": [False, True],
        "has_z": [False, True],
        "chooses_blocks": [False, True],
        "needs_weights": [False, True],
        "has_sink": [False, True],
        "mask": ["none", "causal", "order", "other"],
        "dropout": [0.0, 0.1],
        "device": ["cpu", "cuda", "flex", "meta"],
    }
    table = list(rows())
    used = set()
    for combination in product(*values.values()):
        case = dict(zip(values, combination, strict=True))
        number, row = next((i, row) for i, row in enumerate(table) if matches(row, case))
        assert choose_path(**case) is Path[row[-1]], case
        used.add(number)
    assert used == set(range(len(table)))
