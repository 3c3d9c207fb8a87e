"""Slots: which cells run at once on this machine, and on which devices.

By default each GPU, or each core without a GPU, has one cell. A limit above the number of devices
lets cells share them, equally many on each.
"""

import math
import os
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_attn.ablate.job import Job
from lit_attn.cells.launched import NO_GPU
from lit_attn.schema.errors import ConfigError


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _list_gpus() -> list[str]:
    """Return the UUID of every GPU and, in the order of the bus, its number."""
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 1]
    names = [uuid for _, uuid in gpus]
    # CUDA otherwise numbers different GPUs by their speed.
    if os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID") == "PCI_BUS_ID":
        names += [index for index, _ in gpus]
    return names


@dataclass(eq=False)
class Slot:
    """Device indices of a cell, and its GPUs in CUDA_VISIBLE_DEVICES (None for cores).

    `can_be_shared`: another cell may run on one of the GPUs at the same time, so that times of the
    cell are not those of the cell alone.
    """

    devices: tuple[int, ...]
    gpus: tuple[str, ...] | None
    can_be_shared: bool = False


class Slots:
    """Devices and the cells on them: at most `limit` cells, by default one on each device.

    `devices` are names in CUDA_VISIBLE_DEVICES, or None for each core. At most `per_device` cells
    share a device. A cell on several devices shares none of them.
    """

    def __init__(self, devices: Sequence[str | None], limit: int | None = None) -> None:
        self.devices = devices
        self.limit = limit or len(devices)
        self.per_device = math.ceil(self.limit / len(devices))
        self.count = 0
        self.on_device: list[list[Slot]] = [[] for _ in devices]

    @property
    def unit(self) -> str:
        """Name of one device."""
        return "core" if self.devices[0] is None else "GPU"

    def check(self, jobs: Iterable[Job]) -> None:
        """Raise ConfigError if a cell needs more devices than there are."""
        for job in jobs:
            wanted = job.processes
            if wanted > len(self.devices):
                raise ConfigError(
                    f"{job.study}: variant '{job.variant}': training.devices: {wanted} exceeds"
                    f" the {len(self.devices)} {self.unit}s of this machine"
                )

    def at_once(self, jobs: Iterable[Job]) -> int:
        """Return how many of `jobs` can run at once at most: those on fewest devices first."""
        number = 0
        free = len(self.devices) * self.per_device
        for wanted in sorted(job.processes for job in jobs):
            free -= wanted if wanted == 1 else wanted * self.per_device
            if free < 0 or number == self.limit:
                break
            number += 1
        return max(1, number)

    def processes_at_once(self, jobs: Iterable[Job]) -> int:
        """Return how many processes of `jobs` can run at once at most: one for each device."""
        counts = sorted((job.processes for job in jobs), reverse=True)
        places = max(len(self.devices), self.limit)
        return max(1, min(places, sum(counts[: self.limit])))

    def reserve(self, job: Job) -> Slot | None:
        """Reserve devices for the cell of `job`. Return None if too few are free."""
        if self.count >= self.limit:
            return None
        wanted = job.processes
        # Devices with fewer cells come first.
        order = sorted(range(len(self.devices)), key=lambda index: len(self.on_device[index]))
        free = [index for index in order if self._has_room(index, wanted)]
        if len(free) < wanted:
            return None
        indices = tuple(free[:wanted])
        names = [self.devices[index] for index in indices]
        gpus = tuple(name for name in names if name is not None)
        can_be_shared = wanted == 1 and self.per_device > 1 and bool(gpus)
        slot = Slot(indices, gpus or None, can_be_shared)
        for index in indices:
            self.on_device[index].append(slot)
        self.count += 1
        return slot

    def _has_room(self, index: int, wanted: int) -> bool:
        """Return True if a cell on `wanted` devices may have the device with this index."""
        cells = self.on_device[index]
        if wanted > 1 or any(len(slot.devices) > 1 for slot in cells):
            return not cells
        return len(cells) < self.per_device

    def release(self, slot: Slot) -> None:
        """Release the devices of a cell."""
        self.count -= 1
        for index in slot.devices:
            self.on_device[index].remove(slot)


def make_slots(limit: int | None) -> Slots:
    """Return the slots of the visible GPUs, or else of the cores.

    Raises ConfigError if CUDA_VISIBLE_DEVICES names no GPU of this machine.
    """
    return Slots(_visible_gpus(_list_gpus()) or [None] * count_cores(), limit)


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
