"""Speed and cache of decoding with each preset: the inference half of DCMHA's Table 6.

The model is Transformer++ with random weights, as in that table: rotary positions, RMSNorm, SwiGLU,
untied output layer; `NAME/windows` has windows in some layers. It processes a prompt at once and
then adds the likeliest token, again and again. Models are uncompiled and not matched in parameters,
as in that table. A model whose logits with the cache differ from those of the complete sequence
gets no number.

Shapes: B batch, n tokens.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_attn.attention.cache import Cache
from lit_attn.attention.spec import PRESETS
from lit_attn.bench import WINDOWS
from lit_attn.bench.measure import (
    Setup,
    Spread,
    format_mebibytes,
    format_spread,
    measure_seconds,
    summarize,
    summarize_ratios,
)
from lit_attn.config.models.base import FFN
from lit_attn.config.models.language import GPTConfig
from lit_attn.models.factory import count
from lit_attn.models.language import GPT

BASELINE = "standard"

HEADER = (
    "| model | parameters | prompt | prefill ms (median ± IQR) | ms a token | tokens/s "
    "| x standard (± IQR) | x standard/windows (± IQR) | ms a token without cache | cache MiB |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)
SPREADS = ("prefill", "token", "ratio", "beside", "recomputed")

# Limits of the parity check: several chunks of queries and several of the published windows of 256,
# with little memory in float64.
CHECKED_TOKENS, CHECKED_VOCABULARY = 1024, 64


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
    return GPTConfig(
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
    """Model and a batch of sequences: `prefill` processes the prompt, then `decode` adds tokens."""

    def __init__(self, name: str, shape: Shape, n: int, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.generate = shape.generate
        self.network = build_network(name, shape, n + shape.generate, device, dtype)
        self.prompt = draw_tokens(shape.batch, n, shape.vocabulary, device)
        # The average length of the sequence while it grows.
        length = n + (shape.generate + 1) // 2
        self.sequence = draw_tokens(shape.batch, length, shape.vocabulary, device)
        self.caches: list[Cache] = []
        self.last = self.prompt[:, -1:]

    def prefill(self) -> None:
        self.caches = self.network.trunk.new_caches()
        self.last = self._next(self.prompt, self.caches)

    def decode(self) -> None:
        for _ in range(self.generate):
            self.last = self._next(self.last, self.caches)

    def recompute(self) -> None:
        self._next(self.sequence, None)

    @torch.no_grad()
    def _next(self, tokens: Tensor, caches: list[Cache] | None) -> Tensor:
        """Return the likeliest next token, (B, n) -> (B, 1), without a wait for the device."""
        hidden = self.network.trunk(tokens, caches=caches)
        return self.network.logits(hidden[:, -1:]).argmax(-1)


def build_network(name: str, shape: Shape, n: int, device: str, dtype: torch.dtype) -> GPT:
    """Return the model called `name` for up to `n` tokens."""
    network = GPT(configure(name, shape), shape.vocabulary, n, device)
    return network.to(dtype).eval()


def draw_tokens(batch: int, n: int, vocabulary: int, device: str) -> Tensor:
    """Return random tokens (B, n)."""
    return torch.randint(vocabulary, (batch, n), device=device)


def count_cache_bytes(caches: Sequence[Cache]) -> int:
    """Return the bytes of the storages behind the tensors of the caches."""
    storages = [part.untyped_storage() for cache in caches for part in cache.tensors()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@torch.no_grad()
def agrees(name: str, shape: Shape, n: int, device: str) -> bool:
    """Return True if decoding with the cache gives the logits of the complete sequence, in float64.

    The model has its first layers only, with every window among them.
    """
    torch.manual_seed(0)
    depth = min(shape.depth, max(2, len(shape.windows)))
    small = shape._replace(
        depth=depth, vocabulary=min(shape.vocabulary, CHECKED_VOCABULARY), generate=3
    )
    n = min(n, CHECKED_TOKENS)
    network = build_network(name, small, n + small.generate, device, torch.double)
    tokens = draw_tokens(min(shape.batch, 2), n + small.generate, small.vocabulary, device)
    caches = network.trunk.new_caches()
    cuts = itertools.pairwise([0, *range(n, n + small.generate + 1)])
    logits = torch.cat([network(tokens[:, start:stop], caches) for start, stop in cuts], dim=1)
    return torch.allclose(logits, network(tokens), rtol=1e-9, atol=1e-11)


class Row(NamedTuple):
    """Measurements of one model after one prompt; they are None if its cache is wrong.

    Seconds of the prompt (`prefill`), of a step that adds a token to each sequence (`token`), and
    of such a step without a cache (`recomputed`). `rate`: tokens/s of all sequences; `ratio` and
    `beside`: the rate over the standard model's in the same round, without and with windows.
    `cache`: bytes of each sequence after the last token.
    """

    name: str
    parameters: int
    tokens: int
    prefill: Spread | None = None
    token: Spread | None = None
    rate: float | None = None
    ratio: Spread | None = None
    beside: Spread | None = None
    recomputed: Spread | None = None
    cache: int | None = None


def run(names: Sequence[str], prompts: Sequence[int], shape: Shape, setup: Setup) -> list[Row]:
    """Return a row for every model and length of the prompt, the standard model first.

    If models have windows, the standard model with the same windows is the second.
    """
    standards = [BASELINE + WINDOWS] if any(name.endswith(WINDOWS) for name in names) else []
    models = list(dict.fromkeys([BASELINE, *standards, *names]))
    return [row for n in prompts for row in _measure(models, n, shape, setup)]


def _measure(names: list[str], n: int, shape: Shape, setup: Setup) -> list[Row]:
    agreeing = [name for name in names if agrees(name, shape, n, setup.device)]
    decoders = {name: Decoder(name, shape, n, setup.device, setup.dtype) for name in names}
    calls: dict[str, Callable[[], None]] = {}
    for name in agreeing:
        decoder = decoders[name]
        # The order matters: the tokens of a round follow its prompt.
        calls["prefill " + name] = decoder.prefill
        calls["decode " + name] = decoder.decode
        calls["recompute " + name] = decoder.recompute
    seconds = measure_seconds(calls, setup.rounds, setup.device, setup.clock)
    rows = []
    for name, decoder in decoders.items():
        row = Row(name, count(decoder.network), n)
        if name in agreeing:
            decoding = seconds["decode " + name]
            token = summarize(total / shape.generate for total in decoding)
            windowed = BASELINE + WINDOWS
            row = row._replace(
                prefill=summarize(seconds["prefill " + name]),
                token=token,
                rate=shape.batch / token.median,
                ratio=summarize_ratios(seconds["decode " + BASELINE], decoding)
                if BASELINE in agreeing
                else None,
                beside=summarize_ratios(seconds["decode " + windowed], decoding)
                if name.endswith(WINDOWS) and windowed in agreeing
                else None,
                recomputed=summarize(seconds["recompute " + name]),
                cache=count_cache_bytes(decoder.caches) // shape.batch,
            )
        rows.append(row)
    return rows


def format_title(shape: Shape, dtype: str, rounds: int) -> str:
    """Return a description of the measurements."""
    windows = ", ".join("all" if keys is None else f"{keys} tokens" for keys in shape.windows)
    return (
        f"Decoding with a key-value cache, uncompiled, {dtype}: "
        f"{shape.depth} layers, width {shape.dim}, {shape.heads} heads, vocabulary of "
        f"{shape.vocabulary}, batch {shape.batch}; a prompt, then {shape.generate} tokens one by "
        f"one; {rounds} interleaved rounds. x: tokens/s over the standard model's. /windows: the "
        f"layers in turn see {windows}. Cache: of one sequence, after the last token."
    )


def format_row(row: Row) -> list[str]:
    """Return the cells of a row under HEADER."""
    cells = [row.name, f"{row.parameters:,}", str(row.tokens)]
    if row.rate is None or row.cache is None:
        return [*cells, "differs from the whole sequence: no number", *[""] * 6]
    return [
        *cells,
        format_spread(row.prefill, 1e3),
        format_spread(row.token, 1e3),
        f"{row.rate:.1f}",
        format_spread(row.ratio),
        format_spread(row.beside),
        format_spread(row.recomputed, 1e3),
        format_mebibytes(row.cache),
    ]
