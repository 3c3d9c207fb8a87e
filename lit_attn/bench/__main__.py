"""Benchmarks of attention mechanisms.

attention   a transformer block, forward + backward, relative to the standard block
memory      growth of one layer's memory and time with the number of tokens
decoding    a causal model with its key-value cache, token by token
data        samples per second of a core, and the wait of a device for its batches
compiling   graphs and seconds of torch.compile, for the whole model and block by block
training    a training step of this package, beside a plain PyTorch loop of the same model
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NamedTuple

from lit_attn.bench import WINDOWS
from lit_attn.files import require_writable
from lit_attn.schema.base import load
from lit_attn.schema.errors import ConfigError, OneLineParser, command, from_one, program, require

PAGE = "benchmarks.md"  # Page of docs/ that every help names.
MODES = ["eager", "compiled"]

MEASURED_IN_MEMORY = [
    "standard", "mgk", "smgk", "mgk-hard", "smgk-hard", "talking-heads", "dcmha", "linear", "mlk",
    "smlk",
]  # fmt: skip
DECODED = [
    "standard", "belief2", "xsa", "mgk", "smgk", "mgk-hard", "mlk", "talking-heads", "dcmha",
    "dcmha-query", "dcmha/windows", "dcmha-query/windows",
]  # fmt: skip


class Defaults(NamedTuple):
    """Default options of a benchmark; `rounds` counts the measurements of each row.

    `presets` is None for all presets. `described` is how the help calls the presets.
    """

    dim: int
    heads: int
    rounds: int
    presets: list[str] | None
    described: str


DEFAULTS = {
    "attention": Defaults(192, 12, 15, None, "all"),
    "memory": Defaults(384, 6, 3, MEASURED_IN_MEMORY, "one a kind"),
    "decoding": Defaults(384, 6, 5, DECODED, "one a kind"),
    "compiling": Defaults(64, 4, 3, ["standard", "belief2"], "standard, belief2"),
}


@command
def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 2 for bad arguments."""
    # torch's profiler, which counts a CPU's memory, would report its own start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    options = _make_parser().parse_args(arguments)
    # Functions below import PyTorch too, because --help imports none.
    from lit_attn.attention.own_presets import load_presets

    own_presets = load_presets(options.parts)
    if options.out is not None:
        require_writable(options.out, "--out")
    if options.rounds < 2:
        raise ConfigError("--rounds: an interquartile range needs at least 2")
    if options.command == "data":
        _measure_data(options)
    elif options.command == "training":
        _measure(options)
    else:
        if options.presets is None:
            options.presets = own_presets or _list_default_presets(options.command)
        _check(options)
        _measure(options)
    return 0


def _list_default_presets(benchmark: str) -> list[str]:
    """Return the presets that a benchmark measures without `--presets`."""
    from lit_attn.attention.spec import PRESETS

    chosen = DEFAULTS[benchmark].presets
    return list(PRESETS) if chosen is None else chosen


def _measure_data(options: argparse.Namespace) -> None:
    """Print the table of the preparation of batches and write it to `--out`."""
    import torch

    from lit_attn.bench import data, measure

    # A worker process has one thread.
    torch.set_num_threads(1)
    setup = measure.Setup("cpu", torch.float32, options.rounds)
    conditions = measure.read_conditions("cpu", setup.clock)
    for table in data.make_data_tables(options, setup):
        conditions["load"] += f" to {measure.read_conditions('cpu', setup.clock)['load']}"
        measure.write_table(table, conditions, options.out)


