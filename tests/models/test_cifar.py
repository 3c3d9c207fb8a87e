"""Tests of the CIFAR models against the published set-ups (docs/setups.md)."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.data.image_sets import Cifar10, Cifar100
from lit_attn.models.base import FFN
from lit_attn.models.factory import count, describe, resolve
from lit_attn.models.vit import ShiftedPatchEmbed, ViTConfig, build
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ImageLabels

CIFAR = (3, 32, 32)


def belief2_vit(attention: AttentionSpec | str = "standard", width: int | None = 576) -> ViTConfig:
    spec = PRESETS[attention] if isinstance(attention, str) else attention
    return ViTConfig(
        dim=192,
        depth=9,
        heads=12,
        patch=4,
        attention=spec,
        ffn=None if width is None else FFN(width=width),
        drop_path=0.1,
        drop_path_schedule="constant",
        init="xavier",
    )


def vit_small(attention: str = "standard", plain: bool = False) -> ViTConfig:
    return ViTConfig(
        dim=512,
        depth=6,
        heads=8,
        patch=4,
        attention=PRESETS[attention],
        ffn=FFN(width=512),
        dropout=0.1,
        embed_dropout=0.1,
        patchify="plain" if plain else "shifted",
        local_self_attention=not plain,
        init="torch",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "classes", "parameters"),
    [
        (belief2_vit(width=384), 100, 2_709_796),
        (belief2_vit(), 100, 3_375_076),
        (belief2_vit("belief2", 384), 100, 3_375_076),
        (belief2_vit("belief2", None), 100, 2_039_332),
        (belief2_vit(PRESETS["belief2"].model_copy(update={"zz": False}), 384), 100, 3_043_300),
        (belief2_vit("belief-star", 480), 100, 3_375_940),
        (belief2_vit("belief"), 100, 3_375_076),
        (vit_small(), 10, 9_622_512),
        (vit_small(), 100, 9_668_682),
        (vit_small(plain=True), 10, 9_523_722),
        (vit_small("belief-star"), 10, 11_198_448),
        (vit_small("attentionx"), 10, 9_622_512),
    ],
)
def test_parameter_counts_equal_the_published_ones(
    model: ViTConfig, classes: int, parameters: int
) -> None:
    assert describe(model, Cifar10() if classes == 10 else Cifar100()).parameters == parameters


@pytest.mark.parametrize(
    ("name", "width"), [("belief2", 384), ("belief-star", 480), ("belief", 576), ("xsa", 576)]
)
def test_matching_finds_the_published_widths(name: str, width: int) -> None:
    start = belief2_vit(name, 7)
    matched = resolve(start, belief2_vit(), Cifar100())
    assert matched == belief2_vit(name, width)


def test_matching_refuses_impossible_counts() -> None:
    with pytest.raises(ConfigError, match="no FFN"):
        resolve(belief2_vit("belief2", None), belief2_vit(), Cifar100())
    with pytest.raises(ConfigError, match=r"exceed the .* to match; widen"):
        resolve(belief2_vit("belief2"), belief2_vit(width=1), Cifar100())


def test_flops_equal_a_count_by_hand() -> None:
    """The count covers every matrix product of one forward pass with 2 FLOPs per multiply-add."""
    n, d, h, depth = 65, 192, 576, 9
    linear = 2 * n * d * (3 * d + d + 2 * h)
    attention = 2 * (2 * n * n * d)
    patches, head = 2 * 64 * 48 * d, 2 * d * 100
    assert (
        describe(belief2_vit(), Cifar100()).flops == depth * (linear + attention) + patches + head
    )


def test_belief2_pays_for_z_and_the_second_projection() -> None:
    """In each layer W_Z and W_p cost 2 x 2 n d^2, and the padded logits count twice."""
    n, d = 65, 192
    standard = describe(belief2_vit(width=384), Cifar100()).flops
    belief2 = describe(belief2_vit("belief2", 384), Cifar100()).flops
    assert belief2 - standard == 9 * (2 * 2 * n * d * d + 2 * 2 * n * n * d)


def test_patches_must_tile_the_image() -> None:
    model = belief2_vit().model_copy(update={"patch": 5})
    with pytest.raises(ValueError, match=r"patch: patches of 5 do not tile"):
        model.build(ImageLabels(CIFAR, 10))


def test_shifted_patches_equal_a_plain_implementation() -> None:
    torch.manual_seed(0)
    embed = ShiftedPatchEmbed((8, 8), 4, 3, 16, True, False).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.double)
    shifted = [x]
    for dy, dx in ((0, 1), (0, -1), (1, 0), (-1, 0)):
        moved = torch.zeros_like(x)
        for i in range(8):
            for j in range(8):
                if 0 <= i + dy < 8 and 0 <= j + dx < 8:
                    moved[..., i, j] = x[..., i + dy, j + dx]
        shifted.append(moved)
    stacked = torch.cat(shifted, 1)
    for patch in range(4):
        row, column = divmod(patch, 2)
        cut = stacked[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].flatten(1)
        expected = embed.proj(F.layer_norm(cut, (240,), embed.norm.weight, embed.norm.bias))
        torch.testing.assert_close(embed(x)[:, patch], expected)


def test_xavier_treats_the_fused_matrix_as_one() -> None:
    torch.manual_seed(0)
    network = build(belief2_vit(), CIFAR, 100)
    block = network.blocks[0]
    for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1):
        rows, columns = linear.weight.shape
        assert linear.weight.std().item() == pytest.approx((2 / (rows + columns)) ** 0.5, rel=0.03)
        assert linear.bias is None or not linear.bias.any()
    assert network.patch_embed.proj.weight.std().item() == pytest.approx((2 / 240) ** 0.5, rel=0.05)
    assert network.pos_embed.std().item() == pytest.approx(1, rel=0.05)


def test_drop_path_is_constant_or_linear_over_layers() -> None:
    network = build(belief2_vit(), CIFAR, 100)
    rates = {m.drop_prob for m in network.modules() if type(m).__name__ == "DropPath"}
    assert rates == {0.1}
    linear = build(belief2_vit().model_copy(update={"drop_path_schedule": "linear"}), CIFAR, 100)
    rates = [m.drop_prob for m in linear.modules() if type(m).__name__ == "DropPath"]
    assert rates == sorted(rates)
    assert len(set(rates)) == 8


def test_without_ffn_a_block_contains_only_attention() -> None:
    torch.manual_seed(0)
    network = build(belief2_vit("standard", None), CIFAR, 10).eval()
    block = network.blocks[0]
    x = torch.randn(2, 65, 192)
    torch.testing.assert_close(block(x), x + block.attn(block.norm1(x)))
    assert not any(isinstance(m, nn.GELU) for m in network.modules())


def test_equal_seeds_give_equal_weights_and_every_parameter_gets_a_gradient() -> None:
    torch.manual_seed(1)
    one = build(vit_small("belief-star"), CIFAR, 10)
    torch.manual_seed(1)
    two = build(vit_small("belief-star"), CIFAR, 10)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert count(one) == 11_198_448
    one(torch.randn(2, *CIFAR)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in one.parameters())
