"""Dry runs of the shipped studies with plug-ins of their own."""

import subprocess
import sys

import pytest
from helpers.paths import ROOT

STUDIES = (
    "attentionx-cifar10",
    "belief2-imagenet",
    "beliefformer-gpt2",
    "dcmha-imagenet",
    "dcmha-synthetic",
    "mgk-wikitext103",
    "mgk-wmt14",
)


@pytest.mark.process
def test_a_dry_run_of_shipped_plug_ins_imports_no_torch() -> None:
    """Tests try the plug-ins out, so a dry run need not build them."""
    code = (
        "import sys; from lit_attn.ablate.__main__ import main\n"
        "code = main(['ablations.yaml', '--dry-run', *sys.argv[1:]])\n"
        "sys.exit('torch' if 'torch' in sys.modules else code)"
    )
    names = [f"--study={study}" for study in STUDIES]
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
