"""Encoder-decoder for translation (Vaswani et al. 2017).

Shapes: B batch, m source tokens, n target tokens, d width, V vocabulary. Id 0 is padding.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn import signatures
from lit_attn.attention.cache import Cache
from lit_attn.attention.spec import AttentionSpec
from lit_attn.data.text.ids import PADDING
from lit_attn.models.base import require_heads
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import draw_parameters
from lit_attn.models.token_loss import token_losses, total_loss
from lit_attn.models.token_transformer import TokenTransformer
from lit_attn.models.trunk import Memory, Trunk, initialise
from lit_attn.schema.base import consistency_check


class EncoderDecoder(nn.Module):
    """Bidirectional encoder of the source, and causal decoder with cross-attention to it."""

    def __init__(
        self, model: "EncoderDecoderConfig", vocabulary: int, context: int, device: Device = None
    ) -> None:
        """Build a network for at most `context` tokens; initialise it except on "meta"."""
        super().__init__()
        self.encoder = Trunk(model, vocabulary, context, is_causal=False, device=device)
        self.decoder = Trunk(model, vocabulary, context, True, device, cross=model.cross)
        if model.embeddings == "all":
            self.decoder.tokens = self.encoder.tokens
        self.head = None
        if model.embeddings == "separate":
            self.head = nn.Linear(model.dim, vocabulary, bias=False, device=device)
        specs = (*model.attention.mechanisms, *model.cross.mechanisms)
        self.hides_queries = any(spec.similarity.counts_queries for spec in specs)
        draw_parameters(self, lambda: self._initialise(model))

    @torch.no_grad()
    def _initialise(self, model: "EncoderDecoderConfig") -> None:
        """Fill the parameters; fairseq's scheme sets the embedding of padding to zero."""
        initialise(self, model, tied=self.head is None)
        if model.init.matrices == "fairseq":
            for trunk in (self.encoder, self.decoder):
                trunk.tokens.weight[PADDING] = 0

    def forward(self, source: Tensor, inputs: Tensor) -> Tensor:
        """Return logits (B, n, V) of the tokens that follow `inputs` (B, n)."""
        return self.logits(self.decode(source, inputs))

    def nll(self, source: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return -log p(target) in nats, (B, n), at least float32; 0 where a target is IGNORED."""
        hidden = self.decode(source, inputs)
        losses = token_losses(hidden.flatten(0, 1), self.output_weight, targets.flatten())
        return losses.unflatten(0, targets.shape)

    def total_loss(
        self, source: Tensor, inputs: Tensor, targets: Tensor, label_smoothing: float
    ) -> Tensor:
        """Return the sum of the label-smoothed losses of `targets` (B, n) that are not IGNORED.

        As in torch, all V tokens share `label_smoothing`.
        """
        hidden = self.decode(source, inputs).flatten(0, 1)
        return total_loss(hidden, self.output_weight, targets.flatten(), label_smoothing)

    def decode(self, source: Tensor, inputs: Tensor) -> Tensor:
        """Return the decoder's output (B, n, d) for `inputs` (B, n)."""
        tokens, mask = self.encode(source)
        present = None
        if self.hides_queries:
            present = inputs != PADDING
            mask = mask & present[:, None, :, None]
        return self.decoder(inputs, present, memory=(tokens, mask))

    def fill_caches(self, source: Tensor, inputs: Tensor) -> list[Cache]:
        """Return the decoder's caches with `inputs` (B, n) and the memory of `source` (B, m)."""
        caches = self.decoder.new_caches()
        self.decoder(inputs, caches=caches, memory=self.encode(source))
        return caches

    @property
    def output_weight(self) -> Tensor:
        """Weight (V, d) that turns the decoder's output into logits."""
        return self.decoder.tokens.weight if self.head is None else self.head.weight

    def encode(self, source: Tensor) -> Memory:
        """Return the memory of the sentences `source` (B, m)."""
        present = source != PADDING
        return self.encoder(source, present), present[:, None, None, :]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the decoder's output, (B, n, d) -> (B, n, V)."""
        return F.linear(hidden, self.output_weight)


class EncoderDecoderConfig(TokenTransformer, kind="encoder-decoder"):
    """Bidirectional encoder, and causal decoder with cross-attention, of `depth` blocks each."""

    takes = (signatures.ParallelTokens,)
    builder = (EncoderDecoder, "vocabulary", "context")
    cross_attention: AttentionSpec | None = Field(
        None, description="attention of the decoder to the encoder; null: that of `attention`"
    )
    embeddings: Literal["separate", "decoder", "all"] = Field(
        "decoder",
        description="shared embedding; decoder: of the decoder's input and output; all: also of "
        "the encoder's input; separate: none",
    )
    branches: Literal["sequential"] = Field("sequential", description="order of the branches")

    @property
    def cross(self) -> AttentionSpec:
        """Attention of the decoder to the encoder."""
        return self.cross_attention or self.attention

    def check(self, signature: signatures.TokenSignature) -> None:
        for spec in (self.attention, self.cross):
            model = self.model_copy(update={"attention": spec})
            TokenTransformer.check(model, signature)

    @consistency_check
    def _cross_attention_has_a_meaning(self) -> None:
        """Refuse parts of the attention that cross-attention cannot have."""
        key = "attention" if self.cross_attention is None else "cross_attention"
        for spec in self.cross.mechanisms:
            cross_problem = spec.find_cross_problem()
            if cross_problem:
                raise ValueError(f"{key}.{cross_problem}")
        require_heads(self.cross, self.heads, self.depth)
