"""Fast forms of the similarity parts: features whose scaled dot products are the logits.

A part maps q, k of shape (B, H, n, D) to features q', k' of shape (B, H, n, E) with
    s_ij = q'_i . k'_j / sqrt(D)   up to a constant in i, which the softmax does not see,
so that one scaled-dot-product call computes any of them.
"""

from torch import Tensor, nn

from lit_attn.attention import spec


class Dot(nn.Module):
    """s_ij = q_i.k_j / sqrt(D): q and k are the features."""

    def __init__(self, part: spec.Dot) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


SIMILARITIES: dict[type[spec.Similarity], type[nn.Module]] = {spec.Dot: Dot}
