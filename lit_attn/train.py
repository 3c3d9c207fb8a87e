"""One cell, from its config.yaml to its result.json: `python -m lit_attn.train CELL_DIR`.

A cell that was stopped goes on from its newest checkpoint. `result.json` is written last, after
every number in it was checked; its existence is the only mark of success.
"""

import argparse
import datetime
import math
import multiprocessing.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lit_attn.config.cell import Cell
from lit_attn.config.errors import ConfigError
from lit_attn.config.image_folder import ClassFolders
from lit_attn.errors import Diverged, Preempted
from lit_attn.records import Metric, MetricRow, Result, Timing, read_metrics

if TYPE_CHECKING:
    import lightning as L
    import torch

    from lit_attn.ablate.ranks import Place
    from lit_attn.tasks.group import Group


def main(arguments: list[str] | None = None) -> int:
    """The command line.

    Exit codes: 0 with a result, 1 diverged, 2 bad configuration, 75 another process runs the cell,
    143 stopped by SIGTERM.
    """
    parser = argparse.ArgumentParser(prog="python -m lit_attn.train", description=__doc__)
    parser.add_argument("cell", type=Path, metavar="CELL_DIR", help="a folder with a config.yaml")
    smoke = "one step and one evaluation batch, in CELL_DIR/smoke"
    parser.add_argument("--smoke", action="store_true", help=smoke)
    options = parser.parse_args(arguments)

    from lit_attn.ablate.folder import result
    from lit_attn.ablate.lock import Held, hold, holder
    from lit_attn.ablate.ranks import ranks
    from lit_attn.ablate.worker import BUSY

    folder: Path = options.cell
    try:
        cell = Cell.read(folder / "config.yaml")
        if options.smoke:
            folder = folder / "smoke"
            cell.write(folder / "config.yaml")
        elif result(folder, cell.fingerprint) is not None:
            print(f"{folder}: has a result already")
            return 0
        devices = cell.experiment.training.devices
        if devices == 1:
            with hold(folder):
                return _answered(folder, options.smoke)
        with (
            ranks(devices, lambda: sys.exit(_answered(folder, options.smoke))) as processes,
            hold(folder),
        ):
            return processes.run(None)
    except Held:
        by = holder(folder)
        who = "another process" if by is None else f"process {by.pid} on {by.host}"
        print(f"{folder}: {who} runs this cell", file=sys.stderr)
        return BUSY
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _answered(folder: Path, smoke: bool) -> int:
    """Run the cell; the exit code."""
    try:
        run_cell(folder, smoke=smoke)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except Diverged as error:
        print(f"diverged: {error}", file=sys.stderr)
        return 1
    except Preempted as error:
        print(error, file=sys.stderr)
        return 143
    return 0


class Limits(NamedTuple):
    """Steps of training, and batches of each evaluated split."""

    steps: int
    evaluation_batches: int


SMOKE = Limits(1, 1)
ESTIMATE = Limits(15, 2)


def run_cell(cell_dir: Path, *, smoke: bool = False) -> None:
    """Train the cell in `cell_dir` and write its result.json.

    Raises ConfigError for a configuration that cannot run, Diverged for a loss that is not finite,
    Preempted after SIGTERM, and whatever else goes wrong as it is.
    """
    _run(cell_dir, SMOKE if smoke else None)


def time_cell(cell_dir: Path, *, smoke: bool = False) -> None:
    """Run a few steps and evaluation batches of the cell in `cell_dir`; write its timing.json.

    And a result.json, whose numbers mean nothing. Raises what `run_cell` does.
    """
    begun = time.perf_counter()
    extent = _run(cell_dir, ESTIMATE)
    if extent is None:
        return
    seconds = time.perf_counter() - begun
    result = Result.model_validate_json((cell_dir / "result.json").read_bytes())
    evaluation = 0.0 if result.evaluation_time is None else result.evaluation_time.median
    # What is neither steps at their usual pace nor evaluation: data, model, compilation.
    startup = seconds - result.steps * result.step_time.median - evaluation - extent.looked
    Timing(
        startup=max(0.0, startup),
        step_time=result.step_time.median,
        steps=extent.steps,
        evaluation_time=evaluation * extent.evaluation_share + extent.looking / extent.evaluations,
        evaluations=extent.evaluations,
        memory=result.peak_memory,
    ).write(cell_dir / "timing.json")


