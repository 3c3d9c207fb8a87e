"""The command `lit-attn doctor`: its record, table, verdict and exit code."""

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_attn.__main__ import main
from lit_attn.attention.spec import PRESETS
from lit_attn.checks import paths
from lit_attn.checks.comparison import MOST_EPS, LayerCheck, largest, relative_errors
from lit_attn.checks.paths import (
    SHAPES,
    Selection,
    build_layer,
    explain_path,
    list_cases,
    list_precisions,
    list_presets,
)
from lit_attn.doctor import examine, machine, trainings
from lit_attn.doctor.trainings import TrainingCheck, compare
from lit_attn.doctor.verdict import Choice, Examination, PathCheck, Speed, make_table

CPU = torch.device("cpu")
SHORT = Selection(is_short=True)


def examination(**changes: Any) -> Examination:
    """Return a short examination in which everything holds, with `changes`."""
    content: dict[str, Any] = {
        "checked": "2026-11-26T08:00:00+00:00",
        "is_short": True,
        "device": "CPU x86_64 AVX2",
        "code": "0123456789ab",
        "machine": {"torch": "2.15.0"},
        "paths": [PathCheck("ONE_CALL", 1)],
        "layers": [LayerCheck("standard", "ONE_CALL", "float32", True, 1.0, 2.0)],
        "choices": [Choice("standard", "ONE_CALL", "softmax of dot products")],
        "compiled": [],
        "trainings": [],
        "speeds": {},
    }
    return Examination(**content | changes)


@pytest.fixture
def checked_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, tuple[list[PathCheck], list[LayerCheck]]]:
    """Outcome that replaces the checks of the layers, under "paths".

    The checks themselves are tested in test_wrong_paths.py, and CI runs all of them.
    """
    layer = LayerCheck("standard", "ONE_CALL", "float32", False, 0.5, 1.5)
    outcome = {"paths": ([PathCheck("ONE_CALL", 1)], [layer])}
    monkeypatch.setattr(examine, "check_paths", lambda *_: outcome["paths"])
    return outcome


