"""Causal models that decode with a cache, and the check of their logits.

The model is the Transformer++ of DCMHA's Table 6, untrained: rotary positions, RMSNorm, SwiGLU, and
an output head that is not shared with the embedding. Its name is the name of a preset;
`NAME/windows` has windows in some layers.

Shapes: B batch, n tokens, V vocabulary.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_attn.attention.cache import Cache
from lit_attn.attention.spec import PRESETS
from lit_attn.bench.arguments import WINDOWS
from lit_attn.config.models import language
from lit_attn.config.models.base import FFN
from lit_attn.models import gpt

# Largest number of tokens and of vocabulary entries in the check: several chunks of queries,
# several times the published window of 256, and little memory in float64.
CHECKED_TOKENS, CHECKED_VOCABULARY = 1024, 64


class Shape(NamedTuple):
    """Size of the model and of the batch; each sequence grows by `generate` tokens."""

    batch: int
    generate: int
    dim: int
    depth: int
    heads: int
    vocabulary: int
    windows: tuple[int | None, ...]


def configuration(name: str, shape: Shape) -> language.GPTConfig:
    """Return the configuration of model `name`, with LLaMA's FFN: 8 d / 3 rounded up to 256s."""
    base = name.removesuffix(WINDOWS)
    return language.GPTConfig(
        dim=shape.dim,
        depth=shape.depth,
        heads=shape.heads,
        ffn=FFN(width=-(-8 * shape.dim // (3 * 256)) * 256, activation="swiglu"),
        positions="rotary",
        norm="rmsnorm",
        head="untied",
        attention=PRESETS[base],
        windows=(None,) if name == base else shape.windows,
    )


class Decoder:
    """Model with one batch of sequences: `prefill` reads the prompt, then `decode` adds tokens."""

    def __init__(self, name: str, shape: Shape, n: int, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.generate = shape.generate
        self.network = network(name, shape, n + shape.generate, device, dtype)
        self.prompt = drawn(shape.batch, n, shape.vocabulary, device)
        # The average length of the sequence while it grows.
        middle = n + (shape.generate + 1) // 2
        self.whole = drawn(shape.batch, middle, shape.vocabulary, device)
        self.caches: list[Cache] = []
        self.last = self.prompt[:, -1:]

    def prefill(self) -> None:
        self.caches = self.network.trunk.new_caches()
        self.last = self._next(self.prompt, self.caches)

    def decode(self) -> None:
        for _ in range(self.generate):
            self.last = self._next(self.last, self.caches)

    def recompute(self) -> None:
        self._next(self.whole, None)

    @torch.no_grad()
    def _next(self, tokens: Tensor, caches: list[Cache] | None) -> Tensor:
        """Return the most likely next token, (B, n) -> (B, 1), without waiting for the device."""
        hidden = self.network.trunk(tokens, caches=caches)
        return self.network.logits(hidden[:, -1:]).argmax(-1)


def network(name: str, shape: Shape, n: int, device: str, dtype: torch.dtype) -> gpt.GPT:
    """Build model `name` for up to `n` tokens."""
    built = gpt.build(configuration(name, shape), shape.vocabulary, n, device)
    return built.to(dtype).eval()


def drawn(batch: int, n: int, vocabulary: int, device: str) -> Tensor:
    """Return random tokens, (B, n)."""
    return torch.randint(vocabulary, (batch, n), device=device)


def held(caches: Sequence[Cache]) -> int:
    """Return the bytes of the storages behind the caches' tensors."""
    storages = [part.untyped_storage() for cache in caches for part in cache.tensors()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@torch.no_grad()
def agrees(name: str, shape: Shape, n: int, device: str) -> bool:
    """Return True if decoding with the cache gives the logits of the whole sequence, in float64.

    The check decodes a prompt and a few single tokens, with the first layers and all windows.
    """
    torch.manual_seed(0)
    depth = min(shape.depth, max(2, len(shape.windows)))
    small = shape._replace(
        depth=depth, vocabulary=min(shape.vocabulary, CHECKED_VOCABULARY), generate=3
    )
    n = min(n, CHECKED_TOKENS)
    compared = network(name, small, n + small.generate, device, torch.double)
    tokens = drawn(min(shape.batch, 2), n + small.generate, small.vocabulary, device)
    caches = compared.trunk.new_caches()
    cuts = itertools.pairwise([0, *range(n, n + small.generate + 1)])
    logits = torch.cat([compared(tokens[:, start:stop], caches) for start, stop in cuts], dim=1)
    return torch.allclose(logits, compared(tokens), rtol=1e-9, atol=1e-11)
