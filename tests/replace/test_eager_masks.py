"""Replaced models of transformers read the masks of both implementations: boolean and additive."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_attn import replace_attention

LLAMA = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SIZES: dict[str, dict[str, Any]] = {"llama": LLAMA, "gpt2": GPT2}

# Parts that count or normalise visible keys in different ways.
CHOICES: dict[str, Any] = {
    "sigmoid": {"normaliser": "sigmoid"},
    "sigmoid of two keys": {"preset": "mgk", "normaliser": "sigmoid"},
    "offset-softmax": {"preset": "mgk", "normaliser": "offset-softmax"},
    "differential": {"normaliser": "differential"},
    "composition": "dcmha",
    "hard mixture in a window": {"preset": "mgk-hard", "window": 4},
    "belief2": "belief2",
}

# GPT-2 makes its masks in another way, with the same meaning for every mechanism.
CASES = [("llama", name) for name in CHOICES] + [("gpt2", "composition"), ("gpt2", "belief2")]

LENGTH, PADDING = 9, 3


def make_model(kind: str, choices: Any, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, bos_token_id=1, eos_token_id=None, **SIZES[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    model = replace_attention(model.eval(), choices)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_padding_changes_no_token_of_either_implementation(kind: str, name: str) -> None:
    tokens = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    present = torch.ones_like(tokens)
    present[1, :PADDING] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    results: list[list[Tensor]] = []
    for implementation in ("sdpa", "eager"):
        model = make_model(kind, CHOICES[name], implementation)
        with torch.no_grad():
            logits = model(tokens, attention_mask=present, use_cache=False).logits
            generated = model.generate(tokens, attention_mask=present, **options)
            alone = model.generate(tokens[1:, PADDING:], **options)
        assert torch.equal(generated[1:, PADDING:], alone)
        assert logits.isfinite().all()
        results.append([logits[present == 1], generated])
    for boolean, additive in zip(*results, strict=True):
        torch.testing.assert_close(additive, boolean)
