"""Equal cost of training: `match: flops` and `match: time` of a study.

The training of each variant is stretched so that all of its steps together cost as much as those of
the baseline, without evaluations. FLOPs of a step, forward and backward, are counted on the meta
device. The time of a step is measured before the first cell (lit_attn.ablate.step_times).
"""

from dataclasses import replace
from pathlib import Path

from lit_attn.ablate.variants import Variant
from lit_attn.cells.records import StepTimes
from lit_attn.config.study import StudySource
from lit_attn.schema.errors import ConfigError

_FLOPS: dict[str, int] = {}  # FLOPs of a step by Cell.kind.


def apply_criteria(
    source: StudySource, written: list[Variant], folder: Path, tuned: dict[str, Variant]
) -> list[Variant]:
    """Return the `tuned` variants under each criterion of `match`, without unmeasured ones.

    The factors are those of the `written` variants. The baseline occurs once. Raises ConfigError if
    the trainings of two variants differ by more than the model, the optimizer and the schedule, so
    that a factor cannot make them equal.
    """
    study = source.study
    baseline = next(variant for variant in written if variant.name == study.baseline)
    variants = []
    for number, criterion in enumerate(study.match):
        timed = read_ratios(folder, written, baseline) if criterion == "time" else {}
        for variant in written:
            if variant.name not in tuned or (variant is baseline and number > 0):
                continue
            flops = count_step_flops(variant) if "flops" in study.match else None
            factor = 1.0
            if criterion in ("flops", "time"):
                _require_equal_lengths(source, variant, baseline, criterion)
            if flops is not None and criterion == "flops":
                factor = count_step_flops(baseline) / flops
            elif criterion == "time" and variant is not baseline:
                if variant.name not in timed:
                    continue
                factor = 1 / timed[variant.name]
            name = variant.name if number == 0 else f"{variant.name}@{criterion}"
            named = replace(tuned[variant.name], name=name, criterion=criterion)
            # config.yaml and the tables print all digits of the factor.
            variants.append(replace(named, stretch=float(f"{factor:.4g}"), step_flops=flops))
    return variants


def read_ratios(folder: Path, written: list[Variant], baseline: Variant) -> dict[str, float]:
    """Return the measured ratios of step times to the baseline, by variant."""
    times = StepTimes.read(folder / "step_times.json")
    kinds = {variant.name: (_kind(variant), _kind(baseline)) for variant in written}
    entries = () if times is None else times.variants
    valid = [e for e in entries if kinds.get(e.variant) == (e.kind, e.baseline_kind)]
    return {entry.variant: entry.ratio for entry in valid}


def count_step_flops(variant: Variant) -> int:
    """Return the FLOPs of the products and convolutions of a training step, both passes."""
    from torch.utils.flop_counter import FlopCounterMode

    from lit_attn.models import factory

    kind, data = _kind(variant), variant.experiment.data
    if kind not in _FLOPS:
        model = factory.resolve(variant.experiment.model, variant.match_to, data)
        network = factory.build(model, data, "meta").train()
        with FlopCounterMode(display=False) as counter, factory.model_errors():
            network(*data.signature().sample()).sum().backward()
        flops = int(counter.get_total_flops()) * data.batch_size
        _FLOPS[kind] = flops // data.signature().sample_count
    return _FLOPS[kind]


def _kind(variant: Variant) -> str:
    return replace(variant, stretch=1.0).cell("", 0).kind


def _require_equal_lengths(
    source: StudySource, variant: Variant, baseline: Variant, criterion: str
) -> None:
    """Raise ConfigError if the steps of a variant are not comparable with the baseline's."""
    experiments, data = (variant.experiment, baseline.experiment), variant.experiment.data
    context = f"{variant.where}: {source.name}: variant '{variant.name}': match: {criterion}"
    if data.at_final_size() != data:
        raise ConfigError(f"{context}: excludes images that grow")
    if any(experiment.training.stop is not None for experiment in experiments):
        raise ConfigError(f"{context}: excludes training.stop, which ends the equal budget early")
    lengths = [(e.data, e.training.epochs, e.training.max_steps) for e in experiments]
    if lengths[0] != lengths[1]:
        keys = "data, training.epochs and training.max_steps"
        raise ConfigError(f"{context}: {keys} must be those of the baseline '{baseline.name}'")
