"""The parts of a training step add up to the step, and the largest causes come first."""

import os

import pytest
import torch
from torchmetrics import MeanMetric

from lit_attn.bench.step_parts import MOST_CAUSES, PartTimer, list_causes, name_part
from lit_attn.tasks.running_mean import RunningMean
from lit_attn.training.trainer import remember_absent_gpu

VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


class FakeClock:
    """Clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_of_a_part_is_without_the_parts_inside_it() -> None:
    clock = FakeClock()
    timer = PartTimer(clock)
    with timer.profile("run_training_epoch"):
        clock.now = 7.0
        timer.forget()
        with timer.profile("[Strategy]SingleDeviceStrategy.training_step"):
            clock.now = 8.0
            with timer.profile("means"):
                clock.now = 10.0
            clock.now = 14.0
        with timer.profile("[Callback]Progress.on_train_batch_end"):
            clock.now = 22.0
        clock.now = 38.0
        timer.finish()
        clock.now = 100.0
    assert timer.seconds["means"] == 2.0
    assert timer.seconds["forward pass and loss"] == 5.0
    assert timer.seconds["callback Progress"] == 8.0


def test_the_parts_add_up_to_the_time_between_forget_and_finish() -> None:
    clock = FakeClock()
    timer = PartTimer(clock)
    with timer.profile("run_training_epoch"):
        clock.now = 3.0
        timer.forget()
        for end in (4.0, 6.0):
            with timer.profile("run_training_batch"):
                clock.now = end
        clock.now = 9.0
        timer.finish()
        assert sum(timer.seconds.values()) == 6.0


def test_the_methods_of_one_object_become_a_part_until_the_end() -> None:
    clock = FakeClock()
    timer = PartTimer(clock)

    class Task:
        def record(self, seconds: float) -> str:
            clock.now += seconds
            return "done"

    task = Task()
    end = timer.time_method(task, "record", "records")
    assert task.record(2.0) == "done"
    end()
    task.record(4.0)
    assert timer.seconds == {"records": 2.0}


@pytest.mark.parametrize(
    ("action", "part"),
    [
        ("run_training_epoch", "Lightning's loop"),
        ("[Strategy]SingleDeviceStrategy.backward", "backward pass"),
        ("[LightningModule]Classification.optimizer_step", "step of the optimiser"),
        (
            "[LightningModule]Classification.on_before_optimizer_step",
            "hook on_before_optimizer_step",
        ),
        ("[Callback]Checkpoints.on_train_batch_start", "callback Checkpoints"),
        ("records", "records"),
    ],
)
def test_the_parts_of_both_loops_have_one_name(action: str, part: str) -> None:
    assert name_part(action) == part


def test_the_largest_causes_come_first() -> None:
    numbers = range(MOST_CAUSES + 2)
    cell = {f"part {number}": number * 1e-6 for number in numbers}
    loop = {f"part {numbers[-1]}": 1.0}
    causes = list_causes("small", [cell, cell], [loop, loop])
    assert [cause.part for cause in causes] == [f"part {n}" for n in reversed(numbers[1:-1])]
    assert causes[0].added.median == pytest.approx(10.0)
    assert causes[0].added.iqr == pytest.approx(0.0)


def test_a_running_mean_has_the_bits_of_torchmetrics() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = RunningMean()
    theirs = MeanMetric(nan_strategy="disable")
    for shape in ((), (7,), (3, 5)):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(shape, generator=generator).to(dtype)
            ours.add(values)
            theirs.update(values)
            assert ours.compute().equal(theirs.compute())
    assert ours.update_called
    ours.reset()
    assert not ours.update_called
    ours.add(torch.tensor(2.0))
    assert ours.compute() == 2.0


@pytest.mark.parametrize(
    ("device", "has_gpu", "value"), [("cpu", False, "0"), ("cpu", True, "1"), ("cuda", True, "1")]
)
def test_torch_looks_for_a_driver_once_without_a_gpu(
    device: str, has_gpu: bool, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    remember_absent_gpu(torch.device(device))
    assert os.environ[VARIABLE] == value
