"""The plug-in for Zoology's network, against its formula in plain operations."""

import importlib
from typing import Any

import pytest
import torch
from helpers.paths import EXPERIMENTS
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from lit_attn.schema.plugins import load_parts
from lit_attn.signatures import TokenStream

load_parts([EXPERIMENTS / "probes" / "zoology_network.py"])
ZoologyConfig = importlib.import_module("zoology_network").ZoologyConfig

SIGNATURE = TokenStream(vocabulary=11, context=7)
SIZES = {"dim": 8, "depth": 2, "heads": 1, "ffn": None, "norm": "layernorm", "bias": "all"}


def network(**changes: Any) -> Any:
    """Return a network in float64 whose parameters are all random, norms and biases too."""
    torch.manual_seed(0)
    built = ZoologyConfig(**SIZES, **changes).build(SIGNATURE, "cpu").double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.5)
    return built


def compute_logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return the logits (B, n, V) of two blocks: x + attention(norm(x)), then x + norm(x)."""

    def normalise(x: Tensor, name: str) -> Tensor:
        deviation = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        scaled = (x - x.mean(-1, keepdim=True)) / deviation
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def multiply(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    n = tokens.shape[1]
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    x = weights["trunk.tokens.weight"][tokens] + weights["trunk.positions.weight"][:n]
    for number in range(2):
        block = f"trunk.blocks.{number}"
        q, k, v = multiply(normalise(x, f"{block}.norm1"), f"{block}.attn.qkv").chunk(3, -1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
        x = x + multiply(scores.softmax(-1) @ v, f"{block}.attn.proj")
        x = x + normalise(x, f"trunk.added_norms.{number}")
    return normalise(x, "trunk.norm") @ weights["trunk.tokens.weight"].T


def test_the_network_equals_its_formula_in_value_and_gradient() -> None:
    built = network().eval()
    weights = dict(built.named_parameters())
    tokens = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1))
    results = []
    for logits in (built(tokens), compute_logits(weights, tokens)):
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
        results.append([logits, *torch.autograd.grad(loss, list(weights.values()))])
    torch.testing.assert_close(results[0], results[1])


def test_dropout_is_that_of_the_embedding_alone() -> None:
    built = network(embedding_dropout=0.5).train()
    tokens = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1))
    undropped = built.trunk.tokens(tokens) + built.trunk.positions.weight
    embedded = built.trunk.embed(tokens, torch.arange(7))
    is_dropped = embedded == 0
    assert 0.3 < is_dropped.double().mean() < 0.7
    torch.testing.assert_close(embedded[~is_dropped], 2 * undropped[~is_dropped])
    block = built.trunk.blocks[0]
    in_training = block(undropped, None, True, None)
    torch.testing.assert_close(in_training, block.eval()(undropped, None, True, None))


def test_initial_values_are_those_of_the_source() -> None:
    """Deviations: 0.02 for embeddings and matrices, divided by sqrt(2 depth) for W."""
    sizes = SIZES | {"dim": 64}
    built = ZoologyConfig(**sizes).build(TokenStream(vocabulary=500, context=64), "cpu")
    deviations = {name: float(p.detach().std()) for name, p in built.named_parameters()}
    for name, deviation in deviations.items():
        if "norm" in name or name.endswith("bias"):
            assert deviation == 0
        else:
            expected = 0.01 if name.endswith("proj.weight") else 0.02
            assert abs(deviation / expected - 1) < 0.05, name


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"ffn": {"width": 16}}, "ffn: Zoology's network has none; write null"),
        ({"norm_order": "post"}, "norm_order: Zoology's blocks are not 'post'; write pre"),
    ],
)
def test_blocks_that_are_not_those_of_the_source_are_refused(
    change: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(ValidationError, match=refusal):
        ZoologyConfig(**(SIZES | change))
