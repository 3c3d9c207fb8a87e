"""From an optimiser's configuration to the optimiser."""

import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_weight_decay
from torch import nn

from lit_attn.config.optimizers import SGD, Adam, AdamW, Optimizer, SetAdam
from lit_attn.optim.set_adam import SETAdam


def build_optimizer(
    chosen: Optimizer, module: nn.Module, fused: bool = True
) -> torch.optim.Optimizer:
    """The optimiser that `chosen` describes, over the trainable parameters of `module`.

    `fused`: Adam, AdamW and SGD as one kernel.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if isinstance(chosen, SetAdam):
        return SETAdam(
            parameters, chosen.lr, chosen.betas, chosen.eps, chosen.tau, chosen.weight_decay
        )
    if isinstance(chosen, SGD):
        return torch.optim.SGD(
            parameters,
            chosen.lr,
            chosen.momentum,
            weight_decay=chosen.weight_decay,
            nesterov=True,
            fused=fused,
        )
    if isinstance(chosen, Adam):
        return torch.optim.Adam(
            parameters, chosen.lr, chosen.betas, chosen.eps, chosen.weight_decay, fused=fused
        )
    assert isinstance(chosen, AdamW)
    if chosen.decay == "weights":
        named = module.no_weight_decay() if isinstance(module, VisionTransformer) else ()
        groups = param_groups_weight_decay(module, chosen.weight_decay, no_weight_decay_list=named)
        return torch.optim.AdamW(groups, chosen.lr, chosen.betas, chosen.eps, fused=fused)
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    spared = 0.0 if chosen.decay == "matrices" else chosen.weight_decay
    groups = [
        {"params": matrices, "weight_decay": chosen.weight_decay},
        {"params": others, "weight_decay": spared},
    ]
    return torch.optim.AdamW(groups, chosen.lr, chosen.betas, chosen.eps, fused=fused)
