"""Head composition: loss and accuracy of answers to questions, also by task of the grid.

Shapes: tokens (B, n) int64, answers and tasks (B,); answers are IGNORED in rows that are padding.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from lit_attn.config.data.text import IGNORED
from lit_attn.tasks.base import TaskModule


class HeadComposition(TaskModule):
    """Cross-entropy of the token after a question."""

    def build_metrics(self, split: str) -> "Grid":
        return Grid(self.data.signature.tasks, self.data.signature.held_out)

    def metric_names(self, split: str) -> list[str]:
        return ["accuracy", "trained", "held-out", "loss", *self.data.signature.tasks]

    def loss(self, batch: Any) -> Tensor:
        tokens, answers, _ = batch
        return F.cross_entropy(self._logits(tokens), answers)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0],)

    def evaluate(self, batch: Any) -> tuple[Tensor, ...]:
        """Return logits of the answer, the answers and the tasks."""
        tokens, answers, tasks = batch
        return self._logits(tokens), answers, tasks

    def unit_values(self, *arguments: Tensor) -> Tensor:
        logits, answers, _ = arguments
        losses = F.cross_entropy(logits, answers, ignore_index=IGNORED, reduction="none")
        correct = (logits.argmax(-1) == answers).float()
        return torch.stack([losses, (answers != IGNORED).float(), correct], dim=1)

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return probabilities (N, vocabulary) and the N answers that are not padding."""
        logits, answers, _ = evaluated
        answered = answers != IGNORED
        return logits[answered].softmax(-1)[:, : self.data.signature.vocabulary], answers[answered]

    def _logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network(tokens)[:, -1].float()
        return logits


class Grid(Metric):
    """Loss and accuracy of all questions, and accuracies of trained, held-out and single tasks.

    A group of tasks without a question has no accuracy.
    """

    total: Tensor
    correct: Tensor
    questions: Tensor

    def __init__(self, tasks: tuple[str, ...], held_out: tuple[int, ...]) -> None:
        super().__init__()
        self.tasks = tasks
        self.held_out = torch.tensor(held_out, dtype=torch.long)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        zeros = torch.zeros(len(tasks), dtype=torch.float64)
        self.add_state("correct", zeros, dist_reduce_fx="sum")
        self.add_state("questions", zeros.clone(), dist_reduce_fx="sum")

    def update(self, logits: Tensor, answers: Tensor, tasks: Tensor) -> None:
        """Add logits (B, V), answers (B,), IGNORED in padding rows, and tasks (B,)."""
        loss = F.cross_entropy(logits, answers, ignore_index=IGNORED, reduction="sum")
        self.total += loss.double()
        self.questions.index_add_(0, tasks, (answers != IGNORED).double())
        self.correct.index_add_(0, tasks, (logits.argmax(-1) == answers).double())

    def compute(self) -> dict[str, Tensor]:
        held_out = torch.zeros_like(self.questions, dtype=torch.bool)
        held_out[self.held_out] = True
        groups = {"accuracy": torch.ones_like(held_out), "trained": ~held_out, "held-out": held_out}
        for number, name in enumerate(self.tasks):
            groups[name] = torch.arange(len(held_out), device=held_out.device) == number
        values = {"loss": self.total / self.questions.sum()}
        for name, group in groups.items():
            if self.questions[group].sum() > 0:
                values[name] = self.correct[group].sum() / self.questions[group].sum()
        return values
