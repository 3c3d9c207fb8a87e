"""Check of the models and data of variants before the first cell, in one process of its own.

The process checks the variants in the order of the study and ends with the first wrong one
(`train.check_cells`).
"""

import copy
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, TextIO

from lit_attn import train
from lit_attn.ablate.display import format_seconds, write_line
from lit_attn.ablate.job import Job
from lit_attn.ablate.signals import block_interrupts

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lit_attn.ablate.plan import Matrix
    from lit_attn.ablate.variants import Variant

CHECK_LIMIT = 1800.0  # Seconds of a check after which cells start without it.
PROGRESS_SECONDS = 10.0  # Seconds between two lines about how far a check is.


def find_variants(matrices: list["Matrix"], jobs: list[Job]) -> list[tuple[str, "Variant", Job]]:
    """Return the variants of `jobs` in their order, with the study's name and one of the cells."""
    cells = {(job.study, job.variant.partition("@")[0]): job for job in jobs}
    variants = []
    for matrix in matrices:
        for variant in matrix.written:
            key = (matrix.name, variant.name)
            if key in cells:
                variants.append((matrix.source.name, variant, cells[key]))
    return variants


def check_variants(
    create_process: Callable[..., BaseProcess],
    configs: Sequence[dict[str, Any]],
    names: Sequence[str],
    is_local: bool,
    untried: Sequence[int],
    selects: dict[int, list[str]],
    gpu: str | None = None,
    limit: float = CHECK_LIMIT,
    stream: TextIO | None = None,
) -> train.CheckEnd:
    """Check one cell of each variant, and return the first mistake and all warnings.

    `configs` are the values of the config.yaml of these cells, and `names` the variants.
    `is_local`: the data of the cells are on this machine.
    `untried` are the numbers of the cells that make a step, on the `gpu` if there is one, and
    `selects` the names of the metrics by which the study of a cell selects, by its number. There is
    only a warning if the process dies or needs more than `limit` seconds. `stream` gets the lines
    about how far the check is.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    # Not in files, which a killed runner could not remove.
    arguments = (list(configs), sender, is_local, list(untried), selects, gpu)
    process = create_process(target=train.check_cells, args=arguments)
    try:
        with block_interrupts():
            process.start()
        sender.close()
        end = await_end(receiver, names, limit, stream)
        # A killed process would leave the semaphores of its libraries behind.
        process.join(10)
    except (EOFError, OSError):
        return _give_up("the process of the check has ended")
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
    return end


def await_end(
    receiver: "Connection",
    names: Sequence[str],
    limit: float = CHECK_LIMIT,
    stream: TextIO | None = None,
) -> train.CheckEnd:
    """Return the last message of a check, and write how far it is every PROGRESS_SECONDS.

    Raises EOFError if the process ends without it.
    """
    start = time.monotonic()
    next_line = start + PROGRESS_SECONDS
    reached = 0
    while True:
        now = time.monotonic()
        if now >= start + limit:
            return _give_up(f"no answer within {limit:,.0f} s")
        if now >= next_line:
            seconds = format_seconds(now - start)
            write_line(f"  {reached + 1} of {len(names)}: {names[reached]} ({seconds})", stream)
            next_line = now + PROGRESS_SECONDS
        if not receiver.poll(min(start + limit, next_line) - now):
            continue
        message = receiver.recv()
        if isinstance(message, train.CheckEnd):
            return message
        reached = message


def _give_up(reason: str) -> train.CheckEnd:
    """Return the end of a check that says nothing about the cells."""
    return train.CheckEnd(None, [f"{train.NOT_CHECKED}: {reason}"])


def list_untried(configs: Sequence[dict[str, Any]], is_proven: Sequence[bool]) -> list[int]:
    """Return the numbers of the cells that make a step: the first of those with equal steps."""
    steps: set[str] = set()
    untried = []
    for number, config in enumerate(configs):
        step = describe_step(config)
        if not is_proven[number] and step not in steps:
            steps.add(step)
            untried.append(number)
    return untried


def describe_step(config: dict[str, Any]) -> str:
    """Return a text that is equal for cells whose first steps compute the same, but for rates."""
    contents = copy.deepcopy(config["experiment"])
    del contents["schedule"]
    for key in ("lr", "weight_decay"):
        contents["optimizer"].pop(key, None)
    without_effect = ("diagnostics", "histograms", "loggers", "log_every", "profiler")
    for key in ("epochs", "stretch", "max_steps", "stop", *without_effect):
        contents["training"].pop(key, None)
    return json.dumps([contents, config["match_to"]], sort_keys=True)
