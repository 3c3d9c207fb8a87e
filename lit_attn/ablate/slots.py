"""Slots: which cells run at once on this machine, and on which devices.

If more cells run at once than there are devices, cells share devices by their measured memory: the
memory of all cells of a device, with a margin, must fit into what was free when the run began. A
step before the first cell can give an estimate, which counts until a cell of the kind is measured.
"""

import contextlib
import os
import subprocess
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError

NO_GPU = ("", "-1", "NoDevFiles")
"""Entries of CUDA_VISIBLE_DEVICES without a GPU; SLURM sets the last one on nodes without GPUs."""
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


class Device(NamedTuple):
    """A GPU by its name in CUDA_VISIBLE_DEVICES or a core (None), and its free bytes if known."""

    gpu: str | None
    memory: int | None


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free_gpu_memory() -> dict[str, int]:
    """Return the free bytes of every GPU by its UUID and, in the order of the bus, its number."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        gpus = [line.split(", ") for line in done.stdout.splitlines()]
        free = {uuid: int(memory) * 2**20 for _, uuid, memory in gpus}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    # CUDA otherwise numbers different GPUs by their speed.
    if os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID") == "PCI_BUS_ID":
        free |= {index: free[uuid] for index, uuid, _ in gpus}
    return free


def available_memory() -> int | None:
    """Return the bytes free without swapping in all control groups of the process, if known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    return max(0, min([available * 1024, *_cgroup_memory()]))


def _cgroup_memory() -> Iterator[int]:
    """Yield the free bytes of every memory control group (v1 or v2) that contains the process."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    # Lines are `0::/path` (v2) and `7:memory:/path` (v1). A container may see its own group as the
    # root, so the root is always checked.
    for line in {"0::/", "0:memory:/", *lines}:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        limit, used, cache = names
        group = Path(path.lstrip("/"))
        for folder in (root / group, *(root / parent for parent in group.parents)):
            # A group does not exist here, or its limit is "max".
            with contextlib.suppress(OSError, ValueError):
                free = int((folder / limit).read_text()) - int((folder / used).read_text())
                text = (folder / "memory.stat").read_text()
                statistics = dict(line.split() for line in text.splitlines())
                yield free + int(statistics.get(cache, 0))


MARGIN = 1.1
"""Factor between the largest measured memory of a cell and the memory that is reserved for it."""
ESTIMATED = 1.5
"""Factor between the estimate of a cell's memory and the memory that is expected for it.

