"""The command line of `python -m lit_attn.bench`, and what is wrong with one; without torch."""

import argparse
from pathlib import Path

from lit_attn.attention.parts import LinearConfig
from lit_attn.attention.spec import PRESETS
from lit_attn.schema.errors import suggest

MODES = ["eager", "compiled"]

# What stands behind a preset's name where something about it is different.
HALF_HEADS, WINDOWS = "/half-heads", "/windows"

# What `memory` shows: the standard layer, mixtures of each kind, composed heads, linear keys.
SHOWN = [
    "standard",
    "mgk",
    "smgk",
    "mgk-hard",
    "smgk-hard",
    "talking-heads",
    "dcmha",
    "linear",
    "mlk",
    "smlk",
]

# What `decoding` shows: one of every kind that caches or computes something of its own.
DECODED = [
    "standard",
    "belief2",
    "xsa",
    "mgk",
    "mgk-hard",
    "smgk",
    "mlk",
    "talking-heads",
    "dcmha",
    "dcmha-query",
    "dcmha/windows",
    "dcmha-query/windows",
]


def parser(description: str | None) -> argparse.ArgumentParser:
    """All subcommands."""
    made = argparse.ArgumentParser(prog="python -m lit_attn.bench", description=description)
    commands = made.add_subparsers(dest="command", required=True)
    _add_attention(commands.add_parser("attention", help="whole block, forward + backward"))
    _add_memory(commands.add_parser("memory", help="one layer, from few tokens to many"))
    _add_decoding(commands.add_parser("decoding", help="a causal model, token by token"))
    runner = commands.add_parser("runner", help="expansion, and overhead per cell")
    runner.add_argument("--cells", type=int, default=64, help="trivial cells to run")
    runner.add_argument("--jobs", type=int, default=2, help="cells at once")
    runner.add_argument("--expand", type=int, default=10_000, help="cells to expand")
    runner.add_argument("--imports", action="store_true", help="cells load torch and Lightning")
    runner.add_argument("--rounds", type=int, default=5)
    return made


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the arguments of a subcommand with presets, in one line."""
    behind = {"attention": ["", HALF_HEADS], "memory": [""], "decoding": ["", WINDOWS]}
    names = [name + suffix for suffix in behind[options.command] for name in PRESETS]
    for name in options.presets:
        if name not in names:
            return f"--presets: '{name}' is not a preset{suggest(name, names)}"
        if name.endswith(HALF_HEADS) and options.heads % 2:
            return f"--presets: {options.heads} heads have no half for '{name}'"
        if name.endswith(WINDOWS):
            part = PRESETS[name.removesuffix(WINDOWS)].similarity
            if isinstance(part, LinearConfig):
                return f"--presets: '{name}': linear keys have no windows"
    for mode in getattr(options, "modes", []):
        if mode not in MODES:
            return f"--modes: '{mode}' is not a mode{suggest(mode, MODES)}"
    if options.rounds < 2:
        return "--rounds: a spread needs at least 2"
    if options.dim % options.heads:
        return f"--heads: {options.heads} heads do not divide a width of {options.dim}"
    width = options.dim // options.heads
    if options.command == "decoding" and width % 2:
        return f"--heads: rotary positions need heads of an even width, not {width}"
    return None


def _add_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--presets", nargs="+", default=[*PRESETS, "mgk/half-heads"], metavar="NAME[/half-heads]"
    )
    parser.add_argument("--batch", type=_count, default=128)
    parser.add_argument("--tokens", type=_count, nargs="+", default=[65], help="a table for each")
    parser.add_argument("--dim", type=_count, default=192)
    parser.add_argument("--heads", type=_count, default=12)
    parser.add_argument("--ffn-ratio", type=_count, default=3, help="of the baseline's FFN")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--modes", nargs="+", default=MODES, metavar="MODE")
    parser.add_argument("--rounds", type=int, default=15)
    _add_where(parser)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--presets", nargs="+", default=SHOWN, metavar="NAME", help="one of every kind by default"
    )
    parser.add_argument(
        "--tokens", type=_count, nargs="+", help="1k to 8k by default, linear keys to 64k"
    )
    parser.add_argument("--dim", type=_count, default=384)
    parser.add_argument("--heads", type=_count, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    _add_where(parser)


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--presets", nargs="+", default=DECODED, metavar="NAME[/windows]")
    parser.add_argument(
        "--windows",
        type=_window,
        nargs="+",
        default=[256, None],
        metavar="KEYS",
        help="of the layers of NAME/windows in turn, or none; 256 none by default, as DCFormer",
    )
    parser.add_argument("--batch", type=_count, default=1)
    parser.add_argument(
        "--tokens", type=_count, nargs="+", default=[1024], help="lengths of the prompt"
    )
    parser.add_argument("--generate", type=_count, default=128, help="tokens after it")
    parser.add_argument("--dim", type=_count, default=384)
    parser.add_argument("--depth", type=_count, default=6)
    parser.add_argument("--heads", type=_count, default=6)
    parser.add_argument("--vocabulary", type=_count, default=50_304)
    parser.add_argument("--rounds", type=int, default=5)
    _add_where(parser)


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", type=Path, nargs="+", default=[], metavar="FILE", help="that define presets"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="a GPU where there is one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=_count, help="CPU threads; torch's choice by default")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: the process's own time, where other programs share the CPU",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write Markdown and CSV there")


def _count(given: str) -> int:
    """How many of something."""
    if not given.isdecimal() or int(given) < 1:
        raise argparse.ArgumentTypeError(f"'{given}' is not a number from 1 on")
    return int(given)


def _window(given: str) -> int | None:
    """The keys a token sees, itself included; None where it sees all."""
    if given == "none":
        return None
    if not given.isdecimal() or int(given) < 1:
        raise argparse.ArgumentTypeError(f"'{given}' is neither a number of keys nor none")
    return int(given)
