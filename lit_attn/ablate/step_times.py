"""Step times of a study's variants, for `match: time` and --quiet-timing.

They are measured on the device of the cells: every round trains a few steps of each variant in
turn, in one process, and a variant's ratio to the baseline is the median over the rounds. The
study's folder keeps the measurement. `match: time` needs it before the first cell, because the
identities of the cells follow from it; --quiet-timing alone comes after the last cell.
"""

import os
import statistics
import sys
import time
from pathlib import Path

from lit_attn.ablate.display import make_display
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.match import read_ratios
from lit_attn.ablate.plan import Matrix
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import Slots
from lit_attn.ablate.variants import Variant
from lit_attn.cells.folder import Progress
from lit_attn.cells.records import StepTimes, TimedVariant
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError, plural
from lit_attn.temporary import temporary_folder
from lit_attn.training.process_group import join_process_group

MAX_SPREAD = 0.1  # Largest interquartile range of a ratio of step times, relative to its median.
ATTEMPTS = 3  # Measurements of a variant before its noise ends the run.
ROUNDS = 5
STEPS = 20  # Steps of a variant in one round. The first steps are a warm-up and do not count.
TARGET = "lit_attn.ablate.step_times:time_variants"


def measure_step_times(matrix: Matrix, slots: Slots, *, is_noise_allowed: bool) -> None:
    """Measure the missing step times of a study's variants and store them in its folder.

    A variant whose ratio varies by more than MAX_SPREAD is measured up to ATTEMPTS times. Raises
    ConfigError if a variant fails or still varies, and SystemExit if the run is stopped.
    """
    for attempt in range(1, ATTEMPTS + 1):
        known = read_ratios(matrix.folder, matrix.written, matrix.baseline)
        missing = [v for v in matrix.written if v.name not in known and v is not matrix.baseline]
        if not missing:
            return
        print(
            f"{matrix.name}: measuring the step times of {plural(len(missing), 'variant')} and of"
            f" the baseline, {ROUNDS} times {STEPS} steps of each in turn",
            file=sys.stderr,
        )
        seconds = _run_measurement(matrix, [matrix.baseline, *missing], slots)
        noisiest = max(seconds.variants, key=lambda entry: entry.spread)
        _store_step_times(matrix, seconds, is_noise_allowed=is_noise_allowed)
        if noisiest.spread > MAX_SPREAD and not is_noise_allowed and attempt == ATTEMPTS:
            raise ConfigError(
                f"{matrix.name}: variant '{noisiest.variant}': the step time relative to the"
                f" baseline varies by {noisiest.spread:.0%}, and the limit is {MAX_SPREAD:.0%};"
                " measure again on a quiet machine (quiet variants are stored),"
                " or add --allow-noisy-timing"
            )


def _run_measurement(matrix: Matrix, variants: list[Variant], slots: Slots) -> StepTimes:
    """Return the step times of `variants`, the baseline first, measured in one process."""
    launcher = Launcher(TARGET)
    jobs = []
    for variant in matrix.written:
        jobs += [variant.job(matrix.folder, seed) for seed in matrix.seeds]
    launcher.share_cores(slots.processes_at_once(jobs))
    with temporary_folder() as folder:
        job = variants[0].job(folder / matrix.name, 0, "step-times")
        for number, variant in enumerate(variants):
            path = job.folder / "timed" / f"{number:04}" / "config.yaml"
            variant.cell(matrix.name, 0).write(path)
        display = make_display(sys.stderr)
        summary = Runner(launcher, slots, display).run([job])
        if summary.stopped_by is not None:
            raise SystemExit(128 + summary.stopped_by)
        if summary.failed:
            message = summary.failed[0].message
            raise ConfigError(f"{matrix.name}: the step times could not be measured: {message}")
        return StepTimes.model_validate_json((job.folder / "step_times.json").read_bytes())


def _store_step_times(matrix: Matrix, seconds: StepTimes, *, is_noise_allowed: bool) -> None:
    """Add measured step times to those of the study's folder, without noisy ones if refused."""
    kept = seconds.variants
    if not is_noise_allowed:
        kept = [entry for entry in kept if entry.spread <= MAX_SPREAD]
    has_noise = any(entry.spread > MAX_SPREAD for entry in kept)
    before = StepTimes.read(matrix.folder / "step_times.json")
    if before is not None:
        names = {entry.variant for entry in kept}
        earlier = [entry for entry in before.variants if entry.variant not in names]
        kept = [*earlier, *kept]
        has_noise |= before.is_noisy
    times = seconds.model_copy(update={"variants": kept, "is_noisy": has_noise})
    times.write(matrix.folder / "step_times.json")


def _write_progress(folder: Path, done: int, total: int, seconds: float) -> None:
    """Tell the runner's display how many trainings of a few steps have ended, after `seconds`."""
    progress = Progress(step=done * STEPS, total=total * STEPS, step_time=seconds / done / STEPS)
    progress.write(folder / "progress.json")


def time_variants(folder: Path) -> None:
    """Train a few steps of each cell in `folder`/timed in turn and write step_times.json.

    The first cell is the baseline. Its result becomes that of the cell in `folder`, which tells the
    runner that the measurement is complete.
    """
    from lit_attn.training.fit import Limits, fit
    from lit_attn.training.result import at_final_image_size

    folders = sorted((folder / "timed").iterdir())
    cells = [at_final_image_size(Cell.read(path / "config.yaml")) for path in folders]
    rounds: list[list[float]] = []
    limits = Limits(steps=STEPS, evaluation_batches=1)
    start = time.monotonic()
    with join_process_group(cells[0].experiment.training.accelerator) as group:
        for _ in range(ROUNDS):
            runs = []
            for cell, cell_folder in zip(cells, folders, strict=True):
                runs.append(fit(cell, cell_folder, group, limits))
                # Only the first process of several has a result, and writes.
                if runs[-1] is not None:
                    done = len(rounds) * len(cells) + len(runs)
                    _write_progress(folder, done, ROUNDS * len(cells), time.monotonic() - start)
            rounds.append([run.result.step_time.median for run in runs if run is not None])
    if runs[0] is None:
        return
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    variants = []
    for index, cell in enumerate(cells):
        # A round has the seconds of each cell; the first one is the baseline.
        seconds = [row[index] for row in rounds]
        ratios = [row[index] / row[0] for row in rounds]
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        variants.append(
            TimedVariant(
                variant=cell.variant,
                kind=cell.kind,
                baseline_kind=cells[0].kind,
                seconds=statistics.median(seconds),
                ratio=ratio,
                spread=(high - low) / ratio,
            )
        )
    times = StepTimes(device=f"{runs[0].result.device}, {threads} threads", variants=variants)
    times.write(folder / "step_times.json")
    identity = Cell.read(folder / "config.yaml").fingerprint
    runs[0].result.model_copy(update={"identity": identity}).write(folder / "result.json")
