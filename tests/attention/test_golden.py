"""Losses of the first training steps of every preset, compared with golden_losses.json.

The test detects unintended changes of a mechanism. After an intended change, `python
tests/attention/test_golden.py` writes the file anew.
"""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lit_attn.attention.spec import PRESETS
from lit_attn.data.image_sets import Digits
from lit_attn.data.images import ImageData
from lit_attn.models.base import FFN
from lit_attn.models.vit import ViTConfig, build

GOLDEN = Path(__file__).with_name("golden_losses.json")
STEPS, EVERY = 50, 7
TESTED = 4
"""Number of the first losses that are compared: a change of a mechanism changes all of them."""

PROCESSOR = 1e-4
"""Relative tolerance for another processor: each step amplifies the rounding errors before it."""


def losses(name: str, steps: int = STEPS) -> list[float]:
    """Return the loss at every seventh of `steps` AdamW steps on the digits, in float64."""
    torch.manual_seed(0)
    model = ViTConfig(
        dim=16, depth=2, heads=4, patch=2, ffn=FFN(width=16), attention=PRESETS[name], init="xavier"
    )
    network = build(model, (1, 8, 8), 10).double()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    data = ImageData(Digits(batch_size=32), 0, torch.device("cpu"))
    values = []
    for step, (images, labels) in enumerate(data.train_batches(0, steps)):
        loss = F.cross_entropy(network(images.double()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            values.append(round(loss.item(), 6))
    return values


def test_every_preset_has_golden_losses() -> None:
    assert set(json.loads(GOLDEN.read_text())) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_losses_equal_the_golden_losses(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    steps = EVERY * (TESTED - 1) + 1
    assert losses(name, steps) == pytest.approx(golden[:TESTED], rel=PROCESSOR)
    assert golden[-1] < 0.95 * golden[0]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: losses(name) for name in PRESETS}, indent=1) + "\n")
