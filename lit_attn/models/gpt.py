"""Causal language models: one module, from GPT-2 to Transformer++ and MGK's WikiText models.

Shapes: B batch, n tokens, V vocabulary. tokens: (B, n) int64 -> logits: (B, n, V).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.cache import Cache
from lit_attn.config.data.text import IGNORED
from lit_attn.config.models import language
from lit_attn.models.adaptive import AdaptiveSoftmax
from lit_attn.models.initialisation import initialise
from lit_attn.models.seeded_draws import by_name
from lit_attn.models.trunk import Device, Trunk


class GPT(nn.Module):
    """A causal trunk with a tied, untied or adaptive head."""

    def __init__(
        self, model: language.GPTConfig, vocabulary: int, context: int, device: Device = None
    ) -> None:
        """`context` is the longest sequence; learned positions are as many."""
        super().__init__()
        rows = math.ceil(vocabulary / model.vocabulary_multiple) * model.vocabulary_multiple
        self.trunk = Trunk(model, rows, context, is_causal=True, device=device)
        self.head: nn.Module | None = None
        if model.head == "untied":
            self.head = nn.Linear(model.dim, rows, bias=False, device=device)
        elif model.head == "adaptive":
            self.head = AdaptiveSoftmax(rows, model.dim, model.cutoffs, device)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Logits, which are log-probabilities where the head is adaptive.

        With `caches` (from `trunk.new_caches`), `tokens` are what follows those already in them.
        """
        return self.logits(self.trunk(tokens, caches=caches))

    def logits(self, hidden: Tensor) -> Tensor:
        """The same of what the trunk returns, (B, n, d) -> (B, n, V)."""
        if isinstance(self.head, AdaptiveSoftmax):
            flat = self.head.log_probabilities(hidden.flatten(0, 1), self.trunk.tokens.weight)
            return flat.unflatten(0, hidden.shape[:2])
        if self.head is not None:
            logits: Tensor = self.head(hidden)
            return logits
        return F.linear(hidden, self.trunk.tokens.weight)

    def nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """-log p(target) in nats, (B, n), in float32 or wider; 0 where the target is IGNORED."""
        if not isinstance(self.head, AdaptiveSoftmax):
            logits = self(tokens).flatten(0, 1)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            flat = F.cross_entropy(
                logits, targets.flatten(), ignore_index=IGNORED, reduction="none"
            )
            return flat.unflatten(0, targets.shape)
        hidden = self.trunk(tokens).flatten(0, 1)
        predicted = targets.flatten() != IGNORED
        found = self.head.nll(
            hidden[predicted], targets.flatten()[predicted], self.trunk.tokens.weight
        )
        nll = found.new_zeros(targets.numel())
        return nll.masked_scatter(predicted, found).unflatten(0, targets.shape)


def build(model: language.GPTConfig, vocabulary: int, context: int, device: Device = None) -> GPT:
    """The network that `model` describes, initialised; nothing is allocated on "meta"."""
    network = GPT(model, vocabulary, context, device)
    if network.trunk.tokens.weight.device.type != "meta":
        with by_name(network):
            initialise(network, model, tied=model.head != "untied")
    return network
