"""Embeddings of the tokens that a layer adds to its values.

Source: nanochat/gpt.py of github.com/karpathy/nanochat at 92d63d4, after the value residual of Zhou
et al. 2024, https://arxiv.org/abs/2410.17897.

Shapes: B batch, n tokens, d width, H' key heads, D head width.
"""

import torch
from torch import Tensor, nn

from lit_attn.models.language_config import ValueEmbeddings
from lit_attn.models.layers import Device


class ValueEmbedding(nn.Module):
    """f sigmoid(W x') e(token): what a layer adds to its values, (B, n, H', D).

    x' are the first `channels` components of the layer's input x (B, n, d).
    """

    def __init__(
        self,
        options: ValueEmbeddings,
        vocabulary: int,
        key_heads: int,
        head_dim: int,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.head_dim = head_dim
        self.embedding = nn.Embedding(vocabulary, key_heads * head_dim, device=device)
        self.gate = nn.Linear(options.channels, key_heads, bias=False, device=device)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens).unflatten(-1, (-1, self.head_dim))
        opened = torch.sigmoid(self.gate(x[..., : self.options.channels]))
        return self.options.factor * opened[..., None] * embedded
