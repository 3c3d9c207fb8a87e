"""`--paper NAME`: the cells that the tables and figures of a paper need, and their GPU time."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lit_attn.ablate.gpus import GPUS
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.config.experiment import Experiment
from lit_attn.config.study import read_studies
from lit_attn.config.study_values import SeedChoice
from lit_attn.models import factory
from lit_attn.papers.layout import Layout, Reading
from lit_attn.papers.source import PaperSource, Reference
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import Mapping

UTILISATION = 0.4  # Share of a GPU's peak that is assumed; small models and fp32 cells reach less.
NO_STUDY = "no study measures it"


def expand_paper(
    source: PaperSource,
    numbers: Sequence[str],
    out: Path,
    changes: Mapping | None = None,
    seeds: SeedChoice | None = None,
    smoke: bool = False,
) -> list[Matrix]:
    """Return the studies of the tables and figures with `numbers` (all of them if empty).

    Each has the cells that these need and no others. Raises ConfigError for a mistake in the paper
    or in a study, and if nothing of it can be run.
    """
    items = list(source.items(numbers).values())
    needed: dict[str, set[str]] = {}
    for item in items:
        for study, variant in source.references(item):
            needed.setdefault(study, set()).add(variant)
    if not needed:
        scripts = [f"`{item.script}` measures it" for item in items if item.script]
        reasons = {_explain_absence(source, item) for item in items if not item.script}
        explanation = "; ".join([*scripts, *sorted(reasons)])
        raise ConfigError(f"{source.path}: nothing to run: {explanation}")
    studies = read_studies(source.studies_path)
    source.require("no study", needed, studies)
    matrices = []
    # Names of the variants of each study.
    names: dict[str, list[str]] = {}
    for study, variants in needed.items():
        matrix = expand(studies[study], out, changes, seeds, smoke)
        names[study] = [variant.name for variant in matrix.variants]
        source.require(f"study '{study}' has no variant", sorted(variants), names[study])
        jobs = [job for job in matrix.jobs if job.variant in variants]
        matrices.append(replace(matrix, jobs=jobs))
    # With a size, other variants stand in for those that the readings name.
    if not source.size:
        for item in items:
            for reading in item.readings:
                _require_reading(source, item, reading, names)
    return matrices


def _require_reading(
    source: PaperSource, item: Layout, reading: Reading, names: dict[str, list[str]]
) -> None:
    """Raise ConfigError if no study has the variants of a reading; `names` are those by study.

    A reading is a mapping to names of variants, which must all exist, or a pattern of names, of
    which the studies must have one.
    """
    lines = list(source.locate(item, reading).values())
    known = [name for line in lines for name in names.get(line.study, ())]
    if isinstance(reading, dict):
        source.require("no variant for the reading", reading.values(), known)
    elif not any(line.variant in known for line in lines):
        source.require("no variant for the reading", [reading], known)


def estimate_costs(
    source: PaperSource, matrices: list[Matrix], gpu_name: str
) -> dict[Reference, float]:
    """Return the hours that all seeds of each variant in `matrices` take on one GPU.

    The FLOPs are counted on the meta device; a training step counts three forward passes.
    Evaluations are left out, and so is the question whether the model fits on the GPU. Raises
    ConfigError if the paper lacks the size of a data set.
    """
    gpu = GPUS[gpu_name]
    costs: dict[Reference, float] = {}
    for matrix in matrices:
        samples = source.paper.samples.get(matrix.source.name)
        counts = Counter(job.variant for job in matrix.jobs)
        for variant in matrix.variants:
            count = counts[variant.name]
            if not count:
                continue
            experiment = variant.experiment
            model = factory.resolve(experiment.model, variant.match_to, experiment.data)
            network = factory.build(model, experiment.data, "meta").eval()
            sample_flops = 3 * factory.count_sample_flops(network, experiment.data.signature())
            steps = count_steps(experiment, samples)
            sample_count = steps * experiment.data.batch_size
            is_float32 = experiment.training.precision == "fp32"
            peak = gpu.float32_peak if is_float32 else gpu.half_peak
            rate = UTILISATION * peak
            cell_flops = sample_flops * sample_count
            hours = cell_flops * count / rate / 3600
            costs[Reference(matrix.source.name, variant.name)] = hours
    return costs


def count_steps(experiment: Experiment, samples: int | None) -> int:
    """Return the training steps of a cell without reading its data.

    `samples` is the number of training samples of data that only their files can count.
    """
    data = experiment.data
    training = experiment.training
    per_epoch = getattr(data, "epoch_steps", None)
    if per_epoch is None:
        samples = samples or getattr(data, "training_images", None)
        if samples is None:
            raise ConfigError(f"samples: the paper's file lacks the size of '{data.kind}'")
        per_epoch = math.ceil(getattr(data, "epoch_length", 1) * samples / data.batch_size)
    return int(min(training.epochs * per_epoch, training.max_steps or math.inf))


def _explain_absence(source: PaperSource, item: Layout) -> str:
    """Return why no study of this size measures a table or figure."""
    if item.absent or not source.size:
        return item.absent or NO_STUDY
    if replace(source, size="real").references(item):
        return "no study of small models without files measures it; use --small-data"
    return "no study of small models measures it"


def format_item(source: PaperSource, item: Layout, costs: dict[Reference, float]) -> str:
    """Return the GPU time of one table or figure, or the reason why it has none."""
    needed = source.references(item)
    if not needed:
        return item.absent or item.script or NO_STUDY
    return format_time(math.fsum(costs[reference] for reference in needed))


def format_time(hours: float) -> str:
    """Return `1,557.3 h`, `7.5 h`, `27 min` or `0.13 s`."""
    if hours >= 1:
        return f"{hours:,.1f} h"
    if hours * 60 >= 1:
        return f"{hours * 60:.2g} min"
    return f"{hours * 3600:.2g} s"


def print_costs(
    source: PaperSource, items: dict[str, Layout], matrices: list[Matrix], gpu: str
) -> None:
    """Print the GPU time of each table and figure, and of all of them without repetition."""
    costs = estimate_costs(source, matrices, gpu)
    print(source.paper.title)
    print(f"training time of all seeds on one {gpu} at {UTILISATION:.0%} of its peak")
    for number, item in items.items():
        print(f"  {number:<10}  {format_item(source, item, costs)}")
    print(f"  {'all':<10}  {format_time(math.fsum(costs.values()))}")
