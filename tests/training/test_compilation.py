"""Choice of torch.compile by the device, and what follows a failed compilation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training_cells import digits_cell, folder_of, result_of, text_cell

from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.base import TaskModule
from lit_attn.train import run_cell
from lit_attn.training import build, compilation
from lit_attn.training.compilation import choose_mode
from lit_attn.training.first_step import find_mistake

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def digits(choice: Any, **training: Any) -> Any:
    """Return a cell of one epoch with this `training.compile`."""
    return digits_cell(training={"compile": choice, "epochs": 1, **training})


def fail(graph: Any, inputs: Any) -> Any:
    """Backend of torch.compile that fails."""
    raise RuntimeError("no compiler on this machine\nwith a second line")


@pytest.fixture
def broken_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which `compile: auto` compiles, with a compiler that fails."""
    monkeypatch.setattr(compilation, "COMPILED_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(
        build, "compile_blocks", lambda network, mode: network.compile(backend=fail)
    )


@pytest.mark.parametrize(
    ("choice", "on_cpu", "on_gpu"),
    [("auto", None, "default"), (True, "default", "default"), (False, None, None)],
)
def test_the_device_decides_only_by_default(choice: Any, on_cpu: Any, on_gpu: Any) -> None:
    experiment = digits(choice).experiment
    assert choose_mode(experiment, CPU) == on_cpu
    assert choose_mode(experiment, GPU) == on_gpu


def test_the_default_is_auto() -> None:
    assert digits_cell().experiment.training.compile == "auto"


def test_the_choice_does_not_enter_the_identity() -> None:
    choices = ("auto", True, False, "cuda-graphs")
    assert len({digits(choice).fingerprint for choice in choices}) == 1


def test_cuda_graphs_need_a_gpu() -> None:
    experiment = digits("cuda-graphs").experiment
    assert choose_mode(experiment, GPU) == "reduce-overhead"
    with pytest.raises(ConfigError, match=r"^training.compile: cuda-graphs needs a GPU, .*'cpu'"):
        choose_mode(experiment, CPU)


def test_cuda_graphs_need_steps_that_can_be_replayed() -> None:
    training = {"compile": "cuda-graphs"}
    with pytest.raises(ValueError, match="one micro-batch, and this data has 2"):
        text_cell(training=training)
    text_cell(training=training, data={"accumulate": 1})
    with pytest.raises(ValueError, match=r"one device, and .* is 2"):
        text_cell(training={**training, "devices": 2}, data={"accumulate": 1})


def test_a_study_is_told_before_it_starts_that_this_machine_has_no_gpu() -> None:
    cell = text_cell(training={"compile": "cuda-graphs"}, data={"accumulate": 1})
    mistake = find_mistake([cell.model_dump(mode="json")], untried=[0])
    assert mistake is not None
    assert "cuda-graphs needs a GPU" in mistake.message


@pytest.mark.slow
@pytest.mark.usefixtures("broken_compiler")
def test_a_failed_compilation_trains_uncompiled_and_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = folder_of(digits("auto"), tmp_path / "failed")
    run_cell(failed)
    uncompiled = folder_of(digits(False), tmp_path / "uncompiled")
    run_cell(uncompiled)
    result = result_of(failed)
    assert result.is_compiled is False
    assert "no compiler on this machine" in result.compile_failure
    assert "torch.compile failed" in capsys.readouterr().out
    assert (failed / "metrics.csv").read_bytes() == (uncompiled / "metrics.csv").read_bytes()
    assert result_of(uncompiled).compile_failure == ""


@pytest.mark.usefixtures("broken_compiler")
def test_an_explicit_compilation_that_fails_ends_the_cell_in_one_line(tmp_path: Path) -> None:
    folder = folder_of(digits(True), tmp_path)
    with pytest.raises(ConfigError, match=r"^training.compile: torch.compile failed: ") as caught:
        run_cell(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "result.json").exists()


def test_an_error_of_the_network_is_no_failed_compilation() -> None:
    assert not compilation.is_compilation_failure(RuntimeError("shapes differ"))


@pytest.mark.slow
def test_evaluations_do_not_replay_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric may keep outputs, which the next replay would overwrite."""
    modes: list[bool] = []

    def count(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            modes.append(torch.is_grad_enabled())
            return graph(*arguments)

        return run

    monkeypatch.setattr(build, "choose_mode", lambda experiment, device: "reduce-overhead")
    monkeypatch.setattr(
        TaskModule, "compile_network", lambda task: task.network.compile(backend=count)
    )
    folder = folder_of(digits(True, epochs=2), tmp_path)
    run_cell(folder)
    # The second epoch, after an evaluation, replays graphs too.
    assert len(modes) == result_of(folder).steps
    assert all(modes)
