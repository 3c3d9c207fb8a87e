"""`python -m lit_attn` prints the commands and succeeds."""

import re
import subprocess
import sys

from helpers.paths import ROOT


def test_the_overview_names_commands_that_exist() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "lit_attn"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modules = set(re.findall(r"python -m (lit_attn[\w.]*)", finished.stdout))
    assert len(modules) >= 6
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
