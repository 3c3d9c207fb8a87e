"""Decoding token by token with a cache, for each preset: the inference half of DCMHA's Table 6.

The model reads a prompt in one piece, then generates the most likely token each time. Models are
not compiled, and parameters are not matched: as in that table, a preset adds its parameters to
those of the standard model. A model is not timed if its logits with the cache differ from those of
the whole sequence.
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
    """Measurements of one model with one prompt; None if its cache is wrong.

    `prefill`: seconds of the prompt. `token`: seconds of a step that adds one token to each
    sequence. `recomputed`: seconds of such a step that computes the whole sequences again. `rate`:
    tokens/s of all sequences. `ratio` and `beside`: the rate divided by the standard model's in the
    same round, without and with windows. `cache`: bytes per sequence after the last token.
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
    """Measure every model with every length of the prompt; the standard model comes first.

    If a model has windows, the standard model with the same windows comes second.
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
        # The order matters: `decode` continues after the prompt of the same round.
        calls["prefill " + name] = decoder.prefill
        calls["decode " + name] = decoder.decode
        calls["recompute " + name] = decoder.recompute
    seconds = interleaved(calls, rounds, device, clock)
    rows = []
    for name, decoder in decoders.items():
        row = Row(name, parameters(decoder.network), n)
        if name in agreeing:
            decode_seconds = seconds["decode " + name]
            token = spread(value / shape.generate for value in decode_seconds)
            same = BASELINE + WINDOWS
            row = row._replace(
                prefill=spread(seconds["prefill " + name]),
                token=token,
                rate=shape.batch / token.median,
                ratio=ratios(seconds["decode " + BASELINE], decode_seconds)
                if BASELINE in agreeing
                else None,
                beside=ratios(seconds["decode " + same], decode_seconds)
                if name.endswith(WINDOWS) and same in agreeing
                else None,
                recomputed=spread(seconds["recompute " + name]),
                cache=held(decoder.caches) // shape.batch,
            )
        rows.append(row)
    return rows


def title(shape: Shape, dtype: torch.dtype, rounds: int) -> str:
    """Return a sentence that describes the measurement."""
    windows = ", ".join("all" if keys is None else f"{keys} tokens" for keys in shape.windows)
    return (
        f"Decoding with a key-value cache, uncompiled, {str(dtype).removeprefix('torch.')}: "
        f"{shape.depth} layers, width {shape.dim}, {shape.heads} heads, vocabulary of "
        f"{shape.vocabulary}, batch {shape.batch}; a prompt, then {shape.generate} tokens one by "
        f"one; {rounds} interleaved rounds. x: tokens/s over the standard model's. /windows: the "
        f"layers in turn see {windows}. Cache: of one sequence, after the last token."
    )


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [HEADER]
    for row in rows:
        cells = [row.name, f"{row.parameters:,}", str(row.tokens)]
        if row.rate is None or row.cache is None:
            cells += ["differs from the whole sequence: no number", *[""] * 6]
        else:
            cells += [
                _format_spread(row.prefill, 1e3),
                _format_spread(row.token, 1e3),
                f"{row.rate:.1f}",
            ]
            cells += [
                _format_spread(row.ratio),
                _format_spread(row.beside),
                _format_spread(row.recomputed, 1e3),
            ]
            cells.append(mebibytes(row.cache))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_spread(value: Spread | None, unit: float = 1) -> str:
    """Return median and interquartile range, multiplied by `unit`."""
    return "" if value is None else f"{unit * value.median:.2f} ± {unit * value.iqr:.2f}"
