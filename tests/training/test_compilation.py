"""Choice of torch.compile by the device, and what follows a failed compilation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mistakes import find_message
from helpers.training_cells import digits_cell, folder_of, result_of, text_cell

from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError
from lit_attn.train import run_cell
from lit_attn.training import build, compilation
from lit_attn.training.compilation import should_compile

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
    monkeypatch.setattr(build, "compile_blocks", lambda network: network.compile(backend=fail))


@pytest.mark.parametrize(
    ("choice", "on_cpu", "on_gpu"),
    [("auto", False, True), ("blocks", True, True), ("none", False, False)],
)
def test_the_device_decides_only_by_default(choice: str, on_cpu: bool, on_gpu: bool) -> None:
    experiment = digits(choice).experiment
    assert should_compile(experiment, CPU) is on_cpu
    assert should_compile(experiment, GPU) is on_gpu


def test_the_default_is_auto() -> None:
    assert digits_cell().experiment.training.compile == "auto"


def test_the_choice_does_not_enter_the_identity() -> None:
    choices = ("auto", "blocks", "step", "none")
    assert len({digits(choice).fingerprint for choice in choices}) == 1


@pytest.mark.parametrize("choice", [True, False, "cuda-graphs", "step-graph"])
def test_the_words_of_earlier_versions_are_one_line(choice: Any) -> None:
    values = digits("auto").model_dump(mode="json")
    values["experiment"]["training"]["compile"] = choice
    with pytest.raises(ConfigError, match=r"compile: '\S+' is not a choice; ") as caught:
        Cell.parse(values, "config.yaml")
    assert "\n" not in str(caught.value)


def test_a_study_is_told_before_it_starts_that_this_machine_has_no_gpu() -> None:
    cell = text_cell(training={"compile": "step"}, data={"accumulate": 1})
    assert "step needs a GPU" in find_message(cell, untried=[0])


@pytest.mark.slow
@pytest.mark.usefixtures("broken_compiler")
def test_a_failed_compilation_trains_uncompiled_and_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = folder_of(digits("auto"), tmp_path / "failed")
    run_cell(failed)
    uncompiled = folder_of(digits("none"), tmp_path / "uncompiled")
    run_cell(uncompiled)
    result = result_of(failed)
    assert result.is_compiled is False
    assert "no compiler on this machine" in result.compile_failure
    assert "torch.compile failed" in capsys.readouterr().out
    assert (failed / "metrics.csv").read_bytes() == (uncompiled / "metrics.csv").read_bytes()
    assert result_of(uncompiled).compile_failure == ""


@pytest.mark.usefixtures("broken_compiler")
def test_an_explicit_compilation_that_fails_ends_the_cell_in_one_line(tmp_path: Path) -> None:
    folder = folder_of(digits("blocks"), tmp_path)
    with pytest.raises(ConfigError, match=r"^training.compile: torch.compile failed: ") as caught:
        run_cell(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "result.json").exists()


@pytest.mark.parametrize(
    ("make_cell", "names"),
    [(digits_cell, ["VisionTransformer"]), (text_cell, ["Trunk"])],
    ids=["images", "text"],
)
def test_a_network_without_blocks_is_compiled_where_its_task_says(
    make_cell: Callable[..., Cell], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def note(module: torch.nn.Module, **_: Any) -> None:
        compiled.append(type(module).__name__)

    monkeypatch.setattr(build, "is_mostly_blocks", lambda network: False)
    monkeypatch.setattr(torch.nn.Module, "compile", note)
    build.build(make_cell(training={"compile": "blocks"}), CPU)
    assert compiled == names


def test_an_error_of_the_network_is_no_failed_compilation() -> None:
    assert not compilation.is_compilation_failure(RuntimeError("shapes differ"))
