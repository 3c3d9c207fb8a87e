"""What Lightning is told of the machine: devices, ranks, precision; and what it need not say."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
)

from lit_attn.cells.ranks import Place
from lit_attn.schema.errors import ConfigError

NOISE = (
    # Nothing is loaded while training: the data lies on the device in one piece.
    ".*does not have many workers",
    # Said on every machine with SLURM's commands.
    ".*`srun` command is available",
    # A convolution's gradient may lie otherwise in memory than the buckets that devices exchange.
    "Grad strides do not match bucket view strides",
    # Lightning's own use of a deprecated torch function.
    ".*LeafSpec.*is deprecated",
)


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Hold back what Lightning says that no user could act on."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for message in NOISE:
            warnings.filterwarnings("ignore", message=message)
        try:
            yield
        finally:
            logger.setLevel(level)


def device_of(accelerator: str, here: Place) -> torch.device:
    """Where this process trains, of the devices that are visible to all of its cell's."""
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ConfigError("training.accelerator: cuda was asked for and there is no CUDA device")
    if here.world == 1 or accelerator == "cpu":
        return torch.device(accelerator)
    if (seen := torch.cuda.device_count()) < here.on_node:
        raise ConfigError(f"training.devices: {here.on_node} on this machine, and CUDA sees {seen}")
    torch.cuda.set_device(here.local_rank)
    return torch.device(accelerator, here.local_rank)


def cluster(here: Place) -> ClusterEnvironment:
    """Where Lightning finds a process's rank; left to itself, it takes any SLURM for the cell's."""
    return SLURMEnvironment(auto_requeue=False) if here.nodes > 1 else LightningEnvironment()


def precision(chosen: str, device: torch.device) -> Precision:
    """Mixed precision on any device: by its name Lightning computes in bf16 for fp16 on a CPU."""
    if chosen == "fp32":
        return Precision()
    return MixedPrecision("bf16-mixed" if chosen == "bf16" else "16-mixed", device.type)
