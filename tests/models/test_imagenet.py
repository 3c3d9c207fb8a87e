"""Tests of the ImageNet models against the published set-ups (docs/setups.md, sections 5-7)."""

import pytest
import timm
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from lit_attn.attention.spec import PRESETS
from lit_attn.data.image_folders import ImageNet
from lit_attn.models import vit
from lit_attn.models.base import FFN
from lit_attn.models.factory import build, count
from lit_attn.models.layers import HeadNorm
from lit_attn.models.vit import ImageViTConfig, ViTConfig
from lit_attn.signatures import ImageLabels

IMAGENET = ImageNet()

TINY = {"dim": 32, "depth": 2, "heads": 2}


def vit_s(attention: str) -> ImageViTConfig:
    """Return the ViT-S/16 of DCMHA's ImageNet experiment."""
    return ImageViTConfig(attention=PRESETS[attention], pool="average", positions="sincos")


def parameters(model: ImageViTConfig) -> int:
    return count(build(model, IMAGENET, "meta"))


def test_deit_small_has_its_published_count_and_equals_the_timm_model() -> None:
    assert parameters(ImageViTConfig()) == 22_050_664
    torch.manual_seed(0)
    published = timm.create_model("deit_small_patch16_224", img_size=32, depth=2, num_classes=5)
    ours = vit.build_image_vit(ImageViTConfig(depth=2), (3, 32, 32), 5)
    ours.load_state_dict(published.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), published(x), rtol=1e-5, atol=1e-5)


def test_dcmha_adds_the_published_parameters_to_every_layer() -> None:
    assert parameters(vit_s("dcmha")) - parameters(vit_s("standard")) == 12 * 48_384


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


@pytest.mark.parametrize("size", [8, 16, 24])
def test_positions_learn_at_every_image_size(size: int) -> None:
    torch.manual_seed(0)
    network = ImageViTConfig(**TINY, patch=4).build(ImageLabels((3, 16, 16), 3))
    network(torch.randn(2, 3, size, size)).sum().backward()
    assert network.pos_embed.shape == (1, 17, 32)
    assert network.pos_embed.grad.abs().min() > 0


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


def test_patches_must_tile_the_image() -> None:
    with pytest.raises(ValueError, match="patches of 16 do not tile images of 32 x 40"):
        ImageViTConfig().build(ImageLabels((3, 32, 40), 10), "meta")


@pytest.mark.parametrize("config_class", [ImageViTConfig, ViTConfig])
@pytest.mark.parametrize("attention", ["standard", "belief2", "mgk", "linear"])
def test_qk_norm_divides_the_queries_and_keys_of_every_head_by_their_root_mean_square(
    config_class: type[ImageViTConfig | ViTConfig], attention: str
) -> None:
    choices = {**TINY, "patch": 4, "ffn": FFN(width=8), "attention": PRESETS[attention]}
    plain = config_class(**choices).build(ImageLabels((3, 8, 8), 3))
    model = config_class(**choices, qk_norm=True, qk_norm_eps=1e-3)
    normed = model.build(ImageLabels((3, 8, 8), 3)).double()
    width = TINY["dim"] // TINY["heads"]
    assert count(normed) - count(plain) == TINY["depth"] * 2 * width
    names = normed.state_dict().keys() - plain.state_dict().keys()
    assert names == {f"blocks.{i}.attn.{part}_norm.weight" for i in (0, 1) for part in "qk"}
    x = torch.randn(2, 5, TINY["dim"], dtype=torch.double)
    attn = normed.blocks[1].attn
    inputs = attn.inputs(x, None, False, None)
    q = attn.qkv(x)[..., : TINY["dim"]].unflatten(-1, (TINY["heads"], width)).transpose(1, 2)
    expected = q / (q.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(inputs.q, expected)
    assert inputs.keys.square().mean(-1).max() <= 1
    assert normed(torch.randn(2, 3, 8, 8, dtype=torch.double)).shape == (2, 3)


def test_layers_that_differ_have_norms_of_q_and_k_too() -> None:
    layers = {"preset": "standard", "layers": [{"last": 1, "use": "xsa"}]}
    model = ImageViTConfig(**TINY, patch=4, qk_norm=True, attention=layers)
    network = model.build(ImageLabels((3, 8, 8), 3))
    for block in network.blocks:
        assert isinstance(block.attn.q_norm, HeadNorm)
        assert isinstance(block.attn.k_norm, HeadNorm)


def test_an_epsilon_without_norms_is_refused() -> None:
    with pytest.raises(ValidationError, match="qk_norm_eps: needs `qk_norm: true`"):
        ImageViTConfig(qk_norm_eps=1e-5)