def _measure(options: argparse.Namespace) -> None:
    """Print every table and write it to `--out`."""
    import torch

    from lit_attn.bench import measure

    if options.threads:
        torch.set_num_threads(options.threads)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = getattr(options, "dtype", None) or (
        "bfloat16" if device == "cuda" else "float32"
    )
    setup = measure.Setup(device, getattr(torch, options.dtype), options.rounds, options.clock)
    file = "attention" if options.command == "memory" else options.command
    make_tables = load(f"lit_attn.bench.{file}:make_{options.command}_tables")
    conditions = measure.read_conditions(device, setup.clock)
    for table in make_tables(options, setup):
        after = measure.read_conditions(device, setup.clock)
        conditions["load"] += f" to {after['load']}"
        measure.write_table(table, conditions, options.out)
        conditions = after


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for arguments that do not fit together, or not to this machine."""
    import torch

    from lit_attn.attention.spec import PRESETS, attention_spec

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU")
    names = list(PRESETS)
    if options.command == "decoding":
        names += [name + WINDOWS for name in PRESETS]
    for name in options.presets:
        require("--presets: unknown preset", name, names)
        if name.endswith(WINDOWS):
            choices = dict(PRESETS[name.removesuffix(WINDOWS)])
            attention_spec({**choices, "window": 1}, f"--presets: '{name}'")
    width, rest = divmod(options.dim, options.heads)
    if rest:
        raise ConfigError(f"--heads: {options.heads} heads do not divide a width of {options.dim}")
    if options.command == "decoding" and width % 2:
        raise ConfigError(f"--heads: rotary positions need heads of an even width, not {width}")


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of all benchmarks, which share most of their options."""
    parser = OneLineParser(
        program("bench"),
        page=PAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCHMARK")
    for name, add_options in OPTIONS.items():
        command_parser = commands.add_parser(name, page=PAGE)
        _add_common_options(command_parser, name)
        add_options(command_parser)
    _add_data_options(commands.add_parser("data", page=PAGE))
    _add_training_options(commands.add_parser("training", page=PAGE))
    return parser


def _add_common_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options that all benchmarks have to the parser of the benchmark `name`."""
    defaults = DEFAULTS[name]
    metavar = f"NAME[{WINDOWS}]" if name == "decoding" else "NAME"
    add = parser.add_argument
    text = f"default: those of --parts; without --parts {defaults.described}"
    add("--presets", nargs="+", metavar=metavar, help=text)
    add("--dim", type=from_one, default=defaults.dim, help="width of the block, layer or model")
    add("--heads", type=from_one, default=defaults.heads, help="attention heads")
    add("--rounds", type=int, default=defaults.rounds, help="measurements of each row")
    add("--parts", type=Path, nargs="+", default=[], metavar="FILE", help="plug-ins to import")
    add("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: by the device")
    add("--threads", type=from_one, help="CPU threads; default: torch's choice")
    add("--clock", choices=["wall", "cpu"], default="wall", help="cpu: the process's CPU time")
    add("--out", type=Path, metavar="DIR", help="write Markdown and CSV files there")


def _add_attention_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark `attention`: shape and modes of the blocks."""
    add = parser.add_argument
    add("--batch", type=from_one, default=128, help="samples")
    add("--tokens", type=from_one, nargs="+", default=[65], help="lengths; a table for each")
    add("--causal", action="store_true", help="causal attention")
    add("--modes", nargs="+", choices=MODES, default=MODES, help="default: both")


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark `memory`: lengths of the layers."""
    parser.add_argument(
        "--tokens",
        type=from_one,
        nargs="+",
        help="lengths; default: 1k to 8k, linear keys to 64k",
    )


def _add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark `decoding`: size of model and texts."""
    add = parser.add_argument
    add(
        "--windows",
        type=_window,
        nargs="+",
        default=(256, None),
        metavar="KEYS",
        help=f"windows of the layers of NAME{WINDOWS} in turn, or none; default: 256 none",
    )
    add("--batch", type=from_one, default=1, help="sequences")
    add("--tokens", type=from_one, nargs="+", default=[1024], help="lengths of the prompt")
    add("--generate", type=from_one, default=128, help="tokens after the prompt")
    add("--depth", type=from_one, default=6, help="blocks")
    add("--vocabulary", type=from_one, default=50_304, help="token ids")


def _add_compiling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark `compiling`: size of the model and its batch."""
    add = parser.add_argument
    add("--batch", type=from_one, default=4, help="sequences")
    add("--tokens", type=from_one, default=128, help="length of the sequences")
    add("--depth", type=from_one, nargs="+", default=[2, 12], help="blocks; default: 2 12")
    add("--vocabulary", type=from_one, default=256, help="token ids")


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark `data`: experiments, workers and steps."""
    add = parser.add_argument
    add("experiments", type=Path, nargs="+", metavar="EXPERIMENT", help="files of experiments")
    add(
        "--images",
        type=Path,
        metavar="FILE.npz",
        help="training images to use instead of the experiment's (as kind: npz)",
    )
    add(
        "--workers",
        type=_from_zero,
        nargs="+",
        default=[0, 2],
        help="numbers of worker processes; default: 0 2",
    )
    add(
        "--step",
        type=float,
        nargs="+",
        default=[4.0, 16.0],
        metavar="MS",
        help="lengths of a step of the device; default: 4 16",
    )
    add("--steps", type=from_one, default=30, help="steps of a round")
    add("--rounds", type=int, default=5, help="measurements of each row")
    add("--parts", type=Path, nargs="+", default=[], metavar="FILE", help="plug-ins to import")
    add("--out", type=Path, metavar="DIR", help="write Markdown and CSV files there")


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark `training`."""
    add = parser.add_argument
    text = "experiment files; their data are read, one batch of them"
    add("experiments", type=Path, nargs="+", metavar="EXPERIMENT", help=text)
    add("--steps", type=from_one, default=50, help="steps of a round")
    add("--rounds", type=int, default=5, help="measurements of each row")
    add("--parts", type=Path, nargs="+", default=[], metavar="FILE", help="plug-ins to import")
    add("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    add("--threads", type=from_one, help="CPU threads; default: torch's choice")
    add("--clock", choices=["wall", "cpu"], default="wall", help="cpu: the process's CPU time")
    add("--out", type=Path, metavar="DIR", help="write Markdown and CSV files there")


OPTIONS = {
    "attention": _add_attention_options,
    "memory": _add_memory_options,
    "decoding": _add_decoding_options,
    "compiling": _add_compiling_options,
}
"""Function that adds the options of each benchmark of layers and models."""


def _from_zero(text: str) -> int:
    """Return a whole number from 0 on."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def _window(text: str) -> int | None:
    """Return the keys that a token sees, itself included, or None for all keys."""
    return None if text == "none" else from_one(text)


if __name__ == "__main__":
    sys.exit(main())
