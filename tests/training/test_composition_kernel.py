"""`training.composition_kernel`: cells whose layers ask for the kernel."""

import pytest
import torch
from helpers.training_cells import digits_cell

from lit_attn.attention.layer import Attention
from lit_attn.training.build import build


@pytest.mark.parametrize("is_requested", [False, True])
def test_every_layer_of_a_cell_asks_for_the_kernel(is_requested: bool) -> None:
    cell = digits_cell(training={"composition_kernel": is_requested})
    network = build(cell, torch.device("cpu")).task.network
    layers = [module for module in network.modules() if isinstance(module, Attention)]
    assert layers
    assert [layer.composes_in_kernel for layer in layers] == [is_requested] * len(layers)


def test_the_kernel_does_not_enter_the_identity() -> None:
    cells = [digits_cell(training={"composition_kernel": choice}) for choice in (False, True)]
    assert cells[0].fingerprint == cells[1].fingerprint == digits_cell().fingerprint
