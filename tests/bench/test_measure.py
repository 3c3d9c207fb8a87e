"""Clocks and memory counts of the benchmarks."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_attn.bench.measure import (
    CLOCKS,
    Step,
    measure_memory,
    measure_seconds,
    summarize,
    summarize_ratios,
    time_call,
)


def test_a_slower_round_does_not_change_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drift that slows both candidates leaves their ratio as it is."""
    clock = {"now": 0.0, "slow": 1.0}
    monkeypatch.setitem(CLOCKS, "wall", lambda: clock["now"])

    def advance_clock(seconds: float) -> None:
        clock["now"] += seconds * clock["slow"]

    def base() -> None:
        clock["slow"] *= 1.5
        advance_clock(1)

    seconds = measure_seconds({"base": base, "double": lambda: advance_clock(2)}, 7, "cpu")
    assert len(seconds["base"]) == 7
    assert summarize_ratios(seconds["double"], seconds["base"]) == pytest.approx((2, 0))
    assert summarize(seconds["base"]).iqr > 0


def test_a_summary_is_the_median_and_the_interquartile_range() -> None:
    assert summarize([1, 2, 3, 4, 100, 6, 7]) == (4, 5)


def test_the_clock_measures_elapsed_or_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wall clock advances while a process sleeps or waits for the CPU."""
    assert {"wall": time.perf_counter, "cpu": time.process_time} == CLOCKS
    now = {"wall": 0.0, "cpu": 0.0}

    def sleep() -> None:
        now["wall"] += 3

    for name in now:
        monkeypatch.setitem(CLOCKS, name, lambda name=name: now[name])
    assert time_call(sleep, "cpu", "cpu") == 0
    assert time_call(sleep, "cpu", "wall") == 3


class Allocating:
    """Step whose forward and backward passes are functions."""

    def __init__(self, forward: Callable[[], Tensor], backward: Callable[[], object]) -> None:
        self.make, self.then = forward, backward

    def forward(self) -> Tensor:
        return self.make()

    def backward(self, out: Tensor) -> None:
        self.then()


def one_after_the_other() -> Tensor:
    for _ in range(3):
        last = torch.ones(100_000)
        del last
    return torch.ones(50_000)


def together() -> Tensor:
    first, *_ = [torch.ones(100_000) for _ in range(3)]
    return first


def test_the_peak_counts_tensors_that_exist_together() -> None:
    memory = measure_memory(Allocating(one_after_the_other, lambda: None), "cpu")
    assert memory == pytest.approx((200_000, 400_000), rel=0.01)
    memory = measure_memory(Allocating(together, lambda: None), "cpu")
    assert memory == pytest.approx((400_000, 1_200_000), rel=0.01)


def test_held_memory_excludes_the_backward_pass() -> None:
    memory = measure_memory(Allocating(lambda: torch.ones(50_000), together), "cpu")
    assert memory == pytest.approx((200_000, 1_400_000), rel=0.01)


def test_the_memory_of_a_module_includes_its_gradients() -> None:
    """exp keeps its output, and the backward pass needs one more tensor."""

    class Exp(torch.nn.Module):
        def forward(self, x: Tensor, is_causal: bool) -> Tensor:
            return x.exp()

    step = Step(Exp(), torch.randn(100_000), causal=False)
    for _ in range(2):  # the first leaves no gradient behind that the second would not count
        held, peak = measure_memory(step, "cpu")
        assert held == pytest.approx(400_000, rel=0.01)
        assert peak == pytest.approx(800_000, rel=0.01)
    assert step.x.grad is None


@pytest.mark.gpu
def test_memory_is_counted_on_a_gpu() -> None:
    def on_gpu() -> Tensor:
        tensors = [torch.ones(1_000_000, device="cuda") for _ in range(3)]
        return tensors[0]

    assert measure_memory(Allocating(on_gpu, lambda: None), "cuda") == pytest.approx(
        (4_000_000, 12_000_000), rel=0.01
    )


@pytest.mark.gpu
def test_time_is_measured_on_a_gpu() -> None:
    a = torch.randn(1024, 1024, device="cuda")
    calls = {"one": lambda: a @ a, "four": lambda: [a @ a for _ in range(4)]}
    seconds = measure_seconds(calls, 3, "cuda")
    assert all(len(values) == 3 and min(values) > 0 for values in seconds.values())
