"""Wrong forms of an attention path, and checks that never end well, for the tests of doctor.

A spawned process can import this module: its folder is on the path of modules.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from lit_attn.checks.apart import Unavailable
from lit_attn.checks.paths import Selection

Call = Callable[..., Any]


def with_wrong_value(call: Call) -> Call:
    """Return `call` with a result that is off by a thousandth."""
    return lambda *inputs: 1.001 * call(*inputs)


def with_wrong_gradient(call: Call) -> Call:
    """Return `call` with the same result, half of which has no gradient."""

    def wrong(*inputs: Any) -> Any:
        out = call(*inputs)
        return 0.5 * out + 0.5 * out.detach()

    return wrong


def with_nan(call: Call) -> Call:
    """Return `call` with one result that is not a number."""

    def wrong(*inputs: Any) -> Any:
        out = call(*inputs).clone()
        out[0, 0, 0, 0] = float("nan")
        return out

    return wrong


def with_exception(call: Call) -> Call:
    """Return a function that raises what a kernel without enough shared memory raises."""

    def wrong(*inputs: Any) -> Any:
        raise RuntimeError("out of resource: shared memory\nand a second line")

    return wrong


def hang(path: str, device: str, selection: Selection, *share: int) -> Iterator[Any]:
    """Check that does not end."""
    time.sleep(600)
    yield path


def crash(path: str, device: str, selection: Selection, *share: int) -> Iterator[Any]:
    """Check whose process dies after its first result."""
    yield from ()
    os._exit(7)


def lack_memory(path: str, device: str, selection: Selection, *share: int) -> Iterator[Any]:
    """Check that cannot use the device."""
    yield from ()
    raise Unavailable("cuda cannot be used: out of memory")


def check_some(
    path: str, device: str, selection: Selection, process: int, processes: int
) -> Iterator[Any]:
    """Check of five numbers, whose second process dies after its share."""
    yield from range(process, 5, processes)
    if process == 1:
        os._exit(7)


def be_terminated() -> Iterator[str]:
    """Receive a signal to the process group, and go on."""
    os.kill(os.getpid(), signal.SIGTERM)
    yield "finished"
