"""Tests of positions that differ between the layers of a model."""

from typing import Any

import pytest
import torch
from helpers import gpt_cases
from pydantic import ValidationError

from lit_attn.attention import reference
from lit_attn.attention.rotary import rotary
from lit_attn.models.language import GPT

MIXED: dict[str, Any] = {"rotations": ["model", "none", {"share": 0.5, "base": 1e6}]}


def forward_by_formulas(network: GPT, ids: torch.Tensor, turns: list[Any]) -> torch.Tensor:
    """Return the trunk's output with the formula of each layer and the rotation of `turns`."""
    x = network.trunk.tokens(ids)
    for block, turn in zip(network.trunk.blocks, turns, strict=True):
        x = x + block.attention_scale * reference.attention(
            block.attn, block.norm1(x), is_causal=True, rotary=turn
        )
        x = x + block.ffn(block.norm2(x))
    return network.trunk.norm(x)


def test_layers_have_positions_of_their_own() -> None:
    """The widths of heads are 8: all of them, none, and the first 4 rotate."""
    network = gpt_cases.network("casted", **MIXED)
    ids = gpt_cases.tokens()
    indices = torch.arange(gpt_cases.CONTEXT)
    turns = [rotary(indices, 8), None, rotary(indices, 4, 1e6)]
    expected = forward_by_formulas(network, ids, turns)
    torch.testing.assert_close(network.trunk(ids), expected, rtol=1e-9, atol=1e-10)


def test_rotations_repeat_in_turn() -> None:
    config = gpt_cases.config("casted", rotations=["model", "none"])
    widths = [config.rotation_of(layer) for layer in range(3)]
    assert widths == [(8, 10_000.0), None, (8, 10_000.0)]


def test_a_model_without_positions_equals_the_formula() -> None:
    network = gpt_cases.network("casted", positions="none")
    ids = gpt_cases.tokens()
    expected = forward_by_formulas(network, ids, [None] * 3)
    torch.testing.assert_close(network.trunk(ids), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("changes", [MIXED, {"positions": "none"}], ids=["mixed", "none"])
def test_decoding_keeps_the_positions_of_layers(changes: dict[str, Any]) -> None:
    network = gpt_cases.network("casted", **changes, windows=(None, 4, None))
    gpt_cases.assert_decodes(network, [1, 2, 7, 8])


def test_positions_of_layers_start_again_in_each_document() -> None:
    network = gpt_cases.network("casted", **MIXED)
    network.trunk.document_end = 0
    ids = gpt_cases.tokens().clamp_min(1)
    ids[:, 6] = 0
    packed = network.trunk(ids)
    torch.testing.assert_close(packed[:, 6:], network.trunk(ids[:, 6:]), rtol=1e-9, atol=1e-10)


def test_choices_that_are_the_default_keep_the_identity() -> None:
    assert "rotations" not in gpt_cases.config("casted", rotations=["model"]).identity()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "learned", "rotations": ["none"]}, "rotations: need `positions: rotary`"),
        ({"positions": "none", "rotations": ["none"]}, "rotations: need `positions: rotary`"),
        ({"rotations": ["none", "none"]}, "rotations: no layer has positions"),
        ({"rotations": ["model"] * 4}, "rotations: 4 are more than the 3 layers"),
        ({"rotations": [{"share": 0.4}]}, "rotations.0: rotates 3 of 8 components"),
        ({"rotations": [{"share": 0.1}]}, "rotations.0: rotates 0 of 8 components"),
    ],
    ids=str,
)
def test_rotations_without_a_meaning_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        gpt_cases.config("casted", **changes)
