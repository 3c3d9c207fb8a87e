"""TF32: float32 products of matrices whose factors a GPU rounds to 10 bits of mantissa.

PyTorch computes convolutions in TF32 by default, and products of matrices in float32. Here the
precision of a cell decides on both.
"""

import contextlib
from collections.abc import Iterator

import torch

from lit_attn.schema.errors import ConfigError

FIRST_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with TF32 (Ampere)."""


@contextlib.contextmanager
def products_in_tf32(is_allowed: bool) -> Iterator[None]:
    """Compute float32 products and convolutions on a GPU in TF32 in this context, or in float32.

    The settings of PyTorch are those from before when the context ends.
    """
    matrices_before = torch.get_float32_matmul_precision()
    convolutions_before = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if is_allowed else "highest")
    torch.backends.cudnn.allow_tf32 = is_allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matrices_before)
        torch.backends.cudnn.allow_tf32 = convolutions_before


def require_tf32(device: torch.device) -> None:
    """Raise ConfigError if `device` does not compute in TF32."""
    if device.type != "cuda":
        raise ConfigError(
            f"training.precision: tf32 needs a GPU, but this cell trains on '{device}', which has "
            "no TF32. Write fp32, or train on a GPU."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_CAPABILITY:
        raise ConfigError(
            f"training.precision: tf32 needs a GPU of compute capability 8.0 or more, but "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. Write fp32."
        )
