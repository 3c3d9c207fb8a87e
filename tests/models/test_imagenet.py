"""Tests of the ImageNet models against the published set-ups (docs/setups.md, sections 5-7)."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from lit_attn.attention.parts import PerpendicularConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.config.data.images import Cifar10, ImageNet
from lit_attn.config.models.base import FFN
from lit_attn.config.models.vision import ImageViTConfig, LocalViTConfig
from lit_attn.config.signatures import ImageLabels
from lit_attn.models import vit
from lit_attn.models.factory import build, count, describe

# The released LocalViT code builds, in each of 12 layers, two 6 x 6 Linears and two BatchNorms that
# nothing uses; its published counts hold them.
UNUSED = 12 * (2 * (6 * 6 + 6) + 3840)

IMAGENET = ImageNet()

TINY = {"dim": 32, "depth": 2, "heads": 2}


def vit_s(attention: str) -> ImageViTConfig:
    """Return the ViT-S/16 of DCMHA's ImageNet experiment."""
    return ImageViTConfig(attention=PRESETS[attention], pool="average", positions="sincos")


def parameters(model: ImageViTConfig | LocalViTConfig) -> int:
    return count(build(model, IMAGENET, "meta"))


def test_deit_small_has_its_published_count_and_equals_the_timm_model() -> None:
    assert parameters(ImageViTConfig()) == 22_050_664
    torch.manual_seed(0)
    published = timm.create_model("deit_small_patch16_224", img_size=32, depth=2, num_classes=5)
    ours = vit.build_image_vit(ImageViTConfig(depth=2), (3, 32, 32), 5)
    ours.load_state_dict(published.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), published(x), rtol=1e-5, atol=1e-5)


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
    assert parameters(LocalViTConfig(attention=attention)) + UNUSED == published


def test_dcmha_adds_the_published_parameters_to_every_layer() -> None:
    assert parameters(vit_s("dcmha")) - parameters(vit_s("standard")) == 12 * 48_384


def test_the_local_ffn_equals_a_plain_implementation() -> None:
    torch.manual_seed(0)
    ffn = vit.LocalFFN(4, 6).double()
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
    block = vit.build_local(LocalViTConfig(**TINY, patch=4), (3, 16, 16), 3).eval().blocks[0]
    x = torch.randn(2, 17, 32)
    attended = x + block.attn(block.norm1(x))
    out = block(x)
    torch.testing.assert_close(out[:, 0], attended[:, 0])
    assert not torch.allclose(out[:, 1:], attended[:, 1:])


def test_local_vit_starts_from_xavier() -> None:
    """The released code has three Linears for q, k and v, and keeps PyTorch's default biases."""
    torch.manual_seed(0)
    network = vit.build_local(LocalViTConfig(depth=1), (3, 32, 32), 1000)
    attention = network.blocks[0].attn
    matrices = (*attention.qkv.weight.chunk(3), network.blocks[0].mlp.fc1.weight)
    for matrix in (*matrices, attention.proj.weight, network.head.weight):
        rows, columns = matrix.shape
        assert matrix.std().item() == pytest.approx((2 / (rows + columns)) ** 0.5, rel=0.02)
    assert attention.qkv.bias is None
    for bias in (attention.proj.bias, network.head.bias):
        assert bias.std().item() == pytest.approx((3 * 384) ** -0.5, rel=0.1)


