"""Sequence classification by a bidirectional encoder with mean pooling.

Shapes: B batch, n tokens, d width. tokens: (B, n), or (B, 2, n) for pairs of documents; `present`
has the same shape and is False where a token is padding. logits: (B, classes).
"""

import torch
from torch import Tensor, nn

from lit_attn.config.models import language
from lit_attn.models.initialisation import initialise
from lit_attn.models.seeded_draws import by_name
from lit_attn.models.trunk import Device, Trunk


class SequenceClassifier(nn.Module):
    """Linear, ReLU, Linear on the mean x; on [x0, x1, x0 x1, x0 - x1] where documents are pairs."""

    def __init__(
        self,
        model: language.SequenceClassifierConfig,
        vocabulary: int,
        context: int,
        classes: int,
        pairs: bool = False,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.pool = model.pool
        self.pairs = pairs
        self.trunk = Trunk(model, vocabulary, context, is_causal=False, device=device)
        features = 4 * model.dim if pairs else model.dim
        self.classifier = nn.Sequential(
            nn.Linear(features, model.classifier_width, device=device),
            nn.ReLU(),
            nn.Linear(model.classifier_width, classes, device=device),
        )

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        if not self.pairs:
            return self._classified(self.document(tokens, present))
        first, second = (self.document(tokens[:, i], present[:, i]) for i in (0, 1))
        return self._classified(torch.cat([first, second, first * second, first - second], dim=-1))

    def document(self, tokens: Tensor, present: Tensor) -> Tensor:
        """The pooled vector of each document, (B, d)."""
        hidden = self.trunk(tokens, present)
        if self.pool == "positions":
            return hidden.mean(1)
        weights = present.to(hidden.dtype)[..., None]
        return (hidden * weights).sum(1) / weights.sum(1)

    def _classified(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(features)
        return logits


def build(
    model: language.SequenceClassifierConfig,
    vocabulary: int,
    context: int,
    classes: int,
    pairs: bool = False,
    device: Device = None,
) -> SequenceClassifier:
    """The network that `model` describes, initialised; nothing is allocated on "meta"."""
    network = SequenceClassifier(model, vocabulary, context, classes, pairs, device)
    if network.trunk.tokens.weight.device.type != "meta":
        with by_name(network):
            initialise(network, model, tied=False)
    return network
