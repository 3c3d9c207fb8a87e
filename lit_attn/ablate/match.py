"""Equal cost of training: `match: flops` and `match: time` of a study.

The training of each variant is stretched so that all of its steps together cost as much as those of
the baseline, without evaluations. FLOPs of a step, forward and backward, are counted on the meta
device. The time of a step is measured before the first cell (lit_attn.ablate.step_times).
"""

from dataclasses import replace
from pathlib import Path

from torch.utils.flop_counter import FlopCounterMode

from lit_attn.ablate.variants import Variant
from lit_attn.attention.mixer import declared_flops
from lit_attn.cells.records import StepTimes
from lit_attn.config.study import StudySource
from lit_attn.models import factory
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
    if times is None:
        return {}
    kinds = {variant.name: _kind(variant) for variant in written}
    baseline_kind = _kind(baseline)
    ratios = {}
    for entry in times.variants:
        # A measurement is valid as long as neither the variant nor the baseline has changed.
        is_same = kinds.get(entry.variant) == entry.kind and entry.baseline_kind == baseline_kind
        if is_same:
            ratios[entry.variant] = entry.ratio
    return ratios


def count_step_flops(variant: Variant) -> int:
    """Return the FLOPs of the products and convolutions of a training step, both passes."""
    kind = _kind(variant)
    data = variant.experiment.data
    if kind not in _FLOPS:
        model = factory.resolve(variant.experiment.model, variant.match_to, data)
        network = factory.build(model, data, "meta").train()
        counter = FlopCounterMode(display=False)
        with counter, declared_flops(network) as declared, factory.model_errors():
            factory.sum_output(network(*data.signature().sample())).backward()
        # The backward pass of a product has two products.
        sample_flops = int(counter.get_total_flops()) + 3 * sum(declared)
        flops = sample_flops * data.batch_size
        _FLOPS[kind] = flops // data.signature().sample_count
    return _FLOPS[kind]


def _kind(variant: Variant) -> str:
    """Return the kind (see Cell.kind) of the cells of a variant whose training is not stretched."""
    return replace(variant, stretch=1.0).cell("", 0).kind


def _require_equal_lengths(
    source: StudySource, variant: Variant, baseline: Variant, criterion: str
) -> None:
    """Raise ConfigError if the steps of a variant are not comparable with the baseline's."""
    experiment = variant.experiment
    other = baseline.experiment
    context = f"{variant.where}: {source.name}: variant '{variant.name}': match: {criterion}"
    if experiment.data.at_final_size() != experiment.data:
        raise ConfigError(f"{context}: excludes images that grow")
    if experiment.training.stop is not None or other.training.stop is not None:
        raise ConfigError(f"{context}: excludes training.stop, which ends the equal budget early")
    if experiment.training.changing_callbacks or other.training.changing_callbacks:
        raise ConfigError(
            f"{context}: excludes training.callbacks that can end the equal budget early; write "
            "`observes: true` for a callback that only records"
        )
    has_same_length = (
        experiment.data == other.data
        and experiment.training.epochs == other.training.epochs
        and experiment.training.max_steps == other.training.max_steps
    )
    if not has_same_length:
        raise ConfigError(
            f"{context}: data, training.epochs and training.max_steps must be those of the"
            f" baseline '{baseline.name}'"
        )
