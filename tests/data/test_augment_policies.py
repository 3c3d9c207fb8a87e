"""Tests of the augmentation policies: random draws and images, against the published forms."""

import random

import numpy as np
import pytest
import torch
from helpers import pillow_operations
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import RandAugment, _apply_op

from lit_attn.data.augment import policies
from lit_attn.data.augment.base import ImageFormat
from lit_attn.data.augment.pipeline import Pipeline
from lit_attn.data.augment.policies import AutoAugmentConfig, RandAugmentConfig
from lit_attn.data.augment.steps import (
    Crop,
    CropConfig,
    Erasing,
    ErasingConfig,
    Flip,
    FlipConfig,
    Mix,
    MixConfig,
    NormalizeConfig,
)
from lit_attn.data.image_sets import Cifar10, Digits

FORMAT = ImageFormat((3, 32, 32), 4, [0.5] * 3, [1.0] * 3)
AUTOAUGMENT = policies.AutoAugment(AutoAugmentConfig(), FORMAT)
TORCHVISION = RandAugmentConfig().build(FORMAT)
POLICIES = pytest.mark.parametrize(
    "policy", [AUTOAUGMENT, TORCHVISION], ids=["autoaugment", "torchvision"]
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(n: int = 64, size: int = 32) -> Tensor:
    return torch.randint(256, (n, 3, size, size), generator=generator(9), dtype=torch.uint8)


def test_autoaugment_equals_pillow_on_the_same_draws() -> None:
    pillow_operations.assert_equals_pillow(AUTOAUGMENT, batch(400), generator(3))


def test_torchvision_randaugment_equals_torchvisions() -> None:
    """Torchvision applies its table of magnitudes with the signs drawn by this package."""
    x, policy = batch(300), TORCHVISION
    table = RandAugment()._augmentation_space(31, (32, 32))
    assert list(table) == policy.names
    drawn = policy.draw(len(x), generator(4))
    augmented = policy.apply(x, drawn)
    for image, out, *rounds in zip(x, augmented, *(part.tolist() for part in drawn), strict=True):
        expected = Image.fromarray(image.permute(1, 2, 0).numpy())
        for operation, magnitude, _ in zip(*rounds, strict=True):
            name = policy.names[operation]
            magnitudes, signed = table[name]
            amount = float(magnitudes[14] if magnitudes.ndim else magnitudes)
            if signed:
                turned_about = name.startswith("Translate")
                negative = magnitude < (name in policies.ENHANCEMENTS)
                amount *= -1 if negative != turned_about else 1
            expected = _apply_op(expected, name, amount, InterpolationMode.NEAREST, None)
        assert np.array_equal(out.permute(1, 2, 0).numpy(), np.array(expected)), rounds
    posterized = [p.magnitude[p.names.index("Posterize")] for p in every_magnitude()]
    bits, _ = table["Posterize"]
    assert posterized == bits.tolist()


def every_magnitude() -> list[policies.Policy]:
    return [RandAugmentConfig(magnitude=m).build(FORMAT) for m in range(31)]


def test_autoaugment_has_the_cifar_policy() -> None:
    policy = AUTOAUGMENT
    assert len(policy.p) == 25
    operation, magnitude, _ = policy.draw(20_000, generator())

    def amounts(name: str, position: int) -> Tensor:
        return magnitude[:, position][operation[:, position] == policy.names.index(name)]

    # Only the first sub-policy begins with Invert: 1 / 25, at probability 0.1.
    assert len(amounts("Invert", 0)) / 20_000 == pytest.approx(0.1 / 25, abs=0.002)
    assert amounts("Rotate", 0).unique().tolist() == pytest.approx([30 / 9 * 2])
    bins = [150 / 331 * 32 / 9 * 8, 150 / 331 * 32]
    translate = amounts("TranslateX", 1)
    assert translate.abs().unique().tolist() == pytest.approx(bins)
    assert (translate < 0).double().mean() == pytest.approx(0.5, abs=0.05)
    brightness = amounts("Brightness", 0).unique().tolist()
    assert sorted(brightness) == pytest.approx([0.4, 0.7, 1.3, 1.6])
    assert amounts("Posterize", 1).unique().tolist() == [5]
    assert amounts("Solarize", 0).unique().tolist() == pytest.approx([256 / 9 * 4, 256 / 9 * 7])


@POLICIES
@pytest.mark.parametrize("channels", [1, 3])
def test_policies_change_a_copy(policy: policies.Policy, channels: int) -> None:
    x = batch()[:, :channels]
    before = x.clone()
    out = policy.apply(x, policy.draw(len(x), generator()))
    assert torch.equal(x, before)
    assert out.dtype == torch.uint8
    assert out.shape == x.shape
    assert (out != x).flatten(1).any(1).float().mean() > 0.4


def test_flips_and_crops_are_drawn_evenly() -> None:
    (flipped,) = Flip(FlipConfig(p=0.5), FORMAT).draw(4000, generator())
    assert flipped.float().mean() == pytest.approx(0.5, abs=0.03)
    for corner in Crop(CropConfig(padding=4), FORMAT).draw(9000, generator()):
        counts = corner.bincount()
        assert len(counts) == 9
        assert counts.min() > 850


def published_box(part: ErasingConfig) -> list[int]:
    """Draw a box on 32 x 32 pixels like the random-erasing paper and the CIFAR-100 set-up."""
    for _ in range(100):
        area = random.uniform(*part.area) * 32 * 32
        aspect = random.uniform(*part.aspect)
        tall, wide = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if tall < 32 and wide < 32:
            return [random.randint(0, 32 - tall), random.randint(0, 32 - wide), tall, wide]
    return [0, 0, 0, 0]


def test_boxes_have_the_published_distribution() -> None:
    random.seed(0)
    part = ErasingConfig(p=1.0)
    (boxes,) = Erasing(part, FORMAT).draw(20_000, generator())
    assert (boxes[:, :2] + boxes[:, 2:] <= 32).all()
    expected = np.array([published_box(part) for _ in range(20_000)])
    quantiles = np.linspace(0.02, 0.98, 25)
    for drawn, reference in zip(boxes.numpy().T, expected.T, strict=True):
        difference = np.quantile(drawn, quantiles) - np.quantile(reference, quantiles)
        assert np.abs(difference).max() <= 1
        assert drawn.mean() == pytest.approx(reference.mean(), abs=0.25)
    (sometimes,) = Erasing(ErasingConfig(), FORMAT).draw(4000, generator())
    assert (sometimes[:, 2] > 0).float().mean() == pytest.approx(0.25, abs=0.03)


def test_mixup_and_cutmix_apply_to_a_quarter_of_the_batches_each() -> None:
    mix = Mix(MixConfig(), FORMAT)
    drawn = [mix.draw(16, generator(seed)) for seed in range(600)]
    kinds = [one.kind for one in drawn]
    assert kinds.count("none") / 600 == pytest.approx(0.5, abs=0.08)
    assert kinds.count("cutmix") / kinds.count("mixup") == pytest.approx(1, abs=0.35)
    weights = [one.weight for one in drawn if one.kind != "none"]
    assert np.mean(weights) == pytest.approx(0.5, abs=0.06)
    assert np.std(weights) == pytest.approx(12**-0.5, abs=0.04)
    x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    for one in drawn[:50]:
        images, targets = mix.apply(x, y, one)
        torch.testing.assert_close(targets.sum(1), torch.ones(16))
        assert torch.equal(images, x) == (one.kind == "none" or one.weight == 1)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"mixup": 0, "cutmix": 0}, {"none"}),
        ({"mixup": 0, "p": 1}, {"cutmix"}),
        ({"cutmix": 0, "p": 1}, {"mixup"}),
    ],
)
def test_mixes_can_be_switched_off(changes: dict[str, float], kinds: set[str]) -> None:
    mix = Mix(MixConfig(**changes), FORMAT)
    assert {mix.draw(4, generator(seed)).kind for seed in range(40)} == kinds


