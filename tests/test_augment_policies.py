"""What is drawn: distributions, order, and that (seed, step) decides everything."""

import pytest
import torch
from torch import Tensor

from lit_attn.config import data as config
from lit_attn.data.augment import draw_boxes, pipeline, policies
from lit_attn.data.augment.mixing import mix


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(n: int = 64) -> Tensor:
    return torch.randint(256, (n, 3, 32, 32), generator=generator(9), dtype=torch.uint8)


def test_blanking_randaugment_blanks_23_percent() -> None:
    """Two draws of 16, two of them move a 32-pixel image by 46.7: 1 - (14 / 16)^2 = 23.4 %."""
    policy = policies.BlankingRandAugment(config.RandAugment(flavour="blanking"))
    x = torch.full((4000, 3, 32, 32), 200, dtype=torch.uint8)
    rounds = policy.draw(len(x), 32, generator())
    moved = [(r.operation >= policy.names.index("TranslateX")) for r in rounds]
    share = (moved[0] | moved[1]).float().mean().item()
    assert share == pytest.approx(0.234, abs=0.02)
    augmented = policy.apply(x, rounds)
    first = moved[0] & ~moved[1]
    translated_last = augmented[moved[1]]
    assert first.any()
    assert not translated_last.any()


def test_blanking_randaugment_magnitudes_to_the_letter() -> None:
    """docs/setups.md: magnitude 14 of 30 on each range."""
    policy = policies.BlankingRandAugment(config.RandAugment(flavour="blanking"))
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
    (round_,) = policies.BlankingRandAugment(config.RandAugment(flavour="blanking", ops=1)).draw(
        4000, 32, generator()
    )
    assert len(policy.names) == 16
    for name, amount in expected.items():
        drawn = round_.magnitude[round_.operation == policy.names.index(name)]
        assert drawn.abs().unique().tolist() == pytest.approx([amount], rel=1e-4)
        signs = set(drawn.sign().tolist())
        assert signs == ({-1.0, 1.0} if name in policies.SHAPES else {1.0})


def test_autoaugment_has_the_cifar_policy() -> None:
    policy = policies.AutoAugment(config.AutoAugment())
    assert len(policy.p) == 25
    first, second = policy.draw(20_000, 32, generator())
    invert = policy.names.index("Invert")
    # Only the first sub-policy begins with Invert: 1 / 25, at probability 0.1.
    assert (first.operation == invert).float().mean() == pytest.approx(0.1 / 25, abs=0.002)
    rotate = first.magnitude[first.operation == policy.names.index("Rotate")].abs().unique()
    assert rotate.tolist() == pytest.approx([30 / 9 * 2], rel=1e-5)
    translate = second.magnitude[second.operation == policy.names.index("TranslateX")]
    bins = [150 / 331 * 32 / 9 * 8, 150 / 331 * 32]
    assert translate.abs().unique().tolist() == pytest.approx(bins, rel=1e-5)
    brightness = first.magnitude[first.operation == policy.names.index("Brightness")]
    assert sorted(brightness.unique().tolist()) == pytest.approx([0.4, 0.7, 1.3, 1.6], abs=1e-5)


@pytest.mark.parametrize(
    "policy",
    [
        policies.AutoAugment(config.AutoAugment()),
        policies.BlankingRandAugment(config.RandAugment(flavour="blanking")),
        policies.TorchvisionRandAugment(config.RandAugment()),
    ],
    ids=lambda p: type(p).__name__,
)
@pytest.mark.parametrize("channels", [1, 3])
def test_policies_change_a_copy(policy: policies.Policy, channels: int) -> None:
    x = batch()[:, :channels]
    before = x.clone()
    out = policy.apply(x, policy.draw(len(x), 32, generator()))
    assert torch.equal(x, before)
    assert out.dtype == torch.uint8
    assert out.shape == x.shape
    assert (out != x).flatten(1).any(1).float().mean() > 0.4


def test_boxes_stay_inside_and_have_the_stated_area() -> None:
    part = config.Erasing(p=1.0)
    boxes = draw_boxes(torch.zeros(2000, 3, 32, 32), part, generator())
    top, left, tall, wide = boxes.unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + tall <= 32).all()
    assert (left + wide <= 32).all()
    area = (tall * wide).float() / 1024
    assert 0.01 < area.min() < 0.05
    assert 0.35 < area.max() < 0.45
    used = draw_boxes(torch.zeros(4000, 3, 32, 32), config.Erasing(), generator())[:, 2] > 0
    assert used.float().mean() == pytest.approx(0.25, abs=0.03)


def test_mix_mixes_half_the_batches_and_keeps_probabilities() -> None:
    x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    mixed = cut = 0
    for seed in range(300):
        images, targets = mix(x, y, config.Mix(), 4, generator(seed))
        assert torch.allclose(targets.sum(1), torch.ones(16))
        changed = not torch.equal(images, x)
        mixed += changed
        inside = torch.isin(images, x).all()
        cut += changed and bool(inside)
    assert mixed / 300 == pytest.approx(0.5, abs=0.1)
    assert cut / mixed == pytest.approx(0.5, abs=0.15)


def test_mix_switched_off_keeps_labels_hard() -> None:
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    images, targets = mix(x, y, config.Mix(mixup=0, cutmix=0), 4, generator())
    assert torch.equal(images, x)
    assert torch.equal(targets.argmax(1), y)


def test_the_order_is_the_one_written() -> None:
    """Normalising before or after a flip is the same; erasing before normalising is not."""
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.2, 0.2]
    steps = [
        config.Flip(),
        config.Crop(),
        config.AutoAugment(),
        config.Normalize(),
        config.Erasing(p=1.0),
        config.Mix(p=1.0),
    ]
    x, y = batch(), torch.arange(64) % 10
    out, targets = pipeline(steps, mean, std, 10)(x, y, generator())
    again, _ = pipeline(steps, mean, std, 10)(x, y, generator())
    other, _ = pipeline(steps, mean, std, 10)(x, y, generator(1))
    assert torch.equal(out, again)
    assert not torch.equal(out, other)
    assert out.dtype == torch.float32
    assert targets.shape == (64, 10)
    plain, labels = pipeline(steps, mean, std, 10).evaluation()(x, y, generator())
    expected = (x.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / 0.2
    torch.testing.assert_close(plain, expected)
    assert torch.equal(labels, y)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "needs 'normalize' once, has it 0 times"),
        (["normalize", "normalize"], "has it 2 times"),
        (["mix", "normalize"], "'mix' works on normalised images"),
        (["normalize", "autoaugment"], "'autoaugment' works on bytes"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(steps: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.Digits.model_validate({"augment": steps})
