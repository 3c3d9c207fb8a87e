"""Dry runs of the shipped studies with plug-ins of their own."""

import subprocess
import sys

import pytest
from helpers.paths import ROOT


@pytest.mark.process
@pytest.mark.parametrize("study", ["belief2-imagenet", "dcmha-imagenet", "dcmha-synthetic"])
def test_a_dry_run_of_a_shipped_plug_in_imports_no_torch(study: str) -> None:
    """Tests try the plug-ins out, so a dry run need not build them."""
    code = (
        "import sys; from lit_attn.ablate.__main__ import main\n"
        f"code = main(['ablations.yaml', '--study', '{study}', '--dry-run'])\n"
        "sys.exit('torch' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
