"""The plug-in for the RandAugment of the ViT-small CIFAR set-up."""

import importlib

import numpy as np
import pytest
import torch
from helpers import pillow_operations
from helpers.paths import EXPERIMENTS
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from lit_attn.data.augment.base import ImageFormat
from lit_attn.data.augment.operations import MATRICES
from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "cifar_vit_small" / "blanking_randaugment.py"])
code = importlib.import_module("blanking_randaugment")
CONFIG = code.BlankingRandAugmentConfig

FORMAT = ImageFormat((3, 32, 32), 4, [0.5] * 3, [1.0] * 3)
BLANKING = CONFIG().build(FORMAT)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(n: int = 64) -> Tensor:
    return torch.randint(256, (n, 3, 32, 32), generator=generator(9), dtype=torch.uint8)


def test_the_policy_equals_pillow_on_the_same_draws() -> None:
    pillow_operations.assert_equals_pillow(BLANKING, batch(400), generator(3))


def test_23_percent_of_the_images_are_black() -> None:
    """Two of 16 operations move a 32-pixel image by 46.7 pixels; twice: 1 - (14/16)^2 = 23.4 %."""
    x = torch.full((4000, 3, 32, 32), 200, dtype=torch.uint8)
    drawn = BLANKING.draw(len(x), generator())
    moved = drawn[0] >= BLANKING.names.index("TranslateX")
    assert moved.any(1).float().mean().item() == pytest.approx(0.234, abs=0.02)
    augmented = BLANKING.apply(x, drawn)
    assert moved[:, 0].any()
    assert not augmented[moved[:, 1]].any()


def test_the_magnitudes_are_the_published_ones() -> None:
    """The magnitude is 14 of 30 on the range of each operation (docs/setups.md)."""
    expected = {
        "Rotate": 14.0,
        "Posterize": 1.0,
        "Solarize": 119.4667,
        "SolarizeAdd": 51.3333,
        "Color": 0.94,
        "ShearX": 0.14,
        "CutoutAbs": 18.6667,
        "TranslateY": 46.6667,
    }
    operation, magnitude, _ = BLANKING.draw(4000, generator())
    assert len(BLANKING.names) == 16
    for name, amount in expected.items():
        drawn = magnitude[operation == BLANKING.names.index(name)]
        assert drawn.abs().unique().tolist() == pytest.approx([amount], rel=1e-4)
        signs = set(drawn.sign().tolist())
        assert signs == ({-1.0, 1.0} if name in {"Rotate", *MATRICES} else {1.0})


@pytest.mark.parametrize("channels", [1, 3])
def test_the_policy_changes_a_copy(channels: int) -> None:
    x = batch()[:, :channels]
    before = x.clone()
    changed = BLANKING.apply(x, BLANKING.draw(len(x), generator()))
    assert torch.equal(x, before)
    assert changed.dtype == torch.uint8
    assert changed.shape == x.shape
    assert (changed != x).flatten(1).any(1).float().mean() > 0.4


def test_the_identity_is_that_of_recorded_cells() -> None:
    """Cells have this identity since the package itself had these operations."""
    assert CONFIG().identity() == {"kind": "randaugment", "flavour": "blanking"}
    assert CONFIG(ops=3, magnitude=9).identity() == {
        "kind": "randaugment",
        "flavour": "blanking",
        "ops": 3,
        "magnitude": 9,
    }


@pytest.mark.parametrize("addition", [0, 51, 110, 255])
def test_added_levels_are_solarized_as_in_pillow(addition: int) -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    brighter = Image.fromarray(levels).point([min(255, level + addition) for level in range(256)])
    expected = np.asarray(ImageOps.solarize(brighter, 128))
    assert np.array_equal(code.add_and_solarize(levels, addition), expected)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 32, 32), (3, 5, 7), (3, 1, 1)], ids=str)
def test_a_cut_square_has_the_edges_of_pillows_rectangle(shape: tuple[int, int, int]) -> None:
    channels, height, width = shape
    generator = np.random.default_rng(1)
    for side in (0.0, 1.0, 18.6667, 40.0):
        for _ in range(20):
            image = generator.integers(256, size=shape, dtype=np.uint8)
            place = generator.random(2).tolist()
            pixels = image.transpose(1, 2, 0) if channels == 3 else image[0]
            picture = Image.fromarray(np.ascontiguousarray(pixels))
            x = width + (1 - width) * place[0]
            y = height + (1 - height) * place[1]
            left = int(max(0, x - side / 2))
            top = int(max(0, y - side / 2))
            box = (left, top, min(width, left + side), min(height, top + side))
            ImageDraw.Draw(picture).rectangle(box, code.CUTOUT_FILL[:channels])
            code.cut_out(image, side, place)
            expected = np.asarray(picture).reshape(height, width, channels).transpose(2, 0, 1)
            assert np.array_equal(image, expected), (side, place)