def test_the_short_form_writes_a_folder_that_can_be_sent(
    checked_paths: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--short", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "VERDICT: everything that was checked holds" in lines
    (folder,) = (tmp_path / "out").iterdir()
    assert lines[-1] == f"record: {folder}"
    assert torch.__version__.replace("+", "-") in folder.name
    assert folder.name.endswith("-short")
    record = json.loads((folder / "doctor.json").read_text())
    assert record["verdict"] == "VERDICT: everything that was checked holds"
    assert record["layers"][0]["gradient_error"] == 1.5
    assert {choice["preset"] for choice in record["choices"]} == set(PRESETS)
    assert (folder / "doctor.txt").read_text().splitlines() == lines[:-1]


def test_the_exit_code_of_a_failure_is_1_and_json_goes_to_the_output(
    checked_paths: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = LayerCheck("mgk", "MERGED", "bf16", False, math.nan, math.inf)
    checked_paths["paths"] = ([PathCheck("MERGED", 1, wrong.failure)], [wrong])
    arguments = ["doctor", "--short", "--json", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    problem = "path MERGED (mgk, bf16, not causal: the value is not a number)"
    assert record["problems"] == [problem]
    assert record["layers"][0]["value_error"] is None
    assert f"VERDICT: does not hold on this machine: {problem}" in printed.err


def test_a_wrong_command_line_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--device", "cuda", "--out", str(tmp_path)]) == 2
    file = tmp_path / "file"
    file.touch()
    assert main(["doctor", "--out", str(file)]) == 2
    assert main(["doctor", "--presets", "beleif", "--out", str(tmp_path)]) == 2
    plug_in = tmp_path / "without_parts.py"
    plug_in.touch()
    assert main(["doctor", "--parts", str(plug_in), "--out", str(tmp_path)]) == 2
    first, second, third, fourth = capsys.readouterr().err.splitlines()
    assert "torch finds no GPU; write --device cpu" in first
    assert str(file) in second
    assert "--presets: unknown preset 'beleif'; did you mean 'belief'?" in third
    assert "--parts: these files have no part and no preset to compare" in fourth


def test_the_verdict_names_everything_that_does_not_hold() -> None:
    assert examination().verdict == "VERDICT: everything that was checked holds"
    compiled_layer = LayerCheck("mgk", "FLEX", "float32", False, 1.0, MOST_EPS + 1)
    training = TrainingCheck("same seed twice", 0.5, 0.0)
    wrong = examination(
        paths=[PathCheck("FLEX", 3, "no answer within 300 s, which counts as failed")],
        compiled=[compiled_layer],
        compiled_failure="the process crashed (exit code -11)",
        trainings=[training],
    )
    assert wrong.verdict == (
        "VERDICT: does not hold on this machine: "
        "path FLEX (no answer within 300 s, which counts as failed); "
        "compiled FLEX (mgk, float32, not causal: the gradient is off by 31 eps (limit 30)); "
        "compiled layers (the process crashed (exit code -11)); "
        "same seed twice: losses differ by 0.5 (limit 0)"
    )


def test_the_verdict_names_what_could_not_be_checked() -> None:
    unknown = examination(
        paths=[PathCheck("FLEX", 0, unavailable="cuda cannot be used: busy")],
        compiled_not_checked="there is no C++ compiler",
        trainings=[TrainingCheck("two ranks", 0.0, 0.0, not_checked="there is one GPU")],
    )
    assert unknown.list_problems() == []
    assert unknown.verdict == (
        "VERDICT: everything that was checked holds; not checked: "
        "path FLEX (cuda cannot be used: busy); compiled layers (there is no C++ compiler); "
        "two ranks (there is one GPU)"
    )


def test_the_table_has_the_largest_error_and_speeds_of_every_compared_preset() -> None:
    layers = [
        LayerCheck("standard", "ONE_CALL", "float32", True, 1.0, 2.0),
        LayerCheck("standard", "ONE_CALL", "bf16", True, 3.04, 2.0),
        LayerCheck("mgk", "FLEX", "bf16", True, math.nan, 2.0),
    ]
    choices = [Choice(name, "ONE_CALL", "") for name in ("standard", "mgk", "dcmha")]
    speeds = {"standard": Speed(1.5, 0.1, 1.0, 2**20, 1.0)}
    lines = make_table(examination(layers=layers, choices=choices, speeds=speeds))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(line) for line in lines}) == 1
    assert rows[2] == [
        "standard", "ONE_CALL", "3.0 eps (bf16)", "1.5 ± 0.1 ms", "1 MiB", "1.00", "1.00"
    ]  # fmt: skip
    assert rows[3] == ["mgk", "ONE_CALL", "FAILED (bf16)", "", "", "", ""]
    assert len(rows) == 4
    short = make_table(examination())
    assert "time" not in short[0]


def test_errors_of_zero_gradients_are_relative_to_the_largest_gradient() -> None:
    one = torch.ones(4)
    expected = [one, one, 2 * one, 0 * one]
    actual = [1.1 * one, one, 2 * one, 0.02 * one]
    value, x, first, second = relative_errors(actual, expected)
    assert value == pytest.approx(0.1)
    assert x == first == 0
    assert second == pytest.approx(0.1)
    assert math.isnan(largest([1.0, math.nan, 2.0]))
    assert largest([1.0, 3.0]) == 3.0


def test_the_short_form_has_a_preset_for_each_set_of_properties() -> None:
    chosen = list_presets(SHORT, CPU)
    reasons = {explain_path(build_layer(name, SHAPES[0]), CPU) for name in chosen}
    all_reasons = {explain_path(build_layer(name, SHAPES[0]), CPU) for name in PRESETS}
    assert reasons == all_reasons
    assert list_presets(Selection(is_short=False), CPU) == list(PRESETS)
    assert len(list_cases(CPU, SHORT)) == 2


def test_precisions_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [precision.name for precision in list_precisions(CPU)]
    assert names == ["float32", "bf16", "fp16"]
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert [precision.name for precision in list_precisions(gpu)] == ["float32", "fp16"]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    names = [precision.name for precision in list_precisions(gpu)]
    assert names == ["float32", "tf32", "bf16", "fp16"]


def test_the_machine_is_described_without_names_of_users(tmp_path: Path) -> None:
    facts = machine.describe_machine(Path("runs"))
    names = ["torch", "CUDA", "driver", "NCCL", "Triton", "MPS", "SLURM", "free disk", "locks"]
    assert set(names) <= facts.keys()
    assert facts["locks"] == "work"
    assert str(Path.home()) not in str(facts)


def test_a_disk_without_locks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(machine.os, "link", refuse)
    facts = machine.describe_machine(tmp_path / "runs")
    assert facts["locks"] == "do not work on this file system: Operation not supported"


def test_a_driver_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", hang)
    assert machine.describe_machine(Path("runs"))["driver"] == "nvidia-smi fails"


def test_trainings_are_compared_by_their_losses() -> None:
    first = trainings.Trained({"val/loss": 2.0, "train/loss": 1.0})
    other = trainings.Trained({"val/loss": 2.2, "train/loss": 1.0})
    assert compare("repeat", first, first, 0.0).describe() == "repeat: equal, bit by bit"
    assert compare("repeat", other, first, 0.2).problem == ""
    assert "differ by 0.1 (limit 0.05)" in compare("repeat", other, first, 0.05).problem
    infinite = trainings.Trained({"val/loss": math.nan, "train/loss": 1.0})
    assert compare("repeat", infinite, first, 0.2).problem
    failed = trainings.Trained({}, failure="exit code 1: no memory")
    assert compare("repeat", failed, first, 0.2).problem == "repeat: exit code 1: no memory"
    skipped = trainings.Trained({}, not_checked="it ended too early")
    assert "not checked, it ended too early" in compare("repeat", skipped, first, 0.2).describe()


@pytest.mark.process
def test_an_interrupted_training_continues(tmp_path: Path) -> None:
    cell = trainings.make_cell(CPU)
    resumed = trainings.train(tmp_path / "resumed", cell, is_interrupted=True)
    assert resumed.failure == resumed.not_checked == ""
    assert "val/loss" in resumed.losses
    assert len(list((tmp_path / "resumed").glob("doctor.log"))) == 1
    assert "saved at step" in (tmp_path / "resumed" / "doctor.log").read_text()


def test_blocks_are_measured_relative_to_the_standard_layer() -> None:
    speeds = examine.measure_presets(["standard", "mgk"], CPU)
    assert list(speeds) == ["standard", "mgk"]
    assert speeds["standard"].memory_ratio == pytest.approx(1.0, abs=0.05)
    assert speeds["mgk"].milliseconds > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_compiled_layers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "list_presets", lambda selection, device: ["standard"])
    (check,) = paths.check_compiled("cpu", 0, 1)
    assert check.failure == ""
    assert paths.has_compiler(CPU)


def test_without_a_compiler_compiled_layers_are_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(paths.shutil, "which", lambda name: None)
    assert not paths.has_compiler(CPU)
    assert paths.has_compiler(torch.device("cuda"))
