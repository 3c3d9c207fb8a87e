"""Count the parameters and FLOPs that tables and figures of the papers print.

    python experiments/papers/count_costs.py

A count needs no data and no training. The file costs.csv in --out has a row for each variant of a
study whose parameters or FLOPs a column or a panel of a paper shows, with the columns study,
variant, parameters, and flops: those of a forward pass of one sample, as cells record them. A page
of a paper shows these counts for variants without a result.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.cells.rows import csv_lines
from lit_attn.files import write_atomic
from lit_attn.papers.layout import COUNTS, Figure
from lit_attn.papers.source import COUNTS_FILE, SMALL_FILE, PaperSource, Reference, read_paper
from lit_attn.schema.errors import OneLineParser, command

if TYPE_CHECKING:
    from lit_attn.ablate.variants import Variant

FOLDER = Path(__file__).parent


@command
def main(arguments: list[str] | None = None) -> int:
    """Write the file; return exit code 0, or 2 for wrong input."""
    parser = OneLineParser(prog="python experiments/papers/count_costs.py", description=__doc__)
    default = FOLDER / COUNTS_FILE.parent
    parser.add_argument(
        "--out", type=Path, default=default, metavar="FOLDER", help="folder of the file"
    )
    parser.add_argument("--studies", nargs="+", metavar="STUDY", help="only these studies")
    options = parser.parse_args(arguments)
    rows: list[tuple[object, ...]] = [("study", "variant", *COUNTS)]
    for study, variants in sorted(find_counted_variants().items()):
        if options.studies is None or study in options.studies:
            rows += count_study(study, variants)
    path = options.out / COUNTS_FILE.name
    write_atomic(path, csv_lines(rows))
    print(path)
    return 0


def find_counted_variants() -> dict[str, set[str]]:
    """Return the variants whose counts a paper shows, by study."""
    names = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.name != SMALL_FILE)
    variants: dict[str, set[str]] = {}
    for name in names:
        for reference in list_counted(read_paper(name, "", FOLDER)):
            variants.setdefault(reference.study, set()).add(reference.variant)
    return variants


def list_counted(source: PaperSource) -> list[Reference]:
    """Return the variants whose counts the columns and panels of a paper show."""
    counted = []
    for item in source.items(()).values():
        located = source.locate(item)
        columns, _ = item.grid()
        for (_, heading), reference in located.items():
            column = columns[heading]
            if column.value in COUNTS and column.file is None:
                counted.append(reference)
                if column.relative is not None:
                    counted.append(reference._replace(variant=column.relative))
        if isinstance(item, Figure) and item.file is None:
            labels = list_counted_lines(item)
            counted += [located[label, ""] for label in labels]
    return counted


def list_counted_lines(figure: Figure) -> list[str]:
    """Return the labels of the lines that are counts in a panel of a figure."""
    labels: list[str] = []
    for panel in figure.panels:
        if panel.y in COUNTS:
            labels += panel.lines or figure.lines
    return labels


def count_study(study: str, variants: set[str]) -> list[tuple[object, ...]]:
    """Return the rows of some variants of a study, by name."""
    from lit_attn.ablate.plan import expand
    from lit_attn.config.study import read_studies

    matrix = expand(read_studies(FOLDER.parents[1] / "ablations.yaml")[study], Path("runs"))
    counted = [variant for variant in matrix.variants if variant.name in variants]
    counted.sort(key=lambda variant: variant.name)
    return [(study, variant.name, *count_variant(variant)) for variant in counted]


def count_variant(variant: "Variant") -> tuple[int, int]:
    """Return the parameters of a variant, and the FLOPs of a forward pass of one sample."""
    from lit_attn.models import factory

    experiment = variant.experiment
    model = factory.resolve(experiment.model, variant.match_to, experiment.data)
    budget = factory.describe(model, experiment.data)
    return budget.parameters, budget.flops


if __name__ == "__main__":
    sys.exit(main())
