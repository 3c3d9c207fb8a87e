"""Decoders of transformers that differ from Llama: sinks, ALiBi, groups of rows, and dropout."""

import copy
from typing import Any

import pytest
import torch
from helpers.replaced_models import assert_refused, find_layers, make_hub
from torch import Tensor

from lit_attn import replace_attention

VOCABULARY = 50
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": None}
LLAMA = TEXT | {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
GPT_OSS = LLAMA | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
GPT_OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}


def make(kind: str, implementation: str = "sdpa", **options: Any) -> Any:
    """Return a model in float64 and evaluation mode, with weights that differ everywhere."""
    model = make_hub(kind, options, implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.05 * torch.randn_like(parameter)
            if "attn" in name or "attention" in name:
                parameter *= 5
    return model.double().eval()


def make_inputs() -> dict[str, Tensor]:
    """Return two texts, of which the second one has three tokens of padding on the left."""
    tokens = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    present = torch.ones_like(tokens)
    present[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": present}


def compute(model: Any) -> Tensor:
    inputs = make_inputs()
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    return logits[inputs["attention_mask"] == 1]


def generate(model: Any, **options: Any) -> Tensor:
    options |= {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens: Tensor = model.generate(**make_inputs(), **options)
    return tokens


FALCONS = {
    "alibi": {"alibi": True, "multi_query": False},
    "alibi for three heads": {"alibi": True, "hidden_size": 24, "num_attention_heads": 3},
    "groups": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "heads": {"multi_query": False, "bias": True},
    "one key": {"multi_query": True, "parallel_attn": False},
}


@pytest.mark.parametrize("name", FALCONS)
def test_every_form_of_falcon_computes_and_generates_the_same(name: str) -> None:
    model = make("falcon", **TEXT | FALCONS[name])
    expected = compute(model)
    tokens = generate(model)
    replace_attention(model, "standard")
    torch.testing.assert_close(compute(model), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(generate(model), tokens)


def test_alibi_that_transformers_adds_twice_is_refused() -> None:
    model = make("falcon", "eager", **TEXT | {"alibi": True})
    assert_refused(model, "standard", "transformers adds ALiBi twice with attn_implement")
    model = make("falcon", "eager", **TEXT | {"alibi": False})
    replace_attention(model, "standard")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("bloom", BLOOM, "'linear' attention has no logits, to which this module adds a mask or"),
        ("falcon", TEXT | {"alibi": True}, "'linear' attention has no logits, to which .* ALiBi"),
        ("gpt_oss", GPT_OSS, "'linear' attention has no logits, to which this module adds a sink"),
    ],
)
def test_attention_without_logits_is_refused(
    kind: str, options: dict[str, Any], message: str
) -> None:
    implementation = "sdpa" if kind == "falcon" else "eager"
    assert_refused(make(kind, implementation, **options), "linear", message)


def test_the_sinks_of_gpt_oss_are_those_of_our_normaliser() -> None:
    model = make("gpt_oss", "eager", **GPT_OSS)
    sinks = model.model.layers[0].self_attn.sinks
    expected = compute(model)
    same = replace_attention(copy.deepcopy(model), "sink")
    torch.testing.assert_close(compute(same), expected, rtol=1e-12, atol=1e-12)
    replace_attention(model, "standard")
    layer = find_layers(model)[0]
    assert layer.normaliser.logit is sinks
    model(**make_inputs()).logits.square().sum().backward()
    assert sinks.grad is not None
    with torch.no_grad():
        sinks += 1
    assert not torch.allclose(compute(model), expected, atol=1e-4)


def test_another_normaliser_has_no_place_for_sinks() -> None:
    model = make("gpt_oss", "eager", **GPT_OSS)
    assert_refused(model, "softpick", "normaliser: 'softpick' has no place for its sinks")


def test_bloom_without_the_bias_of_its_output_is_refused() -> None:
    """With both options, transformers leaves the bias of `dense` out."""
    model = make("bloom", "eager", **BLOOM | {"pretraining_tp": 2, "slow_but_exact": True})
    assert_refused(model, "standard", r"its option `slow_but_exact` \(True\) is unknown")


def test_dropout_of_the_output_is_kept() -> None:
    starcoder = make("starcoder2", **LLAMA | {"residual_dropout": 0.2})
    assert find_layers(replace_attention(starcoder, "standard"))[0].proj_drop.p == 0.2
    bloom = make("bloom", "eager", **BLOOM | {"hidden_dropout": 0.3, "attention_dropout": 0.1})
    layer = find_layers(replace_attention(bloom, "standard"))[0]
    assert (layer.proj_drop.p, layer.attn_drop) == (0.3, 0.1)
