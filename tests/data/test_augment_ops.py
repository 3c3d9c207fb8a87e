"""Every operation on a batch equals Pillow's (or torchvision's, timm's) on each image."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from timm.data.mixup import cutmix_bbox_and_lam, mixup_target
from torch import Tensor

from lit_attn.config import augment as config
from lit_attn.data.augment import operations, policies
from lit_attn.data.augment.steps import Mix, MixDraw, cutmix

FILL = (125, 7, 250)


def images(n: int = 12, size: int = 32) -> Tensor:
    """Return noise, ramps, constants and images of few values, which test histograms."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    ramp = torch.arange(size).view(1, 1, size).expand(3, size, size)
    x[0] = 77
    x[1] = (ramp * 3 + 40).to(torch.uint8)
    x[2] = (ramp % 2 * 255).to(torch.uint8)
    x[3, 1:] = 0
    return x


def pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def same(batch: Tensor, singles: list[Image.Image]) -> None:
    expected = torch.stack([tensor(image) for image in singles])
    torch.testing.assert_close(batch, expected, rtol=0, atol=0)


ENHANCE = {
    operations.brightness: ImageEnhance.Brightness,
    operations.color: ImageEnhance.Color,
    operations.contrast: ImageEnhance.Contrast,
    operations.sharpness: ImageEnhance.Sharpness,
}


@pytest.mark.parametrize("operation", ENHANCE, ids=lambda f: f.__name__)
def test_enhancements_equal_those_of_pillow(operation: object) -> None:
    x = images()
    factors = torch.linspace(0.1, 1.9, len(x))
    enhanced = [
        ENHANCE[operation](pil(i)).enhance(f) for i, f in zip(x, factors.tolist(), strict=True)
    ]
    same(operation(x, factors), enhanced)


@pytest.mark.parametrize(
    ("operation", "reference"),
    [
        (operations.autocontrast, ImageOps.autocontrast),
        (policies.PIXELS["Equalize"], ImageOps.equalize),
        (policies.PIXELS["Invert"], ImageOps.invert),
    ],
)
def test_operations_without_magnitude(operation: object, reference: object) -> None:
    x = images()
    same(operation(x, torch.zeros(len(x))), [reference(pil(i)) for i in x])


def test_grey_images() -> None:
    x = images()[:, :1]
    factors = torch.linspace(0.1, 1.9, len(x))
    for operation in ENHANCE:
        enhanced = [
            ENHANCE[operation](Image.fromarray(i[0].numpy())).enhance(f)
            for i, f in zip(x, factors.tolist(), strict=True)
        ]
        expected = torch.stack([torch.from_numpy(np.array(image)) for image in enhanced])
        assert torch.equal(operation(x, factors)[:, 0], expected)


def test_posterize_and_solarize() -> None:
    x = images(9)
    bits = torch.arange(9).clamp(1, 8).float()
    same(
        operations.posterize(x, bits),
        [ImageOps.posterize(pil(i), int(b)) for i, b in zip(x, bits, strict=True)],
    )
    thresholds = torch.linspace(0, 256, 9)
    same(
        operations.solarize(x, thresholds),
        [ImageOps.solarize(pil(i), float(t)) for i, t in zip(x, thresholds, strict=True)],
    )


def test_solarize_add() -> None:
    x = images(4)
    added = (x.int() + 51).clamp(0, 255).to(torch.uint8)
    expected = [ImageOps.solarize(pil(i), 128) for i in added]
    same(operations.solarize_add(x, torch.full((4,), 51.3)), expected)


def affine(
    image: Tensor, *matrix: float, by: Image.Resampling = Image.Resampling.NEAREST
) -> Image.Image:
    size = tuple(image.shape[-2:][::-1])
    return pil(image).transform(size, Image.Transform.AFFINE, matrix, by, fillcolor=FILL)


@pytest.mark.parametrize("size", [32, 33])
def test_geometric_operations_equal_those_of_pillow(size: int) -> None:
    x = images(13, size)
    fill = torch.tensor(FILL, dtype=torch.uint8)
    shear = torch.linspace(-0.3, 0.3, 13, dtype=torch.double)
    pairs = list(zip(x, shear.tolist(), strict=True))
    same(operations.shear_x(x, shear, fill), [affine(i, 1, a, 0, 0, 1, 0) for i, a in pairs])
    same(operations.shear_y(x, shear, fill), [affine(i, 1, 0, 0, a, 1, 0) for i, a in pairs])
    by = Image.Resampling.BICUBIC
    smooth_x = [affine(i, 1, a, 0, 0, 1, 0, by=by) for i, a in pairs]
    smooth_y = [affine(i, 1, 0, 0, a, 1, 0, by=by) for i, a in pairs]
    same(operations.shear_x_bicubic(x, shear, fill), smooth_x)
    same(operations.shear_y_bicubic(x, shear, fill), smooth_y)
    move = torch.linspace(-46.7, 46.7, 13, dtype=torch.double)
    pairs = list(zip(x, move.tolist(), strict=True))
    same(operations.translate_x(x, move, fill), [affine(i, 1, 0, a, 0, 1, 0) for i, a in pairs])
    same(operations.translate_y(x, move, fill), [affine(i, 1, 0, 0, 0, 1, a) for i, a in pairs])
    turn = torch.linspace(-30, 30, 13, dtype=torch.double)
    turned = [pil(i).rotate(a, fillcolor=FILL) for i, a in zip(x, turn.tolist(), strict=True)]
    same(operations.rotate(x, turn, fill), turned)


@pytest.mark.parametrize("side", [18.67, 10.0, 40.0])
def test_cutout_equals_that_of_pillow(side: float) -> None:
    x = images(6)
    centres = torch.tensor([[1.0, 1.0], [31.9, 31.9], [16.2, 3.7], [5.5, 30.1], [10, 10], [31, 2]])
    drawn = []
    for image, (cx, cy) in zip(x, centres.tolist(), strict=True):
        copy = pil(image)
        left, top = int(max(0, cx - side / 2)), int(max(0, cy - side / 2))
        box = (left, top, min(32, left + side), min(32, top + side))
        ImageDraw.Draw(copy).rectangle(box, FILL)
        drawn.append(copy)
    fill, sides = torch.tensor(FILL, dtype=torch.uint8), torch.full((6,), side)
    same(operations.cutout(x, sides, centres[:, 0], centres[:, 1], fill), drawn)


def test_flip_and_crop() -> None:
    x = images(4)
    flipped = operations.flip(x, torch.tensor([True, False, True, False]))
    assert torch.equal(flipped[0], x[0].flip(-1))
    assert torch.equal(flipped[1], x[1])
    top, left = torch.tensor([0, 4, 8, 3]), torch.tensor([8, 4, 0, 5])
    cropped = operations.crop(x, 4, top, left)
    for i in range(4):
        padded = ImageOps.expand(pil(x[i]), 4)
        box = (int(left[i]), int(top[i]), int(left[i]) + 32, int(top[i]) + 32)
        assert torch.equal(cropped[i], tensor(padded.crop(box)))
    assert torch.equal(cropped[1], x[1])


def test_erase_sets_the_box_to_the_mean() -> None:
    x = torch.randn(3, 3, 8, 8)
    mean = torch.tensor([0.5, 0.4, 0.3])
    boxes = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0], [5, 5, 3, 3]])
    erased = operations.erase(x, boxes, mean)
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
    mix, others = Mix(config.MixConfig(), 4), torch.arange(6).flip(0)
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
