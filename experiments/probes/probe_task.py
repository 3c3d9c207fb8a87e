"""Training and evaluation of probes: the loss, the accuracy, and the steps before one is solved.

Shapes: B sequences, n tokens; N of the B n targets count.
"""

from collections.abc import Mapping
from typing import Any

import torch
from probes import SOLVED
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from lit_attn.data.text.ids import IGNORED
from lit_attn.tasks.language import LanguageModelling


class ProbeTask(LanguageModelling):
    """Cross-entropy of the targets, and the steps after which a split was still unsolved."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # The steps of the last evaluation before a split was solved, by the split's prefix.
        self.unsolved_steps: dict[str, int] = {}
        self.solved: set[str] = set()

    def build_metrics(self, split: str) -> "ProbeMetrics":
        return ProbeMetrics()

    def metric_names(self, split: str) -> list[str]:
        return ["accuracy", "solved", "errors", "loss", "unsolved_steps"]

    def values_of_training(self, prefix: str, values: Mapping[str, float]) -> dict[str, float]:
        """Return the steps of the last evaluation before the split was solved.

        They are 0 if the first evaluation solves it. Until an evaluation does, they are all planned
        steps, so that a lower value is never an earlier one.
        """
        if values[f"{prefix}solved"] == 1:
            self.solved.add(prefix)
        if prefix in self.solved:
            steps = self.unsolved_steps.get(prefix, 0)
        else:
            self.unsolved_steps[prefix] = self.global_step
            steps = self.trainer.max_steps
        return {f"{prefix}unsolved_steps": float(steps)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["unsolved_steps"] = self.unsolved_steps
        checkpoint["solved"] = sorted(self.solved)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.unsolved_steps = dict(checkpoint.get("unsolved_steps", {}))
        self.solved = set(checkpoint.get("solved", []))

    def chance_levels(self, split: str) -> dict[str, float]:
        """Return the accuracy of the best guessing."""
        return {"accuracy": self.data.signature.floor}

    def evaluate(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the logits (N, V) of the N targets that count, and the targets (B, n)."""
        return self.target_logits(batch), batch[-1]

    def unit_values(self, *arguments: Tensor) -> Tensor:
        logits, targets = arguments
        counted = targets != IGNORED
        losses = F.cross_entropy(logits, targets[counted], reduction="none")
        is_correct = (logits.argmax(-1) == targets[counted]).float()
        sums = [counted.sum(1).float()]
        for values in (losses, is_correct):
            by_token = values.new_zeros(targets.shape).masked_scatter(counted, values)
            sums.append(by_token.sum(1))
        counts, loss_sums, correct = sums
        return torch.stack([loss_sums, counts, correct], dim=1)

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return probabilities (N, vocabulary) and the N targets that count."""
        logits, targets = evaluated
        vocabulary = self.data.signature.vocabulary
        return logits.softmax(-1)[:, :vocabulary], targets[targets != IGNORED]


class ProbeMetrics(Metric):
    """Loss and accuracy of all targets, whether it reaches SOLVED, and sequences with an error."""

    total: Tensor
    correct: Tensor
    targets: Tensor
    failed: Tensor
    sequences: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("correct", "targets", "failed", "sequences"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add logits (N, V) of the N targets that count, and targets (B, n)."""
        counted = targets != IGNORED
        counted_targets = targets[counted]
        losses = F.cross_entropy(logits, counted_targets, reduction="none")
        self.total += losses.sum(dtype=torch.float64)
        is_wrong = logits.argmax(-1) != counted_targets
        self.correct += (~is_wrong).sum()
        self.targets += len(counted_targets)
        self.failed += torch.zeros_like(counted).masked_scatter(counted, is_wrong).any(1).sum()
        # A row of padding has no target.
        self.sequences += counted.any(1).sum()

    def compute(self) -> dict[str, Tensor]:
        accuracy = self.correct / self.targets
        return {
            "accuracy": accuracy,
            "solved": (accuracy >= SOLVED).double(),
            "errors": self.failed / self.sequences,
            "loss": self.total / self.targets,
        }
