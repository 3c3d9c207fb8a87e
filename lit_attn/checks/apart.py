"""Checks in a process of their own, which may hang or crash without ending the program."""

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from lit_attn.cells.process import die_with_parent
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.mistakes import describe_check_failure


class Unavailable(Exception):
    """A check could not start or lacked memory, so that nothing is known about what it checks."""


class Outcome(NamedTuple):
    """Results of a check, in the order in which they came, and why it ended early, if it did.

    `failure` is a hang, a crash or an exception of the check; `unavailable` explains why nothing is
    known. Both are empty texts for a complete check.
    """

    results: list[Any]
    failure: str = ""
    unavailable: str = ""


class _End(NamedTuple):
    """Last message of a process; the texts are those of `Outcome`.

    `mistake` is the message of a ConfigError: the input is wrong, and nothing was checked.
    """

    failure: str = ""
    unavailable: str = ""
    mistake: str = ""


def run_apart(
    check: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
    seconds: float,
    show: Callable[[Any], None] | None = None,
) -> Outcome:
    """Return the results that `check(*arguments)` yields in a new process within `seconds`.

    `show` gets every result as soon as it comes. The process is killed at the limit: a hang is a
    failure. Raises ConfigError if the check raises it.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_results, args=(check, arguments, sender), daemon=True)
    process.start()
    # The process has its copy. Without this one, the pipe ends with the process.
    sender.close()
    try:
        return _receive(receiver, process, seconds, show)
    finally:
        process.kill()
        process.join()


def count_processes(device: torch.device) -> int:
    """Return how many processes compare layers at once.

    It is one on a CPU. On a GPU it is one for every four cores, up to four: compiling a kernel
    takes a core seconds, and running it takes the GPU less than a millisecond.
    """
    if device.type != "cuda":
        return 1
    return min(4, max(1, len(os.sched_getaffinity(0)) // 4))


def run_shares(
    check: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
    processes: int,
    seconds: float,
    show: Callable[[Any], None] | None = None,
) -> Outcome:
    """Return the results of `run_apart` in several processes, each of which checks a share.

    The last two arguments of `check` are the number of the process and that of all processes.
    """
    with ThreadPoolExecutor(processes) as threads:
        waiting = []
        for process in range(processes):
            of_share = (*arguments, process, processes)
            waiting.append(threads.submit(run_apart, check, of_share, seconds, show))
        outcomes = [one.result() for one in waiting]
    results: list[Any] = []
    for outcome in outcomes:
        results += outcome.results
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    reasons = [outcome.unavailable for outcome in outcomes if outcome.unavailable]
    return Outcome(results, "; ".join(dict.fromkeys(failures)), "; ".join(dict.fromkeys(reasons)))


def _receive(
    receiver: Connection, process: Any, seconds: float, show: Callable[[Any], None] | None
) -> Outcome:
    """Return what the process sends until it ends or its time is over."""
    results: list[Any] = []
    deadline = time.monotonic() + seconds
    while receiver.poll(max(0.0, deadline - time.monotonic())):
        try:
            message = receiver.recv()
        except EOFError:
            process.join()
            return Outcome(results, failure=f"the process crashed (exit code {process.exitcode})")
        if isinstance(message, _End):
            if message.mistake:
                raise ConfigError(message.mistake)
            return Outcome(results, message.failure, message.unavailable)
        results.append(message)
        if show is not None:
            show(message)
    return Outcome(results, failure=f"no answer within {seconds:.0f} s, which counts as failed")


def _send_results(
    check: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], sender: Connection
) -> None:
    """Send every result of the check, and then how it ended."""
    die_with_parent()
    # Signals to the whole process group are for the parent, which ends this process: a check that
    # one of them ended would count as a crash.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    try:
        for result in check(*arguments):
            sender.send(result)
    except Unavailable as error:
        sender.send(_End(unavailable=str(error)))
    except ConfigError as error:
        sender.send(_End(mistake=str(error)))
    except Exception as error:
        sender.send(_End(failure=describe_check_failure(error)))
    else:
        sender.send(_End())
