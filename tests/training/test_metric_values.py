"""Values of the metrics of tasks, computed by hand from few predictions."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from lit_attn.data.text.ids import IGNORED
from lit_attn.optim.averaging import decay_of_mean
from lit_attn.tasks.classification import Classification, TokenClassification

CLASSES = 6
DATA = SimpleNamespace(signature=SimpleNamespace(classes=CLASSES), largest_class={"val": (0.3, 84)})
LOGITS = torch.tensor(
    [
        [5.0, 4.0, 3.0, 2.0, 1.0, 0.0],
        [5.0, 4.0, 3.0, 2.0, 1.0, 0.0],
        [0.0, 1.0, 2.0, 3.0, 4.0, 9.0],
        [1.0, 1.5, 2.5, 2.0, 1.0, 0.0],
    ]
)
# Ranks of the targets among the logits: 1, 3, 1 and 6.
TARGETS = torch.tensor([0, 2, 5, 5])


def test_the_metrics_of_a_classification() -> None:
    metrics = Classification.build_metrics(SimpleNamespace(data=DATA), "val")
    for part in (slice(0, 1), slice(1, 4)):
        metrics.update(LOGITS[part], TARGETS[part])
    values = {name: value.item() for name, value in metrics.compute().items()}
    assert values["accuracy"] == 0.5
    assert values["top5"] == 0.75
    assert values["loss"] == pytest.approx(F.cross_entropy(LOGITS.double(), TARGETS).item())
    # Fifteen bins of the largest probability: the gap between it and the accuracy counts.
    bins: dict[int, list[float]] = {}
    for row, target in zip(LOGITS.softmax(1), TARGETS, strict=True):
        confidence, prediction = row.max(0)
        is_correct = float(prediction == target)
        bins.setdefault(int(confidence * 15), []).append(confidence.item() - is_correct)
    gaps = [abs(sum(differences)) for differences in bins.values()]
    assert values["calibration"] == pytest.approx(sum(gaps) / len(TARGETS), rel=1e-5)


def test_chance_is_two_standard_errors_above_the_largest_class() -> None:
    levels = Classification.chance_levels(SimpleNamespace(data=DATA), "val")
    assert levels == {"accuracy": pytest.approx(0.3 + 2 * math.sqrt(0.3 * 0.7 / 84))}
    assert Classification.chance_levels(SimpleNamespace(data=DATA), "test") == {}


def test_the_metrics_of_tokens_leave_out_those_without_a_class() -> None:
    classes = TARGETS.clone()
    classes[3] = IGNORED
    metrics = TokenClassification.build_metrics(SimpleNamespace(data=DATA), "val")
    metrics.update(LOGITS.T[None], classes[None])
    values = metrics.compute()
    assert values["accuracy"] == pytest.approx(2 / 3)
    assert values["loss"].item() == pytest.approx(F.cross_entropy(LOGITS[:3], TARGETS[:3]).item())


def test_the_loss_of_a_micro_batch_is_its_share_of_the_steps_mean() -> None:
    """Micro-batches with 1 and 3 tokens have the mean over 4 tokens, not the mean of two means."""
    total = torch.zeros(())
    for part in (slice(0, 1), slice(1, 4)):
        task = SimpleNamespace(
            network=lambda tokens, present: tokens,
            loss_function=F.cross_entropy,
            _count_correct=lambda logits, targets: None,
        )
        batch = (LOGITS[None, part], None, TARGETS[None, part], torch.tensor([2.0]))
        # The training loop takes the mean of two micro-batches.
        total = total + TokenClassification.loss(task, batch) / 2
    torch.testing.assert_close(total, F.cross_entropy(LOGITS, TARGETS))


def test_the_average_of_weights_is_the_mean_over_epochs() -> None:
    """The first two of five epochs do not count; the average does not change within an epoch."""
    average = math.nan
    for step in range(1, 16):
        decay = decay_of_mean(step, epoch_steps=3, unaveraged_epochs=2)
        weight = float(step)
        average = weight if decay == 0.0 else decay * average + (1 - decay) * weight
    assert average == pytest.approx((9 + 12 + 15) / 3)
