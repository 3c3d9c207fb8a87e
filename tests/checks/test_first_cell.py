"""The first cell of its kind on a GPU checks the attention paths that it takes, and no others."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from helpers import wrong_paths
from helpers.paths import EXPERIMENTS
from helpers.training_cells import digits_cell, text_cell

from lit_attn.attention import path_record
from lit_attn.attention.path_record import Combination, PathRecord
from lit_attn.attention.residual import FullConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.checks import first_cell
from lit_attn.checks.apart import Outcome, run_apart
from lit_attn.checks.first_cell import check_before_first_cell, compare_call
from lit_attn.checks.paths import list_cases, list_presets
from lit_attn.config.cell import Cell
from lit_attn.models.attention_calls import AttentionCall, find_calls, without_foreign_parts
from lit_attn.schema.errors import ConfigError

GPU = Combination("simulated sm_90", "2.0", "0123456789ab")


class Request(NamedTuple):
    """Arguments of a check."""

    call: AttentionCall
    precision: str
    refused: Sequence[str]
    device: str


Answer = Callable[[Request], Outcome]


@pytest.fixture(autouse=True)
def simulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch report a GPU, without any record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(path_record, "_REFUSED", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (path_record, first_cell):
        monkeypatch.setattr(module, "read_combination", lambda kind: GPU)


def answer_requests(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> list[Request]:
    """Replace the process of a check by `answer`; return the list that gets every request."""
    requests: list[Request] = []

    def run(check: object, arguments: tuple[Any, ...], seconds: float) -> Outcome:
        request = Request(*arguments)
        requests.append(request)
        return answer(request)

    monkeypatch.setattr(first_cell, "run_apart", run)
    return requests


def hold(request: Request) -> Outcome:
    return Outcome(["ONE_CALL", ""])


def fail_on_flex(request: Request) -> Outcome:
    """Answer as a machine whose FLEX is wrong."""
    if "FLEX" in request.refused:
        return Outcome(["MERGED", ""])
    return Outcome(["FLEX", "mgk, fp32: the value is off"])


def cell_with(attention: object, **training: object) -> Cell:
    return digits_cell(model={"attention": attention}, training={"accelerator": "auto", **training})


def test_a_cell_checks_each_of_its_calls_once_in_its_own_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = answer_requests(monkeypatch, hold)
    check_before_first_cell(cell_with("mgk", precision="bf16"))
    line = "first cell of its kind on simulated sm_90 with torch 2.0: "
    assert capsys.readouterr().out == f"{line}checking 1 attention call in bf16 (mgk)\n"
    assert [request.precision for request in requests] == ["bf16"]
    check_before_first_cell(cell_with("mgk", precision="bf16"))
    assert len(requests) == 1
    check_before_first_cell(cell_with("mgk", precision="tf32"))
    check_before_first_cell(cell_with("belief2", precision="bf16"))
    assert len(requests) == 3


def test_a_check_has_the_order_the_heads_and_the_layers_of_the_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = answer_requests(monkeypatch, hold)
    layers = {"layers": [{"every": 2, "use": "xsa"}]}
    cell = text_cell(model={"attention": layers, "depth": 4}, training={"accelerator": "auto"})
    check_before_first_cell(cell)
    calls = [request.call for request in requests]
    assert [call.preset for call in calls] == ["standard", "xsa"]
    assert all(call.is_causal and not call.has_mask for call in calls)


def test_a_refused_path_is_replaced_by_one_that_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = answer_requests(monkeypatch, fail_on_flex)
    check_before_first_cell(cell_with("mgk"))
    assert [request.refused for request in requests] == [(), ("FLEX",)]
    assert "attention path FLEX is not used" in capsys.readouterr().out
    assert path_record.is_refused("FLEX", "cuda")
    record = PathRecord.read(GPU.file)
    assert record is not None
    assert (list(record.refused), len(record.calls)) == (["FLEX"], 1)
    # A further cell keeps the refusal, and does not try the path again.
    check_before_first_cell(cell_with("smgk"))
    assert requests[-1].refused == ("FLEX",)


def test_a_path_without_another_one_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = answer_requests(
        monkeypatch, lambda request: Outcome(["sums", "linear: the value is off"])
    )
    check_before_first_cell(cell_with("linear"))
    assert len(requests) == 2
    assert path_record.is_refused("sums", "cuda")


def test_a_layer_that_fails_on_every_path_takes_no_path_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong term of mixtures once ended the cells of every layer on a GPU."""

    def answer(request: Request) -> Outcome:
        path = "FORMED" if "ONE_CALL" in request.refused else "ONE_CALL"
        is_mixture = request.call.preset == "mgk"
        return Outcome([path, f"mgk, fp32, {path}: the gradient is off" if is_mixture else ""])

    answer_requests(monkeypatch, answer)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"fails the check .*: mgk, fp32, FORMED: the"):
            check_before_first_cell(cell_with("mgk"))
    check_before_first_cell(cell_with("standard"))
    assert path_record.refused_paths("cuda") == {}


