"""Families of transformers: a replaced model computes the same, also with large logits.

Some decoders have sinks, ALiBi, groups of rows, or a dropout of the output.

All models are tiny and have random weights, to which noise is added. They compute in float64, and
the matrices of their attention modules are five times as large as usual: a cap of the logits, a
clip or a forgotten scale then changes the outputs.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from helpers.replaced_models import assert_refused, count, enlarge, find_layers, layers, make_hub
from torch import Tensor

from lit_attn import replace_attention

LENGTH = 9
PADDING = 3
VOCABULARY = 50

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48}
TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": None}
GROUPED = TEXT | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 16}
IMAGE = SIZES | {"image_size": 16, "patch_size": 4}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": 1, "eos_token_id": None}
TOWER = SIZES | {"projection_dim": 16}
TOWERS = {
    "text_config": TOWER | {"vocab_size": VOCABULARY, "max_position_embeddings": 16},
    "vision_config": TOWER | {"image_size": 16, "patch_size": 4},
}
T5 = {"d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
T5 |= {"eos_token_id": None}
WHISPER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48}
WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
WHISPER |= {"vocab_size": VOCABULARY, "num_mel_bins": 4, "max_source_positions": 8}
WHISPER |= {"max_target_positions": 32, "decoder_start_token_id": 1, "pad_token_id": 0}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 2}

EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
OLMOE = {"num_experts": 2, "num_experts_per_tok": 1}
DOTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
DOTS |= {"first_k_dense_replace": 2}
ROTARY = {"rope_type": "default", "rope_theta": 100.0}
PARTIAL = ROTARY | {"partial_rotary_factor": 0.5}
FALCON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
FALCON |= {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": None}

Options = dict[str, Any]

DECODERS: dict[str, Options] = {
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    | {"bos_token_id": 1, "eos_token_id": None},
    "cohere": GROUPED | {"use_qk_norm": True},
    "cohere2": WIDE | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "falcon": FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True},
    "gemma": WIDE,
    # The cap and the scale differ from those of the published models, to be visible here.
    "gemma2": WIDE
    | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 7, "sliding_window": 4},
    "gemma3_text": WIDE | {"query_pre_attn_scalar": 24, "sliding_window": 4, "layer_types": None},
    "glm": WIDE | {"rope_parameters": PARTIAL},
    "glm4": WIDE | {"rope_parameters": PARTIAL, "attention_bias": True},
    "gpt2": GPT2 | {"scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": TEXT,
    "gpt_oss": WIDE
    | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    | {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": ROTARY},
    "granite": GROUPED | {"attention_multiplier": 0.7},
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 5},
    "mixtral": GROUPED | {"num_local_experts": 2},
    "nemotron": WIDE | {"rope_parameters": PARTIAL, "attention_bias": True},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "opt": TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "phi": GROUPED | {"qk_layernorm": True},
    "phi3": GROUPED | {"sliding_window": 5, "rope_parameters": {"partial_rotary_factor": 0.5}},
    "qwen2": GROUPED,
    "qwen2_moe": GROUPED
    | {"num_experts": 2, "num_experts_per_tok": 1}
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3": WIDE,
    "qwen3_moe": WIDE | {"num_experts": 2, "num_experts_per_tok": 1},
    "smollm3": GROUPED | {"no_rope_layers": [1, 0]},
    "stablelm": GROUPED | {"qk_layernorm": True, "use_qkv_bias": True},
    "starcoder2": GROUPED | {"sliding_window": 5},
}
ENCODERS: dict[str, Options] = {
    "bert": TEXT,
    "distilbert": {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4}
    | {"hidden_dim": 48, "pad_token_id": 0},
    "electra": TEXT,
    "modernbert": TEXT
    | {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1}
    | {"sep_token_id": 2},
    "roberta": TEXT,
}
VISION: dict[str, Options] = {"dinov2": IMAGE, "siglip_vision_model": IMAGE, "vit": IMAGE}
PAIRS: dict[str, Options] = {"clip": TOWERS, "siglip": TOWERS}
TRANSLATORS: dict[str, Options] = {"t5": T5, "whisper": WHISPER}


class Family(NamedTuple):
    """A family of transformers: its configuration and the inputs of its models."""

    factory: Any
    config: Options
    inputs: Callable[[], dict[str, Tensor]]


def make_tokens(padded_left: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    present = torch.ones_like(tokens)
    if padded_left:
        present[1, :PADDING] = 0
    else:
        present[1, -PADDING:] = 0
    return {"input_ids": tokens, "attention_mask": present}


def make_images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).double()}


def make_translation_inputs() -> dict[str, Tensor]:
    return make_tokens() | {"decoder_input_ids": make_tokens()["input_ids"][:, :5]}


def make_sound() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sound = torch.randn(2, 4, 16, generator=generator).double()
    return {"input_features": sound, "decoder_input_ids": make_tokens()["input_ids"][:, :5]}


FAMILIES: dict[str, Family] = {}
for name, options in DECODERS.items():
    FAMILIES[name] = Family(transformers.AutoModelForCausalLM, options, make_tokens)
for name, options in ENCODERS.items():
    FAMILIES[name] = Family(transformers.AutoModel, options, make_tokens)
for name, options in VISION.items():
    FAMILIES[name] = Family(transformers.AutoModel, options, make_images)
for name, options in PAIRS.items():
    FAMILIES[name] = Family(transformers.AutoModel, options, lambda: make_tokens() | make_images())
FAMILIES["t5"] = Family(transformers.AutoModelForSeq2SeqLM, T5, make_translation_inputs)
FAMILIES["whisper"] = Family(transformers.AutoModelForSpeechSeq2Seq, WHISPER, make_sound)

RELATIVES: dict[str, Family] = {
    "apertus": Family(transformers.AutoModelForCausalLM, GROUPED, make_tokens),
    "arcee": Family(transformers.AutoModelForCausalLM, GROUPED, make_tokens),
    "camembert": Family(transformers.AutoModel, TEXT, make_tokens),
    "deit": Family(transformers.AutoModel, IMAGE, make_images),
    "dinov2_with_registers": Family(transformers.AutoModel, IMAGE, make_images),
    "dots1": Family(transformers.AutoModelForCausalLM, WIDE | DOTS, make_tokens),
    "ernie4_5": Family(transformers.AutoModelForCausalLM, WIDE, make_tokens),
    "granitemoe": Family(transformers.AutoModelForCausalLM, GROUPED | EXPERTS, make_tokens),
    "helium": Family(transformers.AutoModelForCausalLM, GROUPED | {"head_dim": 8}, make_tokens),
    "mt5": Family(transformers.AutoModelForSeq2SeqLM, T5, make_translation_inputs),
    "olmo3": Family(
        transformers.AutoModelForCausalLM, GROUPED | {"sliding_window": 5}, make_tokens
    ),
    "olmoe": Family(transformers.AutoModelForCausalLM, GROUPED | OLMOE, make_tokens),
    "phimoe": Family(transformers.AutoModelForCausalLM, GROUPED | EXPERTS, make_tokens),
    "seed_oss": Family(transformers.AutoModelForCausalLM, WIDE, make_tokens),
    "xlm-roberta": Family(transformers.AutoModel, TEXT, make_tokens),
}
"""Families whose attention has the code of another one."""

CAUSAL = transformers.AutoModelForCausalLM
FULL = {"layer_types": ["full_attention", "full_attention"]}
MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
UNNAMED: dict[str, Options] = {
    "bamba": GROUPED
    | {"attn_layer_indices": [0, 1], "mamba_n_heads": 4, "mamba_d_head": 16}
    | {"mamba_n_groups": 1, "mamba_d_state": 4},
    "cwm": WIDE | MIXED,
    "ernie4_5_moe": WIDE | {"moe_num_experts": 2, "moe_k": 1, "moe_layer_start_index": 5},
    "exaone4": WIDE | MIXED,
    "flex_olmo": GROUPED | OLMOE,
    "hyperclovax": GROUPED,
    "jais2": GROUPED,
    "lfm2": GROUPED | FULL | {"block_multiple_of": 8},
    "minimax_m2": WIDE | EXPERTS | {"rotary_dim": 8},
    "ministral": WIDE | {"sliding_window": 5},
    "moshi": GROUPED | {"audio_vocab_size": 20},
    "solar_open": WIDE | EXPERTS,
    "vaultgemma": WIDE | {"sliding_window": 4},
}
"""Families whose attention no file of this package names."""
for name, options in UNNAMED.items():
    RELATIVES[name] = Family(CAUSAL, options, make_tokens)
for name in ("eurobert", "gte", "nomic_bert"):
    RELATIVES[name] = Family(transformers.AutoModel, TEXT, make_tokens)

EAGER = ("bloom", "gemma2", "gpt_oss", "vaultgemma")
"""Families that transformers computes completely with attn_implementation="eager" alone."""

ROUNDED = ("bloom", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma2", "modernbert")
ROUNDED += ("vaultgemma",)
"""Families whose rotation, norms or eager softmax are in float32 also in float64."""


def make_model(
    name: str, implementation: str = "eager", seed: int = 0, config: Options | None = None
) -> Any:
    """Return a model of a family with disturbed weights, in evaluation mode and in float64."""
    family = (FAMILIES | RELATIVES)[name]
    model = make_hub(name, config or family.config, implementation, family.factory, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.double().eval()


def compute(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the output of a model with a row for every token that is present."""
    with torch.no_grad():
        out = model(**inputs)
    for key in ("logits_per_image", "logits", "last_hidden_state"):
        if key in out:
            result: Tensor = out[key]
            break
    if "attention_mask" in inputs and result.shape[:2] == inputs["attention_mask"].shape:
        return result[inputs["attention_mask"] == 1]
    return result


