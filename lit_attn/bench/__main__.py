"""Benchmarks: `python -m lit_attn.bench attention|memory|decoding`.

attention   a transformer block, forward + backward, relative to the standard block
memory      growth of one layer's memory and time with the number of tokens
decoding    a causal model with its key-value cache, token by token
"""

import argparse
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ValidationError

from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.bench import HALF_HEADS, WINDOWS
from lit_attn.files import require_writable
from lit_attn.schema.errors import ConfigError, explain, suggest
from lit_attn.schema.plugins import load_parts

if TYPE_CHECKING:
    from lit_attn.bench.measure import Setup

# Name of the files, title and rows of each table of a benchmark.
Tables: TypeAlias = Iterator[tuple[str, str, list[Any]]]

MODES = ["eager", "compiled"]

SUFFIXES = {"attention": ["", HALF_HEADS], "memory": [""], "decoding": ["", WINDOWS]}

MIXTURES = ["mgk", "smgk", "mgk-hard", "smgk-hard"]
COMPOSED = ["talking-heads", "dcmha", "dcmha-query"]
MEMORY_PRESETS = ["standard", *MIXTURES, *COMPOSED[:2], "linear", "mlk", "smlk"]
WINDOWED = ["dcmha/windows", "dcmha-query/windows"]
DECODING_PRESETS = ["standard", "belief2", "xsa", *MIXTURES[:3], "mlk", *COMPOSED, *WINDOWED]


def main(arguments: list[str] | None = None) -> int:
    """Return 0, 1 if a preset does not compute what it should, or 2 for bad arguments."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    # torch's profiler, which counts a CPU's memory, would report its own start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        load_parts(options.parts)
        if options.out is not None:
            require_writable(options.out, "--out")
        _check(options)
        return _measure(options)
    except ConfigError as error:
        print(f"python -m lit_attn.bench: error: {error}", file=sys.stderr)
        return 2


def _measure(options: argparse.Namespace) -> int:
    """Print every table, write it to `--out`, and return 1 if a row has no numbers."""
    from lit_attn.bench import measure

    setup = _make_setup(options)
    benchmark = import_module(f"lit_attn.bench.{options.command}")
    tables = {
        "attention": _attention_tables,
        "memory": _memory_tables,
        "decoding": _decoding_tables,
    }
    lacks_numbers = False
    conditions = measure.read_conditions(setup.device, setup.clock)
    for name, title, rows in tables[options.command](options, setup):
        conditions["load"] += f" to {measure.read_load()}"
        cells = map(benchmark.format_row, rows)
        text = measure.format_document(title, conditions, benchmark.HEADER, cells)
        print(text)
        if options.out is not None:
            records = measure.make_records(rows, benchmark.SPREADS)
            measure.write_files(options.out, name, text, records, conditions)
        lacks_numbers |= any(getattr(row, benchmark.SPREADS[0]) is None for row in rows)
        conditions = measure.read_conditions(setup.device, setup.clock)
    return int(lacks_numbers)


def _attention_tables(options: argparse.Namespace, setup: "Setup") -> Tables:
    """Yield the name, the title and the rows of each table, one for each number of tokens."""
    from lit_attn.bench import attention

    for tokens in options.tokens:
        shape = attention.Shape(
            options.batch, tokens, options.dim, options.heads, options.ffn_ratio, options.causal
        )
        rows = attention.run(options.presets, shape, options.modes, setup)
        title = (
            f"Transformer block, forward + backward, {_name(setup)}: "
            f"batch {shape.batch}, {tokens} tokens{', causal' if shape.causal else ''}, "
            f"width {shape.dim}, {shape.heads} heads, {setup.rounds} interleaved rounds; "
            "parameters matched through the FFN."
        )
        yield f"attention-{setup.device}-{tokens}{'-causal' if shape.causal else ''}", title, rows


def _memory_tables(options: argparse.Namespace, setup: "Setup") -> Tables:
    from lit_attn.bench import memory

    sizes = options.presets, options.tokens, options.dim, options.heads
    rows = memory.run(*sizes, setup)
    title = (
        f"Attention layer, forward + backward, uncompiled, {_name(setup)}: one sample, width "
        f"{options.dim}, {options.heads} heads, {setup.rounds} rounds. Held: memory kept from "
        "forward to backward. Peak: greatest memory in either. Without parameters and input."
    )
    yield f"memory-{setup.device}", title, rows


def _decoding_tables(options: argparse.Namespace, setup: "Setup") -> Tables:
    from lit_attn.bench import decoding

    sizes = options.dim, options.depth, options.heads, options.vocabulary, tuple(options.windows)
    shape = decoding.Shape(options.batch, options.generate, *sizes)
    rows = decoding.run(options.presets, options.tokens, shape, setup)
    yield f"decoding-{setup.device}", decoding.format_title(shape, _name(setup), setup.rounds), rows


def _make_setup(options: argparse.Namespace) -> "Setup":
    """Return the setup of a benchmark, and set the number of threads."""
    import torch

    from lit_attn.bench.measure import Setup

    if options.threads:
        torch.set_num_threads(options.threads)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU")
    dtype = getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))
    return Setup(device, dtype, options.rounds, options.clock)


def _name(setup: "Setup") -> str:
    return str(setup.dtype).removeprefix("torch.")


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for arguments that do not fit together."""
    names = [name + suffix for suffix in SUFFIXES[options.command] for name in PRESETS]
    for name in options.presets:
        if name not in names:
            raise ConfigError(f"--presets: '{name}' is not a preset{suggest(name, names)}")
        if name.endswith(HALF_HEADS) and options.heads % 2:
            raise ConfigError(f"--presets: '{name}': {options.heads} heads cannot be halved")
        if name.endswith(WINDOWS):
            choices = dict(PRESETS[name.removesuffix(WINDOWS)])
            try:
                AttentionSpec.model_validate({**choices, "window": 1})
            except ValidationError as error:
                raise explain(error, f"--presets: '{name}'") from error
    for mode in getattr(options, "modes", []):
        if mode not in MODES:
            raise ConfigError(f"--modes: '{mode}' is not a mode{suggest(mode, MODES)}")
    if options.rounds < 2:
        raise ConfigError("--rounds: an interquartile range needs at least 2")
    width, rest = divmod(options.dim, options.heads)
    if rest:
        raise ConfigError(f"--heads: {options.heads} heads do not divide a width of {options.dim}")
    if options.command == "decoding" and width % 2:
        raise ConfigError(f"--heads: rotary positions need heads of an even width, not {width}")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lit_attn.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCHMARK")
    _add_attention(commands.add_parser("attention"))
    _add_memory(commands.add_parser("memory"))
    _add_decoding(commands.add_parser("decoding"))
    return parser


