"""Memory of a GPU that a training is expected to hold, from the step of the check."""

from typing import Any

import pytest
import torch
from helpers.fake_gpu import rehearsal
from helpers.training_cells import digits_cell, text_cell

from lit_attn.attention import flex, path_record
from lit_attn.config.cell import Cell
from lit_attn.models import factory
from lit_attn.training import first_step, step_memory
from lit_attn.training.recording import CUDA_CONTEXT

RESERVED = 1000
"""Bytes that the allocator of the simulated GPU has reserved."""


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Values of the last step, which is made on the CPU and counts as one on a GPU."""
    values: dict[str, Any] = {}

    def expect(cell: Cell, data: Any, trainer: Any, device: torch.device) -> int | None:
        tensors = factory.list_tensors(vars(data))
        values["data"] = sum(tensor.nbytes for tensor in tensors)
        return step_memory.expect_memory(cell, data, trainer, torch.device("cuda"))

    monkeypatch.setattr(first_step, "expect_memory", expect)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: RESERVED)
    return values


def expect(cell: Cell) -> int | None:
    """Return the memory that the check of a cell expects."""
    ends: list[first_step.CellEnd] = []
    mistake = first_step.find_mistake(
        [cell.model_dump(mode="json")],
        untried=[0],
        end_cell=lambda number, end: ends.append(end),
    )
    assert mistake is None
    (end,) = ends
    return end.memory


def test_states_and_data_are_added_to_the_memory_of_the_step(expected: dict[str, Any]) -> None:
    cell = digits_cell()
    network = factory.build(cell.experiment.model, cell.experiment.data, "meta")
    parameters = list(network.parameters())
    memory = expect(cell)
    assert memory is not None
    # Adam's two averages in float32, and a step number for each parameter.
    states = 2 * 4 * factory.count(network) + 4 * len(parameters)
    assert memory == RESERVED + CUDA_CONTEXT + states + expected["data"]
    # Images of 8 x 8 bytes.
    assert expected["data"] > 1700 * 64


@pytest.mark.usefixtures("expected")
def test_gradients_stay_between_the_micro_batches_of_a_step() -> None:
    cell = text_cell(data={"accumulate": 1})
    memory = expect(cell)
    assert memory is not None
    network = factory.build(cell.experiment.model, cell.experiment.data, "meta")
    accumulated = expect(text_cell(data={"accumulate": 2}))
    assert accumulated == memory + 4 * factory.count(network)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on")
def test_a_step_on_a_gpu_has_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = digits_cell(training={"accelerator": "cuda"})
    with rehearsal():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**36, 2**36))
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: RESERVED)
        memory = expect(cell)
    assert memory is not None
    assert memory > RESERVED + CUDA_CONTEXT


def test_a_cpu_expects_nothing() -> None:
    assert expect(digits_cell()) is None


@pytest.mark.usefixtures("expected")
@pytest.mark.parametrize(
    "training", [{"devices": 2}, {"compile": "cuda-graphs"}, {"compile": "step-graph"}]
)
def test_nothing_is_expected_of_several_devices_and_cuda_graphs(
    training: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The step is made on a CPU, which has no CUDA graphs.
    monkeypatch.setattr(first_step, "choose_mode", lambda experiment, device: None)
    assert expect(digits_cell(training=training)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on")
def test_the_step_of_the_check_compiles_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation of flex_attention took half a minute on a GPU, before any cell had begun."""
    calls: list[str] = []
    compiled = flex.weighted_sums

    def count(*arguments: Any) -> Any:
        calls.append("flex")
        return compiled(*arguments)

    cell = text_cell(model={"attention": "belief2", "dim": 32}, training={"accelerator": "cuda"})
    with rehearsal():
        monkeypatch.setattr(flex, "_compiled", lambda: count)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**36, 2**36))
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: RESERVED)
        assert expect(cell) is not None
        assert calls == []
        assert not path_record.is_refused("FLEX", "cuda")
