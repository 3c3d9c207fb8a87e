"""The plug-in for LocalViT against the published set-up (docs/setups.md, section 5)."""

import importlib
from typing import Any

import pytest
import torch
from helpers.paths import EXPERIMENTS
from torch import nn
from torch.nn import functional as F

from lit_attn.attention.residual import PerpendicularConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.data.image_folders import ImageNet
from lit_attn.data.image_sets import Cifar10
from lit_attn.models.base import FFN
from lit_attn.models.factory import build, count, describe
from lit_attn.schema.plugins import load_parts
from lit_attn.signatures import ImageLabels

load_parts([EXPERIMENTS / "imagenet_local_vit" / "imagenet_local_vit.py"])
config = importlib.import_module("imagenet_local_vit")

# The released LocalViT code builds, in each of 12 layers, two 6 x 6 Linears and two BatchNorms that
# nothing uses; its published counts hold them.
UNUSED = 12 * (2 * (6 * 6 + 6) + 3840)

TINY = {"dim": 32, "depth": 2, "heads": 2}


def make(**choices: Any) -> nn.Module:
    return config.LocalViTConfig(**choices).build(ImageLabels((3, 16, 16), 3))


@pytest.mark.parametrize(
    ("attention", "published"),
    [
        (AttentionSpec(), 22_226_776),
        (PRESETS["belief"], 22_226_776),
        (AttentionSpec(residual=PerpendicularConfig(scope="both", bias=False)), 23_996_248),
        (PRESETS["belief-star"], 24_000_856),
    ],
)
def test_local_vit_has_its_published_count(attention: AttentionSpec, published: int) -> None:
    model = config.LocalViTConfig(attention=attention)
    assert count(build(model, ImageNet(), "meta")) + UNUSED == published


def test_the_local_ffn_equals_a_plain_implementation() -> None:
    torch.manual_seed(0)
    ffn = config.LocalFFN(4, 6).double()
    x = torch.randn(2, 10, 4, dtype=torch.double)
    hidden = nn.functional.hardswish(x[:, 1:] @ ffn.fc1.weight.T)
    out = torch.zeros(2, 9, 6, dtype=torch.double)
    for i in range(3):
        for j in range(3):
            for di in (-1, 0, 1):
                for dj in (-1, 0, 1):
                    if 0 <= i + di < 3 and 0 <= j + dj < 3:
                        neighbours = hidden[:, 3 * (i + di) + j + dj]
                        out[:, 3 * i + j] += neighbours * ffn.conv.weight[:, 0, 1 + di, 1 + dj]
    expected = nn.functional.hardswish(out) @ ffn.fc2.weight.T
    torch.testing.assert_close(ffn(x)[:, 1:], expected)


def test_the_class_token_skips_the_local_ffn() -> None:
    torch.manual_seed(0)
    block = make(**TINY, patch=4).eval().blocks[0]
    x = torch.randn(2, 17, 32)
    attended = x + block.attn(block.norm1(x))
    out = block(x)
    torch.testing.assert_close(out[:, 0], attended[:, 0])
    assert not torch.allclose(out[:, 1:], attended[:, 1:])


def test_local_vit_starts_from_xavier() -> None:
    """The released code has three Linears for q, k and v, and keeps PyTorch's default biases."""
    torch.manual_seed(0)
    network = config.LocalViTConfig(depth=1).build(ImageLabels((3, 32, 32), 1000))
    attention = network.blocks[0].attn
    matrices = (*attention.qkv.weight.chunk(3), network.blocks[0].mlp.fc1.weight)
    for matrix in (*matrices, attention.proj.weight, network.head.weight):
        rows, columns = matrix.shape
        assert matrix.std().item() == pytest.approx((2 / (rows + columns)) ** 0.5, rel=0.02)
    assert attention.qkv.bias is None
    for bias in (attention.proj.bias, network.head.bias):
        assert bias.std().item() == pytest.approx((3 * 384) ** -0.5, rel=0.1)


def test_local_vit_refuses_images_that_are_not_square() -> None:
    network = make(**TINY, patch=4)
    with pytest.raises(ValueError, match="8 patches are not a square"):
        network(torch.randn(1, 3, 8, 16))


def test_replaced_positions_follow_training_and_evaluation() -> None:
    """Training resamples the positions of the last evaluation, and evaluation those of training."""
    torch.manual_seed(0)
    model = config.LocalViTConfig(**TINY, patch=4, positions="replaced")
    network = model.build(ImageLabels((3, 16, 16), 3))
    learned = model.model_copy(update={"positions": "learned"})
    assert count(network) == count(learned.build(ImageLabels((3, 16, 16), 3))) - 17 * 32
    start = network.pos_embed.clone()
    large, small = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 12, 12)
    network.eval()(large)
    network.eval()(small)
    network.train()(large)
    network.eval()(large)
    assert torch.equal(network.pos_embed, start)
    for _ in range(2):
        network.train()(small)
        assert torch.equal(network.pos_embed, start)
    network.eval()(large)
    network(large)
    grid = start[:, 1:].mT.reshape(1, 32, 4, 4)
    for side in (3, 4):
        grid = F.interpolate(grid, (side, side), mode="bicubic", align_corners=False)
    torch.testing.assert_close(network.pos_embed[:, 1:], grid.flatten(2).mT)
    assert torch.equal(network.pos_embed[:, 0], start[:, 0])


def test_flops_of_local_vit_equal_a_count_by_hand() -> None:
    """The count covers every matrix product and convolution with 2 FLOPs per multiply-add."""
    n, d, w, depth = 16, 32, 48, 2
    tiny = {**TINY, "patch": 8, "ffn": FFN(width=w, activation="hard-swish")}
    block = 2 * (n + 1) * d * 4 * d + 2 * (2 * (n + 1) ** 2 * d) + 2 * n * w * (2 * d + 9)
    ends = 2 * n * 3 * 64 * d + 2 * d * 10
    assert describe(config.LocalViTConfig(**tiny), Cifar10()).flops == depth * block + ends
