"""Layers that transformers over tokens choose from: norms, positions, adaptive softmax."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.precision import wide

Device = torch.device | str | None


class HeadNorm(nn.RMSNorm):
    """RMSNorm over the width of a head, for queries and keys: gain * x / rms(x) * weight.

    Without `is_weighted` there is no weight.
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-6,
        is_weighted: bool = True,
        gain: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(width, eps, elementwise_affine=is_weighted, **options)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the weight is wider than x, for which PyTorch has no fused kernel.
        wide_x = wide(x) if self.weight is None else x.to(self.weight.dtype)
        normalised = super().forward(wide_x)
        if self.gain != 1:
            normalised = self.gain * normalised
        return normalised.to(x.dtype)


def sincos_positions(
    rows: int, columns: int, dim: int, divisor: int, device: Device = None
) -> Tensor:
    """Return fixed positions (rows * columns, dim), float32, computed in float64.

    The first half has the sines and cosines of the column, the second half those of the row.
    Coordinate k of the dim / 4 frequencies is 10,000^(-k / divisor).
    """
    exponents = torch.arange(dim // 4, device=device, dtype=torch.float64) / divisor
    frequencies = 10_000.0**-exponents
    row_angles = torch.arange(rows, device=device)[:, None] * frequencies
    column_angles = torch.arange(columns, device=device)[:, None] * frequencies
    y = row_angles.repeat_interleave(columns, dim=0)
    x = column_angles.repeat(rows, 1)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()


def norm(kind: str, dim: int, eps: float, device: Device) -> nn.Module:
    """Return the norm over the last axis that the configuration calls `kind`."""
    makers: dict[str, Callable[..., nn.Module]] = {
        "layernorm": nn.LayerNorm,
        "layernorm-unbiased": partial(nn.LayerNorm, bias=False),
        "rmsnorm": nn.RMSNorm,
        "rmsnorm-unweighted": partial(nn.RMSNorm, elementwise_affine=False),
    }
    return makers[kind](dim, eps=eps, device=device)


class AdaptiveSoftmax(nn.Module):
    """Softmax by frequency classes (Grave et al. 2017, arXiv:1609.04309), divisor 1, tied weights.

    Shapes: N tokens, d width, V vocabulary. hidden: (N, d), targets: (N,), embedding: (V, d).

    Ids are in order of falling frequency, and `cutoffs` are the first ids of the rarer classes. The
    head scores the most frequent ids and one column for each rarer class. The probability of a
    rarer id is p(class) p(id | class). Every id has a bias, as in Transformer-XL.
    """

    def __init__(
        self, vocabulary: int, dim: int, cutoffs: tuple[int, ...], device: Device = None
    ) -> None:
        super().__init__()
        self.edges = (*cutoffs, vocabulary)
        self.classes = nn.Linear(dim, len(cutoffs), device=device)
        self.bias = nn.Parameter(torch.zeros(vocabulary, device=device))

    def nll(self, hidden: Tensor, targets: Tensor, embedding: Tensor) -> Tensor:
        """Return -log p(target), (N,) float32. Only classes that have a target are scored."""
        head = self._head(hidden, embedding)
        first = self.edges[0]
        # The values of targets in rarer classes are replaced below.
        frequent_targets = targets.clamp_max(first - 1)
        nll = -head.gather(1, frequent_targets[:, None]).squeeze(1)
        for number, (start, stop) in enumerate(itertools.pairwise(self.edges)):
            is_in_class = (targets >= start) & (targets < stop)
            rows = is_in_class.nonzero().squeeze(1)
            within = self._within(hidden[rows], embedding, start, stop)
            log_p_within = within.gather(1, (targets[rows] - start)[:, None]).squeeze(1)
            log_p_class = head[rows, first + number]
            nll = nll.index_copy(0, rows, -log_p_class - log_p_within)
        return nll

    def log_probabilities(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Return log p of every id, (N, V) float32."""
        head = self._head(hidden, embedding)
        first = self.edges[0]
        parts = [head[:, :first]]
        for number, (start, stop) in enumerate(itertools.pairwise(self.edges)):
            within = self._within(hidden, embedding, start, stop)
            parts.append(head[:, first + number, None] + within)
        return torch.cat(parts, dim=1)

    def _head(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Return log p of the frequent ids and of the rarer classes."""
        first = self.edges[0]
        frequent = F.linear(hidden, embedding[:first], self.bias[:first])
        logits = torch.cat([frequent, self.classes(hidden)], dim=1)
        return wide(logits).log_softmax(-1)

    def _within(self, hidden: Tensor, embedding: Tensor, start: int, stop: int) -> Tensor:
        """Return log p(id | class) of the class with ids `start` to `stop` - 1."""
        logits = F.linear(hidden, embedding[start:stop], self.bias[start:stop])
        return wide(logits).log_softmax(-1)
