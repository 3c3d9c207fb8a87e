"""Speed and cache of decoding with each preset: the inference half of DCMHA's Table 6.

The model is Transformer++ with random weights, as in that table: rotary positions, RMSNorm, SwiGLU,
untied output layer; `NAME/windows` has windows in some layers. It processes a prompt at once and
then adds the likeliest token, again and again. Models are uncompiled and not matched in parameters,
as in that table. tests/attention/test_decoding.py compares the cache with the complete sequence.

Shapes: B batch, n tokens.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_attn.attention.cache import Cache, count_bytes
from lit_attn.attention.spec import PRESETS
from lit_attn.bench import WINDOWS, measure
from lit_attn.bench.measure import TITLES, Setup, Spread, Table, summarize, summarize_ratios
from lit_attn.models.base import FFN
from lit_attn.models.factory import count
from lit_attn.models.language import GPT, GPTConfig

BASELINE = "standard"


class Shape(NamedTuple):
    """Batch of sequences to which `generate` tokens are added, and the size of the model.

    `windows` are those of `GPTConfig`, for models called NAME/windows.
    """

    batch: int
    generate: int
    dim: int
    depth: int
    heads: int
    vocabulary: int
    windows: tuple[int | None, ...]


def configure(name: str, shape: Shape) -> GPTConfig:
    """Return the model called `name`, with LLaMA's FFN width: 8 d / 3, rounded up to 256."""
    base = name.removesuffix(WINDOWS)
    multiples_of_256 = math.ceil(8 * shape.dim / (3 * 256))
    return GPTConfig(
        dim=shape.dim,
        depth=shape.depth,
        heads=shape.heads,
        ffn=FFN(width=256 * multiples_of_256, activation="swiglu"),
        positions="rotary",
        norm="rmsnorm",
        head="untied",
        attention=PRESETS[base],
        windows=(None,) if name == base else shape.windows,
    )


class Decoder:
    """Model and a batch of sequences: `prefill` processes the prompt, then `decode` adds tokens."""

    def __init__(self, name: str, shape: Shape, n: int, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.generate = shape.generate
        network = GPT(configure(name, shape), shape.vocabulary, n + shape.generate, device)
        self.network = network.to(dtype).eval()
        self.prompt = torch.randint(shape.vocabulary, (shape.batch, n), device=device)
        self.caches: list[Cache] = []
        self.last = self.prompt[:, -1:]

    def prefill(self) -> None:
        self.caches = self.network.trunk.new_caches()
        self._add(self.prompt)

    def decode(self) -> None:
        for _ in range(self.generate):
            self._add(self.last)

    @torch.no_grad()
    def _add(self, tokens: Tensor) -> None:
        """Set `last` to the likeliest next token, (B, n) -> (B, 1), without a wait for the GPU."""
        hidden = self.network.trunk(tokens, caches=self.caches)
        self.last = self.network.logits(hidden[:, -1:]).argmax(-1)


class Row(NamedTuple):
    """Measurements of one model after one prompt; `beside` is None without windows."""

    name: str
    parameters: int
    tokens: int
    prefill: Spread
    token: Spread
    rate: float
    ratio: Spread
    beside: Spread | None
    cache: int
    cache_per_token: float


def make_decoding_tables(options: argparse.Namespace, setup: Setup) -> Iterator[Table]:
    """Yield the table of all models and lengths of the prompt."""
    shape = Shape(
        batch=options.batch,
        generate=options.generate,
        dim=options.dim,
        depth=options.depth,
        heads=options.heads,
        vocabulary=options.vocabulary,
        windows=options.windows,
    )
    windows = ", ".join("all" if keys is None else f"{keys} tokens" for keys in shape.windows)
    title = TITLES["decoding"].format(options=options, shape=shape, setup=setup, windows=windows)
    yield (f"decoding-{setup.device}", title, run(options.presets, options.tokens, shape, setup))


def run(names: Sequence[str], prompts: Sequence[int], shape: Shape, setup: Setup) -> list[Row]:
    """Return a row for every model and length of the prompt, the standard model first.

    If models have windows, the standard model with the same windows is the second.
    """
    models = [BASELINE]
    if any(name.endswith(WINDOWS) for name in names):
        models.append(BASELINE + WINDOWS)
    for name in names:
        if name not in models:
            models.append(name)
    rows = []
    for n in prompts:
        rows += _measure(models, n, shape, setup)
    return rows


def _measure(names: list[str], n: int, shape: Shape, setup: Setup) -> list[Row]:
    """Return a row for every model after a prompt of `n` tokens."""
    prefills: dict[str, list[float]] = {name: [] for name in names}
    decodings: dict[str, list[float]] = {name: [] for name in names}
    parameters: dict[str, int] = {}
    caches: dict[str, int] = {}
    for _ in range(setup.rounds):
        for name in names:
            # A model is built for its turn, so only one is on the device, and the largest sizes of
            # the paper fit.
            decoder = Decoder(name, shape, n, setup.device, setup.dtype)
            # The order matters: the tokens of a round follow its prompt.
            calls = {"prefill " + name: decoder.prefill, "decode " + name: decoder.decode}
            seconds = measure.measure_seconds(calls, 1, setup.device, setup.clock)
            prefills[name] += seconds["prefill " + name]
            decodings[name] += seconds["decode " + name]
            parameters[name] = count(decoder.network)
            caches[name] = count_bytes(decoder.caches)
            del decoder, calls
    rows = []
    for name in names:
        token = summarize(total / shape.generate for total in decodings[name])
        beside = None
        if name.endswith(WINDOWS):
            beside = summarize_ratios(decodings[BASELINE + WINDOWS], decodings[name])
        rows.append(
            Row(
                name=name,
                parameters=parameters[name],
                tokens=n,
                prefill=summarize(prefills[name]),
                token=token,
                rate=shape.batch / token.median,
                ratio=summarize_ratios(decodings[BASELINE], decodings[name]),
                beside=beside,
                cache=caches[name],
                cache_per_token=caches[name] / (n + shape.generate),
            )
        )
    return rows
