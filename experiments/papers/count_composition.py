"""Count what DCFormer++ adds to Transformer++.

    python experiments/papers/count_composition.py

Table 2 of DCMHA (arXiv:2405.08553) has the shares of extra parameters and extra computation for
models of 1.4B and 6.9B and several lengths. A count needs no data and no training. The file
composition.csv is written to --out, with the columns size, parameters and flops (shares of the
model without composition; FLOPs of a forward pass), and `python -m lit_attn.report --paper dcmha`
shows it.
"""

import sys
from pathlib import Path

from lit_attn.cells.rows import csv_lines
from lit_attn.files import write_atomic
from lit_attn.schema.errors import OneLineParser, command

SIZES = {
    "1.4B-2048": ("dcmha-overhead-1.4B", 2048),
    "6.9B-2048": ("dcmha-speed-6.9B", 2048),
    "6.9B-4096": ("dcmha-speed-6.9B", 4096),
    "6.9B-8192": ("dcmha-speed-6.9B", 8192),
}
"""Study and number of tokens by row of the table."""


@command
def main(arguments: list[str] | None = None) -> int:
    """Write the file and return exit code 0."""
    parser = OneLineParser(
        prog="python experiments/papers/count_composition.py", description=__doc__
    )
    default = Path(__file__).parent / "counts"
    parser.add_argument(
        "--out", type=Path, default=default, metavar="FOLDER", help="folder of the file"
    )
    options = parser.parse_args(arguments)
    rows = []
    for size, (study, tokens) in SIZES.items():
        parameters, flops = count_shares(study, tokens)
        rows.append((size, f"{parameters:.6g}", f"{flops:.6g}"))
    path = options.out / "composition.csv"
    write_atomic(path, csv_lines([("size", "parameters", "flops"), *rows]))
    print(path)
    return 0


def count_shares(study: str, tokens: int) -> tuple[float, float]:
    """Return the shares of parameters and FLOPs that DCFormer++ of a study adds."""
    from lit_attn.ablate.variants import resolve
    from lit_attn.config.study import read_studies
    from lit_attn.models import factory

    studies = read_studies(Path(__file__).parents[2] / "ablations.yaml")
    experiments = {variant.name: variant.experiment for variant in resolve(studies[study])}
    data = experiments["standard"].data.model_copy(update={"context": tokens})
    # Windows would not count equally in both models, so neither has one.
    no_windows = {"windows": (None,)}
    dcformer = experiments["dcformer"].model.model_copy(update=no_windows)
    standard = experiments["standard"].model.model_copy(update=no_windows)
    ours = factory.describe(dcformer, data)
    baseline = factory.describe(standard, data)
    return ours.parameters / baseline.parameters - 1, ours.flops / baseline.flops - 1


if __name__ == "__main__":
    sys.exit(main())
