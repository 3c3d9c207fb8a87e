"""The page with all keys of an experiment."""

import re
import subprocess
import sys

from helpers.paths import ROOT
from write_keys import iterate_fields

from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.config.study import StudyConfig

PAGE = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")


def test_the_page_of_all_keys_is_up_to_date() -> None:
    """The page comes from a new process, because other tests register members of families."""
    command = [sys.executable, str(ROOT / "docs" / "generators" / "write_keys.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == PAGE, "run python docs/generators/write_keys.py > docs/keys.md"


def test_the_page_of_all_keys_has_every_member() -> None:
    for row in ("`training.epochs`", "| `betas` |", "### `kind: npz`", "| `kv_heads` |"):
        assert row in PAGE
    assert PAGE.count("| `lr` | number > 0 | required |") == 9
    assert "| `momentum` | number > 0, < 1 | `0.9` |" in PAGE
    assert "| `vocabulary` | whole number >= 4 | `10000` |" in PAGE
    assert PAGE.count("| `arguments` | mapping | `{}` |") == 9


def test_every_key_has_a_description() -> None:
    """A description is a phrase without an antecedent: it does not begin with a preposition."""
    for config in (Experiment, StudyConfig, Cell):
        for name, field in iterate_fields(config):
            assert field.description, name
            assert not re.match(r"(of|where|that|which|what|as|it) ", field.description), name
