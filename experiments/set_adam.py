"""Plug-in for SET-Adam, the optimiser of the CIFAR tables of BeliefFormer and AttentionX.

Studies on cifar10_vit_small.yaml and cifar100_vit_small.yaml name this file under `parts`. The
optimizer is in set_adam_optimizer.py, which a cell imports when it is built.

Source: Zhang 2024, arXiv 2302.01029 (docs/setups.md, section 12).
"""

from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from lit_attn.config.optimizers import Adaptive
from lit_attn.schema.base import Share, load

if TYPE_CHECKING:
    import torch
    from torch import nn


class SetAdam(Adaptive, kind="set-adam"):
    """SET-Adam (Zhang 2024): Adam with a suppressed range of adaptive step sizes."""

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    target = "set_adam_optimizer:SETAdam"
    eps: PositiveFloat = Field(1e-18, description="added to the mean square, in the root")
    tau: Share = Field(0.5, description="share of a tensor's smallest divisor to subtract")

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        choices = (self.lr, self.betas, self.eps, self.tau, self.weight_decay)
        optimizer: torch.optim.Optimizer = load(self.target)(self.parameters(module), *choices)
        return optimizer
