"""The plug-in for fairseq's AdamW, which tests/released compares with fairseq itself."""

import importlib

import pytest
import torch
from helpers.paths import EXPERIMENTS

from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "translation_mgk" / "fairseq_adam.py"])
FairseqAdam = importlib.import_module("fairseq_adam").FairseqAdam


def test_epsilon_is_added_before_the_correction_also_after_resuming() -> None:
    """A step is lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)."""
    config = FairseqAdam(lr=1e-2, betas=(0.9, 0.98), eps=0.1)
    value, m, v, state = 1.0, 0.0, 0.0, None
    for step, gradient in enumerate((0.3, -0.2, 0.5), start=1):
        network = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.constant_(network.weight, value)
        optimizer = config.build(network, fused=False)
        if state is not None:
            optimizer.load_state_dict(state)
        network.weight.grad = torch.full((1, 1), gradient, dtype=torch.float64)
        optimizer.step()
        state = optimizer.state_dict()
        m, v = 0.9 * m + 0.1 * gradient, 0.98 * v + 0.02 * gradient**2
        value -= 1e-2 * (1 - 0.98**step) ** 0.5 / (1 - 0.9**step) * m / (v**0.5 + 0.1)
        assert network.weight.item() == pytest.approx(value, rel=1e-9)
