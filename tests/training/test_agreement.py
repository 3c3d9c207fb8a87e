"""Agreement of ranks on checkpoints and stops: seldom, and at the same step on every rank."""

from pathlib import Path
from typing import Any

import pytest

from lit_attn.training import checkpoints
from lit_attn.training.checkpoints import LATER, STOP, Checkpoints


class Group:
    """Stand-in for the ranks of a cell, with the numbers that the other ranks have."""

    def __init__(self, world_size: int, others: tuple[int, int] = (LATER, 0)) -> None:
        self.world_size = world_size
        self.others = others
        self.calls = 0

    def maxima(self, numbers: list[int]) -> list[int]:
        self.calls += 1
        return [max(pair) for pair in zip(numbers, self.others, strict=True)]


def make(group: Any) -> Checkpoints:
    return Checkpoints(Path("nowhere"), 0, 3600.0, group, describe=lambda: None)  # type: ignore[arg-type, return-value]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Stand-in for the clock of the host: `now` in seconds."""
    clock = {"now": 0.0}
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: clock["now"])
    return clock


@pytest.mark.parametrize(
    ("step_seconds", "most_agreements"), [(0.001, 15), (0.05, 110), (2.0, 1000)]
)
def test_ranks_agree_about_twice_a_second(
    step_seconds: float, most_agreements: int, clock: dict[str, float]
) -> None:
    group = Group(2)
    saved = make(group)
    for step in range(1000):
        saved._agree(step)
        clock["now"] += step_seconds
    assert most_agreements / 2 < group.calls <= most_agreements


def test_the_slowest_rank_decides_when_all_agree_again(clock: dict[str, float]) -> None:
    """Every rank must choose the same step, or they would wait for each other for ever."""
    ranks = [make(Group(2, (LATER, 20_000))) for _ in range(2)]
    for step_seconds, saved in zip((0.001, 0.02), ranks, strict=True):
        saved.agreed = clock["now"] - step_seconds
        saved._agree(1)
    assert ranks[0].next_agreement == ranks[1].next_agreement == 26


def test_a_stop_of_another_rank_is_seen_at_the_next_agreement(clock: dict[str, float]) -> None:
    group = Group(2, (LATER, 100_000))
    saved = make(group)
    assert saved._agree(0) == LATER
    group.others = (STOP, 100_000)
    assert [saved._agree(step) for step in range(1, 6)] == [LATER] * 4 + [STOP]


def test_a_single_rank_stops_before_the_next_step(clock: dict[str, float]) -> None:
    group = Group(1)
    saved = make(group)
    assert saved._agree(0) == LATER
    saved._stop(15, None)
    assert saved._agree(1) == STOP
    assert group.calls == 0
