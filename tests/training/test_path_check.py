"""The first cell on a new combination of GPU, torch and code checks the attention paths."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lit_attn.attention import path_record
from lit_attn.attention.path_record import Combination, PathRecord
from lit_attn.training import path_check
from lit_attn.training.path_check import LIMIT, check_before_first_cell

GPU = Combination("simulated sm_90", "2.0", "0123456789ab")


@pytest.fixture(autouse=True)
def simulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch report a GPU, without any record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(path_record, "_REFUSED", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (path_record, path_check):
        monkeypatch.setattr(module, "read_combination", lambda kind: GPU)


def count_runs(monkeypatch: pytest.MonkeyPatch, doctor: Callable[[float], str]) -> list[float]:
    """Replace the process by `doctor`; return the list that gets the limit of every run."""
    limits: list[float] = []

    def run(seconds: float) -> str:
        limits.append(seconds)
        return doctor(seconds)

    monkeypatch.setattr(path_check, "run_doctor", run)
    return limits


def test_only_the_first_cell_runs_the_doctor_and_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def doctor(seconds: float) -> str:
        path_record.remember(GPU, ["ONE_CALL"], {"MERGED": "mgk, bf16: the value is off"})
        return "record: doctor"

    limits = count_runs(monkeypatch, doctor)
    check_before_first_cell("auto")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("first cell on simulated sm_90 with torch 2.0: checking")
    assert second.startswith("attention path MERGED is not used")
    assert path_record.is_refused("MERGED", "cuda")
    check_before_first_cell("cuda")
    assert capsys.readouterr().out.splitlines() == [second]
    assert limits == [LIMIT]


def test_a_hang_of_the_doctor_leaves_formed_weights_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def doctor(seconds: float) -> str:
        raise subprocess.TimeoutExpired("doctor", seconds)

    count_runs(monkeypatch, doctor)
    check_before_first_cell("auto")
    assert "did not end within" in capsys.readouterr().out
    record = PathRecord.read(GPU.file)
    assert record is not None
    assert "FORMED" not in record.refused
    assert {"ONE_CALL", "MERGED"} <= record.refused.keys()
    assert path_record.is_refused("MERGED", "cuda")


def test_a_doctor_that_cannot_start_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count_runs(monkeypatch, lambda seconds: "VERDICT: not checked: path FLEX (cuda is busy)")
    check_before_first_cell("auto")
    assert "could not be checked: VERDICT: not checked" in capsys.readouterr().out
    assert path_record.refused_paths("cuda") == {}


def test_a_cell_on_a_cpu_runs_no_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = count_runs(monkeypatch, lambda seconds: "")
    check_before_first_cell("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_before_first_cell("auto")
    assert limits == []


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    count_runs(monkeypatch, lambda seconds: "")
    check_before_first_cell("auto")
    path_check.refuse_all(GPU, "a hang")
    assert path_record.is_refused("MERGED", "cuda")
