"""A wrong attention path is refused, recorded, and not used."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import wrong_paths
from helpers.training_cells import digits_cell, folder_of, result_of

from lit_attn.attention import dispatch, path_record
from lit_attn.attention.path_record import PathRecord, read_combination
from lit_attn.checks.apart import Outcome, run_shares
from lit_attn.checks.comparison import make_tokens
from lit_attn.checks.paths import PATHS, SHAPES, build_layer, check_path, read_path
from lit_attn.doctor.examine import check_paths, judge_path, list_choices, remember
from lit_attn.doctor.verdict import PathCheck
from lit_attn.train import run_cell

CPU = torch.device("cpu")

WRONG = {
    "value": (wrong_paths.with_wrong_value, "the value is off by"),
    "gradient": (wrong_paths.with_wrong_gradient, "the gradient is off by"),
    "NaN": (wrong_paths.with_nan, "the value is not a number"),
    "exception": (wrong_paths.with_exception, "RuntimeError: out of resource: shared memory"),
}


@pytest.fixture(autouse=True)
def empty_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without records, and forget what the test refuses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(path_record, "_REFUSED", {})


def forget_process_memory() -> None:
    """Read the record again, as another process would."""
    path_record._REFUSED.clear()


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_path_is_refused_recorded_and_not_used(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, reason = WRONG[kind]
    layer = build_layer("belief2", SHAPES[0])
    x, _ = make_tokens(SHAPES[0])
    expected = layer(x)
    monkeypatch.setattr(dispatch, "_merged_calls", wrong(dispatch._merged_calls))
    outcome = Outcome(list(check_path("MERGED", "cpu", True, 0, 1)))
    checked = judge_path("MERGED", outcome)
    assert reason in checked.failure
    assert "\n" not in checked.failure

    assert remember(CPU, [checked], is_short=True)[1] == ""
    forget_process_memory()
    assert path_record.refused_paths("cpu") == {"MERGED": checked.failure}
    assert read_path(layer, CPU) == "FORMED"
    torch.testing.assert_close(layer(x), expected)
    choices = {choice.preset: choice for choice in list_choices(CPU)}
    assert choices["belief2"].path == "FORMED"
    assert "MERGED refused" in choices["belief2"].reason
    assert choices["standard"].path == "ONE_CALL"


def test_a_right_path_holds() -> None:
    outcome = Outcome(list(check_path("ONE_CALL", "cpu", True, 0, 1)))
    checked = judge_path("ONE_CALL", outcome)
    assert checked.failure == ""
    assert checked.comparisons > 0
    remember(CPU, [checked], is_short=True)
    record = PathRecord.read(read_combination("cpu").file)
    assert record is not None
    assert record.held == ["ONE_CALL"]
    assert record.refused == {}


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
    paths, _ = check_paths(CPU, True, lines.append, check, seconds, ["MERGED"])
    assert paths == [PathCheck("MERGED", 0, reason)]
    assert lines == [f"   MERGED: FAILED, {reason}"]
    remember(CPU, paths, is_short=True)
    forget_process_memory()
    assert path_record.is_refused("MERGED", "cpu")


@pytest.mark.process
def test_a_busy_device_refuses_nothing_and_leaves_no_record() -> None:
    lines: list[str] = []
    paths, _ = check_paths(CPU, True, lines.append, wrong_paths.lack_memory, 300.0, ["MERGED"])
    assert paths[0].failure == ""
    assert "not checked, cuda cannot be used" in lines[0]
    remember(CPU, paths, is_short=True)
    assert not read_combination("cpu").file.exists()


def test_the_short_form_keeps_earlier_refusals_and_the_full_form_replaces_them() -> None:
    remember(CPU, [PathCheck("MERGED", 3, "wrong")], is_short=False)
    remember(CPU, [PathCheck("MERGED", 3)], is_short=True)
    forget_process_memory()
    assert path_record.is_refused("MERGED", "cpu")
    remember(CPU, [PathCheck("MERGED", 3)], is_short=False)
    forget_process_memory()
    assert not path_record.is_refused("MERGED", "cpu")


def test_the_check_of_a_refused_path_ignores_the_record() -> None:
    path_record.set_refused("cpu", {"MERGED": "wrong"})
    assert len(list(check_path("MERGED", "cpu", True, 0, 1))) > 0


def test_a_layer_without_a_usable_path_is_refused_in_one_line() -> None:
    path_record.set_refused("cpu", {"FORMED": "wrong"})
    x, _ = make_tokens(SHAPES[0])
    with pytest.raises(RuntimeError, match="every path of this layer is refused") as raised:
        build_layer("dcmha", SHAPES[0])(x)
    assert "\n" not in str(raised.value)
    assert {choice.preset: choice.path for choice in list_choices(CPU)}["dcmha"] == "none"
    # Layers on other paths still work.
    build_layer("belief2", SHAPES[0])(x)


def test_every_path_of_the_package_is_checked() -> None:
    assert set(PATHS) == {*dispatch.Path.__members__, "sums"}


def test_other_devices_have_no_record() -> None:
    remember(CPU, [PathCheck("MERGED", 3, "wrong")], is_short=False)
    assert not path_record.is_refused("MERGED", "meta")


def test_a_record_of_other_code_or_an_unreadable_one_has_no_effect() -> None:
    remember(CPU, [PathCheck("MERGED", 3, "wrong")], is_short=False)
    combination = read_combination("cpu")
    other = combination._replace(code="000000000000")
    assert other.file != combination.file
    combination.file.write_text("{")
    forget_process_memory()
    assert not path_record.is_refused("MERGED", "cpu")


def test_a_compiled_layer_does_not_use_a_refused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    path_record.set_refused("cpu", {"MERGED": "wrong"})
    wrong = wrong_paths.with_exception(dispatch._merged_calls)
    monkeypatch.setattr(dispatch, "_merged_calls", wrong)
    layer = build_layer("belief2", SHAPES[0])
    x, _ = make_tokens(SHAPES[0])
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_the_record_of_a_cell_notes_refused_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path_record.set_refused("cpu", {"MERGED": "the value is off"})
    folder = folder_of(digits_cell(training={"epochs": 1}), tmp_path)
    run_cell(folder, smoke=True)
    assert result_of(folder).refused_paths == {"MERGED": "the value is off"}
    line = "attention path MERGED is not used: it failed a check on this machine (the value is off)"
    assert line in capsys.readouterr().out


def test_several_processes_share_a_check_and_each_failure_counts() -> None:
    numbers: list[int] = []
    outcome = run_shares(wrong_paths.check_some, ("FLEX", "cpu", True), 3, 300.0, numbers.append)
    assert outcome.results == [0, 3, 1, 4, 2]
    assert sorted(numbers) == [0, 1, 2, 3, 4]
    assert outcome.failure == "the process crashed (exit code 7)"