class Extent(NamedTuple):
    """All of a cell's steps and evaluations, and how many times a limited one goes into a whole.

    `looked` are the seconds that this run has looked at diagnostics, `looking` those of all.
    """

    steps: int
    evaluations: int
    evaluation_share: float
    looked: float
    looking: float


def _run(cell_dir: Path, limits: Limits | None) -> Extent | None:
    """What a cell would be without limits; None on all of its processes but the first."""
    cell = Cell.read(cell_dir / "config.yaml")
    from lit_attn.ablate.ranks import place

    here = place()
    _keep_temporary_files_inside(cell_dir, here.rank)

    from lit_attn.tasks.environment import device_of
    from lit_attn.tasks.group import joined

    device = device_of(cell.experiment.training.accelerator, here)
    with joined(here.rank, here.world, here.meeting, device) as group:
        return _train(cell, cell_dir, device, group, here, limits)


def _train(
    cell: Cell,
    cell_dir: Path,
    device: "torch.device",
    group: "Group",
    here: "Place",
    limits: Limits | None,
) -> Extent | None:
    import lightning as L

    from lit_attn.tasks import build, measure
    from lit_attn.tasks.checkpoints import Checkpoints
    from lit_attn.tasks.diagnostics import Diagnostics
    from lit_attn.tasks.environment import cluster, precision, without_noise
    from lit_attn.tasks.recording import MetricsFile, Progress, write_pictures

    training = cell.experiment.training
    built = _grown(cell) if limits is ESTIMATE else cell
    data, task, costs, accumulate, tokens = build.build(built, device)
    whole = min(training.epochs * data.steps_per_epoch, training.max_steps or math.inf)
    total = int(whole if limits is None else min(whole, limits.steps))
    checkpoints = Checkpoints(cell_dir / "checkpoints", cell.seed, training.checkpoint_every, group)
    resume = None if limits else checkpoints.latest_that_loads()
    start = 0 if resume is None else checkpoints.step_of(resume)
    metrics = MetricsFile(cell_dir / "metrics.csv")
    if group.is_first:
        metrics.start(start)
    tensorboard = _tensorboard(cell_dir, start)
    progress = Progress(cell_dir / "progress.json", total)
    # In this order a step's time is without the checkpoint before it, an evaluation's without what
    # is looked at after it.
    callbacks: list[L.Callback] = [checkpoints, progress]
    looking = None
    if training.diagnostics is not None:
        every = training.evaluate_every * data.steps_per_epoch
        looking = Diagnostics(cell_dir, training.diagnostics, every, total, tensorboard)
        callbacks.append(looking)
        if group.is_first:
            looking.start(start)
    with without_noise():
        trainer = L.Trainer(
            accelerator=device.type,
            devices=here.on_node,
            num_nodes=here.nodes,
            strategy="auto" if group.world == 1 else "ddp",
            plugins=[precision(training.precision, device), cluster(here)],
            max_epochs=training.epochs,
            max_steps=total,
            limit_train_batches=accumulate * limits.steps if limits else 1.0,
            limit_val_batches=limits.evaluation_batches if limits else 1.0,
            check_val_every_n_epoch=1 if limits else training.evaluate_every,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=training.clip,
            logger=[metrics, tensorboard],
            callbacks=callbacks,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            default_root_dir=cell_dir,
        )
        trainer.fit(task, data, ckpt_path=resume, weights_only=True)
        if trainer.global_step < total:
            raise RuntimeError(f"training ended at step {trainer.global_step} of {total}")
        # Where the last epoch is none of every `evaluate_every`, or `max_steps` cut it short.
        if task.evaluated_at < total:
            trainer.validate(task, datamodule=data, verbose=False)

    peak_memory = group.most(measure.peak_memory(device))
    if not group.is_first:
        return None
    rows = read_metrics(metrics.path)
    step_time = measure.step_time(progress.step_times)
    peak = measure.peak_flops(measure.device_name(device), training.precision)
    if isinstance(cell.experiment.data, ClassFolders) and cell.experiment.data.sizes:
        # FLOPs are of the last size of images, and these grew.
        peak = None
    peak = None if peak is None else peak * group.world
    samples = cell.experiment.data.batch_size
    speed = measure.speed(step_time, samples, tokens, costs.flops, peak)
    evaluation = measure.evaluation_time(progress.evaluation_times)
    if evaluation is not None:
        speed["evaluation/seconds"] = evaluation.median
    # Not in the file, which is the same however often a cell was stopped.
    rows += [MetricRow(total, rows[-1].epoch, name, value) for name, value in speed.items()]
    chosen = selected(rows, cell.metric)
    result = Result(
        study=cell.study,
        variant=cell.variant,
        seed=cell.seed,
        identity=cell.fingerprint,
        metrics={row.name: row.value for row in chosen} | speed,
        selected_epoch=chosen[0].epoch,
        steps=trainer.global_step,
        epochs=math.ceil(total / data.steps_per_epoch),
        devices=group.world,
        batch_size=cell.experiment.data.batch_size,
        parameters=costs.parameters,
        flops=costs.flops,
        ffn_width=costs.ffn_width,
        step_time=step_time,
        evaluation_time=evaluation,
        peak_memory=peak_memory,
        wall_time=checkpoints.elapsed,
        device=measure.device_name(device),
        attempts=max(1, len(list((cell_dir / "attempts").glob("*")))),
        code=measure.CODE,
        data=data.fingerprint(),
        versions=measure.versions(),
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    chosen_by = {cell.metric.name: result.metrics[cell.metric.name], **speed}
    settings = {"variant": cell.variant, "seed": cell.seed, "ffn_width": costs.ffn_width}
    settings |= cell.experiment.model_dump(mode="json")
    tensorboard.log_hyperparams(settings, chosen_by, step=result.steps)
    if pictures := task.pictures(data, device, cell.metric.averaged):
        write_pictures(pictures, cell_dir / "pictures", tensorboard, result.steps)
    tensorboard.finalize("success")
    checkpoints.keep_weights(task.network)
    if task.average is not None:
        checkpoints.keep_weights(task.average.module, "ema.pt")
    result.write(cell_dir / "result.json")
    checkpoints.clear()

    batches = [len(loader) for loader in data.val_dataloader()]
    evaluated = [min(count, limits.evaluation_batches) if limits else count for count in batches]
    every = training.evaluate_every * data.steps_per_epoch
    evaluations = math.ceil(whole / every)
    share = sum(batches) / sum(evaluated)
    if looking is None:
        return Extent(int(whole), evaluations, share, looked=0.0, looking=0.0)
    of_all = statistics.fmean(looking.times) * math.ceil(evaluations / looking.chosen.every)
    return Extent(int(whole), evaluations, share, sum(looking.times), of_all)


def selected(rows: list[MetricRow], metric: Metric) -> list[MetricRow]:
    """The rows of the epoch that counts: the last evaluated, or the best on validation.

    Raises ConfigError where the metric was not logged.
    """
    criterion = metric.name
    if metric.selection == "best-validation":
        criterion = "val/" + metric.name.split("/", 1)[1]
    found = [row for row in rows if row.name == criterion]
    if not found:
        names = ", ".join(sorted({row.name for row in rows}))
        raise ConfigError(f"metric: '{criterion}' was not logged; logged were {names}")
    best = found[-1]
    if metric.selection == "best-validation":
        sign = 1 if metric.goal == "max" else -1
        best = max(found, key=lambda row: sign * row.value)
    return [row for row in rows if row.epoch == best.epoch]


def _grown(cell: Cell) -> Cell:
    """`cell` with images of their last size from the first step on, as most of its steps have."""
    data = cell.experiment.data
    if not isinstance(data, ClassFolders):
        return cell
    grown = {"data": data.model_copy(update={"sizes": ()})}
    return cell.model_copy(update={"experiment": cell.experiment.model_copy(update=grown)})


def _tensorboard(cell_dir: Path, start: int) -> "L.pytorch.loggers.TensorBoardLogger":
    """Scalars named after the folder; those that a stopped attempt wrote past `start` are void."""
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(
        cell_dir, name=None, version="", default_hp_metric=False, purge_step=start + 1
    )


def _keep_temporary_files_inside(cell_dir: Path, rank: int) -> None:
    """Point TMPDIR below the cell: Lightning's checkpoint writing is atomic only so.

    It writes to a temporary file and moves that into place; across file systems a move is a copy,
    which a kill cuts short. What a killed attempt left there goes. The cache of compiled code stays
    outside, for all cells to share.
    """
    # Chosen now, and kept: the paths of sockets, as between processes that read data, end at 107
    # characters, which a cell's folder may well have.
    multiprocessing.util.get_temp_dir()
    outside = Path(tempfile.gettempdir()) / f"torchinductor-{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(outside))
    inside = (cell_dir / (f"tmp.rank{rank}" if rank else "tmp")).resolve()
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir()
    os.environ["TMPDIR"] = str(inside)
    tempfile.tempdir = None


if __name__ == "__main__":
    sys.exit(main())
