"""The cost of a cell, estimated from a short run of it (`--dry-run --estimate`)."""

import math
import statistics

from lit_attn.cells.records import Timing
from lit_attn.config.cell import Cell
from lit_attn.training.fit import FinishedRun, Limits

SAMPLE = Limits(steps=15, evaluation_batches=2)


def at_final_image_size(cell: Cell) -> Cell:
    """Return `cell` with images of their final size from the first step on.

    Most steps of a cell whose images grow have the final size.
    """
    data = cell.experiment.data.at_final_size()
    experiment = cell.experiment.model_copy(update={"data": data})
    return cell.model_copy(update={"experiment": experiment})


def estimate_cost(cell: Cell, run: FinishedRun, seconds: float) -> Timing:
    """Return the cost of the whole `cell`, from a `run` limited to SAMPLE that took `seconds`."""
    training, data, result = cell.experiment.training, run.parts.data, run.result
    batches = [len(loader) for loader in data.val_dataloader()]
    evaluated = sum(min(count, SAMPLE.evaluation_batches) for count in batches)
    evaluations = math.ceil(run.total_steps / (training.evaluate_every * data.steps_per_epoch))
    evaluation_time = 0.0 if result.evaluation_time is None else result.evaluation_time.median
    diagnostics_time = diagnostics_total = 0.0
    if run.diagnostics is not None:
        times = run.diagnostics.times
        recordings = math.ceil(evaluations / run.diagnostics.settings.every)
        diagnostics_time, diagnostics_total = sum(times), statistics.fmean(times) * recordings
    # The rest of the time went into reading the data, building the model and compiling it.
    steps_time = result.steps * result.step_time.median
    startup = seconds - steps_time - evaluation_time - diagnostics_time
    return Timing(
        startup=max(0.0, startup),
        step_time=result.step_time.median,
        steps=run.total_steps,
        evaluation_time=evaluation_time * sum(batches) / evaluated
        + diagnostics_total / evaluations,
        evaluations=evaluations,
        memory=result.peak_memory,
    )
