"""Equal cost of training: `match: flops` and `match: time` of a study.

The training of each variant is stretched so that all of its steps together cost as much as those of
the baseline. The FLOPs of a step, forward and backward, are counted on the meta device. The time of
a step is measured before the first cell, on the device of the cells: every round trains a few steps
of each variant in turn, in one process, and a variant's ratio to the baseline is the median over
the rounds. The measurement is stored in the study's folder, because the identities of the cells
follow from it. Evaluations are not part of the budget.
"""

import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.ablate.variants import Variant
from lit_attn.cells.records import StepTimes, TimedVariant
from lit_attn.config.cell import Cell
from lit_attn.config.study import StudySource
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from lit_attn.ablate.plan import Matrix
    from lit_attn.ablate.slots import Slots

MAX_SPREAD = 0.1  # Largest interquartile range of a ratio of step times, relative to its median.
ATTEMPTS = 3  # Measurements of a variant before its noise ends the run.
ROUNDS = 5
STEPS = 20  # Steps of a variant in one round. The first steps are a warm-up and do not count.
TARGET = "lit_attn.ablate.match:time_variants"
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


def measure_step_times(matrix: "Matrix", slots: "Slots", *, is_noise_allowed: bool) -> None:
    """Measure the missing step times of a study's variants and store them in its folder.

    A variant whose ratio varies by more than MAX_SPREAD is measured up to ATTEMPTS times. Raises
    ConfigError if a variant fails or still varies, and SystemExit if the run is stopped.
    """
    for attempt in range(1, ATTEMPTS + 1):
        known = read_ratios(matrix.folder, matrix.written, matrix.baseline)
        missing = [v for v in matrix.written if v.name not in known and v is not matrix.baseline]
        if not missing:
            return
        print(f"{matrix.name}: measuring {len(missing)} step times", file=sys.stderr)
        seconds = _run_measurement(matrix, [matrix.baseline, *missing], slots)
        noisiest = max(seconds.variants, key=lambda entry: entry.spread)
        _store_step_times(matrix, seconds, is_noise_allowed=is_noise_allowed)
        if noisiest.spread > MAX_SPREAD and not is_noise_allowed and attempt == ATTEMPTS:
            where = f"{matrix.name}: variant '{noisiest.variant}': the step time relative to the"
            text = f"baseline varies by {noisiest.spread:.0%}, and the limit is {MAX_SPREAD:.0%}"
            hint = "measure again on a quiet machine (quiet variants are stored)"
            raise ConfigError(f"{where} {text}; {hint}, or add --allow-noisy-timing")


def _run_measurement(matrix: "Matrix", variants: list[Variant], slots: "Slots") -> StepTimes:
    """Return the step times of `variants`, the baseline first, measured in one process."""
    from lit_attn.ablate.display import Display
    from lit_attn.ablate.launch import Launcher
    from lit_attn.ablate.plan import Job
    from lit_attn.ablate.runner import Runner

    launcher = Launcher(TARGET)
    launcher.share_cores(slots.at_once(v.cell("", s) for v in matrix.written for s in matrix.seeds))
    with tempfile.TemporaryDirectory(prefix="lit_attn-") as name:
        cell = replace(variants[0], name="step-times").cell(matrix.name, 0)
        job = Job(cell, Path(name) / "cell")
        for number, variant in enumerate(variants):
            path = job.folder / "timed" / f"{number:04}" / "config.yaml"
            variant.cell(matrix.name, 0).write(path)
        summary = Runner(launcher, slots, Display(sys.stderr)).run([job])
        if summary.stopped_by is not None:
            raise SystemExit(128 + summary.stopped_by)
        if summary.failed:
            message = summary.failed[0].message
            raise ConfigError(f"{matrix.name}: the step times could not be measured: {message}")
        return StepTimes.model_validate_json((job.folder / "step_times.json").read_bytes())


def _store_step_times(matrix: "Matrix", seconds: StepTimes, *, is_noise_allowed: bool) -> None:
    """Add measured step times to those of the study's folder, without noisy ones if refused."""
    noisy = [entry for entry in seconds.variants if entry.spread > MAX_SPREAD]
    kept = [e for e in seconds.variants if is_noise_allowed or e not in noisy]
    before = StepTimes.read(matrix.folder / "step_times.json")
    if before is not None:
        names = {entry.variant for entry in kept}
        kept = [*(e for e in before.variants if e.variant not in names), *kept]
    has_noise = bool(noisy and is_noise_allowed) or (before is not None and before.is_noisy)
    times = seconds.model_copy(update={"variants": kept, "is_noisy": has_noise})
    times.write(matrix.folder / "step_times.json")


def time_variants(folder: Path, *, smoke: bool = False) -> None:
    """Train a few steps of each cell in `folder`/timed in turn and write step_times.json.

    The first cell is the baseline. Its result becomes that of the cell in `folder`, which tells the
    runner that the measurement is complete. `smoke` has no effect.
    """
    from lit_attn.training.fit import Limits, fit
    from lit_attn.training.process_group import join_process_group
    from lit_attn.training.result import at_final_image_size

    folders = sorted((folder / "timed").iterdir())
    cells = [at_final_image_size(Cell.read(path / "config.yaml")) for path in folders]
    rounds: list[list[float]] = []
    with join_process_group(cells[0].experiment.training.accelerator) as group:
        for _ in range(ROUNDS):
            limits = Limits(steps=STEPS, evaluation_batches=1)
            runs = [fit(*each, group, limits) for each in zip(cells, folders, strict=True)]
            rounds.append([run.result.step_time.median for run in runs if run is not None])
    if runs[0] is None:
        return
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    pairs = [[(row[i], row[0]) for row in rounds] for i in range(len(cells))]
    variants = []
    for cell, pair in zip(cells, pairs, strict=True):
        ratios = [seconds / baseline_seconds for seconds, baseline_seconds in pair]
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        names = {"variant": cell.variant, "kind": cell.kind, "baseline_kind": cells[0].kind}
        numbers = {"seconds": statistics.median(seconds for seconds, _ in pair), "ratio": ratio}
        variants.append(TimedVariant(**names, **numbers, spread=(high - low) / ratio))
    times = StepTimes(device=f"{runs[0].result.device}, {threads} threads", variants=variants)
    times.write(folder / "step_times.json")
    identity = Cell.read(folder / "config.yaml").fingerprint
    runs[0].result.model_copy(update={"identity": identity}).write(folder / "result.json")


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
