"""A cell across the nodes of a SLURM job: every task is a rank, and trains in its own process.

Rank 0 holds the cell's lock and keeps its records, as a worker on one machine does. There is no
runner: SLURM's time limit is the only one, and it ends all ranks where one of them fails.
"""

import datetime
import faulthandler
import importlib
import os
import signal
import time
import traceback
from types import FrameType

from lit_attn.ablate.plan import Job
from lit_attn.cells import failure, folder
from lit_attn.cells.failure import Preempted
from lit_attn.cells.lock import HEARTBEAT, hold_lock
from lit_attn.cells.ranks import ACROSS_NODES, redirect_output
from lit_attn.cells.records import Exit


def run(job: Job, target: str, smoke: bool) -> None:
    """Train as this task's rank; raises what training does, on rank 0 after it was recorded."""
    requeue = signal.getsignal(signal.SIGUSR2)
    os.environ[ACROSS_NODES] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    out_of_time = False

    def save_and_stop(number: int, frame: FrameType | None) -> None:
        nonlocal out_of_time
        out_of_time = True
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGUSR2, save_and_stop)
    module, _, function = target.partition(":")
    train = getattr(importlib.import_module(module), function)
    if os.environ["SLURM_PROCID"] != "0":
        try:
            train(job.folder, smoke=smoke)
        except Preempted:
            # Not a failure, for which SLURM would end rank 0 before it has recorded anything.
            print(traceback.format_exc())
        return
    # A job that was here before and died on another node holds it for some minutes more.
    while job.state() == "running":
        time.sleep(HEARTBEAT)
    with hold_lock(job.folder):
        attempt = folder.create_attempt(job.folder)
        redirect_output(attempt / folder.log_name(0))
        faulthandler.enable()
        try:
            train(job.folder, smoke=smoke)
        except BaseException as error:
            said = traceback.format_exc()
            print(said, flush=True)
            Exit(
                failure=failure.classify_failure(1, said),
                returncode=1,
                message=failure.describe_failure(1, said),
                finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            ).write(attempt / "exit.json")
            if not (isinstance(error, Preempted) and out_of_time):
                raise
    if out_of_time and job.state() != "done" and callable(requeue):
        requeue(signal.SIGUSR2, None)
