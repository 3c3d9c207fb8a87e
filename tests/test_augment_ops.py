"""Every operation on a batch equals Pillow's (or torchvision's, timm's) on each image."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from lit_attn.data.augment import pixels, shapes
from lit_attn.data.augment.mixing import cutmix, mixup

FILL = (125, 7, 250)


def images(n: int = 12, size: int = 32) -> Tensor:
    """Noise, smooth ramps, constants, and images of few values: what breaks histograms."""
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
    pixels.brightness: ImageEnhance.Brightness,
    pixels.color: ImageEnhance.Color,
    pixels.contrast: ImageEnhance.Contrast,
    pixels.sharpness: ImageEnhance.Sharpness,
}


@pytest.mark.parametrize("operation", ENHANCE, ids=lambda f: f.__name__)
def test_enhancements(operation: object) -> None:
    x = images()
    factors = torch.linspace(0.1, 1.9, len(x))
    enhanced = [
        ENHANCE[operation](pil(i)).enhance(f) for i, f in zip(x, factors.tolist(), strict=True)
    ]
    same(operation(x, factors), enhanced)


@pytest.mark.parametrize(
    ("operation", "reference"),
    [
        (pixels.autocontrast, ImageOps.autocontrast),
        (pixels.equalize, ImageOps.equalize),
        (pixels.invert, ImageOps.invert),
    ],
)
def test_operations_without_magnitude(operation: object, reference: object) -> None:
    x = images()
    same(operation(x, torch.zeros(len(x))), [reference(pil(i)) for i in x])


def test_posterize_and_solarize() -> None:
    x = images(9)
    bits = torch.arange(9).clamp(1, 8).float()
    same(
        pixels.posterize(x, bits),
        [ImageOps.posterize(pil(i), int(b)) for i, b in zip(x, bits, strict=True)],
    )
    thresholds = torch.linspace(0, 256, 9)
    same(
        pixels.solarize(x, thresholds),
        [ImageOps.solarize(pil(i), float(t)) for i, t in zip(x, thresholds, strict=True)],
    )


def test_solarize_add() -> None:
    x = images(4)
    added = (x.int() + 51).clamp(0, 255).to(torch.uint8)
    expected = [ImageOps.solarize(pil(i), 128) for i in added]
    same(pixels.solarize_add(x, torch.full((4,), 51.3)), expected)


def affine(image: Tensor, *matrix: float) -> Image.Image:
    size = image.shape[-2:][::-1]
    return pil(image).transform(
        tuple(size), Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=FILL
    )


@pytest.mark.parametrize("size", [32, 33])
def test_shapes_against_pillow(size: int) -> None:
    x = images(13, size)
    fill = torch.tensor(FILL, dtype=torch.uint8)
    shear = torch.linspace(-0.3, 0.3, 13, dtype=torch.double)
    pairs = list(zip(x, shear.tolist(), strict=True))
    same(shapes.shear_x(x, shear, fill), [affine(i, 1, a, 0, 0, 1, 0) for i, a in pairs])
    same(shapes.shear_y(x, shear, fill), [affine(i, 1, 0, 0, a, 1, 0) for i, a in pairs])
    move = torch.linspace(-46.7, 46.7, 13, dtype=torch.double)
    pairs = list(zip(x, move.tolist(), strict=True))
    same(shapes.translate_x(x, move, fill), [affine(i, 1, 0, a, 0, 1, 0) for i, a in pairs])
    same(shapes.translate_y(x, move, fill), [affine(i, 1, 0, 0, 0, 1, a) for i, a in pairs])
    turn = torch.linspace(-30, 30, 13, dtype=torch.double)
    turned = [pil(i).rotate(a, fillcolor=FILL) for i, a in zip(x, turn.tolist(), strict=True)]
    same(shapes.rotate(x, turn, fill), turned)


def test_cutout_against_pillow() -> None:
    x = images(6)
    centres = torch.tensor([[0.0, 0.0], [31.9, 31.9], [16.2, 3.7], [5.5, 30.1], [10, 10], [31, 0]])
    drawn = []
    for image, (cx, cy) in zip(x, centres.tolist(), strict=True):
        copy = pil(image)
        left, top = int(max(0, cx - 18.67 / 2)), int(max(0, cy - 18.67 / 2))
        right, bottom = min(32, left + 18.67), min(32, top + 18.67)
        ImageDraw.Draw(copy).rectangle((left, top, int(right), int(bottom)), FILL)
        drawn.append(copy)
    fill = torch.tensor(FILL, dtype=torch.uint8)
    same(shapes.cutout(x, 18.67, centres[:, 0], centres[:, 1], fill), drawn)


def test_flip_and_crop() -> None:
    x = images(4)
    flipped = shapes.flip(x, torch.tensor([True, False, True, False]))
    assert torch.equal(flipped[0], x[0].flip(-1))
    assert torch.equal(flipped[1], x[1])
    top, left = torch.tensor([0, 4, 8, 3]), torch.tensor([8, 4, 0, 5])
    cropped = shapes.crop(x, 4, top, left)
    for i in range(4):
        padded = ImageOps.expand(pil(x[i]), 4)
        box = (int(left[i]), int(top[i]), int(left[i]) + 32, int(top[i]) + 32)
        assert torch.equal(cropped[i], tensor(padded.crop(box)))
    assert torch.equal(cropped[1], x[1])


def test_erase_sets_the_box_to_the_mean() -> None:
    x = torch.randn(3, 3, 8, 8)
    mean = torch.tensor([0.5, 0.4, 0.3])
    boxes = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0], [5, 5, 3, 3]])
    erased = shapes.erase(x, boxes, mean)
    assert torch.equal(erased[0, :, 1:4, 2:6], mean.view(3, 1, 1).expand(3, 3, 4))
    assert torch.equal(erased[1], x[1])
    assert (erased != x).sum() == 3 * (12 + 9)


def test_mixup_and_cutmix_weights() -> None:
    ones, zeros = torch.ones(2, 3, 10, 10), torch.zeros(2, 3, 10, 10)
    assert torch.equal(mixup(ones, zeros, 0.3), torch.full_like(ones, 0.3))
    for x, y, lam in ((0.5, 0.5, 0.75), (0.0, 0.0, 0.5), (0.99, 0.2, 0.0)):
        mixed, kept = cutmix(ones, zeros, lam, x, y)
        assert mixed[0, 0].mean().item() == pytest.approx(kept)
    _, kept = cutmix(ones, zeros, 0.75, 0.5, 0.5)
    side = int(10 * math.sqrt(0.25))
    assert kept == pytest.approx(1 - (side // 2 * 2) ** 2 / 100)
