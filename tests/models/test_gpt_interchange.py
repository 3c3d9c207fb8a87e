"""Tests that GPT-2 weights in Hugging Face's layout give the same logits here."""

import math
import re

import pytest
import torch
from torch import Tensor

from lit_attn.attention.residual import SplitConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.models import language
from lit_attn.models.base import FFN
from lit_attn.models.language import GPTConfig

VOCABULARY, CONTEXT, DIM, DEPTH, HEADS = 40, 12, 16, 2, 2

COPYING = AttentionSpec(residual=SplitConfig(activation="identity", init="copy"))


def model(attention: AttentionSpec = PRESETS["standard"]) -> language.GPT:
    chosen = GPTConfig(
        dim=DIM,
        depth=DEPTH,
        heads=HEADS,
        ffn=FFN(width=4 * DIM, activation="gelu-tanh"),
        norm="layernorm",
        bias="all",
        attention=attention,
    )
    return language.GPT(chosen, VOCABULARY, CONTEXT).double().eval()


# Names of Hugging Face's GPT-2 and of this suite's.
NAMES = {"wte": "tokens", "wpe": "positions", "ln_f": "norm", "h.": "blocks."}
NAMES |= {"ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj"}
NAMES |= {"mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"}


def load_gpt2(network: language.GPT, state: dict[str, Tensor]) -> None:
    """Fill `network` with a state of transformers, which stores matrices as (inputs, outputs)."""
    converted = {}
    for full_name, value in state.items():
        name = full_name.removeprefix("transformer.")
        if name != "lm_head.weight":
            ours = re.sub("|".join(map(re.escape, NAMES)), lambda match: NAMES[match[0]], name)
            is_matrix = name.endswith(".weight") and ".c_" in name
            converted["trunk." + ours] = value.T if is_matrix else value
    network.load_state_dict(converted)


def random_state() -> dict[str, Tensor]:
    """Return random weights in the layout; matrices are (inputs, outputs)."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"wte.weight": (VOCABULARY, DIM), "wpe.weight": (CONTEXT, DIM)}
    for i in range(DEPTH):
        for name, rows, columns in (
            ("attn.c_attn", DIM, 3 * DIM),
            ("attn.c_proj", DIM, DIM),
            ("mlp.c_fc", DIM, 4 * DIM),
            ("mlp.c_proj", 4 * DIM, DIM),
        ):
            shapes[f"h.{i}.{name}.weight"] = (rows, columns)
            shapes[f"h.{i}.{name}.bias"] = (columns,)
        for name in ("ln_1", "ln_2"):
            shapes[f"h.{i}.{name}.weight"] = shapes[f"h.{i}.{name}.bias"] = (DIM,)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (DIM,)
    return {
        name: 0.3 * torch.randn(shape, generator=generator, dtype=torch.double)
        for name, shape in shapes.items()
    }


def gpt2_logits(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return GPT-2's logits from its weights and definition (Radford et al. 2019), head by head."""
    n, width = tokens.shape[1], DIM // HEADS

    def layer_norm(x: Tensor, name: str) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv1d(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][:n]
    for i in range(DEPTH):
        q, k, v = conv1d(layer_norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(DIM, -1)
        heads = []
        for h in range(HEADS):
            part = slice(h * width, (h + 1) * width)
            logits = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width)
            logits = logits + torch.full((n, n), -math.inf).triu(1)
            heads.append(logits.softmax(-1) @ v[..., part])
        x = x + conv1d(torch.cat(heads, -1), f"h.{i}.attn.c_proj")
        u = conv1d(layer_norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        u = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + conv1d(u, f"h.{i}.mlp.c_proj")
    return layer_norm(x, "ln_f") @ w["wte.weight"].T


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", [PRESETS["standard"], COPYING], ids=["standard", "copying"])
def test_logits_equal_the_definition_of_gpt2(attention: AttentionSpec) -> None:
    network = model(attention)
    load_gpt2(network, random_state())
    torch.testing.assert_close(network(tokens()), gpt2_logits(random_state(), tokens()))


# A latent has other projections than GPT-2.
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "mla"])
def test_every_preset_takes_the_weights(name: str) -> None:
    network = model(PRESETS[name])
    load_gpt2(network, random_state())
    logits = network(tokens())
    assert torch.isfinite(logits).all()
    # Only the standard layer computes the same as GPT-2. Shifted keys are the standard
    # layer under the dot kernel, for q.b_r is the same for every key.
    same = torch.allclose(logits, gpt2_logits(random_state(), tokens()))
    starts_as_standard = ("gated-xsa", "knocking-heads", "knocking-heads-mlp", "moba")
    assert same == (name in ("standard", "softmax-smgk", *starts_as_standard))


def test_logits_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="comes with lit_attn[dev]")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=DIM, n_layer=DEPTH, n_head=HEADS
    )
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    network = model()
    load_gpt2(network, theirs.state_dict())
    torch.testing.assert_close(network(tokens()), theirs(tokens()).logits)