STEPS = (
    FlipConfig(),
    CropConfig(),
    AutoAugmentConfig(),
    NormalizeConfig(),
    ErasingConfig(p=1.0),
    MixConfig(p=1.0),
)


def test_augmentations_apply_in_the_configured_order() -> None:
    """The test applies the same draws step by step."""
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.2, 0.25]
    data = Cifar10(augment=STEPS)
    images = ImageFormat(data.image_shape, data.num_classes, mean, std)
    pipeline = Pipeline(data.augment, images, torch.device("cpu"))
    x, y = batch(), torch.arange(64) % 10
    out, targets = pipeline.apply(x, y, generator())
    by_hand, draws = x, generator()
    steps = [*pipeline.before, *pipeline.after]
    for step in steps:
        by_hand = step.apply(by_hand, step.draw(64, draws))
    names = [type(step).__name__ for step in steps]
    assert names == ["Flip", "Crop", "AutoAugment", "Normalize", "Erasing"]
    assert pipeline.mix is not None
    assert torch.equal(out, pipeline.mix.apply(by_hand, y, pipeline.mix.draw(64, draws))[0])
    assert out.dtype == torch.float32
    assert targets.shape == (64, 10)
    normalized = pipeline.normalize.apply(x, ())
    expected = (x.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(
        3, 1, 1
    )
    assert torch.equal(normalized, expected)


@pytest.mark.gpu
@POLICIES
def test_policies_are_the_same_on_the_gpu(policy: policies.Policy) -> None:
    x = batch(500)
    drawn = policy.draw(len(x), generator())
    assert torch.equal(policy.apply(x.cuda(), drawn).cpu(), policy.apply(x, drawn))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "needs 'normalize' once, has it 0 times"),
        (["normalize", "normalize"], "has it 2 times"),
        (["normalize", "rescale"], "'rescale' is not a known augmentation"),
        (["mix", "normalize"], "'mix' works on normalised images"),
        (["normalize", "mix", "erasing"], "'mix' works on the batch: put it last"),
        (["normalize", "autoaugment"], "'autoaugment' works on bytes"),
    ],
)
def test_an_invalid_order_of_augmentations_is_refused(steps: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Digits.model_validate({"augment": steps})
