"""Scalars that two versions of YAML read in two ways, written and read."""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers import studies
from helpers.paths import ROOT
from helpers.training_cells import digits_cell

from lit_attn.config.cell import Cell
from lit_attn.config.source import load, parse_value
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import format_yaml, parse_plain
from lit_attn.study import Study

TEXTS = [
    "no", "on", "y", "Yes", "~", "null", "", "true", "FALSE", "010", "08", "+08", "0o17", "0x10",
    "1_000", "1e-05", "1e5", "1.0e5", "1.5E+3", ".5", "1.", "1e400", "1:30", "1:30:00",
    "2026-11-27", ".inf", "-.INF", ".nan", "=", "<<", "!!int 3", "*a", "&a", "- ", "a: b", "#c",
    "'q'", '"q"', "\t", "a\nb", "{a}", "é", "9" * 25,
]  # fmt: skip
"""Texts that YAML can read as another value unless they are quoted."""

NUMBERS = [1e-5, 1e20, 5e-324, 1e300, 0.1, -0.0, 3, -2, 2**60, True, False, None]

VALUES = [*TEXTS, *NUMBERS]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_this_package_writes_is_read_back_by_every_reader(value: Any, tmp_path: Path) -> None:
    tree = {"key": value, "list": [value], str(value): 1}
    text = format_yaml(tree)
    path = tmp_path / "study.yaml"
    path.write_text(text)
    for read in (load(path), parse_plain(text, "file")):
        assert read == tree
        assert list(read) == list(tree)
        assert type(read["key"]) is type(value)
    assert parse_value(format_yaml([value]), "command line") == [value]


@pytest.mark.parametrize("name", ["1e-05", "08", "010", "no"])
def test_a_cell_with_such_a_name_is_read_back(name: str, tmp_path: Path) -> None:
    cell = digits_cell().model_copy(update={"study": name, "variant": name})
    path = tmp_path / "config.yaml"
    cell.write(path)
    read = Cell.read(path)
    assert (read, read.fingerprint) == (cell, cell.fingerprint)


def test_a_number_in_a_configuration_is_that_of_a_study(tmp_path: Path) -> None:
    cell = digits_cell(optimizer={"lr": 1e-4})
    path = tmp_path / "config.yaml"
    cell.write(path)
    text = path.read_text()
    assert "lr: 0.0001\n" in text
    path.write_text(text.replace("lr: 0.0001\n", "lr: 1e-4\n"))
    assert Cell.read(path) == cell


def test_a_study_in_python_can_name_its_baseline_like_a_number(tmp_path: Path) -> None:
    study = Study(
        "tiny",
        experiment=parse_plain(studies.EXPERIMENT, "experiment"),
        folder=tmp_path,
        out=tmp_path / "runs",
        seeds=1,
        cells={"1e-05": {}, "no": {"optimizer.lr": 3e-3}},
        baseline="1e-05",
    )
    assert set(study.status()["variant"]) == {"1e-05", "no"}


def test_a_reader_does_not_multiply_depth_by_aliases() -> None:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{number}: &a{number} [*a{number - 1}]" for number in range(1, 60)]
    with pytest.raises(ConfigError, match=r"^file:\d+: too large or too deeply nested"):
        parse_plain("\n".join(lines), "file")


def test_no_other_module_reads_yaml() -> None:
    """PyYAML reads `1e-3` as text and `no` as false; ruamel.yaml alone sets no limit."""
    reader = ROOT / "lit_attn" / "schema" / "yaml_text.py"
    for folder in ("lit_attn", "docs", "experiments"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            pattern = r"^\s*(import|from) (yaml|ruamel)\b"
            has_import = re.search(pattern, path.read_text(), re.MULTILINE)
            assert path == reader or not has_import, path
