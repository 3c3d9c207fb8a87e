"""GPUs whose time and memory can be estimated without one."""

import argparse
from typing import NamedTuple

from lit_attn.schema.errors import suggest

GIBIBYTE = 2**30

USABLE_SHARE = 0.9
"""Share of a GPU's memory that an estimate may fill.

An estimate leaves out CUDA's context, the work space of libraries, and the fragmentation of the
allocator. That they fit into the rest is an assumption: no GPU was measured.
"""


class Gpu(NamedTuple):
    """FLOP/s of dense products in half precision and in float32, and memory.

    `marketed` is the memory in the data sheet (GB, of 10^9 or of 2^30 bytes). `memory` is what a
    program has (GiB): the smallest total that PyTorch reports on such a GPU (`total_memory` of
    `torch.cuda.get_device_properties`), which is less than `nvidia-smi` shows.
    """

    half_peak: float
    float32_peak: float
    marketed: int
    memory: float

    @property
    def usable_bytes(self) -> float:
        """Bytes that an estimate may fill."""
        return USABLE_SHARE * self.memory * GIBIBYTE


# FLOP/s: NVIDIA's data sheets, whose peaks of tensor cores with sparsity are halved here. Memory:
# errors and properties that users of PyTorch have published. In the order of this table,
# nvidia-smi shows 81,559, 143,771, 81,920 and 49,140 MiB.
GPUS = {
    "H100": Gpu(9.89e14, 6.7e13, 80, 79.1),
    "H200": Gpu(9.89e14, 6.7e13, 141, 139.7),
    "A100": Gpu(3.12e14, 1.95e13, 80, 79.1),
    "A6000": Gpu(1.548e14, 3.87e13, 48, 47.4),
}
"""GPUs by name. The H100 is the SXM5 module and the A100 the one with 80 GB; the memory of the
A6000 is that without ECC."""


def read_gpu(text: str) -> str:
    """Return the name of a GPU that an option has; argparse reports the error of another one."""
    if text not in GPUS:
        raise argparse.ArgumentTypeError(f"unknown GPU '{text}'{suggest(text, GPUS)}")
    return text
