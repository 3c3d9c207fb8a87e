"""Slots: which cells run at once on this machine, and on which devices.

A cell takes whole devices, as many as its `training.devices`. If more cells run at once than there
are devices, cells share devices by their measured memory: the memory of all cells of a device, with
a margin, must fit into what was free on it when the run began.
"""

from collections.abc import Iterable
from typing import NamedTuple

from lit_attn.ablate.machine import Device, list_devices
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError

MARGIN = 1.1
"""Factor between the largest measured memory of a cell and the memory that is reserved for it."""
UNMEASURED = 2.0
"""Factor between the largest measured memory and the memory reserved for an unmeasured cell."""


class Slot(NamedTuple):
    """Device indices of a cell, and its GPUs in CUDA_VISIBLE_DEVICES (None for cores)."""

    devices: tuple[int, ...]
    gpus: tuple[str, ...] | None


class Slots:
    """Devices of a machine and the cells that run on them.

    At most `limit` cells run at once; by default, one on each device.
    """

    def __init__(self, devices: list[Device], limit: int | None = None) -> None:
        self.devices = devices
        self.limit = limit or len(devices)
        # Kinds (see Cell.kind) of the cells on each device, and of the cells in each slot.
        self.on_device: list[list[str]] = [[] for _ in devices]
        self.in_slot: dict[Slot, list[str]] = {}
        # Largest measured memory of each kind.
        self.memory: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of cells that may run at once."""
        return self.limit

    def check(self, cells: Iterable[Cell]) -> None:
        """Raise ConfigError if a cell needs more devices than there are."""
        for cell in cells:
            if (wanted := cell.experiment.training.devices) > len(self.devices):
                unit = "GPUs" if self.devices[0].gpu is not None else "cores"
                raise ConfigError(
                    f"{cell.study}: variant '{cell.variant}': training.devices: {wanted} exceeds "
                    f"the {len(self.devices)} {unit} of this machine"
                )

    def at_once(self, cells: Iterable[Cell]) -> int:
        """Return how many of `cells` may run at once, apart from memory."""
        wanted = [cell.experiment.training.devices for cell in cells]
        whole = [len(self.devices) // devices for devices in wanted if devices > 1]
        return max(1, min(self.limit, len(wanted), *whole))

    def take(self, cell: Cell) -> Slot | None:
        """Reserve devices for `cell`. Return None if too few are free."""
        if sum(map(len, self.in_slot.values())) >= self.limit:
            return None
        wanted, kind = cell.experiment.training.devices, cell.kind
        can_share = wanted == 1 and self.limit > len(self.devices)
        by_load = sorted(range(len(self.devices)), key=lambda index: len(self.on_device[index]))
        free = [i for i in by_load if not self.on_device[i] or (can_share and self._fits(kind, i))]
        if len(free) < wanted:
            return None
        indices = tuple(free[:wanted])
        for index in indices:
            self.on_device[index].append(kind)
        names = [self.devices[index].gpu for index in indices]
        slot = Slot(indices, tuple(name for name in names if name is not None) or None)
        self.in_slot.setdefault(slot, []).append(kind)
        return slot

    def give_back(self, slot: Slot, cell: Cell) -> None:
        """Release the devices of `cell`."""
        self.in_slot[slot].remove(cell.kind)
        for index in slot.devices:
            self.on_device[index].remove(cell.kind)

    def learn(self, cell: Cell, memory: int) -> None:
        """Record that `cell` held `memory` bytes of a device."""
        self.memory[cell.kind] = max(memory, self.memory.get(cell.kind, 0))

    def is_shared(self, slot: Slot) -> bool:
        """Return True if several cells are on a device of `slot`."""
        return any(len(self.on_device[index]) > 1 for index in slot.devices)

    def give_whole(self, cell: Cell) -> None:
        """From now on, give cells of the kind of `cell` devices of their own."""
        self.learn(cell, max(device.memory or 0 for device in self.devices))

    def _fits(self, kind: str, index: int) -> bool:
        """Return True if a cell of `kind` fits on a device beside its other cells.

        At most one cell of a device may be of a kind that was not measured yet.
        """
        memory = self.devices[index].memory
        is_whole = any(
            kinds and len(slot.devices) > 1 and index in slot.devices
            for slot, kinds in self.in_slot.items()
        )
        if is_whole or memory is None or not self.memory:
            return False
        kinds = [*self.on_device[index], kind]
        unmeasured = [one for one in kinds if one not in self.memory]
        largest = UNMEASURED * max(self.memory.values())
        total = sum(self.memory.get(one, largest) for one in kinds)
        return len(unmeasured) <= 1 and MARGIN * total <= memory


def make_slots(limit: int | None) -> Slots:
    """Return the slots of this machine."""
    return Slots(list_devices(), limit)
