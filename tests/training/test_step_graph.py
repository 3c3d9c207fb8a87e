"""Recorded training steps compute what the same steps compute without a record."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.finished_cells import train_cell
from helpers.paths import ROOT
from helpers.recorded_steps import NoRecord, RecordingCPU, use
from helpers.stopping import run_until
from helpers.training_cells import cell_of, digits_cell, folder_of, result_of, text_cell
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.tasks import step_graph
from lit_attn.tasks.step_graph import Recorder, StepGraph
from lit_attn.train import run_cell
from lit_attn.training.compilation import should_compile

GRAPH = {"compile": "step", "accelerator": "auto"}
ONE_BATCH = {"accumulate": 1, "epoch_steps": 6}


def digits(training: dict[str, Any] | None = None, **changes: Any) -> Cell:
    return digits_cell(training={**GRAPH, "epochs": 2, **(training or {})}, **changes)


def text(training: dict[str, Any] | None = None, **changes: Any) -> Cell:
    return text_cell(training={**GRAPH, "epochs": 2, **(training or {})}, data=ONE_BATCH, **changes)


def probe() -> Cell:
    """Return a cell of recall, whose task and data are plug-ins."""
    folder = ROOT / "experiments" / "probes"
    experiment = parse_plain((folder / "recall.yaml").read_text(), "text")
    experiment["training"] |= {**GRAPH, "epochs": 2}
    experiment["schedule"]["warmup"] = 1
    load_parts([folder / "recall.py"])
    return cell_of(experiment, parts=[str(folder / "recall.py")])


def mixture(prior: str) -> dict[str, Any]:
    return {"attention": {"similarity": {"kind": "mixture", "prior": prior}}}


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a trained cell, and its averaged ones."""
    weights = {}
    for path in sorted(folder.rglob("*.pt")):
        for name, value in torch.load(path, weights_only=True).items():
            weights[f"{path.name} {name}"] = value
    assert weights
    return weights


def train(
    cell: Cell, root: Path, monkeypatch: pytest.MonkeyPatch, recorder: type = RecordingCPU
) -> Path:
    """Return the folder of a cell that was trained with this recorder."""
    folder = folder_of(cell, root / recorder.__name__)
    with monkeypatch.context() as patch:
        use(patch, recorder)
        run_cell(folder)
    return folder


CELLS = {
    "dropout and paths": digits(),
    "clipped and averaged": digits({"clip": 0.5, "average": {"decay": 0.9}}),
    "training accuracy": digits(data={"augment": ["normalize"]}),
    "bfloat16": digits({"precision": "bf16"}),
    "mixture that learns": digits(model=mixture("m-step")),
    "layer decay": digits(optimizer={"layer_decay": 0.7}),
    "coupled decay": digits(optimizer={"kind": "adam", "weight_decay": 0.1}),
    "text": text(),
    "muon": digits(optimizer={"kind": "muon", "lr": 0.02, "weight_decay": 0.1, "layer_decay": 0.7}),
    "probe": probe(),
    "sgd": digits(optimizer={"kind": "sgd", "lr": 0.1, "weight_decay": 0.1}),
    "lion": digits(optimizer={"kind": "lion", "lr": 1e-3, "weight_decay": 0.1}),
}


def assert_equal_trainings(first: Path, second: Path) -> None:
    """Assert that two cells have recorded the same values and have the same weights."""
    assert (first / "metrics.csv").read_bytes() == (second / "metrics.csv").read_bytes()
    expected = weights_of(second)
    weights = weights_of(first)
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_a_record_changes_no_value(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = train(CELLS[name], tmp_path, monkeypatch)
    assert_equal_trainings(recorded, train(CELLS[name], tmp_path, monkeypatch, NoRecord))


def test_the_steps_after_the_warm_up_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    folder = train_cell(digits(), tmp_path)
    assert RecordingCPU.replays == result_of(folder).steps - step_graph.WARM_UP_STEPS == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("clipped and averaged", 1e-5),
        ("mixture that learns", 1e-5),
        # Muon makes matrices orthogonal in bfloat16, which rounds a changed number elsewhere.
        ("muon", 1e-3),
        ("sgd", 1e-5),
        ("lion", 1e-5),
    ],
)
def test_only_roundings_of_rate_and_step_differ_from_other_trainings(
    name: str, error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = CELLS[name]
    recorded = train(cell, tmp_path, monkeypatch)
    training = cell.experiment.training.model_copy(update={"compile": "none"})
    experiment = cell.experiment.model_copy(update={"training": training})
    plain = train_cell(cell.model_copy(update={"experiment": experiment}), tmp_path / "plain")
    expected = weights_of(plain)
    for key, value in weights_of(recorded).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=error)


