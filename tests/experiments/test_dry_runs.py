"""Dry runs of the shipped studies with plug-ins of their own."""

import pytest
from helpers.commands import run_new_python
from helpers.paths import ROOT

STUDIES = (
    "attentionx-cifar10",
    "belief2-imagenet",
    "beliefformer-gpt2",
    "dcmha-imagenet",
    "dcmha-synthetic",
    "mgk-wikitext103",
    "mgk-wmt14",
    "modern",
)


@pytest.mark.process
def test_a_dry_run_of_shipped_plug_ins_prints_no_warning() -> None:
    words = [f"--study={study}" for study in STUDIES]
    done = run_new_python(ROOT, "-m", "lit_attn.ablate", "ablations.yaml", "--dry-run", *words)
    assert (done.returncode, done.stderr) == (0, "")
    for study in STUDIES:
        assert f"{study}: " in done.stdout
