"""A whole training step as one CUDA graph: recorded once, and replayed with every later batch.

The host needs longer to run Python and to launch the kernels of a small network than the GPU needs
to run them. A CUDA graph keeps the kernels of a step (forward and backward pass, clipping, update)
with the addresses of their tensors, and one launch replays all of them. So everything that differs
between steps is a tensor at an address that stays: the batch and the learning rates, which are
copied there, and what a step changes in place (weights, states of the optimiser, buffers). Random
numbers need nothing: CUDA's generator gives each replay the numbers that the step would have had.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_attn.data.loading import start_copy
from lit_attn.models.sharding import to_plain
from lit_attn.optim.schedules import set_constants
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.optimizing import OptimizedModule

WARM_UP_STEPS = 3
"""Steps before the recording, in which code is compiled and the optimiser creates its states."""


class StepOutputs(NamedTuple):
    """Results of a training step; a replay writes to the tensors of its record again.

    `gradient_norm` is the joint norm of all gradients before they were clipped, and `values` are
    those of training samples, by the name of their mean.
    """

    loss: Tensor
    gradient_norm: Tensor | None
    values: list[tuple[str, Tensor]]


Work = Callable[[], StepOutputs]
"""Function that makes a training step."""


class Recorder(ABC):
    """Device that records the work of a function, and repeats it."""

    @abstractmethod
    def warm_up(self, work: Work) -> StepOutputs:
        """Do the work without a record, in the way in which it will be recorded."""

    @abstractmethod
    def record(self, work: Work) -> StepOutputs:
        """Record the work. It is not done, and its outputs have no values, before a `replay`."""

    @abstractmethod
    def replay(self) -> None:
        """Do the recorded work once more, on the tensors that the record has."""


class CudaRecorder(Recorder):
    """CUDA graph on the current GPU."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # Work of the default stream cannot be recorded on another one.
        self.stream = torch.cuda.Stream()

    def warm_up(self, work: Work) -> StepOutputs:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            outputs = work()
        torch.cuda.current_stream().wait_stream(self.stream)
        return outputs

    def record(self, work: Work) -> StepOutputs:
        # Other threads may copy the next batch to the device meanwhile.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        self.graph.replay()


class Record(NamedTuple):
    """Tensors of a recorded step: its batch, the rates of all groups, and its outputs."""

    batch: Any
    rates: Tensor
    outputs: StepOutputs


class StepGraph:
    """Training steps of a task, of which those after the warm-up are replays of a record.

    A batch of other shapes than the recorded one is computed without the record. A training with
    another optimiser starts afresh, because Lightning moves the weights after a training.
    """

    def __init__(self, make_recorder: Callable[[], Recorder], clip: float | None) -> None:
        self.make_recorder = make_recorder
        self.clip = clip
        self.gradient_norm: Tensor | None = None
        """Joint norm of the gradients of the last step, before they were clipped."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._recorder: Recorder | None = None
        self._record: Record | None = None
        self._steps = 0
        self._values: list[tuple[str, Tensor]] | None = None

    def step(self, task: OptimizedModule, batch: Any) -> Tensor:
        """Make a training step, and return its loss, a scalar that the next step may overwrite.

        Raises ConfigError if the step cannot be recorded.
        """
        optimizer = task.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        if self._recorder is None or optimizer is not self._optimizer:
            self._optimizer = optimizer
            self._recorder = self.make_recorder()
            self._record = None
            self._steps = 0
        recorder = self._recorder
        rates = set_rates(task, optimizer)
        if self._record is None and self._steps >= WARM_UP_STEPS:
            self._record = self._make_record(recorder, task, optimizer, batch)
        if self._record is not None and describe(batch) == describe(self._record.batch):
            copy_into(self._record.batch, batch)
            self._record.rates.copy_(start_copy(rates, task.device))
            recorder.replay()
            outputs = self._record.outputs
        else:
            outputs = recorder.warm_up(lambda: self._compute(task, optimizer, batch))
        self._steps += 1
        self.gradient_norm = outputs.gradient_norm
        for name, values in outputs.values:
            task.record_training(name, values)
        return outputs.loss

    def takes(self, name: str, values: Tensor) -> bool:
        """Return True during a step, after which `values` are added to the mean of the epoch.

        A record would contain the sums of one epoch alone, because the next one has new tensors.
        """
        if self._values is None:
            return False
        self._values.append((name, values))
        return True

    def _make_record(
        self,
        recorder: Recorder,
        task: OptimizedModule,
        optimizer: torch.optim.Optimizer,
        batch: Any,
    ) -> Record:
        """Record a step with a copy of `batch`, which later batches overwrite."""
        batch = clone(batch)
        groups = optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        rates = torch.tensor(numbers, device=task.device)
        for group, rate in zip(groups, rates.unbind(), strict=True):
            group["lr"] = rate
            if takes_tensor_rate(group):
                group["capturable"] = True
        try:
            outputs = recorder.record(lambda: self._compute(task, optimizer, batch))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                "training.compile: step cannot record a training step of this cell: "
                f"{type(error).__name__}: {reason}. Write auto, which changes no identity."
            ) from error
        finally:
            # Steps without a record, and checkpoints, have numbers.
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
                if takes_tensor_rate(group):
                    group["capturable"] = False
        return Record(batch, rates, outputs)

    def _compute(
        self, task: OptimizedModule, optimizer: torch.optim.Optimizer, batch: Any
    ) -> StepOutputs:
        """Make a step as Lightning's loop does."""
        # The first gradient is written, and a second one would be added to it.
        optimizer.zero_grad(set_to_none=True)
        recorded_values: list[tuple[str, Tensor]] = []
        self._values = recorded_values
        try:
            loss = task.loss(batch)
        finally:
            self._values = None
        # Lightning's context of automatic precision is that of the forward pass alone.
        with torch.autocast(task.device.type, enabled=False):
            loss.backward()
            norm = measure_gradient_norm(task)
            task.configure_gradient_clipping(optimizer, self.clip)
            update(optimizer)
            task.end_learning_step()
        # A loss that remembers how it was computed would keep all activations until the next step.
        return StepOutputs(loss.detach(), norm, recorded_values)


