"""Tiny language models that together use every option of the configuration."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.models import language
from lit_attn.models.base import FFN
from lit_attn.models.language import GPTConfig
from lit_attn.models.token_transformer import Init

VOCABULARY, CONTEXT = 50, 16
HEADS = 3


def fits(spec: AttentionSpec) -> bool:
    """Return True if a layer with these parts can have an odd number of heads."""
    try:
        spec.check_heads(HEADS)
    except ValueError:
        return False
    return True


FITTING = [name for name, spec in PRESETS.items() if fits(spec)]
"""Presets of the models of this file; differential attention needs pairs of heads."""

CHOICES: dict[str, dict[str, Any]] = {
    "nanogpt": {"vocabulary_multiple": 64},
    "casted": {
        "positions": "rotary",
        "norm": "rmsnorm-unweighted",
        "attention_branch": "depth-scaled",
        "init": Init(matrices="torch", embedding="torch", depth_scaled=False),
    },
    "transformer++": {
        "positions": "rotary",
        "norm": "rmsnorm",
        "qk_norm": True,
        "ffn": FFN(width=20, activation="swiglu"),
        "head": "untied",
        "windows": (4, None),
        "init": Init(matrices=0.006, embedding=1.0, depth_scaled=False),
    },
    "wikitext": {
        "positions": "sinusoidal",
        "norm": "layernorm",
        "norm_order": "post",
        "head_dim": 4,
        "ffn": FFN(width=20, activation="relu"),
        "bias": "ffn",
        "embedding_scale": "sqrt-dim",
        "head": "adaptive",
        "cutoffs": (10, 25),
        "init": Init(norms=0.02, depth_scaled=False),
    },
    "pythia": {
        "positions": "rotary",
        "rotary_share": 0.25,
        "rotary_base": 500.0,
        "branches": "parallel",
        "norm": "layernorm",
        "bias": "all",
        "head": "untied",
    },
    "nanochat": {
        "positions": "rotary",
        "norm": "rmsnorm-unweighted",
        "qk_norm": "unweighted",
        "qk_gain": 1.2,
        "ffn": FFN(width=20, activation="relu2"),
        "head": "untied",
        "logit_cap": 15.0,
        "value_embeddings": {"every": 2, "channels": 5, "factor": 3.0},
        "init": Init(matrices="torch", embedding=0.8, depth_scaled=False),
    },
    "without-ffn": {"ffn": None, "norm": "layernorm", "bias": "all"},
}


def config(name: str, **changes: Any) -> GPTConfig:
    return GPTConfig(
        **{"dim": 24, "depth": 3, "heads": HEADS, "ffn": FFN(width=32), **CHOICES[name], **changes}
    )


def network(name: str, seed: int = 0, **changes: Any) -> language.GPT:
    """Return a model in float64 and in evaluation mode."""
    torch.manual_seed(seed)
    return language.GPT(config(name, **changes), VOCABULARY, CONTEXT).double().eval()


def tokens(batch: int = 2, n: int = CONTEXT, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, n), generator=torch.Generator().manual_seed(seed))


def decode(network: language.GPT, ids: torch.Tensor, cuts: Sequence[int]) -> torch.Tensor:
    """Return the logits of tokens that caches receive in pieces, which begin at `cuts`."""
    caches = network.trunk.new_caches()
    pieces = []
    for start, stop in pairwise([0, *cuts, ids.shape[1]]):
        pieces.append(network(ids[:, start:stop], caches))
    return torch.cat(pieces, dim=1)


@torch.no_grad()
def assert_decodes(
    network: language.GPT, cuts: Sequence[int], ids: torch.Tensor | None = None
) -> None:
    """Assert that decoding in pieces has the logits of the whole sequence."""
    ids = tokens() if ids is None else ids
    decoded = decode(network, ids, cuts)
    torch.testing.assert_close(decoded, network(ids), rtol=1e-9, atol=1e-10)
