"""Peak memory of real training steps on a CPU, from PyTorch's profiler."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lit_attn.config.cell import Cell
from lit_attn.data.module import DataModule
from lit_attn.tasks.base import TaskModule
from lit_attn.training.build import build
from lit_attn.training.memory import MemoryEstimate, estimate_memory
from lit_attn.training.trainer_data import TrainerData


def estimate_cell(cell: Cell) -> MemoryEstimate:
    """Return the estimate of a cell with the micro-batches that its configuration has."""
    data = cell.experiment.data
    return estimate_memory(cell.experiment, cell.match_to, data.batch_size // data.micro_batches)


def measure_cell(cell: Cell, folder: Path) -> int:
    """Return the peak bytes of the first three training steps of a cell, trained by Lightning.

    Tensors that exist before the training count with their sizes, and so does one batch, which the
    loaders create outside PyTorch's allocator. All other memory counts as the profiler sees it
    allocated and freed.
    """
    training = cell.experiment.training
    parts = build(cell, torch.device("cpu"))
    task = parts.task
    batch = list(task.data.train_batches(0, 1))
    before = _count_bytes([batch, task.network, task.average])
    precision: Precision = Precision()
    if training.precision == "bf16":
        precision = MixedPrecision("bf16-mixed", "cpu")
    with warnings.catch_warnings():
        # Lightning warns of SLURM, loggers and workers, which do not matter here.
        warnings.simplefilter("ignore")
        return before + _train(task, parts.data, precision, training.clip, folder)


def _train(
    task: TaskModule, data: DataModule, precision: Precision, clip: float | None, folder: Path
) -> int:
    """Train three steps and return the peak of the bytes that are allocated meanwhile."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[precision, LightningEnvironment()],
        max_steps=3,
        limit_val_batches=0,
        accumulate_grad_batches=data.accumulate,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    # The first step allocates gradients and states within the profile, because the profiler does
    # not know the sizes of older memory that is freed.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.fit(task, TrainerData(data))
    return _read_peak(profiler)


def _read_peak(profiler: profile) -> int:
    """Return the largest sum of the bytes that were allocated and freed in a profile."""
    assert profiler.profiler is not None
    # PyTorch's type stubs lack the bytes of an event.
    results: Any = profiler.profiler.kineto_results
    all_events = results.events()
    events = [event for event in all_events if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    total = 0
    peak = 0
    for event in events:
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def _count_bytes(value: Any) -> int:
    """Return the bytes of all distinct storages in modules and containers of tensors."""
    sizes: dict[int, int] = {}
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, nn.Module):
            waiting += [*item.parameters(), *item.buffers()]
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
    return sum(sizes.values())
