"""Memory that the training of a cell will hold on a GPU, from the step of the check before it."""

import gc
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_attn.config.cell import Cell
from lit_attn.data.module import DataModule
from lit_attn.models.factory import list_tensors
from lit_attn.training.recording import measure_memory


def start_measuring(device: torch.device) -> None:
    """Let a GPU count the memory of the next step alone."""
    if device.type != "cuda":
        return
    # The network of the last cell is in cycles of references with its trainer.
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def expect_memory(
    cell: Cell, data: DataModule, trainer: L.Trainer, device: torch.device
) -> int | None:
    """Return the bytes of a GPU that a training of `cell` is expected to reserve, if known.

    `trainer` has made one uncompiled step since `start_measuring`, with `data` on the CPU. They are
    counted as the "memory" of `progress.json` is. On a CPU the process has held other cells too,
    and nothing is known of cells on several devices, of CUDA graphs, which have memory of their
    own, and of images that grow while the cell trains.
    """
    experiment = cell.experiment
    if device.type != "cuda" or experiment.training.devices > 1:
        return None
    has_graphs = experiment.training.has_cuda_graphs
    if has_graphs or experiment.data.at_final_size() != experiment.data:
        return None
    memory = measure_memory(device, is_reserved=True)
    # The step had most activations before its update created the states of the optimiser, and
    # before any gradient was there.
    for optimizer in trainer.optimizers:
        memory += _count_bytes(list_tensors(list(optimizer.state.values())))
    if experiment.data.micro_batches > 1:
        memory += _count_bytes(_list_gradients(trainer.lightning_module))
    # Data that fit are on the device while a cell trains.
    return memory + _count_bytes(list_tensors(vars(data)))


def _list_gradients(module: Any) -> list[Tensor]:
    """Return the parameters of a module that have gradients, which are as large as they."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements of `tensors`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
