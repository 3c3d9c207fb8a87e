"""Blocks of a network: which modules they are, and their recomputation for the gradient."""

import itertools
from typing import Any

import pytest
import torch
from helpers import block_networks
from helpers.two_ranks import transformer
from torch import Tensor, nn

from lit_attn.attention.layer import attn_layer
from lit_attn.attention.spec import AttentionSpec
from lit_attn.data.image_sets import Digits
from lit_attn.models import block_checks
from lit_attn.models.blocks import (
    find_blocks,
    recompute_blocks,
    require_recomputable,
    require_shardable,
)
from lit_attn.replace import replace_attention
from lit_attn.replace.external import ModuleConfig
from lit_attn.replace.timm_models import TimmConfig
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ImageLabels

KEY = "training.recompute: blocks"


def attention() -> nn.Module:
    return attn_layer(AttentionSpec())(8, 2)


class Loose(nn.Module):
    """Network whose attention layers are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([attention(), attention()])


def test_a_block_is_the_smallest_item_of_a_list_around_a_layer() -> None:
    assert list(find_blocks(transformer("standard"), KEY)) == ["blocks.0", "blocks.1"]
    model = TimmConfig.model_validate(
        {
            "name": "swin_tiny_patch4_window7_224",
            "arguments": {"depths": [1, 2], "num_heads": [1, 2], "embed_dim": 8, "window_size": 2},
        }
    )
    network = model.build(Digits(batch_size=8).signature(), "meta")
    names = list(find_blocks(network, KEY))
    assert names == ["layers.0.blocks.0", "layers.1.blocks.0", "layers.1.blocks.1"]


def test_the_blocks_of_a_model_without_a_list_are_unknown() -> None:
    with pytest.raises(ConfigError) as caught:
        find_blocks(Loose(), KEY)
    assert str(caught.value) == (
        "training.recompute: blocks: the attention layer 'layers.0' is in no block: no module that "
        "contains it is an item of a torch.nn.ModuleList or torch.nn.Sequential; "
        "put the blocks of the model into such a list"
    )


def test_weights_that_blocks_share_cannot_be_sharded() -> None:
    network: Any = transformer("standard")
    require_shardable(network)
    network.blocks[1].norm1 = network.blocks[0].norm1
    with pytest.raises(
        ConfigError, match=r"'blocks.1.norm1.weight' is shared between 'blocks.0' and 'blocks.1'"
    ):
        require_shardable(network)


def test_a_number_cannot_be_sharded() -> None:
    network = transformer("standard")
    network.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match=r"'temperature' is a number without axes"):
        require_shardable(network)


def test_running_statistics_in_a_block_are_refused() -> None:
    network: Any = transformer("standard")
    network.blocks[1].norm1 = nn.BatchNorm1d(16)
    with pytest.raises(ConfigError, match=r"'blocks.1.norm1' \(BatchNorm1d\) averages statistics"):
        require_recomputable(network, KEY)


@pytest.mark.parametrize("preset", ["standard", "belief2", "dcmha", "mgk-soft-e"])
def test_recomputed_gradients_are_the_same(preset: str) -> None:
    """In float64 with dropout: the second computation draws the same random numbers."""
    gradients: list[list[Tensor]] = []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        network: Any = transformer(preset).double().train()
        for block in network.blocks:
            block.mlp.drop1.p = 0.3
            block.attn.proj_drop.p = 0.3
        if is_recomputed:
            recompute_blocks(network)
        torch.manual_seed(1)
        network(torch.randn(2, 3, 8, 8, dtype=torch.double)).square().sum().backward()
        gradients.append([p.grad for p in network.parameters() if p.grad is not None])
    assert gradients[0]
    for plain, recomputed in itertools.zip_longest(*gradients):
        torch.testing.assert_close(plain, recomputed, rtol=1e-12, atol=1e-12)


def test_recomputation_keeps_less_for_the_gradient() -> None:
    """The tensors that autograd keeps, counted in a forward pass with and without recomputation."""
    kept = []
    for is_recomputed in (False, True):
        network = transformer("standard")
        if is_recomputed:
            recompute_blocks(network)
        sizes: list[int] = []

        def count(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            network(torch.zeros(2, 3, 8, 8))
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_a_check_that_cannot_be_made_says_so_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sample = (torch.empty(1, 1, 8, 8, device="meta"),)
    with torch.device("meta"):
        unreadable = replace_attention(block_networks.ReadsValues(), "standard")
        block_checks.require_reads_in_blocks(unreadable, sample)
        sound = replace_attention(block_networks.Blocks(), "standard")
        block_checks.require_reads_in_blocks(sound, sample)
        penalised = replace_attention(block_networks.Penalised(), "standard")
        with pytest.raises(ConfigError, match=r"reads 'encoder\.layers\.0\.linear1\.weight'"):
            block_checks.require_reads_in_blocks(penalised, sample)
    (line,) = caplog.messages
    assert line.startswith("training.strategy: fsdp: not checked where weights are read: ")
    assert "RuntimeError: Tensor.item()" in line


def test_a_model_that_cannot_be_built_is_refused() -> None:
    model = ModuleConfig.model_validate({"import": "torch.nn:Linear", "arguments": {"size": 3}})
    with pytest.raises(ConfigError, match=r"^model: class ModuleConfig: .*argument 'size'"):
        block_checks.check_blocks(model, ImageLabels((1, 8, 8), 10), True, False)
