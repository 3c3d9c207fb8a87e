"""Networks that have forgotten their values."""

import torch
from torch import nn


def forget_values(module: nn.Module) -> None:
    """Move a module from the meta device to uninitialised memory, here NaN."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1 << 30)
