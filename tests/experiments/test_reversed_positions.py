"""The plug-in for a GPT whose positions are distances to the last token."""

import importlib
from typing import Any

import pytest
import torch
from helpers import gpt_cases
from helpers.gpt_cases import VOCABULARY
from helpers.paths import EXPERIMENTS
from pydantic import ValidationError
from torch import Tensor

from lit_attn.models.language import GPTConfig, Sampling, continuation
from lit_attn.models.trunk import sinusoids
from lit_attn.schema.plugins import load_parts
from lit_attn.signatures import TokenStream

load_parts([EXPERIMENTS / "wikitext103_mgk" / "reversed_positions.py"])
ReversedGPTConfig = importlib.import_module("reversed_positions").ReversedGPTConfig

SIGNATURE = TokenStream(vocabulary=VOCABULARY, context=gpt_cases.CONTEXT)


def config(**changes: Any) -> GPTConfig:
    values = gpt_cases.config("wikitext").model_dump(exclude={"kind"})
    model: GPTConfig = ReversedGPTConfig.model_validate(values | changes)
    return model


def network() -> Any:
    torch.manual_seed(0)
    return config().build(SIGNATURE, "cpu").double().eval()


def test_positions_are_distances_to_the_last_token() -> None:
    """In MGK's and Transformer-XL's code the position of token i of n is n - 1 - i."""
    gpt = network()
    tokens = gpt_cases.tokens(n=9)
    embedded: list[Tensor] = []
    gpt.trunk.blocks[0].register_forward_pre_hook(lambda _, inputs: embedded.append(inputs[0]))
    gpt(tokens)
    words = gpt.trunk.tokens(tokens) * gpt.trunk.embedding_scale
    distances = torch.arange(8, -1, -1)
    expected = sinusoids(distances, words.shape[-1]).to(words.dtype)
    torch.testing.assert_close(embedded[0] - words, expected.expand_as(words))


def test_text_is_continued_without_a_cache() -> None:
    gpt = network()
    with pytest.raises(ValueError, match="reversed positions cannot be decoded"):
        gpt.trunk.new_caches()
    tokens = [1, 2, 3]
    for token in continuation(gpt, tokens, 5, VOCABULARY, Sampling(temperature=0)):
        logits = gpt(torch.tensor([tokens]))[0, -1, :VOCABULARY]
        assert token == int(logits.argmax())
        tokens = [*tokens, token]


def test_all_else_is_the_model_of_the_package() -> None:
    """With one token there is one position, which is 0 in both directions."""
    gpt = network()
    plain = gpt_cases.network("wikitext")
    plain.load_state_dict(gpt.state_dict())
    tokens = gpt_cases.tokens(n=1)
    assert torch.equal(gpt(tokens), plain(tokens))


def test_other_positions_are_refused() -> None:
    with pytest.raises(ValidationError, match="positions"):
        config(positions="rotary")


def test_the_identity_is_that_of_recorded_cells() -> None:
    """Cells have this identity since the package itself had these positions."""
    plain = gpt_cases.config("wikitext").identity()
    assert config().identity() == {**plain, "positions": "sinusoidal-reversed"}
