"""GPUs, cores and free memory of this machine, read without starting CUDA."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


class Device(NamedTuple):
    """A GPU by its name in CUDA_VISIBLE_DEVICES, or a core (None).

    `memory` is the number of free bytes, shared by all cells on the device; None if unknown.
    """

    gpu: str | None
    memory: int | None


def list_devices() -> list[Device]:
    """Return the visible GPUs, or without GPUs the cores that this process may use."""
    return _list_gpus() or _list_cores()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _list_gpus() -> list[Device]:
    """Return the GPUs that CUDA would see."""
    free = _free_gpu_memory()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
        return [Device(name, free.get(name)) for name in names]
    if free:
        # By UUID, because CUDA and nvidia-smi may number the GPUs differently.
        return [Device(name, free[name]) for name in free if name.startswith("GPU-")]
    return [Device(str(i), None) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def _free_gpu_memory() -> dict[str, int]:
    """Return the free bytes of every GPU by its UUID and its number; empty without nvidia-smi.

    Numbers are included only if CUDA and nvidia-smi agree on them, or if the GPUs are equal.
    """
    query = [
        "nvidia-smi",
        "--query-gpu=index,uuid,name,memory.free",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
        gpus = [(index, uuid, name, int(free) * 2**20) for index, uuid, name, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    free = {uuid: memory for _, uuid, _, memory in gpus}
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(gpus) == 1:
        free |= {index: memory for index, _, _, memory in gpus}
    elif len({name for _, _, name, _ in gpus}) == 1:
        # Equal GPUs: every number has at least the memory of the fullest GPU.
        least = min(memory for *_, memory in gpus)
        free |= {index: least for index, *_ in gpus}
    return free


def _list_cores() -> list[Device]:
    """Return every core with an equal share of the available memory."""
    count, memory = count_cores(), available_memory()
    return [Device(None, None if memory is None else memory // count)] * count


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping, within all limits of the process's
    control groups; None if unknown."""
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
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            if (memory := _free_memory(root / folder, *names)) is not None:
                yield memory


def _free_memory(group: Path, limit: str, used: str, cache: str) -> int | None:
    """Return the limit of a control group minus its used bytes, without reclaimable page cache."""
    try:
        free = int((group / limit).read_text()) - int((group / used).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # The group does not exist here, or its limit is "max".
        return None
    return free + int(statistics.get(cache, 0))
