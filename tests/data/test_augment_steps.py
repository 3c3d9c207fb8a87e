"""Steps on a batch: flips, crops, erasing, MixUp and CutMix, against Pillow's and timm's."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data.mixup import cutmix_bbox_and_lam, mixup_target
from torch import Tensor

from lit_attn.data.augment.base import ImageFormat
from lit_attn.data.augment.steps import (
    Crop,
    CropConfig,
    Erasing,
    ErasingConfig,
    Flip,
    FlipConfig,
    Mix,
    MixConfig,
    MixDraw,
    cutmix,
)

FORMAT = ImageFormat((3, 32, 32), 4, [0.5, 0.4, 0.3], [1.0] * 3)


def pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_flip_and_crop() -> None:
    x = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    flipped = Flip(FlipConfig(), FORMAT).apply(x, (torch.tensor([True, False, True, False]),))
    assert torch.equal(flipped[0], x[0].flip(-1))
    assert torch.equal(flipped[1], x[1])
    top, left = torch.tensor([0, 4, 8, 3]), torch.tensor([8, 4, 0, 5])
    cropped = Crop(CropConfig(padding=4), FORMAT).apply(x, (top, left))
    for i in range(4):
        padded = ImageOps.expand(pil(x[i]), 4)
        box = (int(left[i]), int(top[i]), int(left[i]) + 32, int(top[i]) + 32)
        assert torch.equal(cropped[i], tensor(padded.crop(box)))
    assert torch.equal(cropped[1], x[1])


def test_erase_sets_the_box_to_the_mean() -> None:
    x, mean = torch.randn(3, 3, 8, 8), torch.tensor(FORMAT.mean)
    boxes = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0], [5, 5, 3, 3]])
    erased = Erasing(ErasingConfig(), FORMAT).apply(x, (boxes,))
    assert torch.equal(erased[0, :, 1:4, 2:6], mean.view(3, 1, 1).expand(3, 3, 4))
    assert torch.equal(erased[1], x[1])
    assert (erased != x).sum() == 3 * (12 + 9)


def test_cutmix_returns_the_share_of_pixels_that_it_keeps() -> None:
    ones, zeros = torch.ones(2, 3, 10, 10), torch.zeros(2, 3, 10, 10)
    for row, column, weight in ((0.5, 0.5, 0.75), (0.0, 0.0, 0.5), (0.99, 0.2, 0.0)):
        mixed, share = cutmix(ones, zeros, weight, row, column)
        assert mixed[0, 0].mean().item() == pytest.approx(share)
    _, share = cutmix(ones, zeros, 0.75, 0.5, 0.5)
    side = int(10 * math.sqrt(0.25))
    assert share == pytest.approx(1 - (side // 2 * 2) ** 2 / 100)


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.75, 0.96])
def test_mixes_equal_those_of_timm(weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timm mixes with the reversed batch, so the draw is the reversed order.

    Boxes have even sides, because timm covers one pixel more of an odd side than CutMix's authors
    and torchvision do.
    """
    x, y = torch.rand(6, 3, 32, 32), torch.arange(6) % 4
    mix, others = Mix(MixConfig(), FORMAT), torch.arange(6).flip(0)
    centre = (0.21, 0.83)

    mixed, targets = mix.apply(x, y, MixDraw("mixup", weight, centre, others))
    torch.testing.assert_close(mixed, weight * x + (1 - weight) * x.flip(0), rtol=0, atol=0)
    torch.testing.assert_close(targets, mixup_target(y, 4, weight))

    places = iter([int(place * 32) for place in centre])
    monkeypatch.setattr(np.random, "randint", lambda *a, **k: next(places))
    (top, bottom, left, right), share = cutmix_bbox_and_lam(x.shape, weight)
    expected = x.clone()
    expected[..., top:bottom, left:right] = x.flip(0)[..., top:bottom, left:right]
    mixed, targets = mix.apply(x, y, MixDraw("cutmix", weight, centre, others))
    torch.testing.assert_close(mixed, expected, rtol=0, atol=0)
    torch.testing.assert_close(targets, mixup_target(y, 4, share))
