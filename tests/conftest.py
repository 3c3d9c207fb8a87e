"""Shared by all tests: GPU tests skip without a GPU; one thread, since tests run side by side."""

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Fixtures of the helpers.
pytest_plugins = ["helpers.small_disk"]

# A shell starts what it runs in the background deaf to interrupts, and its children would be too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if "gpu" in item.keywords]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Give TMPDIR back: a cell trained within a test sets it for this process, and later tests
    would start servers whose sockets have too long a name there."""
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    try:
        return (yield)
    finally:
        os.environ.pop("TMPDIR", None)
        if before[0] is not None:
            os.environ["TMPDIR"] = before[0]
        tempfile.tempdir = before[1]
