"""MixUp and CutMix equal those of timm, bit for bit."""

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data import Mixup

from lit_attn.data.augment.timm_augmentation import TimmAugmentation, draw_box, mix_batch
from lit_attn.data.loading import use_seed

ALPHAS = [(0.8, 1.0), (0.8, 0.0), (0.0, 1.0), (0.001, 0.001)]


def old_box(shape: tuple[int, ...], weight: float, **_: Any) -> list[int]:
    """Return the box of timm 0.3.2, drawn from NumPy's global generator."""
    height, width = shape[-2:]
    cut_height = int(height * np.sqrt(1 - weight))
    cut_width = int(width * np.sqrt(1 - weight))
    row = np.random.randint(height)
    column = np.random.randint(width)
    top, bottom = np.clip([row - cut_height // 2, row + cut_height // 2], 0, height)
    left, right = np.clip([column - cut_width // 2, column + cut_width // 2], 0, width)
    return [int(edge) for edge in (top, bottom, left, right)]


@given(
    seed=st.integers(0, 2**32 - 1),
    alphas=st.sampled_from(ALPHAS),
    pairs=st.integers(1, 3),
    sides=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
@settings(max_examples=60, deadline=None)
def test_batches_equal_those_of_timm(
    seed: int, alphas: tuple[float, float], pairs: int, sides: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2 * pairs, 3, *sides, generator=generator)
    labels = torch.randint(5, (2 * pairs,), generator=generator)
    mix = Mixup(*alphas, label_smoothing=0.0, num_classes=5)
    with use_seed(seed), patch("timm.data.mixup.rand_bbox", old_box):
        expected_images, expected_targets = mix(images.clone(), labels)
    augment = TimmAugmentation(mixup=alphas[0], cutmix=alphas[1])
    mixed, targets = mix_batch(images, labels, 5, augment, seed)
    assert torch.equal(mixed, expected_images)
    assert torch.equal(targets, expected_targets)


@pytest.mark.parametrize("weight", [0.0, 0.4, 0.7])
def test_boxes_of_cutmix_inside_the_image_have_even_sides_as_in_the_released_timm(
    weight: float,
) -> None:
    inside = 0
    for seed in range(40):
        top, bottom, left, right = draw_box((2, 3, 33, 31), weight, np.random.RandomState(seed))
        assert 0 <= top < bottom <= 33
        assert 0 <= left < right <= 31
        if 0 < top < bottom < 33:
            inside += 1
            assert bottom - top == int(33 * math.sqrt(1 - weight)) // 2 * 2
    assert inside or weight == 0