def assert_exact(name: str, implementation: str) -> None:
    """Compare a model of a family with its replacement, at small and at large logits."""
    model = make_model(name, implementation)
    inputs = (FAMILIES | RELATIVES)[name].inputs()
    small = compute(model, inputs)
    enlarge(model)
    expected = compute(model, inputs)
    assert not torch.allclose(small, expected, rtol=0.01)
    parameters = count(model)
    replace_attention(model, "standard")
    assert len(layers(model)) >= 2
    assert count(model) == parameters
    ours = compute(model, inputs)
    # Eager softmaxes of most families are in float32 also in float64.
    is_wide = name not in ROUNDED and (implementation == "sdpa" or name == "gpt_oss")
    tolerance = 1e-12 if is_wide else 1e-4
    scale = expected.abs().max().item()
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in EAGER])
def test_a_family_computes_the_same_with_large_logits(name: str) -> None:
    assert_exact(name, "sdpa")


@pytest.mark.parametrize("name", ["bert", "clip", "llama", "t5", "whisper", *EAGER])
def test_a_family_computes_the_same_with_additive_masks(name: str) -> None:
    assert_exact(name, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", RELATIVES)
def test_a_family_with_the_code_of_another_one_computes_the_same(name: str) -> None:
    assert_exact(name, "eager" if name in EAGER else "sdpa")


def test_each_query_has_its_own_row_of_a_mask() -> None:
    """In a prefix model, BERT gets a mask (B, 1, n, n) whose rows differ."""
    model = make_model("bert", "sdpa")
    tokens = make_tokens()["input_ids"]
    visible = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    visible[..., :4] = True
    inputs = {"input_ids": tokens, "attention_mask": visible}
    expected = model(**inputs).last_hidden_state
    ours = replace_attention(model, "standard")(**inputs).last_hidden_state
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_bidirectional_attention_with_a_window_computes_the_same(name: str) -> None:
    options = FAMILIES[name].config | {"use_bidirectional_attention": True}
    config = transformers.AutoConfig.for_model(name, **options)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    enlarge(model)
    for inputs in (make_tokens(), {"input_ids": make_tokens()["input_ids"]}):
        again = copy.deepcopy(model)
        expected = compute(model, inputs)
        ours = compute(replace_attention(again, "standard"), inputs)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_cap_that_the_code_of_a_family_ignores_is_ignored() -> None:
    config = transformers.AutoConfig.for_model(
        "gemma3_text", **FAMILIES["gemma3_text"].config, attn_logit_softcapping=3.0
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    enlarge(model)
    expected = compute(model, make_tokens())
    ours = compute(replace_attention(model, "standard"), make_tokens())
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_the_order_of_a_text_is_kept_without_a_mask() -> None:
    """CLIP's text model says by an argument of the call that its attention is causal."""
    model = make_model("clip", "sdpa")
    inputs = FAMILIES["clip"].inputs()
    inputs.pop("attention_mask")
    expected = model(**inputs).text_embeds
    torch.testing.assert_close(replace_attention(model, "standard")(**inputs).text_embeds, expected)


@pytest.mark.parametrize("name", [*DECODERS, *TRANSLATORS])
def test_a_family_generates_the_same_from_its_cache(name: str) -> None:
    model = make_model(name, "eager" if name in EAGER else "sdpa")
    enlarge(model)
    if name in EAGER:
        # Eager masks of float64 are -inf in the float32 of the softmax, so padding is NaN.
        model.float()
    inputs: dict[str, Any] = dict(FAMILIES[name].inputs())
    inputs.pop("decoder_input_ids", None)
    if name in DECODERS:
        inputs = make_tokens(padded_left=True)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    options |= {"return_dict_in_generate": True, "num_beams": 1 if name in DECODERS else 2}

    def generate() -> tuple[Tensor, Tensor]:
        out = model.generate(**inputs, **options)
        return out.sequences, torch.stack(out.logits)

    tokens, logits = generate()
    replace_attention(model, "standard")
    our_tokens, our_logits = generate()
    assert torch.equal(our_tokens, tokens)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_cross_attention_is_replaced_or_refused_with_its_path(name: str) -> None:
    model = make_model(name, "sdpa")
    cross = {"t5": "EncDecAttention", "whisper": "encoder_attn"}[name]
    message = rf"decoder.*\.{cross} \(\w+\): its keys belong to another"
    assert_refused(model, "belief2", message)
    replace_attention(model, "belief2", skip=f"*.{cross}")
    assert len(layers(model)) == 4
    assert compute(model, FAMILIES[name].inputs()).isfinite().all()


@pytest.mark.parametrize(
    "name", ["bloom", "cohere2", "falcon", "gemma2", "gpt_oss", "olmo2", "qwen3", "t5", "whisper"]
)
def test_another_mechanism_decodes_from_the_cache_as_without_it(name: str) -> None:
    model = make_model(name, "eager" if name in EAGER else "sdpa")
    replace_attention(model, "mgk")
    inputs = dict(FAMILIES[name].inputs())
    inputs.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(**inputs, **options)
    assert torch.equal(cached, model.generate(**inputs, **options, use_cache=False))


FALCONS = {
    "alibi": {"alibi": True, "multi_query": False},
    "alibi for three heads": {"alibi": True, "hidden_size": 24, "num_attention_heads": 3},
    "groups": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "heads": {"multi_query": False, "bias": True},
    "one key": {"multi_query": True, "parallel_attn": False},
}


@pytest.mark.parametrize("name", FALCONS)
def test_every_form_of_falcon_computes_and_generates_the_same(name: str) -> None:
    model = make_model("falcon", "sdpa", config=FALCON | FALCONS[name])
    enlarge(model)
    inputs = make_tokens(padded_left=True)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = compute(model, inputs)
    tokens = model.generate(**inputs, **options)
    replace_attention(model, "standard")
    torch.testing.assert_close(compute(model, inputs), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.generate(**inputs, **options), tokens)


def test_alibi_that_transformers_adds_twice_is_refused() -> None:
    model = make_model("falcon", config=FALCON | {"alibi": True})
    assert_refused(model, "standard", "transformers adds ALiBi twice with attn_implement")
    replace_attention(make_model("falcon", config=FALCON | {"alibi": False}), "standard")


@pytest.mark.parametrize(
    ("name", "implementation", "changes", "reason"),
    [
        ("bloom", "eager", {}, "to which this module adds a mask or"),
        ("falcon", "sdpa", {"alibi": True}, "to which .* ALiBi"),
        ("gpt_oss", "eager", {}, "to which this module adds a sink"),
        ("gemma2", "eager", {}, "which this module"),
    ],
)
def test_attention_without_logits_is_refused(
    name: str, implementation: str, changes: Options, reason: str
) -> None:
    model = make_model(name, implementation, config=FAMILIES[name].config | changes)
    assert_refused(model, "linear", f"'linear' attention has no logits, {reason}")


def test_the_sinks_of_gpt_oss_are_those_of_our_normaliser() -> None:
    model = make_model("gpt_oss")
    inputs = make_tokens()
    sinks = model.model.layers[0].self_attn.sinks
    expected = compute(model, inputs)
    same = replace_attention(copy.deepcopy(model), "sink")
    torch.testing.assert_close(compute(same, inputs), expected, rtol=1e-12, atol=1e-12)
    replace_attention(model, "standard")
    assert find_layers(model)[0].normaliser.logit is sinks
    model(**inputs).logits.square().sum().backward()
    assert sinks.grad is not None
    with torch.no_grad():
        sinks += 1
    assert not torch.allclose(compute(model, inputs), expected, atol=1e-4)


def test_another_normaliser_has_no_place_for_sinks() -> None:
    message = "normaliser: 'softpick' has no place for its sinks"
    assert_refused(make_model("gpt_oss"), "softpick", message)


def test_bloom_without_the_bias_of_its_output_is_refused() -> None:
    """With both options, transformers leaves the bias of `dense` out."""
    config = FAMILIES["bloom"].config | {"pretraining_tp": 2, "slow_but_exact": True}
    model = make_model("bloom", config=config)
    assert_refused(model, "standard", r"its option `slow_but_exact` \(True\) is unknown")


def test_dropout_of_the_output_is_kept() -> None:
    config = FAMILIES["starcoder2"].config | {"residual_dropout": 0.2}
    starcoder = replace_attention(make_model("starcoder2", "sdpa", config=config), "standard")
    assert find_layers(starcoder)[0].proj_drop.p == 0.2
    config = FAMILIES["bloom"].config | {"hidden_dropout": 0.3, "attention_dropout": 0.1}
    bloom = replace_attention(make_model("bloom", config=config), "standard")
    layer = find_layers(bloom)[0]
    assert (layer.proj_drop.p, layer.attn_drop) == (0.3, 0.1)


def test_capped_logits_refuse_a_composition() -> None:
    model = make_model("gemma2")
    assert_refused(model, "dcmha", "compose: 'query\\+key' would mix logits that it caps")


@pytest.mark.parametrize("name", ["bert", "bloom", "clip", "gpt2", "llama", "t5", "vit", "whisper"])
def test_weights_are_refused_in_one_line(name: str) -> None:
    model = replace_attention(make_model(name), "standard")
    inputs = FAMILIES[name].inputs()
    message = r"\w+\.\d+\..* \(\w+\): `output_attentions`: a replaced layer returns no weights"
    with pytest.raises(ValueError, match=message) as caught:
        model(**inputs, output_attentions=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bloom", "clip", "falcon", "gpt2", "gpt_oss", "llama", "t5"])
def test_a_saved_model_computes_the_same_when_it_is_loaded(name: str, tmp_path: Path) -> None:
    model = replace_attention(make_model(name), "mgk")
    inputs = FAMILIES[name].inputs()
    expected = compute(model, inputs)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    fresh = replace_attention(make_model(name, seed=1), "mgk")
    assert not torch.equal(compute(fresh, inputs), expected)
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(compute(fresh, inputs), expected)
