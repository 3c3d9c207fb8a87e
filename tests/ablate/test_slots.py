"""Slots: the cells that run at the same time, and their devices."""

import io
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from helpers import fake_cells
from helpers.runs import jobs
from helpers.training_cells import digits_cell

from lit_attn.ablate.display import Display
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import ESTIMATED, MARGIN, Device, Slot, Slots, count_cores, make_slots
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError
from lit_attn.training.process_group import choose_device

SMI = """\
#!/bin/sh
cat <<END
0, GPU-aa, 1000
1, GPU-bb, 900
END
"""


def cell(seed: int = 0, lr: float = 1.0, devices: int = 1) -> Cell:
    training = {"devices": devices, "accelerator": "cpu"}
    return digits_cell(seed=seed, optimizer={"lr": lr}, training=training)


def cores_of(*memory: int | None, limit: int | None = None) -> Slots:
    return Slots([Device(None, bytes_free) for bytes_free in memory], limit)


def places(taken: Slot | None) -> tuple[int, ...]:
    assert taken is not None
    return taken.devices


def test_each_cell_gets_a_device() -> None:
    slots = cores_of(100, 100)
    first, second = slots.reserve(cell(0)), slots.reserve(cell(1))
    assert {places(first), places(second)} == {(0,), (1,)}
    assert slots.reserve(cell(2)) is None
    assert first is not None
    slots.release(first)
    assert places(slots.reserve(cell(2))) == first.devices


def test_a_cell_on_several_devices_gets_whole_devices() -> None:
    slots = cores_of(100, 100, 100)
    assert slots.at_once([cell(devices=2)] * 5) == 1
    assert slots.at_once([cell()] * 5) == 3
    assert slots.at_once([]) == 1
    assert len(places(slots.reserve(cell(devices=2)))) == 2
    assert slots.reserve(cell(1, devices=2)) is None
    assert places(slots.reserve(cell(1))) == (2,)
    with pytest.raises(ConfigError, match=r"training.devices: 4 exceeds the 3 cores"):
        slots.check([cell(devices=4)])


def test_the_limit_may_be_smaller_than_the_number_of_devices() -> None:
    slots = cores_of(100, 100, limit=1)
    assert (slots.limit, slots.at_once([cell()] * 5)) == (1, 1)
    assert slots.reserve(cell()) is not None
    assert slots.reserve(cell(1)) is None


def test_cells_share_a_device_only_after_a_measurement() -> None:
    slots = cores_of(100, limit=4)
    assert slots.reserve(cell(0)) is not None
    assert slots.reserve(cell(1)) is None
    slots.record_memory(cell(0), 30)
    # Three cells with the margin need 99 bytes. Another seed needs the same memory.
    assert MARGIN * 3 * 30 < 100 < MARGIN * 4 * 30
    assert slots.reserve(cell(1)) is not None
    assert slots.reserve(cell(2)) is not None
    assert slots.reserve(cell(3)) is None


def test_the_largest_measurement_counts() -> None:
    slots = cores_of(100, limit=4)
    assert slots.reserve(cell(0)) is not None
    slots.record_memory(cell(0), 60)
    slots.record_memory(cell(0), 20)
    assert slots.reserve(cell(1)) is None


def test_an_unmeasured_kind_counts_twice_and_at_most_once_per_device() -> None:
    slots = cores_of(100, limit=4)
    assert slots.reserve(cell(0)) is not None
    slots.record_memory(cell(0), 20)
    assert slots.reserve(cell(0, lr=2.0)) is not None
    assert slots.reserve(cell(0, lr=3.0)) is None
    slots.record_memory(cell(0, lr=2.0), 25)
    # Two measurements, and twice the larger one for the third kind: 20 + 25 + 50.
    assert slots.reserve(cell(0, lr=3.0)) is None
    large_slots = cores_of(1000, limit=4)
    assert large_slots.reserve(cell(0)) is not None
    large_slots.record_memory(cell(0), 20)
    assert large_slots.reserve(cell(0, lr=2.0)) is not None
    assert large_slots.reserve(cell(0, lr=3.0)) is None, "two unmeasured kinds"
    large_slots.record_memory(cell(0, lr=2.0), 25)
    assert large_slots.reserve(cell(0, lr=3.0)) is not None


