"""Sequence classifier of the Long Range Arena (Tay et al. 2021, arXiv:2011.04006).

It follows github.com/minhtannguyen/transformer-mgk (MGK, arXiv:2110.08678), whose arena code comes
from github.com/mlpen/Nystromformer.

Shapes: B batch, n tokens, d width. tokens: (B, n), or (B, 2, n) for pairs of documents; `present`
has the same shape and is False where a token is padding. logits: (B, classes).
"""

import torch
from torch import Tensor, nn

from lit_attn.config.models import language
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import by_name
from lit_attn.models.trunk import Trunk, initialise


class SequenceClassifier(nn.Module):
    """Bidirectional trunk, mean pooling, then Linear, ReLU, Linear.

    For pairs of documents the classifier sees [x0, x1, x0 x1, x0 - x1] of their pooled vectors.
    """

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
        if self.pairs:
            first, second = (self.document(tokens[:, i], present[:, i]) for i in (0, 1))
            features = torch.cat([first, second, first * second, first - second], dim=-1)
        else:
            features = self.document(tokens, present)
        logits: Tensor = self.classifier(features)
        return logits

    def document(self, tokens: Tensor, present: Tensor) -> Tensor:
        """Return the pooled vector of each document, (B, d)."""
        hidden = self.trunk(tokens, present)
        weights = present.to(hidden.dtype)[..., None]
        total = (hidden * weights).sum(1)
        return total / (tokens.shape[1] if self.pool == "zero-padded" else weights.sum(1))


def build(
    model: language.SequenceClassifierConfig,
    vocabulary: int,
    context: int,
    classes: int,
    pairs: bool = False,
    device: Device = None,
) -> SequenceClassifier:
    """Build the network that `model` describes; initialise it except on the meta device."""
    network = SequenceClassifier(model, vocabulary, context, classes, pairs, device)
    if not network.trunk.tokens.weight.is_meta:
        with by_name(network):
            initialise(network, model, tied=False)
    return network
