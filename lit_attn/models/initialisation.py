"""Fill the parameters of a transformer over tokens as its `init` says."""

import math

import torch
from torch import nn

from lit_attn.attention.layer import Attention
from lit_attn.config.models.language import TokenTransformer
from lit_attn.models.trunk import Block


@torch.no_grad()
def initialise(network: nn.Module, model: TokenTransformer, tied: bool) -> None:
    """In place, on a network fresh from its constructor, whose values are PyTorch's defaults."""
    init = model.init
    for name, module in network.named_modules():
        if "composers" in name.split("."):
            continue
        if isinstance(module, nn.Linear) and init.matrices != "torch":
            nn.init.normal_(module.weight, std=init.matrices)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            if init.embedding != "torch":
                nn.init.normal_(module.weight, std=init.embedding)
            elif tied:
                bound = 1 / math.sqrt(module.embedding_dim)
                nn.init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
            nn.init.normal_(module.weight, 1.0, init.norms)
    for module in network.modules():
        if isinstance(module, Block) and init.depth_scaled:
            for projection in _onto_the_stream(module):
                projection.weight.mul_((2 * model.depth) ** -0.5)
        if isinstance(module, Attention):
            module.copy_projection()


def _onto_the_stream(block: Block) -> list[nn.Linear]:
    """W, the residual part's W^l or W_p, and the FFN's last matrix."""
    further = [part for part in block.attn.residual.modules() if isinstance(part, nn.Linear)]
    down = [] if block.ffn is None else [block.ffn.down]
    return [block.attn.proj, *further, *down]
