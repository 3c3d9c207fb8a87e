"""Tests of decoding with caches: equality with the whole sequence, limits, sampling."""

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import gpt_cases
from helpers.gpt_cases import CONTEXT, VOCABULARY, assert_decodes

from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.mixture import MixtureConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.models import language
from lit_attn.models.base import FFN
from lit_attn.models.language import (
    GPT,
    Sampling,
    SequenceClassifierConfig,
    continuation,
    sample_token,
)
from lit_attn.models.token_transformer import Init

every_choice = pytest.mark.parametrize("name", gpt_cases.CHOICES)
BY_POSITION = AttentionSpec(similarity=MixtureConfig(prior_scope="position", positions=8))


def without_caches(network: GPT, prompt: list[int], count: int, how: Sampling) -> list[int]:
    """Return the tokens of `continuation`, computed from the whole context for each token."""
    ids, draws = list(prompt), torch.Generator().manual_seed(how.seed)
    for _ in range(count):
        with torch.no_grad():
            ids.append(sample_token(network(torch.tensor([ids]))[0, -1, :VOCABULARY], how, draws))
    return ids[len(prompt) :]


@every_choice
@pytest.mark.parametrize("cuts", [list(range(1, CONTEXT)), [7, 8, 9], [5, 11]], ids=len)
def test_decoding_equals_the_full_sequence(name: str, cuts: list[int]) -> None:
    assert_decodes(gpt_cases.network(name), cuts)


# Every kind of position, and what layers exchange. tests/attention/test_decoding.py has the layers.
POSITIONS = [("mgk", "learned"), ("belief2", "sinusoidal"), ("dcmha", "fairseq")]
POSITIONS += [(preset, "rotary") for preset in ("mgk", "belief2", "dcmha", "linear", "forgetting")]
POSITIONS += [(preset, "rotary") for preset in ("value-residual-learned", "mla", "moba")]


@pytest.mark.parametrize(("preset", "positions"), POSITIONS)
def test_decoding_works_for_all_positions(preset: str, positions: str) -> None:
    network = gpt_cases.network("nanogpt", attention=PRESETS[preset], positions=positions)
    assert_decodes(network, [3, 4, 5, 9])


@pytest.mark.parametrize("preset", ["standard", "mgk", "dcmha", "belief2"])
def test_decoding_works_for_layers_of_different_windows(preset: str) -> None:
    """Each layer caches the tokens that its own window needs."""
    spec = PRESETS[preset].model_copy(update={"kv_heads": 1})
    network = gpt_cases.network("transformer++", attention=spec, windows=(3, None, 1))
    assert_decodes(network, list(range(4, CONTEXT)))


# The previous test compares the logits of every preset.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "temperature"),
    [("standard", 1), ("mgk-soft-e", 1), ("dcmha", 1), ("linear", 1), ("standard", 0), ("mgk", 0)],
)
def test_caches_do_not_change_the_drawn_tokens(preset: str, temperature: float) -> None:
    # With small weights and a tied head a token is its own likeliest successor.
    lively = Init(matrices=0.5, embedding=0.5)
    network = gpt_cases.network("nanogpt", attention=PRESETS[preset], head="untied", init=lively)
    prompt, how = [3, 1, 4, 1], Sampling(temperature)
    drawn = list(continuation(network, prompt, 10, VOCABULARY, how))
    assert drawn == without_caches(network, prompt, 10, how)
    assert len(set(drawn)) > 3 * temperature


def test_a_token_past_the_learned_positions_is_an_error() -> None:
    network = gpt_cases.network("nanogpt")
    caches = network.trunk.new_caches()
    network(gpt_cases.tokens(), caches)
    with pytest.raises(ValueError, match="17 tokens are more than the 16 positions"):
        network(gpt_cases.tokens(n=1), caches)


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, CONTEXT),
        ({"positions": "rotary"}, None),
        ({"positions": "sinusoidal"}, None),
        ({"positions": "sinusoidal", "attention": BY_POSITION}, 8),
        ({"attention": BY_POSITION}, 8),
        ({"attention": AttentionSpec(similarity=LinearConfig(keys=2))}, CONTEXT),
    ],
)
def test_learned_positions_limit_the_sequence(changes: dict[str, Any], longest: int | None) -> None:
    network = gpt_cases.network("nanogpt", **changes)
    assert network.trunk.max_tokens == longest
    if longest is not None:
        network(gpt_cases.tokens(n=longest))
        with pytest.raises(ValueError, match="positions"):
            network(gpt_cases.tokens(n=longest + 1))


def test_computed_positions_decode_beyond_the_trained_context() -> None:
    tokens = gpt_cases.tokens(n=CONTEXT + 9)
    assert_decodes(gpt_cases.network("casted"), [CONTEXT - 2, CONTEXT + 3], tokens)


def test_a_bidirectional_model_is_refused() -> None:
    model = SequenceClassifierConfig(dim=8, depth=1, heads=2, ffn=FFN(width=8))
    classifier = language.SequenceClassifier(model, VOCABULARY, CONTEXT, classes=2)
    with pytest.raises(ValueError, match="a model that is bidirectional cannot be decoded"):
        classifier.trunk.new_caches()


def test_equal_seeds_draw_equal_tokens() -> None:
    network = gpt_cases.network("nanogpt")
    first, again, other = (
        list(continuation(network, [1, 2], 12, VOCABULARY, Sampling(seed=seed)))
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_padding_rows_of_the_vocabulary_are_never_drawn() -> None:
    """nanoGPT rounds 50,257 up to 50,304; the additional ids have no text."""
    network = gpt_cases.network("nanogpt")
    with torch.no_grad():
        network.trunk.tokens.weight[VOCABULARY:] = 100 * network.trunk.tokens.weight[:14]
    drawn = list(continuation(network, [1], 12, VOCABULARY, Sampling(temperature=5)))
    assert max(drawn) < VOCABULARY


def test_draws_follow_temperature_and_top_k() -> None:
    """Frequencies of 4,000 draws are close to softmax(logits / T) over the k largest."""
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0], dtype=torch.double)
    draws = torch.Generator().manual_seed(0)
    for temperature, candidates in ((1.0, [0, 1, 2, 3]), (2.0, [1, 3, 0]), (0.5, [1, 3])):
        how = Sampling(temperature, None if len(candidates) == 4 else len(candidates))
        counts = Counter(sample_token(logits, how, draws) for _ in range(4000))
        assert set(counts) == set(candidates)
        expected = (logits[candidates] / temperature).softmax(-1)
        for number, share in zip(candidates, expected.tolist(), strict=True):
            assert counts[number] / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("temperature", [0.0, 1e-300])
def test_temperature_zero_takes_the_largest_logit(temperature: float) -> None:
    logits = torch.tensor([-1.0, 700.0, 699.0], dtype=torch.double)
    assert sample_token(logits, Sampling(temperature), torch.Generator()) == 1


def test_a_top_k_above_the_vocabulary_keeps_all_tokens() -> None:
    logits = torch.zeros(3, dtype=torch.double)
    draws = torch.Generator().manual_seed(0)
    assert {sample_token(logits, Sampling(top_k=10), draws) for _ in range(100)} == {0, 1, 2}