def test_a_hang_or_a_crash_refuses_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [
        Outcome(["FLEX"], failure="no answer within 300 s, which counts as failed"),
        Outcome(["MERGED"], failure="the process crashed (exit code -11)"),
        Outcome(["FORMED", ""]),
    ]
    answer_requests(monkeypatch, lambda request: outcomes[len(request.refused)])
    check_before_first_cell(cell_with("mgk"))
    reasons = path_record.refused_paths("cuda")
    assert "no answer within 300 s" in reasons["FLEX"]
    assert "the process crashed (exit code -11)" in reasons["MERGED"]


def test_a_check_that_cannot_start_refuses_nothing_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for busy in (
        Outcome([], unavailable="cuda cannot be used: busy"),
        Outcome(["ONE_CALL"], unavailable="cuda cannot be used: busy"),
        Outcome([], failure="cuda cannot be used: busy"),
    ):
        answer_requests(monkeypatch, lambda request, busy=busy: busy)
        check_before_first_cell(cell_with("standard"))
        assert "standard could not be checked: cuda cannot be used: busy" in capsys.readouterr().out
    assert path_record.refused_paths("cuda") == {}
    requests = answer_requests(monkeypatch, hold)
    check_before_first_cell(cell_with("standard"))
    assert len(requests) == 1


def test_nothing_is_checked_after_a_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = answer_requests(monkeypatch, hold)
    path_record.remember(GPU, ["ONE_CALL"], {})
    check_before_first_cell(cell_with("standard"))
    assert requests == []


def test_a_cell_on_a_cpu_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = answer_requests(monkeypatch, hold)
    check_before_first_cell(cell_with("standard", accelerator="cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_before_first_cell(cell_with("standard"))
    assert requests == []


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    answer_requests(monkeypatch, fail_on_flex)
    check_before_first_cell(cell_with("mgk"))
    assert path_record.is_refused("FLEX", "cuda")


def test_a_part_of_a_user_is_not_part_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PRESETS["belief2"]
    assert without_foreign_parts(spec) == spec
    monkeypatch.setattr(type(spec.residual), "__module__", "own_parts")
    assert without_foreign_parts(spec) == spec.model_copy(update={"residual": FullConfig()})


def test_gpt2_checks_one_call_where_the_short_doctor_compares_many() -> None:
    written = yaml.safe_load((EXPERIMENTS / "gpt2" / "openwebtext.yaml").read_text())
    cell = Cell(study="s", variant="v", seed=0, experiment=written)
    (call,) = find_calls(cell.experiment.model, cell.experiment.data)
    assert call == AttentionCall(AttentionSpec(), 12, 64, 33, True, False, False, False)
    cpu = torch.device("cpu")
    assert len(list_presets(True, cpu)) * len(list_cases(cpu, True)) > 20


@pytest.mark.parametrize("preset", PRESETS)
def test_every_call_holds_on_a_cpu(preset: str) -> None:
    """Causal order without and with padding, and cross-attention where the preset has it."""
    spec = PRESETS[preset]
    plain = AttentionCall(spec, 4, 16, 33, True, False, False, False)
    calls = [plain, plain._replace(is_causal=False, has_mask=True)]
    if not spec.find_cross_problem():
        calls.append(plain._replace(is_causal=False, is_cross=True))
    for call in calls:
        path, failure = compare_call(call, "fp32", [], "cpu")
        assert (failure, path != "") == ("", True)


@pytest.mark.process
def test_the_check_runs_in_a_process_of_its_own() -> None:
    call = AttentionCall(PRESETS["belief2"], 4, 16, 33, False, False, False, False)
    for refused, path in ([], "MERGED"), (["MERGED"], "FORMED"):
        assert run_apart(compare_call, (call, "bf16", refused, "cpu"), 300) == Outcome([path, ""])


@pytest.mark.process
def test_a_signal_to_the_process_group_does_not_end_a_check() -> None:
    """The rank and the runner decide what a signal does; a killed check would refuse a path."""
    assert run_apart(wrong_paths.be_terminated, (), 300) == Outcome(["finished"])
