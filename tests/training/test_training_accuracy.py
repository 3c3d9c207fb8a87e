"""Accuracy of the batches that train, the mean of an epoch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_attn.data.text.ids import IGNORED
from lit_attn.schema.base import load
from lit_attn.tasks.classification import Classification, TokenClassification
from lit_attn.tasks.task import Task

pytestmark = pytest.mark.slow


def make_task(module: type[Classification], network: nn.Module) -> Any:
    task: Any = module(network, SimpleNamespace(splits=()), None, None)  # type: ignore[arg-type]
    task.loss_function = F.cross_entropy
    return task


def logits_of(*classes: int) -> torch.Tensor:
    return 5 * torch.eye(3)[list(classes)]


def test_every_sample_counts_once() -> None:
    """Three of four are correct, in batches of different sizes."""
    task = make_task(Classification, nn.Identity())
    task.loss((logits_of(0, 1, 2), torch.tensor([0, 1, 0])))
    task.loss((logits_of(2), torch.tensor([2])))
    assert task.train_means["accuracy"].compute() == pytest.approx(3 / 4)


def test_mixed_targets_have_no_accuracy() -> None:
    task = make_task(Classification, nn.Identity())
    task.loss((logits_of(0, 1), torch.full((2, 3), 1 / 3)))
    assert not task.train_means["accuracy"].update_called


def test_tokens_without_a_class_do_not_count() -> None:
    class Known(nn.Module):
        def forward(self, tokens: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
            return 5 * torch.eye(3)[tokens]

    task = make_task(TokenClassification, Known())
    tokens, classes = torch.tensor([[0, 1, 2]]), torch.tensor([[0, IGNORED, 1]])
    task.loss((tokens, torch.ones(1, 3, dtype=torch.bool), classes, torch.tensor(2)))
    assert task.train_means["accuracy"].compute() == pytest.approx(1 / 2)


@pytest.mark.parametrize("kind", sorted(Task.family))
def test_a_configuration_declares_what_its_module_records(kind: str) -> None:
    config: Any = Task.family[kind]
    recorded = load(config.module).training_values if config.module else ()
    assert {metric.name for metric in config.training_metrics} == {f"train/{n}" for n in recorded}