def test_cells_with_estimates_start_at_once() -> None:
    slots = cores_of(100, limit=9)
    for rate, memory in ((1.0, 10), (2.0, 12), (3.0, 8)):
        slots.record_estimate(cell(0, lr=rate), memory)
    taken = [slots.reserve(cell(seed, lr=rate)) for seed in (0, 1) for rate in (1.0, 2.0, 3.0)]
    # With both factors, three cells of different kinds need 49.5 bytes, and all six 99.
    assert MARGIN * ESTIMATED * 2 * (10 + 12 + 8) < 100
    assert None not in taken
    assert slots.reserve(cell(2, lr=3.0)) is None


def test_a_measurement_replaces_an_estimate() -> None:
    slots = cores_of(100, limit=9)
    slots.record_estimate(cell(0), 30)
    taken = [slots.reserve(cell(seed)) for seed in (0, 1, 2)]
    assert [slot is not None for slot in taken] == [True, True, False]
    slots.record_memory(cell(0), 30)
    assert slots.reserve(cell(2)) is not None, "without the factor of an estimate"
    assert slots.reserve(cell(3)) is None
    slots = cores_of(100, limit=9)
    slots.record_estimate(cell(0), 10)
    assert slots.reserve(cell(0)) is not None
    slots.record_memory(cell(0), 60)
    assert slots.reserve(cell(1)) is None, "the estimate was too small"


def test_a_cell_without_an_estimate_counts_twice_the_largest() -> None:
    slots = cores_of(100, limit=9)
    slots.record_estimate(cell(0), 10)
    assert slots.reserve(cell(0, lr=2.0)) is not None
    assert slots.reserve(cell(0)) is not None
    assert slots.reserve(cell(1, lr=3.0)) is None, "two unknown kinds"
    assert slots.reserve(cell(1)) is not None
    # 1.1 * (2 * 15 + 2 * 15) is 66; there is room for two more.
    assert slots.reserve(cell(2)) is not None
    assert slots.reserve(cell(3)) is not None
    assert slots.reserve(cell(4)) is None


def test_cells_of_an_isolated_kind_share_no_device() -> None:
    slots = cores_of(1000, limit=4)
    slots.record_memory(cell(0, lr=2.0), 10)
    slots.record_memory(cell(0), 10)
    slot, other = slots.reserve(cell(0)), slots.reserve(cell(0, lr=2.0))
    assert slot is not None
    assert other is not None
    slots.release(slot)
    slots.isolated.add(cell(0).kind)
    assert slots.reserve(cell(1)) is None
    slots.release(other)
    assert slots.reserve(cell(1)) is not None
    assert slots.reserve(cell(1, lr=2.0)) is None


def test_a_slot_records_that_it_was_shared() -> None:
    slots = cores_of(1000, limit=4)
    slots.record_memory(cell(0), 10)
    first = slots.reserve(cell(0))
    assert first is not None
    assert not first.is_shared
    second = slots.reserve(cell(1))
    assert second is not None
    assert first.is_shared
    assert second.is_shared
    # The cell that ends last shared the device, too, although it is alone at its end.
    slots.release(first)
    assert second.is_shared
    slots.release(second)
    third = slots.reserve(cell(0))
    assert third is not None
    assert not third.is_shared


def test_devices_of_unknown_memory_are_not_shared() -> None:
    slots = cores_of(None, limit=4)
    assert slots.reserve(cell(0)) is not None
    slots.record_memory(cell(0), 1)
    assert slots.reserve(cell(1)) is None


def test_a_cell_on_several_devices_shares_none() -> None:
    slots = cores_of(100, 100, limit=4)
    slots.record_memory(cell(0), 1)
    slots.record_memory(cell(0, devices=2), 1)
    single = slots.reserve(cell(0))
    assert single is not None
    assert slots.reserve(cell(1, devices=2)) is None
    slots.release(single)
    both = slots.reserve(cell(1, devices=2))
    assert both is not None
    assert slots.reserve(cell(0)) is None
    slots.release(both)
    assert slots.reserve(cell(0)) is not None


