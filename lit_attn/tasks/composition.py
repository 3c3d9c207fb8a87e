"""Head composition: the answer to a question, and how often it is right in each task of the grid.

Shapes: tokens (B, n) int64, answers and tasks (B,); answers are IGNORED where a row is no question.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from lit_attn.config.data.composition import TASK_NAMES
from lit_attn.config.data.text import IGNORED
from lit_attn.config.metrics import NAMES
from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Rate
from lit_attn.data import composition
from lit_attn.models.gpt import GPT
from lit_attn.tasks.base import Task


class HeadComposition(Task):
    """Cross-entropy of the token after the question; `held_out` are the tasks not trained."""

    network: GPT

    def __init__(
        self,
        network: GPT,
        splits: list[str],
        optimizer: Optimizer,
        rate: Rate,
        held_out: list[int],
    ) -> None:
        self.held_out = held_out
        super().__init__(network, splits, optimizer, rate)

    def metrics_of(self, split: str) -> "Grid":
        return Grid(self.held_out)

    def names_of(self, split: str) -> list[str]:
        return [*NAMES["head-composition"], *TASK_NAMES]

    def loss(self, batch: Any) -> Tensor:
        tokens, answers, _ = batch
        return F.cross_entropy(self._logits(tokens), answers)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """The questions."""
        return (batch[0],)

    def measured(self, batch: Any) -> tuple[Tensor, ...]:
        """Logits of the answer, the answers and the tasks."""
        tokens, answers, tasks = batch
        return self._logits(tokens), answers, tasks

    def _logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network(tokens)[:, -1].float()
        return logits


class Grid(Metric):
    """Loss and accuracy of all questions; accuracy of the trained tasks, of the held-out ones, and
    of each task by its name. What has no question is left out.
    """

    total: Tensor
    right: Tensor
    asked: Tensor

    def __init__(self, held_out: list[int]) -> None:
        super().__init__()
        self.held_out = torch.tensor(held_out, dtype=torch.long)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        zeros = torch.zeros(composition.TASKS, dtype=torch.float64)
        self.add_state("right", zeros, dist_reduce_fx="sum")
        self.add_state("asked", zeros.clone(), dist_reduce_fx="sum")

    def update(self, logits: Tensor, answers: Tensor, tasks: Tensor) -> None:
        """Add logits (B, V), answers (B,), IGNORED where there is no question, and tasks (B,)."""
        self.total += F.cross_entropy(
            logits, answers, ignore_index=IGNORED, reduction="sum"
        ).double()
        asked = (answers != IGNORED).double()
        right = (logits.argmax(-1) == answers).double()
        self.asked.index_add_(0, tasks, asked)
        self.right.index_add_(0, tasks, right)

    def compute(self) -> dict[str, Tensor]:
        held_out = torch.zeros_like(self.asked, dtype=torch.bool)
        held_out[self.held_out] = True
        everything = torch.ones_like(held_out)
        groups = {"accuracy": everything, "trained": ~held_out, "held-out": held_out}
        for task, name in enumerate(TASK_NAMES):
            groups[name] = torch.arange(len(held_out)) == task
        found = {"loss": self.total / self.asked.sum()}
        for name, chosen in groups.items():
            chosen = chosen.to(self.asked.device)
            if self.asked[chosen].sum() > 0:
                found[name] = self.right[chosen].sum() / self.asked[chosen].sum()
        return found
