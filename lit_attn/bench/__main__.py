"""`python -m lit_attn.bench attention|memory|runner`: time as ratios within one run, and memory."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.attention.spec import PRESETS
from lit_attn.config.errors import nearest

if TYPE_CHECKING:
    import torch

MODES = ["eager", "compiled"]

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


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 1 where a preset disagrees with the reference; 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m lit_attn.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_attention(commands.add_parser("attention", help="whole block, forward + backward"))
    _add_memory(commands.add_parser("memory", help="one layer, from few tokens to many"))
    runner = commands.add_parser("runner", help="expansion, and overhead per cell")
    runner.add_argument("--cells", type=int, default=64, help="trivial cells to run")
    runner.add_argument("--jobs", type=int, default=2, help="cells at once")
    runner.add_argument("--expand", type=int, default=10_000, help="cells to expand")
    runner.add_argument("--imports", action="store_true", help="cells load torch and Lightning")
    runner.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.command == "runner":
        return _runner(options)
    if problem := _problem(options):
        parser.error(problem)
    # The profiler that counts a CPU's memory would tell of its own start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return _attention(options) if options.command == "attention" else _memory(options)


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, in one line."""
    halved = [f"{name}/half-heads" for name in PRESETS] if options.command == "attention" else []
    for name in options.presets:
        if name not in PRESETS and name not in halved:
            return f"--presets: '{name}' is not a preset{nearest(name, PRESETS)}"
        if name in halved and options.heads % 2:
            return f"--presets: {options.heads} heads have no half for '{name}'"
    for mode in getattr(options, "modes", []):
        if mode not in MODES:
            return f"--modes: '{mode}' is not a mode{nearest(mode, MODES)}"
    if options.rounds < 2:
        return "--rounds: a spread needs at least 2"
    if options.dim % options.heads:
        return f"--heads: {options.heads} heads do not divide a width of {options.dim}"
    return None


def _add_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--presets", nargs="+", default=[*PRESETS, "mgk/half-heads"], metavar="NAME[/half-heads]"
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs="+", default=[65], help="a table for each")
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--ffn-ratio", type=int, default=3, help="of the baseline's FFN")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--modes", nargs="+", default=MODES, metavar="MODE")
    parser.add_argument("--rounds", type=int, default=15)
    _add_where(parser)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--presets", nargs="+", default=SHOWN, metavar="NAME", help="one of every kind by default"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="1k to 8k by default, linear keys to 64k"
    )
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    _add_where(parser)


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="a GPU where there is one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, help="CPU threads; torch's choice by default")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: the process's own time, where other programs share the CPU",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write Markdown and CSV there")


def _runner(options: argparse.Namespace) -> int:
    from lit_attn.bench import runner

    costs = runner.run(options.cells, options.jobs, options.expand, options.rounds, options.imports)
    print(runner.table(costs))
    return 0


def _attention(options: argparse.Namespace) -> int:
    from lit_attn.bench import attention, report
    from lit_attn.bench.blocks import Shape

    device, dtype = _where(options)
    disagreeing = False
    for tokens in options.tokens:
        shape = Shape(
            options.batch, tokens, options.dim, options.heads, options.ffn_ratio, options.causal
        )
        begun = report.conditions(device, options.clock)
        rows = attention.run(
            options.presets, shape, options.modes, device, dtype, options.rounds, options.clock
        )
        title = (
            f"Transformer block, forward + backward, {str(dtype).removeprefix('torch.')}: "
            f"batch {shape.batch}, {tokens} tokens{', causal' if shape.causal else ''}, "
            f"width {shape.dim}, {shape.heads} heads, {options.rounds} interleaved rounds; "
            "parameters matched through the FFN."
        )
        where = report.finished(begun)
        text = report.document(title, where, attention.table(rows))
        print(text)
        if options.out:
            name = f"attention-{device}-{tokens}{'-causal' if shape.causal else ''}"
            report.write(options.out, name, text, attention.records(rows), where)
        disagreeing |= any(row.seconds is None for row in rows)
    return int(disagreeing)


def _memory(options: argparse.Namespace) -> int:
    from lit_attn.bench import memory, report

    device, dtype = _where(options)
    begun = report.conditions(device, options.clock)
    rows = memory.run(
        options.presets,
        options.tokens,
        options.dim,
        options.heads,
        device,
        dtype,
        options.rounds,
        options.clock,
    )
    title = (
        f"Attention layer, forward + backward, uncompiled, {str(dtype).removeprefix('torch.')}: "
        f"one sample, width {options.dim}, {options.heads} heads, {options.rounds} rounds. Held: "
        "from forward to backward. Peak: at most in either. Both beyond the parameters and input."
    )
    where = report.finished(begun)
    text = report.document(title, where, memory.table(rows))
    print(text)
    if options.out:
        report.write(options.out, f"memory-{device}", text, memory.records(rows), where)
    return 0


def _where(options: argparse.Namespace) -> tuple[str, "torch.dtype"]:
    """The device and its dtype; sets the number of threads."""
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("python -m lit_attn.bench: --device cuda: torch finds no GPU", file=sys.stderr)
        raise SystemExit(2)
    return device, getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))


if __name__ == "__main__":
    sys.exit(main())
