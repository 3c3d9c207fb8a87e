"""Tests of the parameter counts of the published language models and classifiers."""

import pytest

from lit_attn.attention.mixture import MixtureConfig
from lit_attn.attention.similarity import DotConfig, SimilarityConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.models import language
from lit_attn.models.base import FFN
from lit_attn.models.factory import count
from lit_attn.models.language import GPTConfig, SequenceClassifierConfig
from lit_attn.models.token_transformer import Init

GPT2 = GPTConfig(dim=768, depth=12, heads=12, ffn=FFN(width=3072), vocabulary_multiple=64)
CASTED = GPTConfig(
    dim=768,
    depth=12,
    heads=12,
    ffn=FFN(width=3072),
    positions="rotary",
    norm="rmsnorm-unweighted",
    attention_branch="depth-scaled",
    init=Init(matrices="torch", embedding="torch", depth_scaled=False),
)
TRANSFORMER_PP = GPTConfig(
    dim=1024,
    depth=24,
    heads=16,
    ffn=FFN(width=2816, activation="swiglu"),
    positions="rotary",
    norm="rmsnorm",
    head="untied",
    windows=(256, None),
)
WIKITEXT = GPTConfig(
    dim=128,
    depth=16,
    heads=8,
    head_dim=16,
    ffn=FFN(width=2048, activation="relu"),
    positions="sinusoidal",
    norm="layernorm",
    norm_order="post",
    bias="ffn",
    head="adaptive",
    cutoffs=(20_000, 40_000, 200_000),
)


def parameters(model: GPTConfig, vocabulary: int, context: int) -> int:
    return count(language.GPT(model, vocabulary, context, device="meta"))


def test_nanogpts_gpt2_has_its_published_count() -> None:
    """V d + n d + L (12 d^2 + 2 d) + d with the vocabulary rounded up to 50,304."""
    number_of_parameters = parameters(GPT2, 50_257, 1024)
    assert number_of_parameters == 124_373_760
    assert number_of_parameters == (50_304 + 1024) * 768 + 12 * (12 * 768**2 + 2 * 768) + 768
    # nanoGPT prints the number without the positions: 123.59M.
    assert number_of_parameters - 1024 * 768 == 123_587_328


def test_hugging_faces_gpt2_has_its_published_count() -> None:
    model = GPT2.model_copy(update={"bias": "all", "norm": "layernorm", "vocabulary_multiple": 1})
    assert parameters(model, 50_257, 1024) == 124_439_808


def test_casted_has_its_published_count() -> None:
    assert parameters(CASTED, 50_257, 1024) == 123_532_032
    star = CASTED.model_copy(update={"attention": PRESETS["belief-star"]})
    assert parameters(star, 50_257, 1024) == 130_609_920


def test_transformer_pp_405m_has_its_published_count() -> None:
    """2 V d + L (4 d^2 + 3 d f + 2 d) + d at DCFormer's 405M shape."""
    expected = 2 * 50_256 * 1024 + 24 * (4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024) + 1024
    assert parameters(TRANSFORMER_PP, 50_256, 2048) == expected == 411_255_808
    # DCMHA adds 4 (d 4H + (4H)^2) + 4 d H a layer with R = 2.
    composed = TRANSFORMER_PP.model_copy(update={"attention": PRESETS["dcmha"]})
    assert parameters(composed, 50_256, 2048) == expected + 24 * 344_064


@pytest.mark.parametrize(("heads", "total"), [(8, 44_018_394), (4, 43_494_106)])
def test_the_small_wikitext103_model_has_its_published_count(heads: int, total: int) -> None:
    """44.02M, 9.48M of them in the blocks; with 4 heads these keep their width of 16."""
    model = WIKITEXT.model_copy(update={"heads": heads})
    softmax = 267_735 + 3 * 128 + 3
    blocks = 16 * (4 * 128 * 16 * heads + (2 * 128 * 2048 + 2048 + 128) + 4 * 128)
    assert parameters(model, 267_735, 256) == total == 267_735 * 128 + softmax + blocks
    assert heads != 8 or blocks == 9_480_192


@pytest.mark.parametrize(
    ("source", "heads", "total"),
    [("projected", 8, 44_346_074), ("projected", 4, 43_657_946), ("shifted", 8, 44_088_026)],
)
def test_mixtures_of_keys_have_their_published_counts(source: str, heads: int, total: int) -> None:
    """MGK 44.35M, with 4 heads 43.66M; sMGK 44.09M: pi of every head and position, as released."""
    keys = MixtureConfig(source=source, prior="clamped", prior_scope="position", positions=256)
    attention = AttentionSpec(similarity=keys)
    model = WIKITEXT.model_copy(update={"heads": heads, "attention": attention})
    assert parameters(model, 267_735, 256) == total


MGK = MixtureConfig(prior="clamped", prior_scope="layer")
SMGK = MixtureConfig(prior="clamped", prior_scope="layer", source="shifted")


@pytest.mark.parametrize(
    ("similarity", "totals"),
    [
        (DotConfig(), {1: 378_562, 2: 395_138, 4: 428_290, 8: 494_594}),
        (MGK, {1: 382_726, 2: 403_462, 4: 444_934}),
        (SMGK, {1: 378_694, 2: 395_398, 4: 428_806}),
    ],
    ids=["softmax", "mgk", "smgk"],
)
def test_the_retrieval_model_has_its_published_count(
    similarity: SimilarityConfig, totals: dict[int, int]
) -> None:
    assert {heads: retrieval(heads, similarity) for heads in totals} == totals


def retrieval(heads: int, similarity: SimilarityConfig) -> int:
    model = SequenceClassifierConfig(
        dim=64,
        depth=2,
        heads=heads,
        head_dim=32,
        ffn=FFN(width=128),
        norm="layernorm",
        bias="all",
        pool="zero-padded",
        attention=AttentionSpec(similarity=similarity),
    )
    network = language.SequenceClassifier(model, 512, 4096, classes=2, pairs=True, device="meta")
    return count(network)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits(name: str) -> None:
    tiny = GPTConfig(dim=24, depth=2, heads=4, ffn=FFN(width=32), attention=PRESETS[name])
    standard = tiny.model_copy(update={"attention": AttentionSpec()})
    assert parameters(tiny, 50, 16) >= parameters(standard, 50, 16)