def test_the_flax_initialisation_equals_that_of_big_vision() -> None:
    torch.manual_seed(0)
    model = ImageViTConfig(depth=1, init="flax", ffn=FFN(width=1536, activation="gelu-tanh"))
    network = vit.build_image_vit(model, (3, 224, 224), 1000)
    block = network.blocks[0]
    matrices = (*block.attn.qkv.weight.chunk(3), block.attn.proj.weight, block.mlp.fc1.weight)
    for matrix in (*matrices, block.mlp.fc2.weight):
        bound = (6 / sum(matrix.shape)) ** 0.5
        assert matrix.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert matrix.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
    patches = network.patch_embed.proj.weight
    assert patches.std().item() == pytest.approx(768**-0.5, rel=0.01)
    # Truncated at two deviations of the wider normal that has this deviation after truncation.
    assert patches.abs().max().item() == pytest.approx(2 * 768**-0.5 / 0.8796, rel=1e-3)
    assert 5e-7 < block.mlp.fc1.bias.std().item() < 2e-6
    zeros = (network.head.weight, network.head.bias, block.attn.qkv.bias, network.cls_token)
    assert not any(parameter.any() for parameter in zeros)
    x = torch.randn(2, 5, 384)
    hidden = F.gelu(block.mlp.fc1(x), approximate="tanh")
    torch.testing.assert_close(block.mlp(x), block.mlp.fc2(hidden))


def test_local_vit_refuses_images_that_are_not_square() -> None:
    network = vit.build_local(LocalViTConfig(**TINY, patch=4), (3, 16, 16), 3)
    with pytest.raises(ValueError, match="8 patches are not a square"):
        network(torch.randn(1, 3, 8, 16))


@pytest.mark.parametrize(
    "model", [ImageViTConfig(**TINY, patch=4), LocalViTConfig(**TINY, patch=4)]
)
@pytest.mark.parametrize("size", [8, 16, 24])
def test_positions_learn_at_every_image_size(
    model: ImageViTConfig | LocalViTConfig, size: int
) -> None:
    torch.manual_seed(0)
    network = model.build(ImageLabels((3, 16, 16), 3))
    network(torch.randn(2, 3, size, size)).sum().backward()
    assert network.pos_embed.shape == (1, 17, 32)
    assert network.pos_embed.grad.abs().min() > 0


def test_replaced_positions_follow_training_and_evaluation() -> None:
    """Training resamples the positions of the last evaluation, and evaluation those of training."""
    torch.manual_seed(0)
    model = LocalViTConfig(**TINY, patch=4, positions="replaced")
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


def test_sincos_positions_are_fixed_and_the_mean_is_classified() -> None:
    torch.manual_seed(0)
    model = ImageViTConfig(**TINY, patch=4, pool="average", positions="sincos")
    network = vit.build_image_vit(model, (3, 16, 16), 3).eval()
    assert network.cls_token is None
    assert network.pos_embed.shape == (1, 16, 32)
    assert not network.pos_embed.requires_grad
    # Row 2, column 3: sines and cosines of the coordinates at frequencies 10000^(-k / 7).
    frequencies = 10_000.0 ** (-torch.arange(8) / 7)
    rows, columns = 2 * frequencies, 3 * frequencies
    expected = torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()])
    torch.testing.assert_close(network.pos_embed[0, 11], expected)
    x = torch.randn(2, 3, 16, 16)
    mean = network.forward_features(x).mean(1)
    torch.testing.assert_close(network(x), network.head(mean))


def test_without_ffn_every_block_contains_only_attention() -> None:
    network = vit.build_image_vit(ImageViTConfig(**TINY, ffn=None), (3, 32, 32), 3, "meta")
    assert not any("mlp" in name for name, _ in network.named_parameters())


def test_flops_of_local_vit_equal_a_count_by_hand() -> None:
    """The count covers every matrix product and convolution with 2 FLOPs per multiply-add."""
    n, d, w, depth = 16, 32, 48, 2
    tiny = {**TINY, "patch": 8, "ffn": FFN(width=w, activation="hard-swish")}
    block = 2 * (n + 1) * d * 4 * d + 2 * (2 * (n + 1) ** 2 * d) + 2 * n * w * (2 * d + 9)
    ends = 2 * n * 3 * 64 * d + 2 * d * 10
    assert describe(LocalViTConfig(**tiny), Cifar10()).flops == depth * block + ends


def test_patches_must_tile_the_image() -> None:
    for model in (ImageViTConfig(), LocalViTConfig()):
        with pytest.raises(ValueError, match="patches of 16 do not tile images of 32 x 40"):
            model.build(ImageLabels((3, 32, 40), 10), "meta")
