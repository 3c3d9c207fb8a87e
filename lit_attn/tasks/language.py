"""Language modelling.

Shapes: inputs and targets (B, n) int64, targets IGNORED where nothing is to be predicted.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_attn.config.data.text import IGNORED
from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Rate
from lit_attn.data.text.batches import TextMeasure
from lit_attn.models.gpt import GPT
from lit_attn.tasks.base import Task

UNKNOWN = TextMeasure()


class LanguageModelling(Task):
    """Cross-entropy a token; loss, perplexities and bits per byte over all tokens of every split.

    `text` says of every split how much text its tokens stand for.
    """

    network: GPT

    def __init__(
        self,
        network: GPT,
        splits: list[str],
        optimizer: Optimizer,
        rate: Rate,
        text: dict[str, TextMeasure],
    ) -> None:
        self.text = text
        super().__init__(network, splits, optimizer, rate)

    def metrics_of(self, split: str) -> "TokenLoss":
        return TokenLoss(self.text[split])

    def names_of(self, split: str) -> list[str]:
        measure = self.text[split]
        known = ["bits_per_byte"] * (measure.bytes_per_token is not None)
        known += ["word_perplexity"] * (measure.words_per_token is not None)
        return ["loss", "perplexity", *known]

    def compile_network(self) -> None:
        """All but the head, whose adaptive kind chooses its work by the targets."""
        self.network.trunk.compile()

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return self.network.nll(inputs, targets).mean()

    def measured(self, batch: Any) -> tuple[Tensor, Tensor]:
        """-log p of every target, and the targets."""
        inputs, targets = batch
        return self.network.nll(inputs, targets), targets


class TokenLoss(Metric):
    """Nats a token and perplexity; of the text that the tokens stand for, where that is known, bits
    per byte and the perplexity of its words, which do not depend on the tokenizer.

    Words are those of `count_words`, the end of a line being one.
    """

    total: Tensor
    tokens: Tensor

    def __init__(self, text: TextMeasure = UNKNOWN) -> None:
        super().__init__()
        self.text = text
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, nll: Tensor, targets: Tensor) -> None:
        """Add -log p (B, n), 0 where the target (B, n) is IGNORED."""
        self.total += nll.sum(dtype=torch.float64)
        self.tokens += (targets != IGNORED).sum()

    def compute(self) -> dict[str, Tensor]:
        loss = self.total / self.tokens
        found = {"loss": loss, "perplexity": loss.exp()}
        if self.text.bytes_per_token is not None:
            found["bits_per_byte"] = loss / math.log(2) / self.text.bytes_per_token
        if self.text.words_per_token is not None:
            of_words = (loss / self.text.words_per_token).exp()
            # Text without white space is one word, whose perplexity no float holds.
            if of_words.isfinite():
                found["word_perplexity"] = of_words
        return found
