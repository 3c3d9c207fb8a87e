"""Normalisers: the functions that turn logits into weights.

- Softmax: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. 1.
- Sigmoid attention: Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid
  Self-Attention", https://arxiv.org/abs/2409.04431, section 2.
- Differential attention: Ye et al. 2024, "Differential Transformer",
  https://arxiv.org/abs/2410.05258, eq. 1-3.
- Offset softmax: the released language models of Nguyen et al. 2022 (MGK), rows + 1e-6;
  github.com/minhtannguyen/transformer-mgk.

Shapes: B batch, H heads, n tokens, D head width, c queries of a chunk, m keys, M keys per token.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.masks import differs_between_heads
from lit_attn.attention.parts import DifferentialConfig, LayerShape
from lit_attn.attention.precision import wide

# Added to the mean square in the RMSNorm of differential heads (the released code's value).
EPS = 1e-5


class Normaliser(nn.Module):
    """Base of the normalisers: `forward(logits, visible)` returns weights (B, H, c, m).

    `logits` (B, H, c, m) are in float32 or wider, the lowest number of their precision where a
    query may not attend to a key. `visible`, broadcastable to them, is True where it may; None
    means everywhere.
    """

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part

    def over_keys(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        """Return weights of logits (B, H, c, M, m); a token's logit is their log-sum-exp over M."""
        logits = wide(logits)
        logits = logits.squeeze(3) if logits.shape[3] == 1 else logits.logsumexp(3)
        return self(logits, visible)

    def finish(self, heads: Tensor) -> Tensor:
        """Return the heads' weighted sums (B, H, n, D) after what follows them; unchanged here."""
        return heads


class Softmax(Normaliser):
    """a_ij = exp(s_ij) / sum_j exp(s_ij)."""

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        return logits.softmax(-1)

    def over_keys(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        """Return the sum of the softmax over all M m keys: it needs no log-sum-exp over M."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if logits.shape[3] == 1:
            return logits.squeeze(3).softmax(-1, dtype=dtype)
        return logits.flatten(3).softmax(-1, dtype=dtype).view_as(logits).sum(3)


class Sigmoid(Normaliser):
    """a_ij = sigmoid(s_ij - log n); n is the number of keys that i may attend to."""

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        if visible is None:
            return torch.sigmoid(logits - math.log(logits.shape[-1]))
        shown = visible.expand(*visible.shape[:-1], logits.shape[-1])
        count = shown.sum(-1, keepdim=True).clamp_min(1).to(logits.dtype)
        return torch.sigmoid(logits - count.log())


class OffsetSoftmax(Normaliser):
    """a_ij = exp(s_ij) / (offset + sum_j exp(s_ij))."""

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        share = torch.sigmoid(logits.logsumexp(-1, keepdim=True) - math.log(self.part.offset))
        return logits.softmax(-1) * share


class Differential(Normaliser):
    """softmax(s_2m) - lambda softmax(s_2m+1) for both heads 2m and 2m + 1.

    lambda = exp(q1.k1) - exp(q2.k2) + lambda_init with learned vectors q1, k1, q2, k2 of the
    head's width, one set for the layer (eq. 2). A pair of heads is normalised as one head (eq. 3).
    """

    part: DifferentialConfig

    def __init__(self, part: DifferentialConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        # Rows: q1, q2, k1, k2.
        self.vectors = nn.Parameter(torch.empty(4, shape.head_dim, **shape.options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors from N(0, 0.1^2), as in the released code."""
        nn.init.normal_(self.vectors, std=0.1)

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        weights = logits.softmax(-1)
        if visible is not None and differs_between_heads(visible):
            # The softmax of a head that sees no key is uniform; its pair must not take it over.
            weights = weights.masked_fill(~visible, 0)
        first, second = weights.unflatten(1, (-1, 2)).unbind(2)
        q, k = wide(self.vectors).chunk(2)
        lambda_1, lambda_2 = (q * k).sum(-1).exp()
        factor = lambda_1 - lambda_2 + self.part.lambda_init
        return (first - factor * second).repeat_interleave(2, 1)

    def finish(self, heads: Tensor) -> Tensor:
        """Return (1 - lambda_init) RMSNorm of each pair of heads, side by side."""
        pairs = wide(heads).unflatten(1, (-1, 2)).transpose(2, 3)
        normed = F.rms_norm(pairs.flatten(-2), (2 * heads.shape[-1],), eps=EPS)
        normed = (1 - self.part.lambda_init) * normed.unflatten(-1, (2, -1)).transpose(2, 3)
        return normed.flatten(1, 2).to(heads.dtype)
