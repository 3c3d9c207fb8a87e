"""Language modelling.

Shapes: inputs and targets (B, n) int64; targets that are not to be predicted are IGNORED.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from lit_attn.attention.precision import wide
from lit_attn.data.text.ids import IGNORED
from lit_attn.tasks.base import TaskModule


class LanguageModelling(TaskModule):
    """Cross-entropy per token; loss, perplexity and bits per byte over all tokens of a split."""

    network_methods: tuple[str, ...] = ("nll", "target_logits")
    evaluates_in_step = True

    def build_metrics(self, split: str) -> Metric:
        return TokenLoss(self.data.bytes_per_token(split))

    def metric_names(self, split: str) -> list[str]:
        names = ["loss", "perplexity"]
        if self.data.bytes_per_token(split) is not None:
            names.append("bits_per_byte")
        return names

    def chance_levels(self, split: str) -> dict[str, float]:
        """Return the loss of equal probabilities for all ids."""
        return {"loss": math.log(self.data.signature.vocabulary)}

    def list_compiled(self) -> list[nn.Module]:
        """Return the trunk of a GPT, or another network.

        The adaptive head of a GPT selects its computation by the targets, which does not compile.
        """
        return [getattr(self.network, "trunk", self.network)]

    def loss(self, batch: Any) -> Tensor:
        """Return the mean of -log p of the targets, without those that are IGNORED.

        With several processes it is the mean of their means.
        """
        target_count = (batch[-1] != IGNORED).sum()
        return self.nll(batch).sum() / target_count.clamp(min=1)

    def evaluate(self, batch: Any) -> tuple[Tensor, ...]:
        """Return -log p of every target, and the targets."""
        return self.nll(batch), batch[-1]

    def unit_values(self, *arguments: Tensor) -> Tensor:
        nll, targets, *_ = arguments
        losses = nll.sum(1).float()
        target_counts = (targets != IGNORED).sum(1).float()
        uncounted = torch.full_like(losses, math.nan)
        return torch.stack([losses, target_counts, uncounted], dim=1)

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return probabilities (N, vocabulary) and the N targets that are to be predicted."""
        targets = evaluated[1]
        probabilities = self.target_logits(batch).softmax(-1)
        return probabilities[:, : self.data.signature.vocabulary], targets[targets != IGNORED]

    def target_logits(self, batch: Any) -> Tensor:
        """Return the logits (N, V), at least float32, of the N targets that are to be predicted.

        A network that has a method `target_logits` computes no others.
        """
        *inputs, targets = batch
        compute_logits = getattr(self.network, "target_logits", None)
        if compute_logits is not None:
            return wide(compute_logits(*inputs, targets))
        return wide(self.network(*self.inputs(batch))[targets != IGNORED])

    def nll(self, batch: Any) -> Tensor:
        """Return -log p(target) in nats, (B, n), at least float32, and 0 where a target is IGNORED.

        A network that has a method `nll` computes it itself.
        """
        *inputs, targets = batch
        compute_nll = getattr(self.network, "nll", None)
        if compute_nll is not None:
            return compute_nll(*inputs, targets)
        logits = wide(self.network(*inputs)).transpose(1, 2)
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")


class TokenLoss(Metric):
    """Loss in nats per token, perplexity, and bits per byte if the amount of text is known."""

    total: Tensor
    tokens: Tensor

    def __init__(self, bytes_per_token: float | None = None) -> None:
        super().__init__()
        self.bytes_per_token = bytes_per_token
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, nll: Tensor, targets: Tensor) -> None:
        """Add -log p (B, n), which is 0 where the target (B, n) is IGNORED."""
        self.total += nll.sum(dtype=torch.float64)
        self.tokens += (targets != IGNORED).sum()

    def compute(self) -> dict[str, Tensor]:
        loss = self.total / self.tokens
        values = {"loss": loss, "perplexity": loss.exp()}
        if self.bytes_per_token is not None:
            values["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return values
