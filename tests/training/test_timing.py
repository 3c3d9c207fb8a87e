"""Times of steps on a device that works asynchronously, played by a queue with a clock of its own.

No test here measures real time: the host and the device advance a number.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lit_attn.training.recording import Console, Progress
from lit_attn.training.timing import DeviceClock, HostClock, StepTimer

FORWARD, BACKWARD = 0.2, 0.4  # Seconds of work on the device.
EVALUATION = 0.3
STEPS = 20


class Queue(DeviceClock):
    """Device that does its work in order, later than the host asks for it.

    `host` is the time of the host and `free_at` the time at which the device has done all its work.
    """

    def __init__(self) -> None:
        self.host = 0.0
        self.free_at = 0.0

    def enqueue(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.host) + seconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.free_at)

    def now(self) -> float:
        return self.host

    def mark(self) -> float:
        # An event is reached when the device gets to it: at once if it has no work.
        return max(self.free_at, self.host)

    def has_passed(self, mark: float) -> bool:
        return self.host >= mark

    def wait(self, mark: float) -> None:
        self.host = max(self.host, mark)

    def seconds(self, first: float, last: float) -> float:
        return last - first


class SlowData(Dataset[Tensor]):
    """Samples that take the host `seconds` each."""

    def __init__(self, queue: Queue, seconds: float, count: int) -> None:
        self.queue = queue
        self.seconds = seconds
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.queue.host += self.seconds
        return torch.ones(1)


class Network(L.LightningModule):
    """Training as the tasks do it: the loss is read after the forward pass, and nothing later."""

    def __init__(self, queue: Queue, accumulate: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.queue = queue
        self.automatic_optimization = True
        self.accumulate = accumulate

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        self.queue.enqueue(FORWARD / self.accumulate)
        self.queue.synchronize()
        return self.layer(batch).sum()

    def on_after_backward(self) -> None:
        self.queue.enqueue(BACKWARD / self.accumulate)

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.queue.enqueue(EVALUATION)
        self.queue.synchronize()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, loader: float, accumulate: int = 1, is_evaluated: bool = False) -> Progress:
    queue = Queue()
    console = Console(STEPS, 1, "test/accuracy")
    progress = Progress(folder / "progress.json", STEPS, console, queue)
    training = DataLoader(SlowData(queue, loader / accumulate, STEPS * accumulate), batch_size=1)
    evaluation = DataLoader(SlowData(queue, 0.0, 1), batch_size=1)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        callbacks=[progress],
        limit_val_batches=1.0 if is_evaluated else 0,
        val_check_interval=4 * accumulate if is_evaluated else None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Network(queue, accumulate), training, evaluation)
    return progress


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*`srun` command is available"),
]


@pytest.mark.parametrize(
    ("loader", "wall", "accumulate"), [(0.0, 0.6, 1), (0.1, 0.6, 2), (0.8, 1.0, 1)]
)
def test_the_time_of_a_step_is_the_work_of_the_device(
    tmp_path: Path, loader: float, wall: float, accumulate: int
) -> None:
    """The next batch is prepared while the backward pass runs, and the wall time shows the rest."""
    progress = train(tmp_path, loader, accumulate)
    assert progress.steps.device_time.median == pytest.approx(FORWARD + BACKWARD, rel=0.02)
    assert progress.steps.device_time.count == STEPS - 5
    measured = progress.steps.wall_time
    assert measured is not None
    assert measured.median == pytest.approx(wall, rel=0.02)


def test_an_evaluation_does_not_pay_for_the_training_step_before_it(tmp_path: Path) -> None:
    progress = train(tmp_path, 0.0, is_evaluated=True)
    evaluation = progress.evaluation_time
    assert evaluation is not None
    assert evaluation.median == pytest.approx(EVALUATION, rel=0.02)
    wall = progress.steps.wall_time
    assert wall is not None
    assert (wall.median, wall.iqr) == pytest.approx((FORWARD + BACKWARD, 0.0), abs=0.01)


def test_times_are_read_without_waiting_for_the_device() -> None:
    queue = Queue()
    timer = StepTimer(queue)
    for _ in range(3):
        timer.begin_batch()
        queue.enqueue(1.0)
        timer.end_batch()
        timer.end_step()
    assert (queue.host, timer.device_times) == (0.0, [])
    queue.host = 2.5
    timer.begin_batch()
    timer.end_batch()
    timer.end_step()
    assert timer.device_times == [1.0, 1.0]
    assert timer.device_time.count == 4
    assert queue.host == 3.0


def test_a_run_without_two_steps_has_no_wall_time() -> None:
    timer = StepTimer(HostClock())
    assert timer.wall_time is None
    assert timer.device_time.count == 0
    timer.begin_batch()
    timer.end_batch()
    timer.end_step()
    assert timer.wall_time is None
    assert timer.recent_wall_time() is None
    assert timer.device_time.count == 1


def test_micro_batches_share_a_step() -> None:
    queue = Queue()
    timer = StepTimer(queue)
    for _ in range(2):
        timer.begin_batch()
        queue.enqueue(1.0)
        timer.end_batch()
        # The host waits for data between the micro-batches, and the device is idle.
        queue.host += 5.0
    timer.end_step()
    spread: Any = timer.device_time
    assert (spread.median, spread.count) == (2.0, 1)
