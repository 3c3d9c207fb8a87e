"""Images and histograms that TensorBoard shows of a cell."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.finished_cells import train_cell
from helpers.training_cells import digits_cell
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_attn.training.board_images import (
    CAPTION_HEIGHT,
    SAMPLES,
    describe_prediction,
    draw_maps,
    draw_sample,
)


def read_image(events: EventAccumulator, tag: str) -> np.ndarray[Any, Any]:
    """Return the only image of a tag."""
    (event,) = events.Images(tag)
    return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))


@pytest.mark.process
def test_a_cell_shows_predictions_maps_and_histograms(uninterrupted: Path, tmp_path: Path) -> None:
    training = {"diagnostics": {"kinds": ["maps"]}, "histograms": ["*norm*.weight", "*gamma*"]}
    cell = digits_cell(training=training)
    assert cell.fingerprint == digits_cell().fingerprint
    folder = train_cell(cell, tmp_path)
    # Neither the pictures nor the histograms change what the cell computes.
    written = (folder / "metrics.csv").read_bytes()
    assert written == (uninterrupted / "metrics.csv").read_bytes()
    events = EventAccumulator(str(folder), {"images": 0, "histograms": 0}).Reload()
    tags = events.Tags()
    pictures = [tag for tag in tags["images"] if tag.startswith("pictures/")]
    assert pictures == [f"pictures/{number}" for number in range(SAMPLES)]
    assert read_image(events, "pictures/0").shape[0] == 96 + CAPTION_HEIGHT
    maps = [tag for tag in tags["images"] if tag.startswith("attention/")]
    assert maps == ["attention/layer-1", "attention/layer-2"]
    with np.load(folder / "attention.npz") as arrays:
        stored = arrays["map.1"]
    shown = read_image(events, "attention/layer-1")
    assert shown.shape[:2] == draw_maps(stored).shape
    assert len(events.Histograms("weights/blocks.0.norm1.weight")) == 3
    assert all("norm" in tag for tag in tags["histograms"])


def test_a_map_has_one_panel_for_each_head() -> None:
    maps = np.array([[[1.0, 0.0], [0.5, 0.5]], [[0.2, 0.0], [0.1, 0.1]]])
    drawn = draw_maps(maps)
    assert drawn.shape == (64, 2 * (64 + 2))
    for left in (0, 66):
        panel = drawn[:, left : left + 64]
        assert panel[0, 0] == 1
        assert panel[0, 63] == 0
        assert panel[63, 0] == pytest.approx(0.5)
    assert not draw_maps(np.zeros((1, 2, 2)))[:, :64].any()


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_of_any_scale_is_drawn_with_its_caption(channels: int) -> None:
    image = np.linspace(-3, 5, channels * 8 * 8, dtype=np.float32).reshape(channels, 8, 8)
    drawn = draw_sample(image, "class 3, predicted 5")
    assert drawn.shape[0] == 96 + CAPTION_HEIGHT
    assert drawn.shape[1] >= 96
    assert drawn[0, 0, 0] == 0
    assert drawn[95, 95, 2] == 255
    assert (drawn[96:] < 128).any()


def test_a_caption_has_the_class_or_the_numbers() -> None:
    logits = torch.tensor([0.1, 0.7, 0.2])
    assert describe_prediction(torch.tensor(2), logits) == "class 2, predicted 1"
    numbers = describe_prediction(torch.tensor([1.5]), torch.tensor([1.25]))
    assert numbers == "1.5; predicted 1.25"