def _add_attention(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = [*PRESETS, "mgk" + HALF_HEADS]
    add("--presets", nargs="+", default=names, metavar=f"NAME[{HALF_HEADS}]", help="default: all")
    add("--batch", type=_count, default=128, help="samples")
    add("--tokens", type=_count, nargs="+", default=[65], help="lengths; a table for each")
    add("--ffn-ratio", type=_count, default=3, help="FFN width over DIM, of the baseline")
    add("--causal", action="store_true", help="causal attention")
    add("--modes", nargs="+", default=MODES, metavar="MODE", help="eager, compiled; default: both")
    _add_common(parser, dim=192, heads=12, rounds=15)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--presets", nargs="+", default=MEMORY_PRESETS, metavar="NAME", help="default: one a kind")
    add("--tokens", type=_count, nargs="+", help="lengths; default: 1k to 8k, linear keys to 64k")
    _add_common(parser, dim=384, heads=6, rounds=3)


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    metavar = f"NAME[{WINDOWS}]"
    add("--presets", nargs="+", default=DECODING_PRESETS, metavar=metavar, help="one a kind")
    add(
        "--windows",
        type=_window,
        nargs="+",
        default=[256, None],
        metavar="KEYS",
        help=f"windows of the layers of NAME{WINDOWS} in turn, or none; default: 256 none",
    )
    add("--batch", type=_count, default=1, help="sequences")
    add("--tokens", type=_count, nargs="+", default=[1024], help="lengths of the prompt")
    add("--generate", type=_count, default=128, help="tokens after the prompt")
    add("--depth", type=_count, default=6, help="blocks")
    add("--vocabulary", type=_count, default=50_304, help="token ids")
    _add_common(parser, dim=384, heads=6, rounds=5)


def _add_common(parser: argparse.ArgumentParser, dim: int, heads: int, rounds: int) -> None:
    add = parser.add_argument
    add("--dim", type=_count, default=dim, help="width of the block, layer or model")
    add("--heads", type=_count, default=heads, help="attention heads")
    add("--rounds", type=int, default=rounds, help="measurements of each row")
    add("--parts", type=Path, nargs="+", default=[], metavar="FILE", help="plug-ins to import")
    add("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: by the device")
    add("--threads", type=_count, help="CPU threads; default: torch's choice")
    add("--clock", choices=["wall", "cpu"], default="wall", help="cpu: the process's CPU time")
    add("--out", type=Path, metavar="DIR", help="write Markdown and CSV files there")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 on")
    return int(text)


def _window(text: str) -> int | None:
    """Return the keys that a token sees, itself included, or None for all keys."""
    if text != "none" and (not text.isdecimal() or int(text) < 1):
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number of keys nor none")
    return None if text == "none" else int(text)


if __name__ == "__main__":
    sys.exit(main())
