"""Tests of the augmentation policies: random draws and images, against the published forms."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import RandAugment, _apply_op

from lit_attn.config import augment as config
from lit_attn.config.data.images import Cifar10, Digits
from lit_attn.data.augment import policies
from lit_attn.data.augment.steps import Crop, Erasing, Flip, Mix, Pipeline

FORMAT = config.ImageFormat((3, 32, 32), 4, [0.5] * 3, [1.0] * 3)
AUTOAUGMENT = policies.AutoAugment(config.AutoAugmentConfig(), FORMAT)
BLANKING = policies.RandAugment(config.RandAugmentConfig(flavour="blanking"), FORMAT)
TORCHVISION = policies.RandAugment(config.RandAugmentConfig(), FORMAT)
POLICIES = pytest.mark.parametrize(
    "policy", [AUTOAUGMENT, BLANKING, TORCHVISION], ids=["autoaugment", "blanking", "torchvision"]
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(n: int = 64, size: int = 32) -> Tensor:
    return torch.randint(256, (n, 3, size, size), generator=generator(9), dtype=torch.uint8)


def affine(fill: int, by: Image.Resampling, *matrix: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.transform(
        image.size, Image.Transform.AFFINE, matrix, by, fillcolor=(fill,) * 3
    )


def published(
    name: str, m: float, place: list[float], fill: int, shear: Image.Resampling
) -> Callable[[Image.Image], Image.Image]:
    """Apply the operation with Pillow to the drawn parameters (docs/setups.md)."""
    plain = Image.Resampling.NEAREST

    def cutout(image: Image.Image) -> Image.Image:
        x, y = (side + (1 - side) * u for side, u in zip(image.size, place, strict=True))
        left, top = int(max(0, x - m / 2)), int(max(0, y - m / 2))
        box = (left, top, min(image.width, left + m), min(image.height, top + m))
        ImageDraw.Draw(image).rectangle(box, (125, 123, 114))
        return image

    def solarize_add(image: Image.Image) -> Image.Image:
        added = np.clip(np.array(image).astype(int) + m, 0, 255).astype(np.uint8)
        return ImageOps.solarize(Image.fromarray(added), 128)

    return {
        "Identity": lambda image: image,
        "AutoContrast": ImageOps.autocontrast,
        "Equalize": ImageOps.equalize,
        "Invert": ImageOps.invert,
        "Posterize": lambda image: ImageOps.posterize(image, int(m)),
        "Solarize": lambda image: ImageOps.solarize(image, m),
        "SolarizeAdd": solarize_add,
        "Brightness": lambda image: ImageEnhance.Brightness(image).enhance(m),
        "Color": lambda image: ImageEnhance.Color(image).enhance(m),
        "Contrast": lambda image: ImageEnhance.Contrast(image).enhance(m),
        "Sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(m),
        "Rotate": lambda image: image.rotate(m, fillcolor=(fill,) * 3),
        "ShearX": affine(fill, shear, 1, m, 0, 0, 1, 0),
        "ShearY": affine(fill, shear, 1, 0, 0, m, 1, 0),
        "TranslateX": affine(fill, plain, 1, 0, m, 0, 1, 0),
        "TranslateY": affine(fill, plain, 1, 0, 0, 0, 1, m),
        "CutoutAbs": cutout,
    }[name]


@pytest.mark.parametrize("policy", [AUTOAUGMENT, BLANKING], ids=["autoaugment", "blanking"])
def test_policies_equal_pillow_on_the_same_draws(policy: policies.Policy) -> None:
    x = batch(400)
    drawn = policy.draw(len(x), generator(3))
    augmented = policy.apply(x, drawn)
    shear = Image.Resampling.BICUBIC if policy is AUTOAUGMENT else Image.Resampling.NEAREST
    used = set()
    for image, out, *rounds in zip(x, augmented, *(part.tolist() for part in drawn), strict=True):
        expected = Image.fromarray(image.permute(1, 2, 0).numpy())
        for operation, magnitude, place in zip(*rounds, strict=True):
            name = policy.names[operation]
            used.add(name)
            expected = published(name, magnitude, place, policy.fill, shear)(expected)
        assert np.array_equal(out.permute(1, 2, 0).numpy(), np.array(expected)), rounds
    assert used == set(policy.names)


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
    return [policies.RandAugment(config.RandAugmentConfig(magnitude=m), FORMAT) for m in range(31)]


def test_blanking_randaugment_blanks_23_percent() -> None:
    """Two of 16 operations move a 32-pixel image by 46.7 pixels; twice: 1 - (14/16)^2 = 23.4 %."""
    x = torch.full((4000, 3, 32, 32), 200, dtype=torch.uint8)
    drawn = BLANKING.draw(len(x), generator())
    moved = drawn[0] >= BLANKING.names.index("TranslateX")
    assert moved.any(1).float().mean().item() == pytest.approx(0.234, abs=0.02)
    augmented = BLANKING.apply(x, drawn)
    assert moved[:, 0].any()
    assert not augmented[moved[:, 1]].any()


def test_blanking_randaugment_has_the_published_magnitudes() -> None:
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
        assert signs == ({-1.0, 1.0} if name in {"Rotate", *policies.MATRICES} else {1.0})


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
    (flipped,) = Flip(config.FlipConfig(p=0.5), FORMAT).draw(4000, generator())
    assert flipped.float().mean() == pytest.approx(0.5, abs=0.03)
    for corner in Crop(config.CropConfig(padding=4), FORMAT).draw(9000, generator()):
        counts = corner.bincount()
        assert len(counts) == 9
        assert counts.min() > 850


def published_box(part: config.ErasingConfig) -> list[int]:
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
    part = config.ErasingConfig(p=1.0)
    (boxes,) = Erasing(part, FORMAT).draw(20_000, generator())
    assert (boxes[:, :2] + boxes[:, 2:] <= 32).all()
    expected = np.array([published_box(part) for _ in range(20_000)])
    quantiles = np.linspace(0.02, 0.98, 25)
    for drawn, reference in zip(boxes.numpy().T, expected.T, strict=True):
        difference = np.quantile(drawn, quantiles) - np.quantile(reference, quantiles)
        assert np.abs(difference).max() <= 1
        assert drawn.mean() == pytest.approx(reference.mean(), abs=0.25)
    (sometimes,) = Erasing(config.ErasingConfig(), FORMAT).draw(4000, generator())
    assert (sometimes[:, 2] > 0).float().mean() == pytest.approx(0.25, abs=0.03)


def test_mixup_and_cutmix_apply_to_a_quarter_of_the_batches_each() -> None:
    mix = Mix(config.MixConfig(), FORMAT)
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
    mix = Mix(config.MixConfig(**changes), FORMAT)
    assert {mix.draw(4, generator(seed)).kind for seed in range(40)} == kinds


STEPS = (
    config.FlipConfig(),
    config.CropConfig(),
    config.AutoAugmentConfig(),
    config.NormalizeConfig(),
    config.ErasingConfig(p=1.0),
    config.MixConfig(p=1.0),
)


def test_augmentations_apply_in_the_configured_order() -> None:
    """The test applies the same draws step by step."""
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.2, 0.25]
    pipeline = Pipeline(Cifar10(augment=STEPS), mean, std, torch.device("cpu"))
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
