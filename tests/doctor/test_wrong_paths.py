"""Comparison of every attention path with the reference, in processes of their own."""

from collections.abc import Callable

import pytest
import torch
from helpers import wrong_paths

from lit_attn.attention import dispatch, normaliser
from lit_attn.checks.apart import Outcome, run_apart, run_shares
from lit_attn.checks.paths import PATHS, Selection, check_path, list_paths
from lit_attn.doctor.examine import check_paths, judge_path
from lit_attn.doctor.verdict import PathCheck

CPU = torch.device("cpu")
SHORT = Selection(is_short=True)
MERGED = Selection(is_short=True, presets=("belief2",))  # Presets that only take this path.


def test_a_right_path_holds() -> None:
    outcome = Outcome(list(check_path("ONE_CALL", "cpu", SHORT, 0, 1)))
    checked = judge_path("ONE_CALL", outcome)
    assert checked.failure == ""
    assert checked.comparisons > 0


def test_a_wrong_path_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = wrong_paths.with_wrong_gradient(dispatch._merged_calls)
    monkeypatch.setattr(dispatch, "_merged_calls", wrong)
    checked = judge_path("MERGED", Outcome(list(check_path("MERGED", "cpu", SHORT, 0, 1))))
    assert "the gradient is off by" in checked.failure
    assert "\n" not in checked.failure


@pytest.mark.process
@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (wrong_paths.hang, "no answer within 3 s, which counts as failed"),
        (wrong_paths.crash, "the process crashed (exit code 7)"),
    ],
)
def test_a_hang_or_crash_is_a_failure(check: Callable[..., object], reason: str) -> None:
    lines: list[str] = []
    seconds = 3.0 if check is wrong_paths.hang else 300.0
    paths, _ = check_paths(CPU, MERGED, lines.append, check, seconds)
    assert paths == [PathCheck("MERGED", 0, reason)]
    assert lines == [f"   MERGED: FAILED, {reason}"]


@pytest.mark.process
def test_a_busy_device_is_not_checked() -> None:
    lines: list[str] = []
    paths, _ = check_paths(CPU, MERGED, lines.append, wrong_paths.lack_memory, 300.0)
    assert paths[0].failure == ""
    assert "not checked, cuda cannot be used" in lines[0]


def test_every_path_of_the_package_is_checked() -> None:
    assert set(PATHS) == {*dispatch.Path.__members__, "sums"}
    assert list_paths(SHORT, CPU) == list(PATHS)


def test_of_named_presets_only_their_paths_are_checked() -> None:
    named = Selection(is_short=False, presets=("linear", "standard"))
    assert list_paths(named, CPU) == ["ONE_CALL", "sums"]
    checks = [*check_path("ONE_CALL", "cpu", named, 0, 1), *check_path("sums", "cpu", named, 0, 1)]
    assert [check.preset for check in checks] == 14 * ["standard"] + 14 * ["linear"]
    assert {check.precision for check in checks} == {"float64", "float32", "bf16", "fp16"}
    assert not any(check.failure for check in checks)


def test_a_mistake_behind_a_parameter_that_starts_at_zero_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = normaliser.Sink.sink
    monkeypatch.setattr(normaliser.Sink, "sink", lambda self: (1 + 1e-6) * right(self))
    named = Selection(is_short=True, presets=("sink", "standard"))
    checks = list(check_path("ONE_CALL", "cpu", named, 0, 1))
    wrong = [(check.preset, check.precision) for check in checks if check.failure]
    assert wrong == [("sink", "float64")] * 2
    assert len(checks) == 8


def test_several_processes_share_a_check_and_each_failure_counts() -> None:
    numbers: list[int] = []
    outcome = run_shares(wrong_paths.check_some, ("FLEX", "cpu", SHORT), 3, 300.0, numbers.append)
    assert outcome.results == [0, 3, 1, 4, 2]
    assert sorted(numbers) == [0, 1, 2, 3, 4]
    assert outcome.failure == "the process crashed (exit code 7)"


@pytest.mark.process
def test_a_signal_to_the_process_group_does_not_end_a_check() -> None:
    """The doctor decides what a signal does; a killed check would count as a failure."""
    assert run_apart(wrong_paths.be_terminated, (), 300) == Outcome(["finished"])
