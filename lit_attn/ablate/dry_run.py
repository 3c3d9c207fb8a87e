"""`--dry-run`: the cells of a study, what is already done, and on request what they cost."""

from collections import Counter
from typing import TextIO

from lit_attn.ablate.plan import Matrix
from lit_attn.schema.errors import ConfigError


def show(matrices: list[Matrix], params: bool, stream: TextIO) -> None:
    """Write the lists; with `params` every model is built on the meta device, which loads torch."""
    for matrix in matrices:
        _show(matrix, params, stream)


def _show(matrix: Matrix, params: bool, stream: TextIO) -> None:
    source = matrix.source
    print(f"{matrix.name}: {matrix.title}", file=stream)
    print(f"  experiment {source.experiment_path}, baseline {source.study.baseline}", file=stream)
    if params:
        _show_costs(matrix, stream)
    width = max(len(job.cell.variant) for job in matrix.jobs)
    states = []
    for job in matrix.jobs:
        state = job.state()
        states.append(state)
        print(
            f"  {job.cell.variant:<{width}}  seed {job.cell.seed:<4} {job.identity}  {state}",
            file=stream,
        )
    counts = ", ".join(f"{count} {name}" for name, count in Counter(states).items())
    seeds, variants = len(matrix.seeds), len(matrix.variants)
    print(f"  {variants} variants x {seeds} seeds = {len(states)} cells: {counts}\n", file=stream)


def _show_costs(matrix: Matrix, stream: TextIO) -> None:
    from lit_attn.models import budget

    width = max(len(variant.name) for variant in matrix.variants)
    print(f"  {'':<{width}}  {'parameters':>12}  {'MFLOPs':>9}  FFN width", file=stream)
    for variant in matrix.variants:
        data = variant.experiment.data
        try:
            model = budget.resolve(variant.experiment.model, variant.match_to, data)
            cost = budget.describe(model, data)
        except ConfigError as error:
            context = f"{variant.where}: {matrix.source.name}: variant '{variant.name}'"
            raise ConfigError(f"{context}: {error}") from error
        ffn = "none" if cost.ffn_width is None else cost.ffn_width
        matched = "  (matched)" if variant.match_to else ""
        print(
            f"  {variant.name:<{width}}  {cost.parameters:>12,}  {cost.flops / 1e6:>9,.2f}"
            f"  {ffn}{matched}",
            file=stream,
        )
