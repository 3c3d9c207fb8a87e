"""Embeddings of the tokens that a layer adds to its values.

Source: nanochat/gpt.py of github.com/karpathy/nanochat at 92d63d4, after the value residual of Zhou
et al. 2024, https://arxiv.org/abs/2410.17897.

Shapes: B batch, n tokens, d width, H' key heads, D head width.
"""

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from lit_attn.models.layers import Device
from lit_attn.schema.base import Config


class ValueEmbeddings(Config):
    """Embeddings of the tokens that some layers add to their values.

    v_h becomes v_h + f sigmoid(w_h . x') e_h, where e_h are the components of the token's embedding
    for key head h, x' the first `channels` components of the layer's input, and w_h is learned.
    Each of these layers has its own embeddings. Source: nanochat/gpt.py of
    github.com/karpathy/nanochat at 92d63d4, which follows the value residual of Zhou et al. 2024
    (https://arxiv.org/abs/2410.17897) and modded-nanogpt.
    """

    every: PositiveInt = Field(
        2, description="n: every n-th layer, counted back from the last one, which is the first"
    )
    channels: PositiveInt = Field(
        12, description="components of the layer's input that the gate of a key head reads"
    )
    factor: PositiveFloat = Field(3.0, description="f: largest factor of an embedding")

    def has_layer(self, layer: int, depth: int) -> bool:
        """Return True if layer `layer` of `depth` layers, from 0, has embeddings."""
        return (depth - 1 - layer) % self.every == 0


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
