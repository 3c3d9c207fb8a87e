"""Speed of the preparation of training batches, and the wait of a device for them.

The device is a sleep of a fixed time for each step, so that no GPU is needed and a real one could
not hide the wait. A batch is what a worker process makes of it: what is left for the device, as the
normalisation of images in memory, is not measured.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from lit_attn.ablate.slots import count_cores
from lit_attn.bench.measure import TITLES, Setup, Spread, Table, summarize
from lit_attn.config.experiment import Experiment
from lit_attn.config.source import load
from lit_attn.data.base import Data
from lit_attn.data.image_sets import Npz
from lit_attn.data.loading import AHEAD, BatchWorkers
from lit_attn.data.module import DataModule
from lit_attn.schema.errors import ConfigError, explain

SEED = 0


class Row(NamedTuple):
    """Measurements of one experiment with one number of workers and one length of a step.

    `rate` is the number of samples that a core prepares in a second of its time. Times are in ms.
    """

    experiment: str
    batch: int
    rate: Spread
    step: float
    workers: int
    wait: Spread
    share: float
    """Median wait over the length of the step."""


def make_data_tables(options: argparse.Namespace, setup: Setup) -> Iterator[Table]:
    """Yield the table of all experiments, numbers of workers and lengths of a step."""
    rows = []
    for path in options.experiments:
        data = read_data(path, options.images)
        module = data.build(SEED, torch.device("cpu"))
        folder = path.resolve().parent.name
        name = folder if path.stem == "experiment" else f"{folder}/{path.stem}"
        rows += run(name, module, options.workers, options.step, options.steps, setup.rounds)
    title = TITLES["data"].format(options=options, setup=setup, cores=count_cores())
    yield "data-cpu", title, rows


def read_data(path: Path, images: Path | None) -> Data:
    """Return the data of an experiment, or its recipe for the images of an .npz file instead."""
    tree = load(path)
    try:
        if images is None:
            return Experiment.model_validate(tree).data
        recipe = {**tree.get("data", {}), **describe_images(images), "name": path.stem}
        for key in ("kind", "root"):
            recipe.pop(key, None)
        return Npz.model_validate(recipe)
    except ValidationError as error:
        raise explain(error, str(path)) from error


def describe_images(path: Path) -> dict[str, Any]:
    """Return the keys of `kind: npz` for a file; raise ConfigError if it has no training images."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            size = int(arrays["x_train"].shape[1])
            classes = int(arrays["y_train"].max()) + 1
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(f"--images: {path} has no training images: {error}") from error
    return {"path": path, "size": size, "classes": classes}


def run(
    name: str,
    module: DataModule,
    worker_counts: list[int],
    step_times: list[float],
    steps: int,
    rounds: int,
) -> list[Row]:
    """Return a row for each length of a step and number of workers, measured in turn."""
    rate = measure_rate(module, steps, rounds)
    rows = []
    for step_time in step_times:
        pools = {workers: BatchWorkers(module.batch, workers) for workers in worker_counts}
        streams = {workers: pool.read(count()) for workers, pool in pools.items()}
        waits: dict[int, list[float]] = {workers: [] for workers in worker_counts}
        for _ in range(rounds):
            for workers, stream in streams.items():
                waits[workers].append(measure_wait(stream, workers, step_time, steps))
        for workers, pool in pools.items():
            pool.close()
            wait = summarize(waits[workers])
            share = wait.median / step_time
            rows.append(Row(name, module.batch_size, rate, step_time, workers, wait, share))
    return rows


def measure_rate(module: DataModule, steps: int, rounds: int) -> Spread:
    """Return the samples that one core prepares in a second of CPU time, over `rounds` rounds."""
    module.batch(0)
    rates = []
    for number in range(rounds):
        start = time.process_time()
        for step in range(number * steps, (number + 1) * steps):
            module.batch(step)
        rates.append(steps * module.batch_size / (time.process_time() - start))
    return summarize(rates)


def measure_wait(stream: Iterator[Any], workers: int, step_time: float, steps: int) -> float:
    """Return the median wait in ms for a batch of `stream` between sleeps of `step_time` ms.

    The batches that the workers have prepared before this call are not counted.
    """
    waits = []
    for number in range(AHEAD * workers + 1 + steps):
        start = time.perf_counter()
        next(stream)
        wait = time.perf_counter() - start
        if number > AHEAD * workers:
            waits.append(1e3 * wait)
        time.sleep(step_time / 1e3)
    return float(np.median(waits))