def test_a_stopped_cell_resumes_with_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts warm up with steps that the uninterrupted training has replayed."""
    cell = CELLS["clipped and averaged"]
    uninterrupted = train(cell, tmp_path, monkeypatch)
    stopped = folder_of(cell, tmp_path / "stopped")
    use(monkeypatch)
    for step in (2, 6):
        run_until(step, stopped)
    run_cell(stopped)
    assert_equal_trainings(stopped, uninterrupted)


def test_the_recorded_norms_are_those_before_clipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = digits({"clip": 1e-3, "log_every": 1})
    norms = []
    for recorder in (RecordingCPU, NoRecord):
        folder = train(cell, tmp_path, monkeypatch, recorder)
        events = EventAccumulator(str(folder)).Reload().Scalars("steps/gradient-norm")
        norms.append([event.value for event in events])
    assert norms[0] == norms[1]
    assert len(set(norms[0])) == 8
    assert min(norms[0]) > 1e-2


class Counted(nn.Linear):
    """Layer of which the host reads a value in each step."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.is_meta or y.sum().item() < 1e9 else 2 * y


def test_a_step_that_cannot_be_recorded_ends_the_cell_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn, "Linear", Counted)
    folder = folder_of(digits(), tmp_path)
    use(monkeypatch)
    with pytest.raises(ConfigError, match=r"step cannot record .*capturing") as caught:
        run_cell(folder)
    assert "\n" not in str(caught.value)
    assert "Write auto" in str(caught.value)


class Toy(L.LightningModule):
    """Task with the parts that a recorded step needs, and one weight for each of three inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.means: list[float] = []
        self.optimizer_in_use = torch.optim.AdamW([self.weight], lr=0.1, fused=True)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.optimizer_in_use

    @property
    def global_step(self) -> int:
        return len(self.means)

    def rate(self, step: int) -> float:
        return 0.1 / (step + 1)

    def loss(self, batch: Any) -> Tensor:
        (x,), scale = batch["entries"]
        return scale * (self.weight * x).square().mean()

    def record_training(self, name: str, values: Tensor) -> None:
        raise AssertionError("this loss records nothing")

    def configure_gradient_clipping(self, *arguments: Any) -> None:
        pass

    def end_learning_step(self) -> None:
        pass


def batches() -> Iterator[Any]:
    """Yield batches of which one in four has another shape, or another number."""
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        rows = 5 if number % 4 == 1 else 4
        scale = 2.0 if number % 4 == 3 else 1.0
        yield {"entries": ([torch.randn(rows, 3, generator=generator)], scale)}


def make_steps(recorder: type[Recorder], trainings: int = 1) -> list[float]:
    """Return the losses of trainings that share a StepGraph and have an optimiser each."""
    graph = StepGraph(recorder, None)
    losses: list[float] = []
    for _ in range(trainings):
        task: Any = Toy()
        for batch in batches():
            task.means.append(graph.step(task, batch).item())
        losses += task.means
    return losses


@pytest.mark.parametrize("trainings", [1, 2])
def test_other_batches_and_trainings_do_without_the_record(
    trainings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after a batch of another shape use the record again, and the next training a new one.

    Weights of the first training have left the device by then.
    """
    recorded = make_steps(RecordingCPU, trainings)
    monkeypatch.setattr(step_graph, "WARM_UP_STEPS", 10**9)
    assert recorded == make_steps(NoRecord, trainings)
    assert len(set(recorded)) == 12


def own_task() -> Cell:
    """Return a cell of a task of which nothing is known."""
    written = digits().model_dump(mode="json", exclude={"metric"})
    written["experiment"]["task"] = {"kind": "module", "import": "helpers.block_networks:Task"}
    return Cell.model_validate(written)


CYCLE = {"kind": "one-cycle", "warmup": 1, "cycle": [0.85, 0.95]}
OBSERVER = {"kind": "module", "target": "lightning.pytorch.callbacks:DeviceStatsMonitor"}

REFUSED: dict[str, Callable[[], Cell]] = {
    "does not record the steps of task 'module'": own_task,
    "because a step of 'adafactor' has numbers": lambda: digits(optimizer={"kind": "adafactor"}),
    "which schedule 'one-cycle' changes": lambda: digits(schedule=CYCLE),
    "the loss scale of precision fp16": lambda: digits({"precision": "fp16"}),
    "call the hooks of training.callbacks": lambda: digits({"callbacks": [OBSERVER]}),
    "step records the network, and recompute: blocks": lambda: digits({"recompute": "blocks"}),
    "needs one device": lambda: digits({"devices": 2}),
    "one micro-batch, and this data has 2": lambda: text_cell(training=GRAPH),
}
"""Part of the error, and a cell that is refused with it."""


@pytest.mark.parametrize("part", REFUSED)
def test_what_a_record_would_freeze_is_refused_in_the_configuration(part: str) -> None:
    with pytest.raises(ValueError, match=part):
        REFUSED[part]()


def test_a_cell_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^training.compile: step needs a GPU"):
        should_compile(digits().experiment, torch.device("cpu"))
    assert should_compile(digits().experiment, torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CELLS)
def test_a_cuda_graph_computes_the_same_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels may add in another order, so values differ by roundings."""
    # The processes of the compiler keep TMPDIR, which each cell creates and removes.
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    folders = {}
    for warm_up in (3, 10**9):
        folders[warm_up] = folder_of(CELLS[name], tmp_path / str(warm_up))
        with monkeypatch.context() as patch:
            patch.setattr(step_graph, "WARM_UP_STEPS", warm_up)
            run_cell(folders[warm_up])
    expected = weights_of(folders[10**9])
    for key, value in weights_of(folders[3]).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4, msg=key)