def takes_tensor_rate(group: Mapping[str, Any]) -> bool:
    """Return whether the optimiser of a group of parameters computes with a rate on the device."""
    return "capturable" in group


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer) -> None:
    """Make a step of the optimiser with the rates of its groups, which may be tensors.

    An optimiser that reads its rate as a number makes a step with rate 1, of which the weights keep
    the share `lr`, because the change of the weights is proportional to the rate.
    """
    groups = [group for group in optimizer.param_groups if not takes_tensor_rate(group)]
    rates = [group["lr"] for group in groups]
    starts = []
    for group in groups:
        starts.append([weights.clone() for weights in group["params"]])
        group["lr"] = 1.0
    optimizer.step()
    for group, rate, weights_before in zip(groups, rates, starts, strict=True):
        group["lr"] = rate
        for weights, before in zip(group["params"], weights_before, strict=True):
            weights.copy_(before.lerp(weights, rate))


def set_rates(task: OptimizedModule, optimizer: torch.optim.Optimizer) -> Tensor:
    """Set the learning rates of a step in all groups of parameters, and return them on the CPU.

    They are rounded to float32 in every step, as a recorded step reads them.
    """
    set_constants(optimizer.param_groups, task.global_step, task.rate)
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups])
    for group, rate in zip(optimizer.param_groups, rates.tolist(), strict=True):
        group["lr"] = rate
    return rates


def measure_gradient_norm(module: nn.Module) -> Tensor | None:
    """Return the joint norm of all gradients on their device; None without any gradient.

    Every rank must call this if the gradients are sharded.
    """
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return to_plain(nn.utils.get_total_norm(gradients)) if gradients else None


def list_entries(batch: Any) -> Iterator[Any]:
    """Yield the entries of a batch: one value, or those of sequences and dictionaries of values."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, list | tuple):
        yield batch
        return
    for entry in batch:
        yield from list_entries(entry)


def describe(batch: Any) -> list[Any]:
    """Return the shape and type of each tensor of a batch, and all its other entries."""
    description = []
    for entry in list_entries(batch):
        is_tensor = isinstance(entry, Tensor)
        description.append((entry.shape, entry.dtype) if is_tensor else entry)
    return description


def clone(batch: Any) -> Any:
    """Return a batch with copies of the tensors."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, Mapping):
        return {key: clone(entry) for key, entry in batch.items()}
    if isinstance(batch, list | tuple):
        return [clone(entry) for entry in batch]
    return batch


def copy_into(recorded: Any, batch: Any) -> None:
    """Copy the tensors of `batch` into those of the `recorded` batch."""
    for target, source in zip(list_entries(recorded), list_entries(batch), strict=True):
        if isinstance(target, Tensor):
            target.copy_(source, non_blocking=True)
