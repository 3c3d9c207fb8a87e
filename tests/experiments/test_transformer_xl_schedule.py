"""Tests of the plug-in for Transformer-XL's learning rate."""

import importlib

import pytest
import torch
from helpers.paths import EXPERIMENTS

from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "wikitext103_mgk" / "transformer_xl_schedule.py"])
TransformerXL = importlib.import_module("transformer_xl_schedule").TransformerXL


def test_transformer_xls_rate_is_set_after_each_step() -> None:
    """The first step has the constructor's rate; the cosine spans all steps, as its T_max says."""
    rate = TransformerXL(warmup=2).rate(2.5e-4, 10, 50)
    in_steps = TransformerXL(warmup="20 steps").rate(2.5e-4, 10, 50)
    assert [in_steps(step) for step in range(30)] == [rate(step) for step in range(30)]
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=2.5e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)
    expected = optimizer.param_groups[0]["lr"]
    for step in range(500):
        assert rate(step) == pytest.approx(expected, rel=1e-9)
        optimizer.step()
        cosine.step()
        after = step + 1
        expected = 2.5e-4 * after / 20 if after < 20 else cosine.get_last_lr()[0]
    assert rate(500) == 0.0
