"""`python -m lit_attn.bench attention|runner`: how fast, as ratios within one run."""

import argparse
import sys

from lit_attn.attention.spec import PRESETS
from lit_attn.config.errors import nearest


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 1 where a preset disagrees with the reference; 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m lit_attn.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    attention = commands.add_parser("attention", help="whole block, forward + backward")
    attention.add_argument("--presets", nargs="+", default=list(PRESETS), metavar="NAME")
    attention.add_argument("--batch", type=int, default=128)
    attention.add_argument("--tokens", type=int, default=65)
    attention.add_argument("--dim", type=int, default=192)
    attention.add_argument("--heads", type=int, default=12)
    attention.add_argument("--ffn-ratio", type=int, default=3, help="of the baseline's FFN")
    attention.add_argument("--causal", action="store_true")
    attention.add_argument("--modes", nargs="+", default=["eager", "compiled"], metavar="MODE")
    attention.add_argument("--rounds", type=int, default=15)
    attention.add_argument("--threads", type=int, help="CPU threads; torch's choice by default")
    attention.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    runner = commands.add_parser("runner", help="expansion, and overhead per cell")
    runner.add_argument("--cells", type=int, default=64, help="trivial cells to run")
    runner.add_argument("--jobs", type=int, default=2, help="cells at once")
    runner.add_argument("--expand", type=int, default=10_000, help="cells to expand")
    runner.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.command == "runner":
        return _runner(options)
    for name in options.presets:
        if name not in PRESETS:
            parser.error(f"--presets: '{name}' is not a preset{nearest(name, PRESETS)}")
    for mode in options.modes:
        if mode not in ("eager", "compiled"):
            parser.error(f"--modes: '{mode}' is not a mode{nearest(mode, ['eager', 'compiled'])}")
    if options.rounds < 2:
        parser.error("--rounds: a spread needs at least 2")
    return _attention(options)


def _runner(options: argparse.Namespace) -> int:
    from lit_attn.bench import runner

    print(runner.table(runner.run(options.cells, options.jobs, options.expand, options.rounds)))
    return 0


def _attention(options: argparse.Namespace) -> int:
    import torch

    from lit_attn.bench import attention

    if options.threads:
        torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    shape = attention.Shape(
        options.batch,
        options.tokens,
        options.dim,
        options.heads,
        options.ffn_ratio,
        options.causal,
    )
    rows = attention.run(
        options.presets, shape, options.modes, device, getattr(torch, dtype), options.rounds
    )
    where = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    title = (
        f"Transformer block, forward + backward, {dtype}, {where}, torch {torch.__version__}: "
        f"batch {shape.batch}, {shape.tokens} tokens, width {shape.dim}, {shape.heads} heads, "
        f"{options.rounds} interleaved rounds; parameters matched through the FFN."
    )
    print(attention.table(rows, title))
    return 1 if any(row.timing is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
