"""Decoding token by token with a cache, for each preset: the inference half of DCMHA's Table 6.

A prompt goes in in one piece, then the likeliest token each time. Uncompiled, and not matched in
parameters: as in that table, what a preset adds comes on top. A model whose logits with the cache
are not those of the whole sequence gets no number.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lit_attn.bench.arguments import WINDOWS
from lit_attn.bench.blocks import parameters
from lit_attn.bench.decoder import Decoder, Shape, agrees, held
from lit_attn.bench.report import mebibytes
from lit_attn.bench.timing import Spread, interleaved, ratios, spread

BASELINE = "standard"

HEADER = (
    "| model | parameters | prompt | prefill ms (median ± IQR) | ms a token | tokens/s "
    "| x standard (± IQR) | x standard/windows (± IQR) | ms a token without cache | cache MiB |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)
SPREADS = ("prefill", "token", "ratio", "beside", "recomputed")


class Row(NamedTuple):
    """One model after one prompt; what it is measured by is None where its cache is wrong.

    Seconds of the prompt, of a step that adds a token to each sequence, and of one where the whole
    sequences are computed for it. `rate`: tokens/s of all sequences; `ratio` and `beside`: the same
    over the standard model's in the same round, without and with the windows. `cache`: bytes of
    each sequence after the last token.
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


def run(
    names: Sequence[str],
    prompts: Sequence[int],
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    rounds: int,
    clock: str = "wall",
) -> list[Row]:
    """A row for every model and length of the prompt, the standard one's first.

    Where models have windows, the standard one with the same windows is the second.
    """
    windowed = [BASELINE + WINDOWS] if any(name.endswith(WINDOWS) for name in names) else []
    every = list(dict.fromkeys([BASELINE, *windowed, *names]))
    return [row for n in prompts for row in _measure(every, n, shape, device, dtype, rounds, clock)]


def _measure(
    names: list[str],
    n: int,
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    rounds: int,
    clock: str,
) -> list[Row]:
    agreeing = [name for name in names if agrees(name, shape, n, device)]
    decoders = {name: Decoder(name, shape, n, device, dtype) for name in names}
    calls: dict[str, Callable[[], None]] = {}
    for name in agreeing:
        decoder = decoders[name]
        # In this order: a round's tokens follow its prompt.
        calls["prefill " + name] = decoder.prefill
        calls["decode " + name] = decoder.decode
        calls["recompute " + name] = decoder.recompute
    seconds = interleaved(calls, rounds, device, clock)
    rows = []
    for name, decoder in decoders.items():
        row = Row(name, parameters(decoder.network), n)
        if name in agreeing:
            own = seconds["decode " + name]
            token = spread(taken / shape.generate for taken in own)
            same = BASELINE + WINDOWS
            row = row._replace(
                prefill=spread(seconds["prefill " + name]),
                token=token,
                rate=shape.batch / token.median,
                ratio=ratios(seconds["decode " + BASELINE], own) if BASELINE in agreeing else None,
                beside=ratios(seconds["decode " + same], own)
                if name.endswith(WINDOWS) and same in agreeing
                else None,
                recomputed=spread(seconds["recompute " + name]),
                cache=held(decoder.caches) // shape.batch,
            )
        rows.append(row)
    return rows


def title(shape: Shape, dtype: torch.dtype, rounds: int) -> str:
    """What was measured, in words."""
    windows = ", ".join("all" if keys is None else f"{keys} tokens" for keys in shape.windows)
    return (
        f"Decoding with a key-value cache, uncompiled, {str(dtype).removeprefix('torch.')}: "
        f"{shape.depth} layers, width {shape.dim}, {shape.heads} heads, vocabulary of "
        f"{shape.vocabulary}, batch {shape.batch}; a prompt, then {shape.generate} tokens one by "
        f"one; {rounds} interleaved rounds. x: tokens/s over the standard model's. /windows: the "
        f"layers in turn see {windows}. Cache: of one sequence, after the last token."
    )


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADER]
    for row in rows:
        cells = [row.name, f"{row.parameters:,}", str(row.tokens)]
        if row.rate is None or row.cache is None:
            cells += ["differs from the whole sequence: no number", *[""] * 6]
        else:
            cells += [_shown(row.prefill, 1e3), _shown(row.token, 1e3), f"{row.rate:.1f}"]
            cells += [_shown(row.ratio), _shown(row.beside), _shown(row.recomputed, 1e3)]
            cells.append(mebibytes(row.cache))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(found: Spread | None, unit: float = 1) -> str:
    """Median and range, times `unit`."""
    return "" if found is None else f"{unit * found.median:.2f} ± {unit * found.iqr:.2f}"
