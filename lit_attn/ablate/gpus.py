"""GPUs whose training time can be estimated without one."""

import argparse
from typing import NamedTuple

from lit_attn.schema.errors import suggest


class Gpu(NamedTuple):
    """FLOP/s of dense products in half precision and in float32."""

    half_peak: float
    float32_peak: float


# NVIDIA's data sheets, whose peaks of tensor cores with sparsity are halved here.
GPUS = {
    "H100": Gpu(9.89e14, 6.7e13),
    "H200": Gpu(9.89e14, 6.7e13),
    "A100": Gpu(3.12e14, 1.95e13),
    "A6000": Gpu(1.548e14, 3.87e13),
}
"""GPUs by name. The H100 is the SXM5 module."""


def read_gpu(text: str) -> str:
    """Return the name of a GPU that an option has; argparse reports the error of another one."""
    if text not in GPUS:
        raise argparse.ArgumentTypeError(f"unknown GPU '{text}'{suggest(text, GPUS)}")
    return text
