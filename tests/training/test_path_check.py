"""The first cell of its kind on a GPU checks the attention paths that it takes, and no others."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.paths import EXPERIMENTS
from helpers.training_cells import digits_cell, text_cell

from lit_attn.attention import path_record
from lit_attn.attention.path_record import Combination, PathRecord
from lit_attn.attention.residual import FullConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.config.cell import Cell
from lit_attn.doctor import cell_call
from lit_attn.doctor.layers import list_cases, list_presets
from lit_attn.models.attention_calls import AttentionCall, find_calls, without_foreign_parts
from lit_attn.training import path_check
from lit_attn.training.path_check import LIMIT, check_before_first_cell

GPU = Combination("simulated sm_90", "2.0", "0123456789ab")

Answer = Callable[[dict[str, Any]], str]


@pytest.fixture(autouse=True)
def simulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch report a GPU, without any record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(path_record, "_REFUSED", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (path_record, path_check):
        monkeypatch.setattr(module, "read_combination", lambda kind: GPU)


def answer_requests(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> list[dict[str, Any]]:
    """Replace the process of a check by `answer`; return the list that gets every request."""
    requests: list[dict[str, Any]] = []

    def run(text: str) -> "subprocess.CompletedProcess[str]":
        request = json.loads(text)
        requests.append(request)
        return subprocess.CompletedProcess([], 0, stdout=answer(request), stderr="")

    monkeypatch.setattr(path_check, "run_check", run)
    return requests


def hold(request: dict[str, Any]) -> str:
    return "ONE_CALL\n\n"


def fail_on_flex(request: dict[str, Any]) -> str:
    """Answer as a machine whose FLEX is wrong."""
    return "MERGED\n\n" if "FLEX" in request["refused"] else "FLEX\nmgk, fp32: the value is off\n"


def cell_with(attention: object, **training: object) -> Cell:
    return digits_cell(model={"attention": attention}, training={"accelerator": "auto", **training})


def test_a_cell_checks_each_of_its_calls_once_in_its_own_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = answer_requests(monkeypatch, hold)
    check_before_first_cell(cell_with("mgk", precision="bf16"))
    line = "first cell of its kind on simulated sm_90 with torch 2.0: "
    assert capsys.readouterr().out == f"{line}checking 1 attention call in bf16 (mgk)\n"
    assert [request["precision"] for request in requests] == ["bf16"]
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
    calls = [AttentionCall.from_json(request["call"]) for request in requests]
    assert [call.preset for call in calls] == ["standard", "xsa"]
    assert all(call.is_causal and not call.has_mask for call in calls)


def test_a_refused_path_is_replaced_by_one_that_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = answer_requests(monkeypatch, fail_on_flex)
    check_before_first_cell(cell_with("mgk"))
    assert [request["refused"] for request in requests] == [[], ["FLEX"]]
    assert "attention path FLEX is not used" in capsys.readouterr().out
    assert path_record.is_refused("FLEX", "cuda")
    record = PathRecord.read(GPU.file)
    assert record is not None
    assert (list(record.refused), len(record.calls)) == (["FLEX"], 1)
    # A further cell keeps the refusal, and does not try the path again.
    check_before_first_cell(cell_with("smgk"))
    assert requests[-1]["refused"] == ["FLEX"]


def test_a_path_without_another_one_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = answer_requests(monkeypatch, lambda request: "sums\nlinear: the value is off\n")
    check_before_first_cell(cell_with("linear"))
    assert len(requests) == 2
    assert path_record.is_refused("sums", "cuda")


def test_a_hang_or_a_crash_refuses_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(text: str) -> Any:
        if json.loads(text)["refused"]:
            return subprocess.CompletedProcess([], -11, stdout="MERGED\n", stderr="")
        raise subprocess.TimeoutExpired("check", LIMIT, output=b"FLEX\n")

    def end(text: str) -> Any:
        return hang(text) if len(json.loads(text)["refused"]) < 2 else formed

    formed = subprocess.CompletedProcess([], 0, stdout="FORMED\n\n", stderr="")
    monkeypatch.setattr(path_check, "run_check", end)
    check_before_first_cell(cell_with("mgk"))
    reasons = path_record.refused_paths("cuda")
    assert "no answer within 300 s" in reasons["FLEX"]
    assert "the process crashed (signal 11)" in reasons["MERGED"]


def test_a_check_that_cannot_start_refuses_nothing_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = subprocess.CompletedProcess([], 1, stdout="", stderr="cuda cannot be used: busy\n")
    monkeypatch.setattr(path_check, "run_check", lambda text: busy)
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
        assert AttentionCall.from_json(json.loads(json.dumps(call.to_json()))) == call
        path, failure = cell_call.check_call(call, "fp32", [], torch.device("cpu"))
        assert (failure, path != "") == ("", True)


@pytest.mark.process
def test_the_check_runs_in_a_process_of_its_own() -> None:
    call = AttentionCall(PRESETS["belief2"], 4, 16, 33, False, False, False, False)
    request = {"call": call.to_json(), "precision": "bf16", "refused": [], "device": "cpu"}
    done = path_check.run_check(json.dumps(request))
    assert (done.returncode, done.stdout.splitlines()) == (0, ["MERGED", ""])
    request["refused"] = ["MERGED"]
    done = path_check.run_check(json.dumps(request))
    assert done.stdout.splitlines() == ["FORMED", ""]
