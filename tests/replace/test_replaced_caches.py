"""Replaced layers read caches (growing, sliding) and masks (boolean, additive) of transformers."""

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from helpers.replaced_models import make_hub
from torch import Tensor, nn
from transformers.cache_utils import Fp8QuantizedLayer

from lit_attn import replace_attention
from lit_attn.attention.spec import PRESETS
from lit_attn.schema.errors import ConfigError

TOKENS = 24
WINDOW = 6
PADDING = 3
SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SLIDING = SIZES | {"use_sliding_window": True, "sliding_window": WINDOW}
SLIDING |= {"layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}

REFUSED = {"linear", "mlk", "smlk", "mla"}
"""Presets without keys and values, or with projections that no other model has."""

KEEPING: dict[str, Any] = {"forgetting": "forgetting", "selective": "selective"}
KEEPING["multi-token"] = "multi-token"
for place in ("qkv", "q", "k", "output"):
    KEEPING[f"convolution of {place}"] = {"convolution": {"kind": "short", "on": place}}
"""Mechanisms that keep sums over tokens besides their keys and values."""

CHOICES: dict[str, Any] = {name: name for name in PRESETS if name not in REFUSED} | KEEPING
CHOICES["small blocks"] = {"filter": {"kind": "moba", "block": 2, "blocks": 2}}
CHOICES["window alone"] = {"window": 4}
CHOICES["own window"] = {"window": 4, "bias": "forgetting", "convolution": "short"}
CHOICES["second layer"] = {"layers": [{"first": 1, "use": "forgetting"}]}


def make(kind: str, attention: Any, implementation: str = "sdpa", **options: Any) -> Any:
    """Return a replaced model in float64 whose weights differ everywhere."""
    factory = transformers.AutoModelForCausalLM
    if kind == "t5":
        factory = transformers.AutoModelForSeq2SeqLM
    model = make_hub(kind, options, implementation, factory).double().eval()
    skip = "*.EncDecAttention" if kind == "t5" else None
    replace_attention(model, attention, skip=skip)
    disturb(model)
    return model


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn_like(parameter)


def make_tokens() -> tuple[Tensor, Tensor]:
    """Return two texts and which of their tokens are present; the second one starts later."""
    tokens = torch.randint(3, 50, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    present = torch.ones_like(tokens)
    present[1, :PADDING] = 0
    return tokens, present


@torch.no_grad()
def decode(model: Any, cache: Any, cuts: list[int]) -> Tensor:
    """Return the logits of all tokens, which come in pieces."""
    tokens, present = make_tokens()
    pieces = []
    for start, stop in pairwise([0, *cuts, TOKENS]):
        arguments = {"attention_mask": present[:, :stop], "past_key_values": cache}
        pieces.append(model(tokens[:, start:stop], use_cache=True, **arguments).logits)
    return torch.cat(pieces, 1)


@torch.no_grad()
def compute(model: Any) -> Tensor:
    tokens, present = make_tokens()
    logits: Tensor = model(tokens, attention_mask=present, use_cache=False).logits
    return logits


def assert_same(ours: Tensor, expected: Tensor) -> None:
    shown = make_tokens()[1] == 1
    torch.testing.assert_close(ours[shown], expected[shown], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CHOICES)
def test_every_mechanism_decodes_from_growing_and_sliding_caches(name: str) -> None:
    """One layer keeps all tokens and the other one a window; one row has padding."""
    model = make("qwen2", CHOICES[name], **SLIDING)
    expected = compute(model)
    cache = transformers.DynamicCache(config=model.config)
    assert_same(decode(model, cache, [9, 10, 11, 13, 22, 23]), expected)


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_other_families_keep_sums_over_tokens(kind: str, name: str) -> None:
    model = make(kind, KEEPING[name], **GPT2 if kind == "gpt2" else T5)
    tokens, _ = make_tokens()
    first: dict[str, Any] = {"use_cache": True}
    key = "input_ids"
    if kind == "t5":
        first["input_ids"] = tokens[:, :5]
        key = "decoder_input_ids"
    with torch.no_grad():
        expected = model(**first | {key: tokens, "use_cache": False}).logits
        out = model(**first | {key: tokens[:, :20]})
        pieces = [out.logits]
        for token in tokens[:, 20:].split(1, 1):
            out = model(**first | {key: token}, past_key_values=out.past_key_values)
            pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["forgetting", "selective", "multi-token"])
def test_a_beam_search_takes_the_sums_of_its_beams_along(name: str) -> None:
    model = make("qwen2", name, **SLIDING)
    tokens, present = make_tokens()
    options = {"attention_mask": present[:, :9], "max_new_tokens": 8, "num_beams": 3}
    with torch.no_grad():
        cached = model.generate(tokens[:, :9], **options)
        again = model.generate(tokens[:, :9], **options, use_cache=False)
    assert torch.equal(cached, again)


def test_samples_of_a_cache_are_repeated_and_chosen_with_their_sums() -> None:
    model = make("qwen2", "forgetting", **SLIDING)
    cache = transformers.DynamicCache(config=model.config)
    tokens, _ = make_tokens()
    order = torch.tensor([3, 0, 1])
    with torch.no_grad():
        model(tokens[:, :9], past_key_values=cache)
        again = copy.deepcopy(cache)
        again.batch_repeat_interleave(2)
        again.batch_select_indices(order)
        chosen = tokens.repeat_interleave(2, 0)[order]
        ours = model(chosen[:, 9:12], past_key_values=again).logits
        expected = model(chosen[:, :12], use_cache=False).logits[:, 9:]
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        # The cache itself continues as before.
        model(tokens[:, 9:12], past_key_values=cache)


def test_a_cache_that_is_moved_between_devices_keeps_the_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An offloaded cache does this with streams of a GPU, which a stand-in replaces here."""
    model = make("qwen2", "selective", **SLIDING)
    expected = compute(model)
    waits: list[str] = []
    stream = SimpleNamespace(
        synchronize=lambda: waits.append("layer"), wait_stream=lambda other: None
    )
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    monkeypatch.setattr(transformers.DynamicCache, "prefetch", lambda *arguments: None)
    cache = transformers.DynamicCache(config=model.config)
    cache.offloading = True
    cache.only_non_sliding = False
    cache.prefetch_stream = stream
    assert_same(decode(model, cache, [9, 10, 11]), expected)
    assert len(waits) == 6


def test_a_cache_without_tokens_that_are_in_sums_is_refused() -> None:
    tokens, _ = make_tokens()
    message = r"model\.layers\.0\.self_attn \(LlamaAttention\): a replaced layer keeps sums over"
    for attention in ("standard", "forgetting"):
        model = make("llama", attention, **SIZES)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens[:, :9], past_key_values=cache)
            cache.crop(-2)
            if attention == "forgetting":
                with pytest.raises(ValueError, match=message) as caught:
                    model(tokens[:, 7:9], past_key_values=cache)
                assert "\n" not in str(caught.value)
                continue
            ours = model(tokens[:, 7:12], past_key_values=cache).logits
            expected = model(tokens[:, :12], use_cache=False).logits[:, 7:]
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_a_cache_of_fixed_size_or_of_rounded_vectors_is_refused() -> None:
    model = make("llama", "standard", **SIZES)
    rounded = transformers.DynamicCache(config=model.config)
    rounded.layers = [Fp8QuantizedLayer() for _ in range(2)]
    fixed = transformers.StaticCache(config=model.config, max_cache_len=TOKENS)
    for cache, name in ((fixed, "StaticLayer"), (rounded, "Fp8QuantizedLayer")):
        with pytest.raises(
            ValueError, match=f"a cache that grows, such as DynamicCache, not {name}"
        ):
            decode(model, cache, [9])


def test_a_mixer_of_a_user_has_no_cache_of_transformers() -> None:
    model = make("llama", {"kind": "module", "import": "torch.nn:Identity"}, **SIZES)
    assert compute(model).isfinite().all()
    with pytest.raises(ValueError, match="Identity has no keys and values to cache; call the mod"):
        decode(model, transformers.DynamicCache(config=model.config), [9])


def test_parameters_for_places_are_refused_because_padding_moves_them() -> None:
    chosen = {"similarity": {"kind": "mixture", "prior_scope": "position", "positions": 64}}
    with pytest.raises(ConfigError, match="has parameters for places of a text, which padding on"):
        make("llama", chosen, **SIZES)


# Parts that count or normalise visible keys in different ways.
NORMALISING: dict[str, Any] = {
    "sigmoid": {"normaliser": "sigmoid"},
    "sigmoid of two keys": {"preset": "mgk", "normaliser": "sigmoid"},
    "offset-softmax": {"preset": "mgk", "normaliser": "offset-softmax"},
    "differential": {"normaliser": "differential"},
    "composition": "dcmha",
    "hard mixture in a window": {"preset": "mgk-hard", "window": 4},
    "belief2": "belief2",
}

# GPT-2 makes its masks in another way, with the same meaning for every mechanism.
CASES = [("llama", name) for name in NORMALISING] + [("gpt2", "composition"), ("gpt2", "belief2")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_padding_changes_no_token_of_either_implementation(kind: str, name: str) -> None:
    """The masks of the implementation sdpa are boolean, and those of eager are additive."""
    tokens, present = make_tokens()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    results: list[tuple[Tensor, Tensor]] = []
    for implementation in ("sdpa", "eager"):
        sizes = SIZES if kind == "llama" else GPT2
        model = make(kind, NORMALISING[name], implementation, **sizes)
        generated = model.generate(tokens, attention_mask=present, **options)
        alone = model.generate(tokens[1:, PADDING:], **options)
        assert torch.equal(generated[1:, PADDING:], alone)
        results.append((compute(model)[present == 1], generated))
    (logits, generated), (additive_logits, additive_generated) = results
    assert logits.isfinite().all()
    torch.testing.assert_close(additive_logits, logits)
    assert torch.equal(additive_generated, generated)