The step of the estimate is uncompiled, and compiled code may need more work space or less. A later
batch can be larger than the first one, and longer trainings fragment the memory.
"""
UNMEASURED = 2.0
"""Factor between the largest expected memory and the memory reserved for an unknown cell."""


@dataclass(eq=False)
class Slot:
    """Device indices of a cell of `kind`, and its GPUs in CUDA_VISIBLE_DEVICES (None for cores).

    `can_be_shared`: another cell may run on one of the GPUs at the same time, so that times of the
    cell are not those of the cell alone. `is_shared`: another cell was on one of the devices at
    some time.
    """

    devices: tuple[int, ...]
    gpus: tuple[str, ...] | None
    kind: str
    can_be_shared: bool = False
    is_shared: bool = False


class Slots:
    """Devices and the cells on them: at most `limit` cells, by default one on each device."""

    def __init__(self, devices: list[Device], limit: int | None = None) -> None:
        self.devices = devices
        self.limit = limit or len(devices)
        self.count = 0
        self.on_device: list[list[Slot]] = [[] for _ in devices]
        self.isolated: set[str] = set()  # Kinds (see Cell.kind) of cells that share no device.
        self.memory: dict[str, int] = {}  # Largest measured memory of each kind.
        self.estimates: dict[str, int] = {}  # Estimated memory of kinds.

    @property
    def unit(self) -> str:
        """Name of one device."""
        return "core" if self.devices[0].gpu is None else "GPU"

    def check(self, cells: Iterable[Cell]) -> None:
        """Raise ConfigError if a cell needs more devices than there are."""
        for cell in cells:
            wanted = cell.experiment.training.devices
            if wanted > len(self.devices):
                raise ConfigError(
                    f"{cell.study}: variant '{cell.variant}': training.devices: {wanted} exceeds"
                    f" the {len(self.devices)} {self.unit}s of this machine"
                )

    def at_once(self, cells: Iterable[Cell]) -> int:
        """Return how many of `cells` may run at once, apart from memory."""
        counts = [cell.experiment.training.devices for cell in cells]
        groups = [len(self.devices) // count for count in counts if count > 1]
        return max(1, min(self.limit, len(counts), *groups))

    def reserve(self, cell: Cell) -> Slot | None:
        """Reserve devices for `cell`. Return None if too few are free."""
        if self.count >= self.limit:
            return None
        wanted = cell.experiment.training.devices
        kind = cell.kind
        can_share = wanted == 1 and self.limit > len(self.devices)
        # Devices with fewer cells come first.
        order = sorted(range(len(self.devices)), key=lambda index: len(self.on_device[index]))
        free = [
            index
            for index in order
            if not self.on_device[index] or (can_share and self._can_fit(kind, index))
        ]
        if len(free) < wanted:
            return None
        indices = tuple(free[:wanted])
        names = [self.devices[index].gpu for index in indices]
        gpus = tuple(name for name in names if name is not None)
        can_be_shared = can_share and bool(gpus) and kind not in self.isolated
        slot = Slot(indices, gpus or None, kind, can_be_shared)
        for index in indices:
            self.on_device[index].append(slot)
            for neighbour in self.on_device[index]:
                neighbour.is_shared |= len(self.on_device[index]) > 1
        self.count += 1
        return slot

    def release(self, slot: Slot) -> None:
        """Release the devices of a cell."""
        self.count -= 1
        for index in slot.devices:
            self.on_device[index].remove(slot)

    def record_memory(self, cell: Cell, memory: int) -> None:
        """Record that `cell` held `memory` bytes of a device."""
        self.memory[cell.kind] = max(memory, self.memory.get(cell.kind, 0))

    def record_estimate(self, cell: Cell, memory: int) -> None:
        """Record that `cell` will hold about `memory` bytes, which counts until it is measured."""
        self.estimates[cell.kind] = memory

    def _expect_memory(self) -> dict[str, float]:
        """Return the bytes that a cell of each kind is expected to hold, if they are known."""
        expected = {kind: ESTIMATED * memory for kind, memory in self.estimates.items()}
        return expected | self.memory

    def _can_fit(self, kind: str, index: int) -> bool:
        """Return True if a cell of `kind` fits on a device beside at most one unknown cell."""
        memory = self.devices[index].memory
        slots = self.on_device[index]
        kinds = [slot.kind for slot in slots]
        kinds.append(kind)
        if any(len(slot.devices) > 1 for slot in slots):
            return False
        if not self.isolated.isdisjoint(kinds):
            return False
        expected = self._expect_memory()
        if memory is None or not expected:
            return False
        unknown = [other for other in kinds if other not in expected]
        largest = UNMEASURED * max(expected.values())
        total = sum(expected.get(other, largest) for other in kinds)
        return len(unknown) <= 1 and MARGIN * total <= memory


def make_slots(limit: int | None) -> Slots:
    """Return the slots of the visible GPUs, or else of the cores, which share the memory.

    Raises ConfigError if CUDA_VISIBLE_DEVICES names no GPU of this machine.
    """
    free = _free_gpu_memory()
    gpus = [Device(name, free.get(name)) for name in _visible_gpus(free)]
    if gpus:
        return Slots(gpus, limit)
    count = count_cores()
    memory = available_memory()
    core = Device(None, None if memory is None else memory // count)
    return Slots([core] * count, limit)


def _visible_gpus(known: Collection[str]) -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES, or else the names of all GPUs of the machine.

    `known` are the UUIDs and numbers that nvidia-smi reports; without it, /dev counts the GPUs.
    Raises ConfigError for a name of no GPU: CUDA would ignore it and all names after it.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        uuids = [name for name in known if name.startswith("GPU-")]
        if uuids:
            return uuids
        count = len(list(Path("/dev").glob("nvidia[0-9]*")))
        return [str(number) for number in range(count)]
    names = [name.strip() for name in visible.split(",")]
    names = [name for name in names if name not in NO_GPU]
    for name in names:
        # CUDA accepts the beginning of a UUID. nvidia-smi does not list parts of a GPU (MIG).
        is_listed = not known or any(gpu.startswith(name) for gpu in known if not gpu.isdecimal())
        is_number = name.isdecimal() and (not known or name in known)
        is_uuid = name.startswith("MIG-") or (name.startswith("GPU-") and is_listed)
        if not (is_number or is_uuid):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={visible}: this machine has no GPU '{name}'. Name GPUs by "
                "numbers or UUIDs as `nvidia-smi -L` lists them, or set it to '' to use the CPU."
            )
        if names.count(name) > 1:
            raise ConfigError(f"CUDA_VISIBLE_DEVICES={visible}: names GPU '{name}' twice")
    return names
