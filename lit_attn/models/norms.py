"""The norms a transformer over tokens can have."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn


class HeadNorm(nn.RMSNorm):
    """RMSNorm with weight over a head's width, eps 1e-6: for queries and keys."""

    def __init__(
        self,
        width: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width, eps=1e-6, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the weight is wider than x, for which PyTorch has no fused kernel.
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def norm(kind: str, dim: int, eps: float, device: torch.device | str | None) -> nn.Module:
    """The norm over the last axis that the configuration calls `kind`."""
    makers: dict[str, Callable[..., nn.Module]] = {
        "layernorm": nn.LayerNorm,
        "layernorm-unbiased": partial(nn.LayerNorm, bias=False),
        "rmsnorm": nn.RMSNorm,
        "rmsnorm-unweighted": partial(nn.RMSNorm, elementwise_affine=False),
    }
    return makers[kind](dim, eps=eps, device=device)
