"""Batches that worker processes prepare ahead have the bits of batches without workers."""

import contextlib
import gc
import os
import re
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import digit_folders, noise_images, sentence_pairs
from helpers.commands import run_python
from helpers.data_ranks import on_rank
from helpers.paths import EXPERIMENTS
from helpers.runs import wait_until

from lit_attn.data import loading
from lit_attn.data.base import Data
from lit_attn.data.image_folders import ImageFolder
from lit_attn.data.image_sets import Npz
from lit_attn.data.images import ImageData
from lit_attn.data.module import DataModule
from lit_attn.data.text.parallel import ParallelText
from lit_attn.data.text.shards import Shards
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts
from lit_attn.segmentation.scenes import Scenes
from lit_attn.training.trainer_data import TrainerData

# The kind `blanking-randaugment`.
load_parts([EXPERIMENTS / "cifar_vit_small" / "blanking_randaugment.py"])

CPU = torch.device("cpu")
CROP = {"kind": "crop", "padding": 1}
BLANKING = {"kind": "blanking-randaugment"}
AUGMENTATIONS: dict[str, tuple[Any, ...]] = {
    "none": ("normalize",),
    "flip and crop": ("flip", CROP, "normalize"),
    "flip and crop of floats": ("normalize", "flip", CROP),
    "autoaugment": ("flip", "autoaugment", "normalize", "erasing"),
    "randaugment": ("randaugment", "normalize"),
    "blanking": (BLANKING, CROP, "flip", "normalize"),
    "mixup": ("autoaugment", "normalize", {"kind": "mix", "cutmix": 0.0}),
    "cutmix": (CROP, "normalize", "erasing", {"kind": "mix", "mixup": 0.0}),
    "both": (BLANKING, "normalize", "erasing", {"kind": "mix", "p": 0.5}),
}
FILES: dict[str, dict[str, Any]] = {
    "policy, erasing and mixture": {
        "augment": {"policy": "rand-m9-mstd0.5-inc1", "erasing": 0.5, "mixup": 0.8, "cutmix": 1.0}
    },
    "repeats and sizes": {"repeats": 2, "sizes": (8,), "size": 12},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of 40 coloured images in one file, and of digits in class folders."""
    path = tmp_path_factory.mktemp("data")
    noise_images.write(path / "noise.npz")
    return path


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_folders.write(tmp_path_factory.mktemp("digits"))


def noise(folder: Path, **changes: Any) -> Npz:
    path = folder / "noise.npz"
    fields: dict[str, Any] = {"batch_size": 16, "drop_last": False, "workers": 0}
    return Npz(name="noise", path=path, size=8, classes=4, **fields | changes)


def assert_equal(one: Any, other: Any) -> None:
    """Compare two batches: tensors, tuples, and dictionaries of mmsegmentation."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, tuple | list):
        for part, other_part in zip(one, other, strict=True):
            assert_equal(part, other_part)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif hasattr(one, "gt_sem_seg"):
        assert torch.equal(one.gt_sem_seg.data, other.gt_sem_seg.data)
    else:
        assert one == other


def read(module: DataModule, start: int, stop: int) -> list[Any]:
    """Return the training batches as a task receives them, and end the workers."""
    batches = [module.on_after_batch_transfer(b, 0) for b in module.train_batches(start, stop)]
    module.stop_workers()
    return batches


def assert_workers_change_nothing(make: Callable[[int], DataModule]) -> None:
    """Compare two epochs, a resumed epoch, and two ranks with and without two workers."""
    steps = make(0).steps_per_epoch
    expected = read(make(0), 0, 2 * steps + 1)
    module = make(2)
    assert module.workers == 2
    assert_equal(read(module, 0, 2 * steps + 1), expected)
    # The same module reads again from the middle of an epoch, with new workers.
    assert_equal(read(module, steps // 2, steps), expected[steps // 2 : steps])
    for rank in range(2):
        alone = read(on_rank(make(0), rank, 2), 1, steps)
        assert_equal(read(on_rank(make(2), rank, 2, step=1), 1, steps), alone)


@pytest.mark.process
@pytest.mark.parametrize("name", ["flip and crop", "both"])
def test_images_in_memory_do_not_depend_on_workers(name: str, folder: Path) -> None:
    def make(workers: int) -> DataModule:
        data = noise(folder, augment=AUGMENTATIONS[name], workers=workers, epoch_length=2)
        return ImageData(data, 0, CPU)

    assert_workers_change_nothing(make)


@pytest.mark.process
@pytest.mark.parametrize("changes", FILES.values(), ids=FILES)
def test_image_files_do_not_depend_on_workers(changes: Any, digits: Path) -> None:
    def make(workers: int) -> DataModule:
        fields = {"size": 8, "batch_size": 40, "classes": 4, "path": digits, **changes}
        return ImageFolder(name="digits", workers=workers, **fields).build(0, CPU)

    assert_workers_change_nothing(make)


@pytest.mark.process
def test_scenes_do_not_depend_on_workers(tmp_path: Path) -> None:
    pytest.importorskip("mmseg")

    def make(workers: int) -> DataModule:
        augment = ("rescale", "category-crop", "flip", "photometric")
        counts = {"training_images": 9, "evaluation_images": 3, "batch_size": 4}
        scenes = Scenes(root=tmp_path, augment=augment, workers=workers, **counts)
        return scenes.build(0, CPU)

    assert_workers_change_nothing(make)


@pytest.mark.process
@pytest.mark.parametrize("order", ["random", "columns"])
def test_tokens_do_not_depend_on_workers(order: str, tmp_path: Path) -> None:
    """Each step has two micro-batches."""
    for name, tokens in (("train_1", 99), ("train_2", 87), ("val", 20)):
        np.arange(tokens, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")

    def make(workers: int) -> DataModule:
        sizes = {"context": 8, "batch_size": 4, "accumulate": 2}
        files = Shards(name="counting", folder=tmp_path, order=order, workers=workers, **sizes)
        return files.build(0, CPU)

    steps = make(0).steps_per_epoch
    expected = read(make(0), 0, 2 * steps + 1)
    assert len(expected) == 2 * (2 * steps + 1)
    assert_equal(read(make(2), 0, 2 * steps + 1), expected)
    assert_equal(read(make(2), 1, steps + 1), expected[2 : 2 * (steps + 1)])


@pytest.mark.process
def test_pairs_grouped_by_length_do_not_depend_on_workers(tmp_path: Path) -> None:
    sentence_pairs.write(tmp_path, train=60, evaluated=3)

    def make(workers: int) -> DataModule:
        sizes = {"vocabulary": 40, "batch_size": 128, "context": 80, "eval_batch_size": 4}
        files = ParallelText(name="own", folder=tmp_path, workers=workers, **sizes)
        return files.build(0, CPU)

    assert_workers_change_nothing(make)


@pytest.mark.parametrize("augment", AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_ranks_share_the_batch_of_one_process(augment: Any, folder: Path) -> None:
    world = 4
    data = noise(folder, augment=augment)
    single = read(ImageData(data, 0, CPU), 0, 6)
    for rank in range(world):
        parts = read(on_rank(ImageData(data, 0, CPU), rank, world), 0, 6)
        for batch, part in zip(single, parts, strict=True):
            assert_equal(part, (batch[0][rank::world], batch[1][rank::world]))


def test_a_rank_augments_its_share_only(folder: Path) -> None:
    """With a mixture it also augments the images that its own are mixed with."""
    plain = noise(folder, augment=("randaugment", "normalize"), batch_size=40)
    for rank in range(4):
        prepared = on_rank(ImageData(plain, 0, CPU), rank, 4).batch(0)
        assert len(prepared.images) == 10
    always = {"kind": "mix", "p": 1.0}
    mixed = noise(folder, augment=("randaugment", "normalize", always), batch_size=40)
    for rank in range(4):
        prepared = on_rank(ImageData(mixed, 0, CPU), rank, 4).batch(0)
        assert 10 < len(prepared.images) <= 20
    never = {"kind": "mix", "p": 0.0}
    unmixed = noise(folder, augment=("randaugment", "normalize", never), batch_size=40)
    assert len(on_rank(ImageData(unmixed, 0, CPU), 1, 4).batch(0).images) == 10


def test_a_rank_decodes_its_share_only(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ImageFolder(name="digits", path=digits, size=8, classes=4, batch_size=40, workers=0)
    module = on_rank(data.build(0, CPU), 1, 4)
    opened = []
    open_image = module.train.open

    def count(place: int) -> Any:
        opened.append(place)
        return open_image(place)

    monkeypatch.setattr(module.train, "open", count)
    module.batch(0)
    assert len(opened) == 10
    assert len(set(opened)) == 10


def children() -> set[int]:
    """Return the processes that this process has started and that have not ended."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(child) for path in tasks for child in path.read_text().split()}


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of children")
def test_workers_start_once_and_end_with_the_training(folder: Path) -> None:
    before = children()
    data = noise(folder, augment=(BLANKING, "normalize"), workers=2)
    module = ImageData(data, 0, CPU)
    assert children() == before
    steps = module.steps_per_epoch
    list(module.train_batches(0, steps))
    started = children() - before
    assert len(started) == 2
    for epoch in range(1, 4):
        list(module.train_batches(epoch * steps, (epoch + 1) * steps))
        assert children() - before == started
    TrainerData(module).teardown("fit")
    assert children() == before


@pytest.mark.process
def test_workers_prepare_the_next_epoch_while_the_cell_is_evaluated(folder: Path) -> None:
    """A worker writes the step of each batch that it makes to a file."""
    log = folder / "made.txt"

    class Logged(ImageData):
        def batch(self, step: int) -> Any:
            with log.open("a") as file:
                file.write(f"{step}\n")
            return super().batch(step)

    module = on_rank(Logged(noise(folder, workers=1), 0, CPU))
    module.trainer.max_steps = 7
    assert module.steps_per_epoch == 3
    list(module.train_batches(0, 3))
    wait_until(lambda: log.read_text().count("\n") >= 5)
    made = [int(line) for line in log.read_text().split()]
    assert made == [0, 1, 2, 3, 4]
    list(module.train_batches(3, 6))
    list(module.train_batches(6, 7))
    module.stop_workers()
    # No step after the last one of the training is made.
    assert [int(line) for line in log.read_text().split()] == list(range(7))


DYING = """
import os
import signal
import sys
from pathlib import Path

import torch
from lit_attn.data.image_sets import Npz
from lit_attn.data.images import ImageData


class Dying(ImageData):
    def batch(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step)


path = Path(sys.argv[1])
data = Npz(name="noise", path=path, size=8, classes=4, batch_size=16, workers=1)
list(Dying(data, 0, torch.device("cpu")).train_batches(0, 6))
"""


@pytest.mark.process
def test_the_death_of_a_worker_ends_the_training(folder: Path, tmp_path: Path) -> None:
    """The signal of the worker arrives at any moment, so the training is a process by itself."""
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    finished = run_python(tmp_path, str(script), str(folder / "noise.npz"))
    assert finished.returncode == 1
    last_line = finished.stderr.strip().splitlines()[-1]
    # torch notices the death by the signal, or by the end of the process.
    ends = "is killed by signal|exited unexpectedly"
    assert re.match(rf"RuntimeError: DataLoader worker \(pid.*\) ({ends})", last_line)


@pytest.mark.process
def test_an_error_of_a_worker_is_one_line_and_reading_can_go_on(folder: Path) -> None:
    class Failing(ImageData):
        def batch(self, step: int) -> Any:
            if step == 1:
                raise ConfigError("data.path: no image 1")
            return super().batch(step)

    module = Failing(noise(folder, workers=2), 0, CPU)
    with pytest.raises(ConfigError, match=r"^data\.path: no image 1$"):
        list(module.train_batches(0, 3))
    expected = read(ImageData(noise(folder), 0, CPU), 2, 3)
    assert_equal(list(module.train_batches(2, 3)), expected)
    module.stop_workers()


@pytest.mark.process
def test_a_read_that_was_left_early_does_not_disturb_the_next() -> None:
    workers = loading.BatchWorkers(str, 2)
    reading = workers.read(range(100))
    assert next(reading) == "0"
    assert list(workers.read([7, 8])) == ["7", "8"]
    workers.close()
    workers.close()
    assert list(workers.read([9])) == ["9"]
    workers.close()


class Owner:
    """Owner of a worker process; the worker's functions refer to it, as those of a module do."""

    def __init__(self) -> None:
        self.workers = loading.BatchWorkers(self.make, 1, self.prepare)
        self.offset = 0

    def prepare(self) -> None:
        self.offset = 100

    def make(self, key: int) -> int:
        if key == 3:
            raise ConfigError("no batch 3")
        return self.offset + key


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of children")
@pytest.mark.parametrize("last", [1, 3], ids=["left early", "after an error"])
def test_a_worker_ends_by_itself_when_its_owner_is_garbage(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would wait five seconds for a worker that gets no message, and then kill it."""
    # Workers of earlier tests end now.
    gc.collect()
    killed: list[int | None] = []
    monkeypatch.setattr(BaseProcess, "terminate", lambda process: killed.append(process.pid))
    before = children()
    owner = Owner()
    reading = owner.workers.read(range(9))
    assert next(reading) == 100
    with contextlib.suppress(ConfigError):
        for _ in range(last):
            next(reading)
    assert len(children() - before) == 1
    del owner, reading
    gc.collect()
    assert killed == []
    assert children() == before


@pytest.mark.parametrize(
    ("configured", "is_worthwhile", "device", "threads", "workers"),
    [
        (None, True, "cpu", 2, 0),
        (None, True, "cpu", 16, 4),
        (None, True, "cuda", 1, 2),
        (None, True, "cuda", 6, 5),
        (None, True, "cuda", 64, 8),
        (None, False, "cuda", 64, 0),
        (0, True, "cuda", 64, 0),
        (3, False, "cpu", 1, 3),
    ],
)
def test_the_default_depends_on_the_device_and_its_cores(
    configured: int | None,
    is_worthwhile: bool,
    device: str,
    threads: int,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chosen = loading.choose_workers(configured, is_worthwhile, torch.device(device))
    assert chosen == workers


def test_the_number_of_workers_is_not_in_the_identity() -> None:
    fields = Data.model_fields["workers"]
    assert fields.json_schema_extra == ImageFolder.model_fields["path"].json_schema_extra
