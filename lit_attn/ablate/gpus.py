"""GPUs whose time and memory can be estimated without one."""

from typing import NamedTuple

GIBIBYTE = 2**30

USABLE_SHARE = 0.9
"""Share of a GPU's memory that an estimate may fill.

An estimate leaves out CUDA's context, the work space of libraries, and the fragmentation of the
allocator. That they fit into the rest is an assumption: no GPU was measured.
"""


class Gpu(NamedTuple):
    """FLOP/s of dense products in half precision and in float32, and GiB of memory.

    Source: NVIDIA's data sheets, which write GB for the memory.
    """

    half_peak: float
    float32_peak: float
    memory: int

    @property
    def usable_bytes(self) -> float:
        """Bytes that an estimate may fill."""
        return USABLE_SHARE * self.memory * GIBIBYTE


GPUS = {
    "H100": Gpu(9.89e14, 6.7e13, 80),
    "H200": Gpu(9.89e14, 6.7e13, 141),
    "A100": Gpu(3.12e14, 1.95e13, 80),
    "A6000": Gpu(1.55e14, 3.87e13, 48),
}
"""GPUs by name; the A100 is the one with 80 GB."""
