"""Estimate of the memory of a training step, from fake tensors: nothing is computed or allocated.

One step of a cell runs as its training runs it: forward pass, backward pass, clipping, optimiser,
statistics of the attention layers, and the average of the weights. Its tensors are fake, so they
have shapes and types and no memory, and `LiveBytes` counts what they would take.

Fake tensors stand for tensors of a CPU here: without a GPU, PyTorch does not choose the attention
kernels of one. The step is uncompiled. So the estimate leaves out what only a GPU has: its context,
the work space of libraries, the rounding and fragmentation of the allocator, and buffers of NCCL.
On the other hand torch.compile keeps fewer activations than this step does.
"""

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lit_attn.attention.statistics import end_step
from lit_attn.config.experiment import Experiment
from lit_attn.data.base import Data
from lit_attn.data.module import DataModule, EvaluationLoader
from lit_attn.models import factory
from lit_attn.models.base import Model, find_specs
from lit_attn.models.blocks import recompute_blocks
from lit_attn.private_names.of_compiler import FakeTensorMode
from lit_attn.tasks.base import TaskModule
from lit_attn.training.live_bytes import LiveBytes
from lit_attn.training.start_weights import freeze_parameters

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of products in the precisions that are mixed."""

PHASES = ("forward", "backward of the last layers", "backward of the first layers", "update")
"""Phases of a training step, in their order."""

CPU = torch.device("cpu")


class MemoryEstimate(NamedTuple):
    """Bytes of each part at the moment of a training step at which their sum is largest.

    weights: parameters and buffers. gradients: gradients of parameters. states: those of the
    optimiser, and what its step needs for a moment. averages: averaged weights. activations: what
    the layers of the network keep for the backward pass, or need for a moment, and the batch.
    outputs: the network's outputs (logits), what the loss computes from them, and its gradients.
    """

    weights: int
    gradients: int
    states: int
    averages: int
    activations: int
    outputs: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self)


Phases = dict[str, MemoryEstimate]
"""Memory at the peak of each phase of a training step."""


def estimate_memory(
    experiment: Experiment, match_to: Model | None, micro_batch: int
) -> MemoryEstimate:
    """Return the memory of a training step on one device, with `micro_batch` samples at a time.

    Raises ConfigError if the parts of the experiment do not go together or its data have no
    `training_batch`. Code that needs the values of tensors raises exceptions of PyTorch.
    """
    model = factory.resolve(experiment.model, match_to, experiment.data)
    depths = _choose_depths(model, experiment.data)
    if depths is None:
        phases = _measure_phases(experiment, model, micro_batch)
    else:
        shallow = _measure_phases(experiment, _with_depth(model, depths[0]), micro_batch)
        deeper = _measure_phases(experiment, _with_depth(model, depths[1]), micro_batch)
        share = (_read_depth(model) - depths[0]) / (depths[1] - depths[0])
        phases = {}
        for phase, estimate in shallow.items():
            phases[phase] = _extrapolate(estimate, deeper[phase], share)
    return max(phases.values(), key=lambda estimate: estimate.total)


def _choose_depths(model: Model, data: Data) -> tuple[int, int] | None:
    """Return two smaller depths from which the memory of a deep model follows, or None.

    Equal layers make the memory of each phase an affine function of the depth. In the backward pass
    the memory changes by the same amount from layer to layer, so its largest value is that of the
    first or of the last layer: one of them is in each half, and each half is a phase.
    """
    depth = _read_depth(model)
    pattern = max(1, len(getattr(model, "windows", ())))
    period = max(2, pattern)
    has_equal_layers = all(len(spec.mechanisms) == 1 for spec in find_specs(model))
    # The layers of each window must be the same share of every depth.
    is_whole = depth % pattern == 0
    if depth <= 3 * period or not has_equal_layers or not is_whole:
        return None
    depths = (period, 2 * period)
    fewest, fewer, all_parameters = (
        factory.count(factory.build(_with_depth(model, tried), data, "meta"))
        for tried in (*depths, depth)
    )
    # Layers of a model from elsewhere may differ.
    per_layer = (fewer - fewest) / period
    is_affine = all_parameters - fewer == per_layer * (depth - depths[1])
    return depths if is_affine and per_layer > 0 else None


def _read_depth(model: Model) -> int:
    """Return the number of layers of a model, or 0 if its configuration has none."""
    depth: int = getattr(model, "depth", 0)
    return depth


def _with_depth(model: Model, depth: int) -> Model:
    return model.model_copy(update={"depth": depth})


def _extrapolate(first: MemoryEstimate, second: MemoryEstimate, share: float) -> MemoryEstimate:
    """Return the parts at `share`, where `first` is at 0 and `second` at 1."""
    parts = []
    for before, after in zip(first, second, strict=True):
        parts.append(round(before + share * (after - before)))
    return MemoryEstimate(*parts)


def _measure_phases(experiment: Experiment, model: Model, micro_batch: int) -> Phases:
    """Return the memory of a training step of `model`, whose FFN width is solved."""
    network = factory.build(model, experiment.data, "meta").train()
    if experiment.training.freeze:
        freeze_parameters(network, experiment.training.freeze)
    memory = LiveBytes()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    memory.part = "weights"
    with _silence(), memory:
        step = FakeStep(experiment, _copy_to_cpu(network, fake_mode), memory)
    with _silence(), fake_mode, memory:
        step.create_batch(micro_batch)
        step.create_states()
        step.run()
    phases = {}
    for phase in PHASES:
        # Networks of a single parameter have no second half.
        peak = memory.peaks.get(phase, memory.peaks[PHASES[0]])
        phases[phase] = MemoryEstimate(**{part: peak[part] for part in MemoryEstimate._fields})
    return phases


class FakeStep:
    """Training step of an experiment on fake tensors, which runs in the mode `memory`."""

    def __init__(self, experiment: Experiment, network: nn.Module, memory: LiveBytes) -> None:
        """Build the training of `network`, whose tensors are fake."""
        training = experiment.training
        self.memory = memory
        self.clip = training.clip
        self.is_accumulating = experiment.data.micro_batches > 1
        self.half = HALF.get(training.precision)
        data = FakeData(experiment.data)
        self.task: TaskModule = experiment.task.build(
            network, data, experiment.loss, experiment.optimizer, lambda step: 0.0
        )
        self.task.trainer = _make_trainer()
        memory.part = "averages"
        if training.average is not None:
            self.task.average_weights(training.average, 1)
        if training.recompute == "blocks":
            recompute_blocks(self.task.network)
        self.signature = experiment.data.signature()
        has_loss_scale = training.precision == "fp16"
        # `TaskModule.configure_optimizers` has the same rule.
        is_fused = not (has_loss_scale and training.clip is not None)
        self.optimizer = experiment.optimizer.build(self.task.network, fused=is_fused)
        self._follow_phases()

    def create_batch(self, size: int) -> None:
        """Create the micro-batch of the step, with `size` samples."""
        self.memory.part = "activations"
        self.batch = self.signature.training_batch(size)

    def create_states(self) -> None:
        """Run a step of the optimiser, which creates its states, on gradients without values."""
        self.memory.part = "gradients"
        for parameter in self.task.network.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        self.memory.part = "states"
        self.optimizer.step()

    def run(self) -> None:
        """Run the last micro-batch of a step, and the step of the optimiser, as Lightning does.

        The gradients before it are those of the micro-batch before or, without accumulation, of the
        step before: Lightning frees these after the forward pass only.
        """
        memory = self.memory
        forward, last_layers, first_layers, update = PHASES
        memory.start_phase(forward)
        memory.part = "outputs"
        self.is_forward = True
        with self._choose_precision():
            loss = self.task.loss(self.batch)
        self.is_forward = False
        if not self.is_accumulating:
            self.optimizer.zero_grad()
        memory.start_phase(last_layers)
        memory.part = "outputs"
        self.gradients_left = self.trained // 2
        self.next_phase = first_layers
        loss.backward()
        del loss
        memory.start_phase(update)
        memory.part = "states"
        if self.clip is not None:
            self.task.optimizer.clip(list(self.task.parameters()), self.clip)
        self.optimizer.step()
        end_step(self.task.network)
        memory.part = "averages"
        if self.task.average is not None:
            self.task.average.update(self.task.network)

    @contextlib.contextmanager
    def _choose_precision(self) -> Iterator[None]:
        """Compute in the precision of the training in this context."""
        if self.half is None:
            yield
            return
        with torch.autocast("cpu", self.half):
            yield

    def _follow_phases(self) -> None:
        """Let hooks switch the part of new tensors between `activations` and `outputs`.

        Tensors that no module with parameters computes belong to `outputs`. In the backward pass,
        these come first, up to the gradient of the output of such a module.
        """
        self.depth = 0
        self.is_forward = False
        for module in self.task.network.modules():
            if next(module.parameters(), None) is None:
                continue
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)
        self.trained = 0
        for parameter in self.task.network.parameters():
            if parameter.requires_grad:
                self.trained += 1
                parameter.register_post_accumulate_grad_hook(self._keep_gradient)

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        """Count what a module computes as activations."""
        if self.is_forward:
            self.depth += 1
            self.memory.part = "activations"

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Count what follows the outermost module as outputs, with those of the network."""
        if not self.is_forward:
            return
        self.depth -= 1
        if self.depth > 0:
            return
        self.memory.part = "outputs"
        apply_to_collection(output, Tensor, self._watch_output)
        if module is self.task.network:
            apply_to_collection(output, Tensor, self.memory.move, part="outputs")

    def _watch_output(self, output: Tensor) -> None:
        """Count what follows the gradient of a module's output as activations."""
        if output.requires_grad:
            output.register_hook(self._enter_backward)

    def _enter_backward(self, gradient: Tensor) -> None:
        self.memory.part = "activations"

    def _keep_gradient(self, parameter: Tensor) -> None:
        """Count the gradient of a parameter as one."""
        assert parameter.grad is not None
        self.memory.move(parameter.grad, "gradients")
        self.gradients_left -= 1
        if self.gradients_left == 0:
            self.memory.start_phase(self.next_phase)


class FakeData(DataModule):
    """Data without files and without evaluated splits, whose batches have shapes only."""

    steps_per_epoch = 1

    def __init__(self, data: Data) -> None:
        super().__init__(data, 0, CPU)
        self.splits = []

    def fingerprint(self) -> str:
        return ""

    def batch(self, step: int) -> Any:
        return self.signature.training_batch(self.batch_size)

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        return EvaluationLoader([], iter, [], 0)


def _copy_to_cpu(network: nn.Module, fake_mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a network on the meta device with fake tensors of a CPU.

    Modules that share a parameter share it in the copy too.
    """
    copies: dict[int, Any] = {}
    with fake_mode:
        for parameter in network.parameters():
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=CPU)
            copies[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        for buffer in network.buffers():
            copies[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CPU)
    # In the fake mode, tensors that are neither parameters nor buffers could not be copied.
    return copy.deepcopy(network, copies)


def _make_trainer() -> L.Trainer:
    """Return a trainer of one process, which tasks ask for the number of processes."""
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hide what PyTorch and Lightning say about a training that does not take place."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
