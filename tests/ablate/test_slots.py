"""Slots: the cells that run at the same time, and their devices."""

import io
import os
import re
import stat
from pathlib import Path

import pytest
from helpers import fake_cells
from helpers.runs import jobs

from lit_attn.ablate.display import Display
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import Slot, Slots, count_cores, make_slots
from lit_attn.schema.errors import ConfigError
from lit_attn.training.process_group import choose_device

SMI = """\
#!/bin/sh
cat <<END
0, GPU-aa
1, GPU-bb
END
"""


def cell(seed: int = 0, devices: int = 1) -> Job:
    settings = {"experiment": {"training": {"devices": devices}}}
    return Job(Path(), "tiny", "ok", seed, "", settings)


def cores_of(number: int, limit: int | None = None) -> Slots:
    return Slots([None] * number, limit)


def places(taken: Slot | None) -> tuple[int, ...]:
    assert taken is not None
    return taken.devices


def test_each_cell_gets_a_device() -> None:
    slots = cores_of(2)
    first, second = slots.reserve(cell(0)), slots.reserve(cell(1))
    assert {places(first), places(second)} == {(0,), (1,)}
    assert slots.reserve(cell(2)) is None
    assert first is not None
    slots.release(first)
    assert places(slots.reserve(cell(2))) == first.devices


def test_a_cell_on_several_devices_gets_whole_devices() -> None:
    slots = cores_of(3)
    assert slots.at_once([cell(devices=2)] * 5) == 1
    assert slots.at_once([cell()] * 5) == 3
    assert slots.at_once([]) == 1
    assert len(places(slots.reserve(cell(devices=2)))) == 2
    assert slots.reserve(cell(1, devices=2)) is None
    assert places(slots.reserve(cell(1))) == (2,)
    with pytest.raises(ConfigError, match=r"training.devices: 4 exceeds the 3 cores"):
        slots.check([cell(devices=4)])


def test_the_limit_may_be_smaller_than_the_number_of_devices() -> None:
    slots = cores_of(2, limit=1)
    assert (slots.limit, slots.at_once([cell()] * 5)) == (1, 1)
    assert slots.reserve(cell()) is not None
    assert slots.reserve(cell(1)) is None


def test_more_cells_than_devices_share_them_equally() -> None:
    slots = cores_of(2, limit=4)
    taken = [places(slots.reserve(cell(seed))) for seed in range(4)]
    assert sorted(taken) == [(0,), (0,), (1,), (1,)]
    assert set(taken[:2]) == {(0,), (1,)}
    assert slots.reserve(cell(4)) is None
    # Three cells on two devices: the limit counts too.
    slots = cores_of(2, limit=3)
    assert [slots.reserve(cell(seed)) is None for seed in range(4)] == [False] * 3 + [True]
    shared, alone = (Slots(["0"], limit).reserve(cell()) for limit in (2, 1))
    assert shared is not None
    assert alone is not None
    assert (shared.can_be_shared, alone.can_be_shared) == (True, False)


@pytest.mark.parametrize(
    ("devices", "limit", "wanted", "at_once", "processes"),
    [
        # A study on two devices beside one on a single device: two cells run, or one of two ranks.
        (2, None, [1, 1, 2, 2], 2, 2),
        (2, None, [2, 2], 1, 2),
        (2, 1, [1, 1], 1, 1),
        (2, 4, [1] * 5, 4, 4),
        (2, 4, [1, 1, 2], 2, 4),
        (8, 2, [2] * 5, 2, 4),
        (8, None, [1, 4, 4, 4], 2, 8),
        (3, None, [], 1, 1),
    ],
)
def test_the_header_and_the_cores_follow_the_rule_of_the_slots(
    devices: int, limit: int | None, wanted: list[int], at_once: int, processes: int
) -> None:
    slots = cores_of(devices, limit)
    cells = [cell(seed, devices=number) for seed, number in enumerate(wanted)]
    assert slots.at_once(cells) == at_once
    assert slots.processes_at_once(cells) == processes
    taken = [slots.reserve(planned) for planned in cells]
    running = [slot for slot in taken if slot is not None]
    assert len(running) <= at_once or not cells
    assert sum(len(slot.devices) for slot in running) <= processes


def test_a_cell_on_several_devices_shares_none() -> None:
    slots = cores_of(2, limit=4)
    single = slots.reserve(cell(0))
    assert single is not None
    assert slots.reserve(cell(1, devices=2)) is None
    slots.release(single)
    both = slots.reserve(cell(1, devices=2))
    assert both is not None
    assert slots.reserve(cell(0)) is None
    slots.release(both)
    assert slots.reserve(cell(0)) is not None


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
        (None, ["GPU-aa", "GPU-bb"]),
        ("GPU-bb", ["GPU-bb"]),
        # CUDA is told to number the GPUs as nvidia-smi does.
        ("1,0", ["1", "0"]),
        ("MIG-cc", ["MIG-cc"]),
    ],
)
def test_gpus_are_those_that_cuda_sees(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert make_slots(None).devices == expected


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
    runner = Runner(Launcher(fake_cells.TARGET), Slots(["7"]), Display(output))
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
    assert set(make_slots(None).devices) == {None}
    slots = make_slots(3)
    assert (slots.limit, slots.devices) == (3, [None] * count_cores())
    taken = slots.reserve(cell())
    assert taken is not None
    assert taken.gpus is None


@pytest.mark.usefixtures("two_gpus")
def test_a_cell_of_two_gpus_sees_both() -> None:
    taken = make_slots(None).reserve(cell(devices=2))
    assert taken is not None
    assert set(taken.gpus or ()) == {"GPU-aa", "GPU-bb"}
