"""Which cells run at once on this machine, and where: its GPUs or, without any, its cores.

A cell takes whole devices, as many as its `training.devices`. With more cells at once than there
are devices, cells share them, by what they were measured to need and never on trust: the memory of
all on a device, with a margin, stays within what was free on it when the run began.
"""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError

MARGIN = 1.1
"""What a cell is taken to need, over the most that it was seen to hold."""
UNSEEN = 2.0
"""The same for a cell that was not measured yet, over the largest that was."""

GPU_FIELDS = "index,uuid,name,memory.free"


class Device(NamedTuple):
    """A GPU by what CUDA_VISIBLE_DEVICES calls it, or a core (None).

    `memory` is what is free on it for all cells together, in bytes; None where that is not known,
    and then no two cells share it.
    """

    gpu: str | None
    memory: int | None


class Slot(NamedTuple):
    """The places of a cell: indices of devices, and their GPUs (None on a machine without)."""

    devices: tuple[int, ...]
    gpus: tuple[str, ...] | None


class Slots:
    """The devices of a machine, and who is on them.

    At most `limit` cells run at once; without a limit, one on each device.
    """

    def __init__(self, devices: list[Device], limit: int | None = None) -> None:
        self.devices = devices
        self.limit = limit or len(devices)
        # On every device, the kinds of the cells that are there.
        self.taken: list[list[str]] = [[] for _ in devices]
        self.running: dict[Slot, list[str]] = {}
        self.known: dict[str, int] = {}

    def __len__(self) -> int:
        """The cells that may run at once."""
        return self.limit

    def check(self, cells: Iterable[Cell]) -> None:
        """ConfigError where a cell asks for more devices than there are."""
        for cell in cells:
            if (wanted := cell.experiment.training.devices) > len(self.devices):
                what = "GPUs" if self.devices[0].gpu is not None else "cores"
                raise ConfigError(
                    f"{cell.study}: variant '{cell.variant}': training.devices: {wanted}, and this "
                    f"machine has {len(self.devices)} {what}"
                )

    def at_once(self, cells: Iterable[Cell]) -> int:
        """How many of `cells` may run side by side, memory aside."""
        wanted = [cell.experiment.training.devices for cell in cells]
        whole = [len(self.devices) // devices for devices in wanted if devices > 1]
        return max(1, min(self.limit, len(wanted), *whole))

    def take(self, cell: Cell) -> Slot | None:
        """Places for `cell`, or None while there are none."""
        if sum(map(len, self.running.values())) >= self.limit:
            return None
        wanted, need = cell.experiment.training.devices, cell.kind
        shared = wanted == 1 and self.limit > len(self.devices)
        by_load = sorted(range(len(self.devices)), key=lambda index: len(self.taken[index]))
        fit = [i for i in by_load if not self.taken[i] or (shared and self._fits(need, i))]
        if len(fit) < wanted:
            return None
        places = tuple(fit[:wanted])
        for index in places:
            self.taken[index].append(need)
        names = [self.devices[index].gpu for index in places]
        slot = Slot(places, tuple(name for name in names if name is not None) or None)
        self.running.setdefault(slot, []).append(need)
        return slot

    def give_back(self, slot: Slot, cell: Cell) -> None:
        """`cell` has left `slot`."""
        self.running[slot].remove(cell.kind)
        for index in slot.devices:
            self.taken[index].remove(cell.kind)

    def learn(self, cell: Cell, memory: int) -> None:
        """`cell` was seen to hold `memory` bytes of a device."""
        self.known[cell.kind] = max(memory, self.known.get(cell.kind, 0))

    def is_shared(self, slot: Slot) -> bool:
        """Whether several cells are on a device of `slot`."""
        return any(len(self.taken[index]) > 1 for index in slot.devices)

    def give_whole(self, cell: Cell) -> None:
        """From now on, cells like `cell` share no device."""
        self.learn(cell, max(device.memory or 0 for device in self.devices))

    def _fits(self, need: str, index: int) -> bool:
        """Whether one more cell fits on a device, where others are.

        One that was not measured yet counts as twice the largest that was, and joins no other such.
        """
        memory, there = self.devices[index].memory, self.taken[index]
        whole = any(
            kinds and len(slot.devices) > 1 and index in slot.devices
            for slot, kinds in self.running.items()
        )
        if whole or memory is None or not self.known:
            return False
        together = [*there, need]
        unseen = [one for one in together if one not in self.known]
        largest = UNSEEN * max(self.known.values())
        total = sum(self.known.get(one, largest) for one in together)
        return len(unseen) <= 1 and MARGIN * total <= memory


def make_slots(limit: int | None) -> Slots:
    """The slots of this machine: its visible GPUs or else the cores this process may use."""
    return Slots(_gpus() or _cores(), limit)


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[Device]:
    """The GPUs that CUDA would see, found without starting CUDA."""
    free = _free_memory()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
        return [Device(name, free.get(name)) for name in names]
    if free:
        # By their ids: CUDA and nvidia-smi may count in different orders.
        return [Device(name, free[name]) for name in free if name.startswith("GPU-")]
    return [Device(str(i), None) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def _free_memory() -> dict[str, int]:
    """Free bytes of every GPU, by its id and by its number; nothing where nvidia-smi says nothing.

    A number counts only where the order is the bus's, or where it makes no difference.
    """
    query = [
        "nvidia-smi",
        "--query-gpu=index,uuid,name,memory.free",
        "--format=csv,noheader,nounits",
    ]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        rows = [[field.strip() for field in line.split(",")] for line in said.splitlines()]
        gpus = [(index, uuid, name, int(free) * 2**20) for index, uuid, name, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    free = {uuid: memory for _, uuid, _, memory in gpus}
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(gpus) == 1:
        free |= {index: memory for index, _, _, memory in gpus}
    elif len({name for _, _, name, _ in gpus}) == 1:
        # One model each: whichever it is, no less than this is free on it.
        least = min(memory for *_, memory in gpus)
        free |= {index: least for index, *_ in gpus}
    return free


def _cores() -> list[Device]:
    """Every core, with its share of the memory that is available."""
    count, memory = cores(), _available_memory()
    return [Device(None, None if memory is None else memory // count)] * count


def _available_memory() -> int | None:
    """Bytes that may be allocated without swapping, within this process's control group."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    found = [available * 1024]
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        found.append(int(limit) - int(used))
    except (OSError, ValueError):
        # No such group, or a limit of "max".
        pass
    return max(0, min(found))
