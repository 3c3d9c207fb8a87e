"""The benchmark's clocks and its count of memory."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_attn.bench.blocks import Step
from lit_attn.bench.footprint import footprint
from lit_attn.bench.timing import CLOCKS, interleaved, once, ratios, spread


def test_interleaved_ratios_are_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drift that hits both candidates alike leaves their ratio alone."""
    clock = {"now": 0.0, "slow": 1.0}
    monkeypatch.setitem(CLOCKS, "wall", lambda: clock["now"])

    def takes(seconds: float) -> None:
        clock["now"] += seconds * clock["slow"]

    def base() -> None:
        clock["slow"] *= 1.5
        takes(1)

    seconds = interleaved({"base": base, "double": lambda: takes(2)}, 7, "cpu")
    assert len(seconds["base"]) == 7
    assert ratios(seconds["double"], seconds["base"]) == pytest.approx((2, 0))
    assert spread(seconds["base"]).iqr > 0


def test_spread() -> None:
    assert spread([1, 2, 3, 4, 100, 6, 7]) == (4, 5)


def test_the_clock_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asleep a process is as one that waits for the CPU: only the wall clock goes on."""
    assert {"wall": time.perf_counter, "cpu": time.process_time} == CLOCKS
    now = {"wall": 0.0, "cpu": 0.0}

    def sleep() -> None:
        now["wall"] += 3

    for name in now:
        monkeypatch.setitem(CLOCKS, name, lambda name=name: now[name])
    assert once(sleep, "cpu", "cpu") == 0
    assert once(sleep, "cpu", "wall") == 3


class Allocating:
    """A step that allocates as it is told, forward and backward."""

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


def test_footprint_counts_what_lives_at_once() -> None:
    taken = footprint(Allocating(one_after_the_other, lambda: None), "cpu")
    assert taken == pytest.approx((200_000, 400_000), rel=0.01)
    taken = footprint(Allocating(together, lambda: None), "cpu")
    assert taken == pytest.approx((400_000, 1_200_000), rel=0.01)


def test_footprint_tells_forward_from_backward() -> None:
    taken = footprint(Allocating(lambda: torch.ones(50_000), together), "cpu")
    assert taken == pytest.approx((200_000, 1_400_000), rel=0.01)


def test_footprint_of_a_module() -> None:
    """exp keeps its output, which is also the step's: with the gradients of it, three tensors."""

    class Exp(torch.nn.Module):
        def forward(self, x: Tensor, is_causal: bool) -> Tensor:
            return x.exp()

    step = Step(Exp(), torch.randn(100_000), causal=False)
    for _ in range(2):  # the first leaves no gradient behind that the second would not count
        held, peak = footprint(step, "cpu")
        assert held == pytest.approx(400_000, rel=0.01)
        assert peak == pytest.approx(800_000, rel=0.01)
    assert step.x.grad is None


@pytest.mark.gpu
def test_footprint_on_a_gpu() -> None:
    def on_gpu() -> Tensor:
        kept = [torch.ones(1_000_000, device="cuda") for _ in range(3)]
        return kept[0]

    assert footprint(Allocating(on_gpu, lambda: None), "cuda") == pytest.approx(
        (4_000_000, 12_000_000), rel=0.01
    )


@pytest.mark.gpu
def test_seconds_on_a_gpu() -> None:
    a = torch.randn(1024, 1024, device="cuda")
    calls = {"one": lambda: a @ a, "four": lambda: [a @ a for _ in range(4)]}
    seconds = interleaved(calls, 3, "cuda")
    assert all(len(found) == 3 and min(found) > 0 for found in seconds.values())
