"""The page with all keys of an experiment, docs/keys.md."""

import subprocess
import sys

from helpers.paths import ROOT


def test_the_page_of_all_keys_is_up_to_date() -> None:
    """The page comes from a new process, because other tests register members of families."""
    command = [sys.executable, "-m", "lit_attn.config.keys"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    assert finished.stdout == page, f"run {' '.join(command[1:])} > docs/keys.md"
    for row in ("`training.epochs`", "| `betas` |", "### `kind: npz`", "| `kv_heads` |"):
        assert row in page
    assert page.count("| `lr` | number > 0 | required |") == 4
    assert "| `momentum` | number > 0, < 1 | `0.9` |" in page
    assert "| `depth` | whole number >= 2 | `10` |" in page
