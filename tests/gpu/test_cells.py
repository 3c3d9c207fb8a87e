"""Complete cells and benchmarks on a fake GPU, from the configuration to the result.

The docstring of `fake_gpu` lists what such a test can detect.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.digit_folders import experiment, write
from helpers.fake_gpu import NAME, rehearsal
from helpers.paths import EXPERIMENTS
from helpers.stopping import stop_at
from helpers.training_cells import (
    cell_of,
    composition_cell,
    digits_cell,
    folder_of,
    result_of,
    scenes_cell,
    text_cell,
)
from torch import nn

from lit_attn.bench.__main__ import main
from lit_attn.cells.failure import Preempted
from lit_attn.config.cell import Cell
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.tasks.step_graph import Recorder, StepOutputs, Work
from lit_attn.train import run_cell
from lit_attn.training import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on"),
]


LOOKING = {"diagnostics": {"kinds": ["residual", "rank", "maps", "heads", "mixture"]}}
MIXED = {"attention": {"similarity": {"kind": "mixture", "prior": "m-step"}}}
SET_ADAM = {"kind": "set-adam", "lr": 1e-3}


def listops_cell() -> Cell:
    sections = parse_plain((EXPERIMENTS / "long_range_arena" / "listops.yaml").read_text(), "text")
    sections["data"] |= {"lengths": (5, 40), "depth": 4, "context": 40}
    sections["data"] |= {"train": 64, "val": 7, "test": 5, "eval_batch_size": 4}
    return cell_of(sections)


def folders_cell(root: Path) -> Cell:
    data = {"repeats": 2, "sizes": [8]}
    return cell_of(experiment(write(root), data=data, training={"average": {"decay": 0.9}}))


CELLS: dict[str, tuple[str, Callable[[Path], Cell]]] = {
    "looked at": (
        "bf16",
        lambda root: digits_cell(
            training=LOOKING | {"average": {"decay": 0.9}, "clip": 1.0}, model=MIXED
        ),
    ),
    "set-adam": ("fp16", lambda root: digits_cell(optimizer=SET_ADAM)),
    "clipped": ("fp16", lambda root: digits_cell(training={"clip": 1.0})),
    "text": ("bf16", lambda root: text_cell(training=LOOKING)),
    "composition": ("fp32", lambda root: composition_cell()),
    "sequences": ("fp16", lambda root: listops_cell()),
    "class folders": ("bf16", lambda root: folders_cell(root / "images")),
    "scenes": (
        "bf16",
        lambda root: scenes_cell(root / "scenes", training={"average": {"decay": 0.9}}),
    ),
}


def on_gpu(cell: Cell, precision: str) -> Cell:
    # Code cannot be compiled for the simulated GPU.
    update = {"accelerator": "cuda", "precision": precision, "compile": "none"}
    training = cell.experiment.training.model_copy(update=update)
    # The simulated GPU has no memory to which a thread of a worker could pin batches.
    data = cell.experiment.data.model_copy(update={"workers": 0})
    changed = cell.experiment.model_copy(update={"training": training, "data": data})
    return cell.model_copy(update={"experiment": changed})


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_every_task_runs(name: str, tmp_path: Path) -> None:
    precision, cell = CELLS[name]
    folder = folder_of(on_gpu(cell(tmp_path), precision), tmp_path)
    with rehearsal():
        run_cell(folder, smoke=True)
    result = result_of(folder)
    assert result.device == NAME


@pytest.mark.parametrize("optimizer", [{}, SET_ADAM], ids=["adamw", "set-adam"])
def test_a_stopped_cell_resumes(
    optimizer: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = digits_cell(optimizer=optimizer, training={"average": {"decay": 0.9}, "epochs": 2})
    folder = folder_of(on_gpu(cell, "fp16"), tmp_path)
    with rehearsal():
        with monkeypatch.context() as patch:
            stop_at(patch, 5)
            with pytest.raises(Preempted, match="saved at step 5"):
                run_cell(folder)
        run_cell(folder)
    assert result_of(folder).steps == 8


@pytest.mark.parametrize("name", ["clipped", "set-adam", "text", "composition", "sequences"])
def test_a_step_does_not_wait_for_the_gpu(name: str, tmp_path: Path) -> None:
    """The check that the loss is finite reads a copy that has arrived."""
    _, make = CELLS[name]
    cell = on_gpu(make(tmp_path), "fp32")
    with rehearsal() as reads:
        gpu = torch.device("cuda")
        data, task, *_ = build.build(cell, gpu)
        task.to(gpu).train()
        optimizer = cell.experiment.optimizer.build(task.network)
        reads.clear()
        batches = iter(data.train_dataloader())
        for number in range(2):
            task.training_step(next(batches), number).backward()
            nn.utils.clip_grad_norm_(task.parameters(), 1.0)
            optimizer.step()
        assert reads == []


@pytest.mark.parametrize(
    "arguments",
    [
        "attention --presets belief2 dcmha --tokens 20 --batch 2 --modes eager",
        "memory --presets mgk --tokens 20 40",
        "decoding --presets mgk/windows --tokens 8 --generate 2 --depth 1",
    ],
)
def test_benchmarks_run(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--dim 24 --heads 3 --rounds 2 --device cuda"
    with rehearsal():
        assert main([*arguments.split(), *shape.split()]) == 0
    assert NAME in capsys.readouterr().out


def count_waits(cell: Cell, root: Path) -> int:
    """Return how often a training on the simulated GPU waits for it."""
    folder = folder_of(on_gpu(cell, "bf16"), root)
    with rehearsal() as reads:
        run_cell(folder)
    return len(reads)


def test_the_loops_do_not_wait_for_the_gpu(tmp_path: Path) -> None:
    """More steps between the same evaluations, or more batches in each, wait no more often."""
    waits = []
    loops = {"few": {}, "more steps": {"epoch_steps": 4}, "more batches": {"eval_batch_size": 4}}
    for name, further in loops.items():
        data = {"accumulate": 1, "epoch_steps": 2, "eval_batch_size": 8, "eval_tokens": 256}
        data |= further
        training = {"epochs": 2, "clip": 1.0, "average": {"decay": 0.9}}
        cell = text_cell(data=data, training=training, model={"depth": 1})
        waits.append(count_waits(cell, tmp_path / name))
    assert waits[0] == waits[1] == waits[2] > 0


@pytest.mark.parametrize("name", ["looked at", "text"])
def test_a_recorded_step_contains_nothing_that_waits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph contains neither a value that is read nor numbers that are copied to the GPU."""
    recorded = []
    with rehearsal() as reads:

        class Rehearsed(Recorder):
            """Recorder that computes every step: fake tensors have no numbers to repeat."""

            work: Work

            def warm_up(self, work: Work) -> StepOutputs:
                return work()

            def record(self, work: Work) -> StepOutputs:
                self.work = work
                reads.clear()
                outputs = work()
                recorded.append(list(reads))
                return outputs

            def replay(self) -> None:
                self.work()

        monkeypatch.setattr(build, "should_compile", lambda experiment, device: False)
        monkeypatch.setattr(build, "CudaRecorder", Rehearsed)
        precision, make = CELLS[name]
        cell = on_gpu(make(tmp_path), precision)
        changes = {"compile": "step", "epochs": 2}
        training = cell.experiment.training.model_copy(update=changes)
        data = cell.experiment.data.model_copy(update={"accumulate": 1})
        experiment = cell.experiment.model_copy(update={"training": training, "data": data})
        run_cell(folder_of(cell.model_copy(update={"experiment": experiment}), tmp_path))
    assert recorded == [[]]
