"""`python -m lit_attn.bench attention|memory|decoding|runner`: time as ratios, memory."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from lit_attn.bench import arguments
from lit_attn.files import require_writable
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts

if TYPE_CHECKING:
    import torch


def main(given: list[str] | None = None) -> int:
    """Exit code 0; 1 where a preset does not compute what it should; 2 for bad arguments."""
    parser = arguments.parser(__doc__)
    options = parser.parse_args(given)
    if options.command == "runner":
        return _runner(options)
    # The profiler that counts a CPU's memory would tell of its own start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        load_parts(options.parts)
        if options.out is not None:
            require_writable(options.out, "--out")
    except ConfigError as error:
        parser.error(str(error))
    if problem := arguments.problem(options):
        parser.error(problem)
    commands = {"attention": _attention, "memory": _memory, "decoding": _decoding}
    try:
        return commands[options.command](options)
    except ConfigError as error:
        parser.error(str(error))


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
            records = report.records(rows, attention.SPREADS)
            report.write(options.out, name, text, records, where)
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
        records = report.records(rows, memory.SPREADS)
        report.write(options.out, f"memory-{device}", text, records, where)
    return 0


def _decoding(options: argparse.Namespace) -> int:
    from lit_attn.bench import decoding, report
    from lit_attn.bench.decoder import Shape

    device, dtype = _where(options)
    shape = Shape(
        options.batch,
        options.generate,
        options.dim,
        options.depth,
        options.heads,
        options.vocabulary,
        tuple(options.windows),
    )
    begun = report.conditions(device, options.clock)
    rows = decoding.run(
        options.presets, options.tokens, shape, device, dtype, options.rounds, options.clock
    )
    where = report.finished(begun)
    title = decoding.title(shape, dtype, options.rounds)
    text = report.document(title, where, decoding.table(rows))
    print(text)
    if options.out:
        records = report.records(rows, decoding.SPREADS)
        report.write(options.out, f"decoding-{device}", text, records, where)
    return int(any(row.token is None for row in rows))


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
