"""Free memory within the control groups of the process."""

from pathlib import Path

import pytest

from lit_attn.ablate import slots
from lit_attn.ablate.slots import available_memory

GIB = 2**30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def write_group(
    folder: Path, names: tuple[str, str, str], limit: str, used: int = 0, cache: int = 0
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=False):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cache}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that stands for /sys/fs/cgroup; `own` next to it is /proc/self/cgroup."""
    monkeypatch.setattr(slots, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(slots, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path / "cgroup"


def test_memory_is_limited_by_the_tightest_group_around_the_process(groups: Path) -> None:
    groups.with_name("own").write_text("0::/user.slice/job.scope/step\n")
    write_group(groups / "user.slice", V2, str(GIB), used=GIB // 2)
    write_group(groups / "user.slice" / "job.scope", V2, str(GIB // 4), used=GIB // 16)
    write_group(groups / "user.slice" / "job.scope" / "step", V2, "max")
    assert available_memory() == GIB // 4 - GIB // 16


def test_memory_of_a_version_1_group_counts(groups: Path) -> None:
    groups.with_name("own").write_text("12:cpu,cpuacct:/other\n7:memory:/docker/abc\n0::/x\n")
    # A container sees its own group as the root, at a path that does not exist inside of it.
    write_group(groups / "memory", V1, str(GIB // 2), used=GIB // 4)
    assert available_memory() == GIB // 4


def test_page_cache_counts_as_free_memory(groups: Path) -> None:
    write_group(groups, V2, str(GIB // 2), used=GIB // 2, cache=GIB // 8)
    assert available_memory() == GIB // 8


def test_without_groups_the_memory_of_the_machine_counts(groups: Path) -> None:
    assert not groups.exists()
    memory = available_memory()
    assert memory is None or memory > GIB // 4
