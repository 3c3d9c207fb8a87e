"""Composition inside groups of heads: its formula, its isolation, and its cache.

A registered part stays registered, so the checks run in a process of their own.
"""

import pytest
from helpers.commands import run_new_python
from helpers.paths import EXPERIMENTS, ROOT

SETUP = f"""
import torch
from pathlib import Path
from lit_attn.schema.plugins import load_parts
load_parts([Path({str(EXPERIMENTS / "grouped_composition" / "grouped_composition.py")!r})])
from lit_attn.attention import reference
from lit_attn.attention.layer import attn_layer

def make(**choices):
    torch.manual_seed(0)
    compose = {{"kind": "grouped", "groups": 2, "rank": 1, **choices}}
    layer = attn_layer({{"compose": compose}})(16, 4).double().eval()
    for parameter in layer.composers.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer

torch.manual_seed(1)
x = torch.randn(2, 7, 16, dtype=torch.double)
"""

FORMULA = """
for choices in ({}, {"gate": False}, {"projection": False}, {"static": True}, {"place": "post"}):
    layer = make(**choices)
    inputs = [x.requires_grad_(), *layer.parameters()]
    out, expected = layer(x, is_causal=True), reference.attention(layer, x, is_causal=True)
    assert torch.allclose(out, expected), choices
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), inputs) for o in (out, expected))):
        assert torch.allclose(a, b), choices
"""

ISOLATION = """
layer = make()
composer = layer.composers["post"]
maps = composer.maps(x)
a = torch.rand(2, 4, 7, 7, dtype=torch.double)
changed = a.clone()
changed[:, 3] += 1
difference = composer(changed, **maps) - composer(a, **maps)
assert difference[:, :2].abs().max() == 0
assert difference[:, 2].abs().max() > 1e-3
"""

ONE_GROUP = """
layer = make(groups=1)
other = attn_layer({"compose": {"kind": "query+key", "rank": 1}})(16, 4).double().eval()
renamed = {n.replace(".parts.0.", "."): p for n, p in layer.state_dict().items()}
other.load_state_dict(renamed)
assert torch.allclose(layer(x), other(x))
"""

REFUSED = """
from lit_attn.models.language import GPTConfig
from pydantic import ValidationError
sizes = {"dim": 12, "depth": 1, "heads": 6, "ffn": {"width": 8}}
try:
    GPTConfig.model_validate({**sizes, "attention": {"compose": {"kind": "grouped"}}})
except ValidationError as error:
    assert "4 groups do not divide 6 heads" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.process
def test_grouped_composition() -> None:
    """Formula and gradients; no mixing of groups; one group is DCMHA; groups divide the heads."""
    checks = [SETUP, FORMULA, ISOLATION, ONE_GROUP, REFUSED]
    done = run_new_python(ROOT, "-W", "error", "-c", "".join(checks))
    assert done.returncode == 0, done.stderr
