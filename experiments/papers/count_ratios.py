"""Count the cost of mixtures of keys at many sizes.

    python experiments/papers/count_ratios.py

Figures 3 and 10 of MGK (arXiv:2110.08678) have ratios of a model with 4 heads of two keys to one
with 8 heads of one key, for the language model of WikiText-103 with width D and sequences of N
words. The heads have a width of D / 8 in both. A count needs no data and no training. Two files are
written to --out, and `python -m lit_attn.report --paper mgk` draws them:

    mgk-softmax.csv  MGK with 4 heads to softmax with 8 heads (Figure 3)
    mlk-linear.csv   MLK with 4 heads to linear attention with 8 heads (Figure 10)

with the columns length, width, training (FLOPs of a forward and a backward pass), inference (FLOPs
of a forward pass), parameters, without-embeddings (parameters outside embeddings and the output
layer), and formula: FLOPs of a forward pass in which attention has the operations of the paper's
appendix B, and the rest of the model those that are counted. The appendix has formulas for softmax
attention only, so the other file has no such column.

The formulas multiply the values once for each token, and our layer once for each key of a token,
because it calls attention kernels. The columns training and inference count our layer.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.cells.rows import csv_lines
from lit_attn.files import write_atomic
from lit_attn.schema.errors import ConfigError, OneLineParser, command

if TYPE_CHECKING:
    from lit_attn.config.experiment import Experiment

PAIRS = {"mgk-softmax": ("mgk-4", "softmax-8"), "mlk-linear": ("mlk-4", "linear-8")}
WIDTHS = (256, 512, 1024, 2048, 4096)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
HEADER = ("length", "width", "training", "inference", "parameters", "without-embeddings")
HEADS = 8  # Heads of the softmax model; the other one has 4 heads of two keys.
DEPTH = 16


@command
def main(arguments: list[str] | None = None) -> int:
    """Write both files; return exit code 0, or 2 for wrong input."""
    parser = OneLineParser(prog="python experiments/papers/count_ratios.py", description=__doc__)
    default = Path(__file__).parent / "counts"
    parser.add_argument(
        "--out", type=Path, default=default, metavar="FOLDER", help="folder of the files"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, metavar="D")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    options = parser.parse_args(arguments)
    variants = read_variants()
    for name, names in PAIRS.items():
        has_formula = name == "mgk-softmax"
        rows: list[tuple[object, ...]] = [(*HEADER, "formula") if has_formula else HEADER]
        for n in options.lengths:
            for width in options.widths:
                ours = count_costs(variants[names[0]], width, n)
                baseline = count_costs(variants[names[1]], width, n)
                ratios = [cost / other for cost, other in zip(ours, baseline, strict=True)]
                if has_formula:
                    ratios.append(divide_by_formula(DEPTH, baseline[1], width, n))
                rows.append((n, width, *(f"{ratio:.6g}" for ratio in ratios)))
        write_atomic(options.out / f"{name}.csv", csv_lines(rows))
        print(options.out / f"{name}.csv")
    return 0


def read_variants() -> "dict[str, Experiment]":
    """Return the experiments of the study of WikiText-103 by variant."""
    from lit_attn.ablate.variants import resolve
    from lit_attn.config.study import read_studies

    study = read_studies(Path(__file__).parents[2] / "ablations.yaml")["mgk-wikitext103"]
    return {variant.name: variant.experiment for variant in resolve(study)}


def divide_by_formula(depth: int, flops: int, width: int, length: int) -> float:
    """Return the ratio of forward FLOPs if attention has the operations of appendix B.

    `flops` are the counted ones of the softmax model, whose attention is four projections and two
    products of n x n weights.
    """
    d, h, n = width // HEADS, HEADS, length
    counted = 8 * n * width**2 + 4 * n**2 * width
    softmax = n**2 * h * (4 * d - 1) + n * h * d * (6 * width + 2 * h * d - 5)
    mixture = n**2 * h * (3 * d - 0.5) + n * h * d * (4 * width + h * d - 4)
    rest = flops - depth * counted
    return (rest + depth * mixture) / (rest + depth * softmax)


def count_costs(experiment: "Experiment", width: int, length: int) -> tuple[int, int, int, int]:
    """Return FLOPs of training and inference, parameters, and parameters without embeddings.

    Raises ConfigError if the width is not a multiple of 8.
    """
    from torch.utils.flop_counter import FlopCounterMode

    from lit_attn.models import factory
    from lit_attn.models.language import GPT

    if width % 8:
        raise ConfigError(f"--widths: {width} is not a multiple of 8")
    model = experiment.model.model_copy(update={"dim": width, "head_dim": width // 8})
    data = experiment.data.model_copy(update={"context": length})
    network = factory.build(model, data, "meta").eval()
    assert isinstance(network, GPT)
    counter = FlopCounterMode(display=False)
    with counter:
        network(*data.signature().sample()).sum().backward()
    budget = factory.describe(model, data)
    blocks = factory.count(network.trunk.blocks)
    return counter.get_total_flops(), budget.flops, budget.parameters, blocks


if __name__ == "__main__":
    sys.exit(main())
