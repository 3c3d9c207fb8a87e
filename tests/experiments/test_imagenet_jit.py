"""The plug-in for JiT against the published set-up (docs/setups.md, section 6)."""

import importlib
from typing import Any

import pytest
import torch
from helpers.paths import EXPERIMENTS
from torch import nn

from lit_attn.attention.layer import Attention
from lit_attn.attention.rotary import rotate
from lit_attn.attention.spec import PRESETS
from lit_attn.data.image_folders import ImageNet
from lit_attn.data.image_sets import Cifar10
from lit_attn.models.base import FFN
from lit_attn.models.factory import build, count, describe, resolve
from lit_attn.schema.plugins import load_parts
from lit_attn.signatures import ImageLabels

load_parts([EXPERIMENTS / "imagenet_jit" / "imagenet_jit.py"])
config = importlib.import_module("imagenet_jit")

IMAGENET = ImageNet()

TINY = {"dim": 32, "depth": 2, "heads": 2}


def jit_b(attention: str, width: int) -> Any:
    return config.JiTConfig(attention=PRESETS[attention], ffn=FFN(width=width, activation="swiglu"))


def test_jit_b_as_a_classifier_has_its_count() -> None:
    """The count is that of blocks, adaLN, bottleneck, final norm and head."""
    assert count(build(config.JiTConfig(), IMAGENET, "meta")) == 128_539_624


@pytest.mark.parametrize(("attention", "width"), [("belief-star", 1792), ("belief2", 1536)])
def test_matching_finds_the_papers_widths(attention: str, width: int) -> None:
    matched = resolve(jit_b(attention, 64), jit_b("standard", 2048), IMAGENET)
    assert matched == jit_b(attention, width)


def test_flops_equal_a_count_by_hand() -> None:
    """The count covers every matrix product and convolution with 2 FLOPs per multiply-add."""
    n, d, w, b, depth = 16, 32, 48, 128, 2
    tiny = {**TINY, "patch": 8, "ffn": FFN(width=w, activation="swiglu")}
    block = 2 * n * d * (4 * d + 3 * w) + 2 * (2 * n * n * d) + 2 * d * 6 * d
    ends = 2 * n * (3 * 64 * b + b * d) + 2 * d * 10
    assert describe(config.JiTConfig(**tiny), Cifar10()).flops == depth * block + ends


def test_a_jit_block_starts_as_the_identity_and_learns() -> None:
    torch.manual_seed(0)
    network = config.JiTClassifier(config.JiTConfig(**TINY, patch=4), (3, 16, 16), 3)
    x = torch.randn(2, 16, 32)
    turned = config.axial(4, 4, 16)
    torch.testing.assert_close(network.blocks[0](x, torch.randn(2, 32), turned), x)
    optimizer = torch.optim.SGD(network.parameters(), 0.5)
    images = torch.randn(8, 3, 16, 16)
    labels = torch.arange(8) % 3
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(3.0).log().item())
    assert losses[-1] < losses[0] / 2
    assert all(p.grad is not None for p in network.parameters())


def test_axial_positions_see_only_differences_of_rows_and_columns() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.double)
    turned = config.axial(4, 5, 16)
    everywhere = [rotate(x.expand(1, 1, 20, 16), turned) for x in (q, k)]
    logits = (everywhere[0] @ everywhere[1].mT).view(4, 5, 4, 5)
    # From (row, column) to one row down and two columns right, wherever one starts.
    steps = torch.stack([logits[i, j, i + 1, j + 2] for i in range(3) for j in range(2)])
    torch.testing.assert_close(steps, steps[:1].expand(6), rtol=1e-5, atol=1e-6)
    assert not torch.isclose(logits[0, 0, 1, 2], logits[0, 0, 2, 1])


def test_jit_normalises_and_turns_queries_and_keys() -> None:
    network = config.JiTClassifier(config.JiTConfig(**TINY, patch=4), (3, 16, 16), 3)
    attention = network.blocks[0].attn
    assert isinstance(attention, Attention)
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (16,)
    assert attention.q_norm.eps == 1e-6
    assert attention.qkv.bias is not None


def test_without_ffn_every_block_contains_only_attention() -> None:
    network = config.JiTClassifier(config.JiTConfig(**TINY, ffn=None), (3, 32, 32), 3, "meta")
    assert not any("ffn" in name for name, _ in network.named_parameters())
    assert network.blocks[0].modulation.out_features == 3 * 32


def test_patches_must_tile_the_image() -> None:
    with pytest.raises(ValueError, match="patches of 16 do not tile images of 32 x 40"):
        config.JiTConfig().build(ImageLabels((3, 32, 40), 10), "meta")


def test_heads_rotate_by_row_and_column() -> None:
    with pytest.raises(ValueError, match="heads: 128 heads of a width that is a multiple"):
        config.JiTConfig(heads=128)
