"""Settings of all tests: one thread each, their order, and no GPU tests without a GPU."""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Collecting makes a million objects that stay. The garbage collector would go through all of them
# again and again, and in every fork copy their memory.
gc.disable()

# Fixtures of the helpers.
pytest_plugins = ["helpers.small_disk"]

# A shell starts background processes with SIGINT ignored, and child processes would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runner retry failed cells without a pause."""
    monkeypatch.setattr("lit_attn.ablate.runner.BACKOFF", 0.01)


@pytest.fixture
def no_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw all figures, and write an empty image for each, for tests that read tables and pages.

    Layout and rendering take seven tenths of the time of a report, and read no record.
    """
    images = {"svg": b"<svg></svg>", "png": b""}
    monkeypatch.setattr("lit_attn.report.figures.drawing.render", lambda _: images)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    # Also in the process that collects nothing and hands out the tests.
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    # nanobind prints what it finds frozen when Python ends.
    gc.unfreeze()


# Place of a folder's tests in the order of all; other folders have 1. Tests that wait for SLURM are
# first, and thousands of short tests last, so that no process starts a test of a minute when the
# others are done.
ORDER = {"slurm": 0, "attention": 2, "models": 2, "replace": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.get(item.path.parent.name, 1))
    skip_gpu_tests(items)


def skip_gpu_tests(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine without a GPU."""
    # Not `item.keywords`, which have the names of folders too: tests/gpu needs no GPU.
    gpu_tests = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Restore TMPDIR after each test.

    A cell that is trained in a test sets TMPDIR for this process. Servers that later tests start
    would then have socket paths that are too long.
    """
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    try:
        return (yield)
    finally:
        os.environ.pop("TMPDIR", None)
        if before[0] is not None:
            os.environ["TMPDIR"] = before[0]
        tempfile.tempdir = before[1]
