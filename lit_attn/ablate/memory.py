"""Memory of cells: estimates without a GPU, and the smallest number of GPUs on which a cell fits.

`--dry-run --gpu NAME` and `--cost NAME` use it. PyTorch is imported when an estimate is made.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lit_attn.ablate.gpus import GIBIBYTE, GPUS, USABLE_SHARE, Gpu
from lit_attn.ablate.plan import Matrix
from lit_attn.config.experiment import Experiment
from lit_attn.models.base import Model
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure

if TYPE_CHECKING:
    from lit_attn.training.memory import MemoryEstimate

MEBIBYTE = 2**20

MOST_GPUS = 1024
"""Largest number of GPUs that is tried."""

_ESTIMATES: dict[str, MemoryEstimate] = {}
"""Estimates by what they depend on."""


def estimate(experiment: Experiment, match_to: Model | None) -> MemoryEstimate:
    """Return the memory of a training step of a cell on each of its devices.

    Cells that differ only in what takes no memory, such as the seed, share one estimate. Raises
    ConfigError in one sentence if there is no estimate.
    """
    micro_batch = experiment.device_samples
    key = _make_key(experiment, match_to, micro_batch)
    if key not in _ESTIMATES:
        # PyTorch takes seconds to import.
        from lit_attn.training.memory import estimate_memory

        try:
            _ESTIMATES[key] = estimate_memory(experiment, match_to, micro_batch)
        except ConfigError:
            raise
        except Exception as error:
            # The code of a model, an optimiser or a task can raise any exception.
            reason = explain_failure(error, "its training step on tensors without values")
            raise ConfigError(f"the memory is unknown: {reason}") from error
    return _ESTIMATES[key]


def _make_key(experiment: Experiment, match_to: Model | None, micro_batch: int) -> str:
    """Return a text that is equal for experiments whose steps take equal memory."""
    training = experiment.training
    values = [
        experiment.model.model_dump(mode="json"),
        None if match_to is None else match_to.model_dump(mode="json"),
        repr(experiment.data.signature()),
        micro_batch,
        experiment.data.micro_batches > 1,
        experiment.task.model_dump(mode="json"),
        experiment.loss.model_dump(mode="json"),
        experiment.optimizer.model_dump(mode="json", exclude={"lr", "weight_decay"}),
        training.precision,
        training.recompute,
        training.clip is None,
        training.average is None,
    ]
    return json.dumps(values)


def describe_fit(memory: MemoryEstimate, gpu_name: str, gpu: Gpu) -> str:
    """Return whether a training step fits on a GPU, as part of a line of a dry run."""
    needed = format_size(memory.total)
    if memory.total <= gpu.usable_bytes:
        return f"{needed} fit on {gpu_name}"
    if memory.total <= gpu.memory * GIBIBYTE:
        return (
            f"may not fit: needs {needed}, and {USABLE_SHARE:.0%} of the {gpu.memory} GiB of"
            f" {gpu_name} ({gpu.marketed} GB) are assumed to be usable"
        )
    return f"does not fit: needs {needed}, {gpu_name} ({gpu.marketed} GB) has {gpu.memory} GiB"


def format_size(count: float) -> str:
    """Return a number of bytes as `96.1 GiB` or `12 MiB`."""
    if count >= GIBIBYTE:
        return f"{count / GIBIBYTE:.1f} GiB"
    return f"{count / MEBIBYTE:.0f} MiB"


def shard(memory: MemoryEstimate, gpus: int, samples: int) -> float:
    """Return the bytes on each of `gpus` GPUs with sharded parameters (FSDP), from one GPU's.

    `memory` is the estimate for a micro-batch of `samples` on one GPU. Assumptions:

    - Weights, gradients, states of the optimiser and averages are divided evenly.
    - The batch of a step stays the same. Each GPU has its share of the micro-batch, at least one
      sample; a step then has fewer micro-batches, or a larger batch if it had too few samples.
    - Activations and outputs are proportional to the samples of a GPU.
    - The parameters and gradients of the layer that is computed, which FSDP gathers, and the
      buffers of NCCL lie within the share of the memory that an estimate may not fill.
    """
    divided = divide_parameters(memory, gpus)
    share = max(1, samples // gpus) / samples
    activations = share * (memory.activations + memory.outputs)
    return divided.total - memory.activations - memory.outputs + activations


def divide_parameters(memory: MemoryEstimate, gpus: int) -> MemoryEstimate:
    """Return the estimate of each of `gpus` GPUs that divide all but activations and outputs."""
    return memory._replace(
        weights=memory.weights // gpus,
        gradients=memory.gradients // gpus,
        states=memory.states // gpus,
        averages=memory.averages // gpus,
    )


def count_gpus(memory: MemoryEstimate, gpu: Gpu, samples: int) -> int | None:
    """Return the smallest power of 2 of GPUs on which a step fits as in `shard`, None without one.

    The result is 1 if the step fits on one GPU.
    """
    gpus = 1
    while gpus <= MOST_GPUS:
        if shard(memory, gpus, samples) <= gpu.usable_bytes:
            return gpus
        gpus *= 2
    return None


def print_memory(matrix: Matrix, gpu_name: str) -> None:
    """Write the memory of a training step of each variant by part, and whether it fits on a GPU.

    A variant without an estimate has its reason instead.
    """
    gpu = GPUS[gpu_name]
    width = max(len(variant.name) for variant in matrix.written)
    print(
        "  memory of a training step on one device (MiB, estimated without a GPU; the work space "
        "of convolutions and libraries is not counted)"
    )
    headings = ("weights", "gradients", "optimizer", "averages", "activations", "outputs")
    print(f"  {'':<{width}}" + "".join(f"  {heading:>11}" for heading in headings))
    for variant in matrix.written:
        try:
            memory = estimate(variant.experiment, variant.match_to)
        except ConfigError as error:
            print(f"  {variant.name:<{width}}  {error}")
            continue
        training = variant.experiment.training
        if training.is_sharded:
            # The estimate is for the samples of one device.
            memory = divide_parameters(memory, training.devices)
        sizes = "".join(f"  {part / MEBIBYTE:>11,.1f}" for part in memory)
        print(f"  {variant.name:<{width}}{sizes}  {describe_fit(memory, gpu_name, gpu)}")
