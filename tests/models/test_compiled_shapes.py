"""Compiled code sees few shapes: last batches, generation, and the replaced layers of timm."""

import pytest
import timm
import torch
from helpers.graph_counter import GraphCounter
from helpers.training_cells import digits_cell, text_cell

from lit_attn import replace_attention
from lit_attn.attention.cache import SPARE
from lit_attn.config.cell import Cell
from lit_attn.models import blocks, factory
from lit_attn.models.language import Sampling, continuation

pytestmark = pytest.mark.slow


def build(cell: Cell) -> torch.nn.Module:
    torch.manual_seed(0)
    return factory.build(cell.experiment.model, cell.experiment.data)


@pytest.mark.parametrize("attention", ["standard", "dcmha"])
def test_last_batches_of_any_size_need_one_more_graph(
    attention: str, compiler: GraphCounter
) -> None:
    cell = digits_cell(model={"attention": attention, "drop_path": 0.0})
    expected, network = build(cell).eval(), build(cell)
    blocks.compile_blocks(network)
    network.train()(torch.randn(8, 1, 8, 8)).sum().backward()
    network.eval()
    with torch.no_grad():
        for size in (8, 5, 3, 7, 2):
            images = torch.randn(size, 1, 8, 8)
            torch.testing.assert_close(network(images), expected(images), rtol=1e-5, atol=1e-6)
    # Training, evaluation, and evaluation of any other number of samples.
    assert compiler.graphs == 3


@pytest.mark.parametrize("attention", ["belief2", "mgk"])
def test_texts_that_grow_need_one_more_graph(attention: str, compiler: GraphCounter) -> None:
    """Without a cache, each token of a generated text is another length."""
    cell = text_cell(model={"attention": attention})
    expected, network = build(cell).eval(), build(cell).eval()
    blocks.compile_blocks(network)
    with torch.no_grad():
        for length in range(4, 14):
            tokens = torch.randint(20, (2, length))
            torch.testing.assert_close(network(tokens), expected(tokens), rtol=1e-5, atol=1e-6)
    assert compiler.graphs == 2


@pytest.mark.parametrize("attention", ["standard", "mgk"])
def test_generation_with_caches_compiles_only_for_its_first_tokens(
    attention: str, compiler: GraphCounter
) -> None:
    """A cache has another length at each token, and its buffers grow now and then."""
    cell = text_cell(model={"attention": attention, "positions": "rotary"})
    expected, network = build(cell).eval(), build(cell).eval()
    blocks.compile_blocks(network)
    likeliest = Sampling(temperature=0.0)
    count = 2 * SPARE + 8
    ids = []
    graphs = []
    for token in continuation(network, [1, 2, 3], count, 20, likeliest):
        ids.append(token)
        graphs.append(compiler.graphs)
    assert network.trunk.can_be_cached
    assert ids == list(continuation(expected, [1, 2, 3], count, 20, likeliest))
    # The prompt, the first tokens with a cache, and the first growth of a buffer are compiled.
    assert graphs[3] == graphs[SPARE - 1]
    assert graphs[SPARE + 3] == graphs[-1]


@pytest.mark.parametrize("attention", ["belief2", "dcmha"])
def test_a_model_with_replaced_layers_is_compiled_for_any_batch(
    attention: str, compiler: GraphCounter
) -> None:
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **size)
    replace_attention(model, attention)
    model.eval()
    images = [torch.randn(number, 3, 16, 16) for number in (4, 2, 3, 5)]
    with torch.no_grad():
        expected = [model(batch) for batch in images]
        model.compile(backend=compiler)
        for batch, output in zip(images, expected, strict=True):
            torch.testing.assert_close(model(batch), output, rtol=1e-5, atol=1e-6)
    assert compiler.graphs == 2
