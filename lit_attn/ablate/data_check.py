"""The data of what is to run, looked for once before the first cell starts."""

from lit_attn.ablate.plan import Job, Matrix
from lit_attn.config.source import Where, locate
from lit_attn.schema.errors import ConfigError


def require_inputs(matrices: list[Matrix], missing: list[Job]) -> None:
    """ConfigError, by the line that names them, where files of the `missing` cells are not there.

    On a cluster this is not asked: a job may have folders that the submitting machine has not.
    """
    # Not at the top: with numpy, a dry run would take twice as long.
    from lit_attn.data import checks

    waiting = {(job.cell.study, job.cell.variant) for job in missing}
    seen = set()
    for matrix in matrices:
        for variant in matrix.variants:
            experiment = variant.experiment
            asked = experiment.data.model_dump_json(), getattr(experiment.model, "checkpoint", None)
            if (matrix.name, variant.name) not in waiting or asked in seen:
                continue
            seen.add(asked)
            try:
                checks.require(experiment)
            except ConfigError as error:
                keys = str(error).partition(": ")[0].split(".")
                place = locate(variant.tree, keys) or Where(str(matrix.source.experiment_path))
                context = f"{place}: {matrix.source.name}: variant '{variant.name}'"
                raise ConfigError(f"{context}: {error}") from error