def test_the_emptiest_device_is_taken_first() -> None:
    slots = cores_of(100, 100, limit=4)
    slots.record_memory(cell(0), 10)
    taken = [places(slots.reserve(cell(seed))) for seed in range(4)]
    assert sorted(taken) == [(0,), (0,), (1,), (1,)]
    assert set(taken[:2]) == {(0,), (1,)}


def test_cells_that_differ_only_in_the_seed_have_one_kind() -> None:
    """The identities are computed first, as in a runner."""
    cells = [cell(0), cell(1), cell(0, lr=2.0), cell(0, devices=2)]
    assert len({planned.fingerprint for planned in cells}) == 3
    assert cells[0].kind == cells[1].kind
    assert len({planned.kind for planned in cells}) == 3


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [("GPU-aa", 1000), ("GPU-bb", 900)]),
        ("GPU-bb", [("GPU-bb", 900)]),
        # CUDA is told to number the GPUs as nvidia-smi does.
        ("1,0", [("1", 900), ("0", 1000)]),
        ("MIG-cc", [("MIG-cc", None)]),
    ],
)
def test_gpus_are_those_that_cuda_sees(
    visible: str | None, expected: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    slots = make_slots(None).devices
    mega = 2**20
    assert slots == [Device(name, free and free * mega) for name, free in expected]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("foo", "CUDA_VISIBLE_DEVICES=foo: this machine has no GPU 'foo'. Name GPUs by "),
        ("0,foo", "CUDA_VISIBLE_DEVICES=0,foo: this machine has no GPU 'foo'. "),
        ("2", "CUDA_VISIBLE_DEVICES=2: this machine has no GPU '2'. "),
        ("GPU-cc", "this machine has no GPU 'GPU-cc'. "),
        ("0,0", "CUDA_VISIBLE_DEVICES=0,0: names GPU '0' twice"),
    ],
)
def test_a_name_of_no_gpu_is_refused(
    visible: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA itself ignores the name and all names after it, and the cells train on the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_slots(None)


def test_cells_that_fall_back_to_the_cpu_are_reported_once(tmp_path: Path) -> None:
    """This machine's torch sees no GPU with this name; two cells finish on the CPU."""
    cells = jobs(tmp_path, "ok", "ok-2")
    output = io.StringIO()
    runner = Runner(Launcher(fake_cells.TARGET), Slots([Device("7", None)]), Display(output))
    summary = runner.run(cells)
    assert summary.failed == []
    warning = "warning: GPU 7: torch finds no GPU, so cells train on the CPU"
    assert output.getvalue().count(warning) == 1


@pytest.mark.parametrize("visible", ["7", "GPU-aa"])
def test_a_cell_that_falls_back_to_the_cpu_says_so(
    visible: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_device("auto", 0, 1).type == "cpu"
    text = f"warning: CUDA_VISIBLE_DEVICES={visible}: torch finds no such GPU"
    assert capsys.readouterr().out.startswith(text)
    for accelerator, hidden in (("cpu", visible), ("auto", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        choose_device(accelerator, 0, 1)
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", " "])
def test_a_machine_without_visible_gpus_uses_its_cores(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert {device.gpu for device in make_slots(None).devices} == {None}


@pytest.mark.usefixtures("two_gpus")
def test_a_cell_of_two_gpus_sees_both() -> None:
    taken = make_slots(None).reserve(cell(devices=2))
    assert taken is not None
    assert set(taken.gpus or ()) == {"GPU-aa", "GPU-bb"}


def test_cores_are_used_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    slots = make_slots(3)
    assert slots.limit == 3
    assert {device.gpu for device in slots.devices} == {None}
    assert len(slots.devices) == count_cores()
    taken = slots.reserve(cell())
    assert taken is not None
    assert taken.gpus is None
    share = slots.devices[0].memory
    assert share is not None
    assert 0 < share * count_cores() < 2**50
