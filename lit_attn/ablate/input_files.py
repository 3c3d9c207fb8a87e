"""Checks of the input files of cells before the first of them starts."""

from lit_attn.ablate.job import Job
from lit_attn.ablate.model_check import find_variants
from lit_attn.ablate.plan import Matrix
from lit_attn.config.experiment import Experiment
from lit_attn.config.training import MetricLogger, StartWeights
from lit_attn.data.base import Data
from lit_attn.models.base import Model
from lit_attn.schema.errors import ConfigError


def require_inputs(matrices: list[Matrix], jobs: list[Job]) -> None:
    """Raise ConfigError with the responsible line if input files of `jobs` are missing or wrong.

    With SLURM nothing calls this: a job may see folders that the submitting machine does not see.
    """
    for study, variant, _ in find_variants(matrices, jobs):
        try:
            check_files(variant.experiment)
        except ConfigError as error:
            raise variant.error(study, error) from error


def check_files(experiment: Experiment) -> None:
    """Raise ConfigError, which begins with the key, if an input file is missing or wrong."""
    parts: list[tuple[str, Data | Model | MetricLogger | StartWeights]] = [
        ("data", experiment.data),
        ("model", experiment.model),
    ]
    parts += [("training.loggers", logger) for logger in experiment.training.loggers]
    if experiment.training.weights is not None:
        parts.append(("training.weights", experiment.training.weights))
    for section, part in parts:
        try:
            part.check_files()
        except ConfigError as error:
            message = str(error)
            if not message.startswith(f"{section}."):
                message = f"{section}: {message}"
            raise ConfigError(message) from error
