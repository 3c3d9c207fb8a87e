"""Lightning's trainer as cells use it: for a whole training, and for the first step of a check."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)

from lit_attn.config.training import Training
from lit_attn.tasks.base import TaskModule
from lit_attn.training.process_group import ProcessGroup
from lit_attn.training.result import Limits
from lit_attn.training.several_devices import choose_strategy

NOISE = (
    # The loaders of this project start their workers themselves.
    ".*does not have many workers",
    # Lightning says this on every machine that has SLURM's commands.
    ".*`srun` command is available",
    # The memory layout of a convolution's gradient may differ from the buckets that ranks exchange.
    "Grad strides do not match bucket view strides",
    # No code changes the output of a network in place, which FSDP warns of.
    "FSDP2-wrapped module .* returned a view tensor",
    # `training.precision` decides on TF32.
    "TensorFloat32 tensor cores for float32 matrix multiplication available",
    # A short run has fewer steps in an epoch than `training.log_every`.
    "The number of training batches .* is smaller than the logging interval",
    # Lightning itself uses a deprecated torch function.
    ".*LeafSpec.*is deprecated",
)


def make_trainer(
    training: Training,
    task: TaskModule,
    group: ProcessGroup,
    folder: Path,
    *,
    steps: int,
    epochs: int,
    micro_batches: int,
    limits: Limits | None = None,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[L.Callback] = (),
    profiler: Profiler | None = None,
    log_every: int = 1,
) -> L.Trainer:
    """Return a trainer that ends after `steps` steps of `micro_batches` each.

    With `limits` an epoch has so many steps and evaluation batches, and every epoch is evaluated.
    """
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    remember_absent_gpu(group.device)
    train_batches: float = 1.0  # A float is a share, an int a number of batches.
    evaluation_batches: float = 1.0
    evaluate_every = training.evaluate_every
    if limits is not None:
        train_batches = micro_batches * limits.steps
        evaluation_batches = limits.evaluation_batches
        evaluate_every = 1
    return L.Trainer(
        accelerator=group.device.type,
        devices=group.world_size // group.nodes,
        num_nodes=group.nodes,
        strategy=choose_strategy(
            task.network, group.world_size, micro_batches, training.is_sharded
        ),
        # Weights that FSDP gathers in inference mode could not be used in training.
        inference_mode=not training.is_sharded,
        # By default Lightning takes any SLURM allocation around the cell for its ranks.
        plugins=[_make_precision(training, group), LightningEnvironment()],
        max_epochs=max(training.epochs, epochs),
        max_steps=steps,
        limit_train_batches=train_batches,
        limit_val_batches=evaluation_batches,
        check_val_every_n_epoch=evaluate_every,
        accumulate_grad_batches=micro_batches,
        gradient_clip_val=training.clip,
        logger=list(loggers),
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=log_every,
        profiler=profiler,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )


def remember_absent_gpu(device: torch.device) -> None:
    """Let PyTorch remember that this machine has no GPU, which is looked for in each step.

    Adam asks for one before each step. Lightning makes PyTorch answer by loading the library of the
    driver, because the usual answer forbids forked processes to use a GPU. Without a library each
    question searches the disk again, for three times as long as a small step of Adam takes.
    """
    if device.type == "cpu" and not torch.cuda.is_available():
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


def make_profiler(kind: str | None, folder: Path) -> Profiler | None:
    """Return Lightning's profiler, which writes files that begin with `profile` to `folder`."""
    if kind is None:
        return None
    profilers: dict[str, type[Profiler]] = {
        "simple": SimpleProfiler,
        "advanced": AdvancedProfiler,
        "pytorch": PyTorchProfiler,
    }
    return profilers[kind](dirpath=folder, filename="profile")


def _make_precision(training: Training, group: ProcessGroup) -> Precision:
    """Return Lightning's plug-in for the precision of the training."""
    if training.precision in ("fp32", "tf32"):
        return Precision()
    # A name alone would make Lightning compute in bf16 for fp16 on a CPU.
    name: Literal["16-mixed", "bf16-mixed"]
    name = "bf16-mixed" if training.precision == "bf16" else "16-mixed"
    return MixedPrecision(name, group.device.type)
