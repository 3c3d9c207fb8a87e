"""Tests of class folders: order of the images, shares of the ranks, errors."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data_ranks import on_rank
from helpers.digit_folders import CLASSES, write
from PIL import Image
from pydantic import ValidationError
from timm.data import auto_augment
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor

from lit_attn.cells.rows import read_unreadable
from lit_attn.data import loading
from lit_attn.data.augment.timm_augmentation import TimmAugmentation, crop_centre, posterize
from lit_attn.data.image_files import ImageFileData, Reader
from lit_attn.data.image_folders import ImageFolder, ImageNet, list_folders
from lit_attn.data.unreadable import UnreadableImages
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ImageLabels

CPU = torch.device("cpu")
AUGMENT = TimmAugmentation(policy="rand-m9-mstd0.5-inc1", erasing=0.5, mixup=0.8, cutmix=1.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 64 training and 20 evaluation images of 4 classes."""
    return write(tmp_path_factory.mktemp("digits"))


def config(path: Path, **changes: Any) -> ImageFolder:
    fields = {"size": 16, "batch_size": 16, "eval_batch_size": 8, "workers": 0, **changes}
    return ImageFolder(name="digits", path=path, classes=CLASSES, **fields)


def at(data: ImageFolder, rank: int = 0, world: int = 1, step: int = 0, seed: int = 0) -> Any:
    """Return the data as rank `rank` of `world` sees it after `step` training steps."""
    return on_rank(ImageFileData(data, seed, CPU), rank, world, step)


def batches(data: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the remaining batches of an epoch, mixed as the task gets them."""
    return [data.on_after_batch_transfer(batch, 0) for batch in data.train_dataloader()]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def test_batches_are_a_function_of_seed_and_step(folders: Path) -> None:
    data = config(folders, augment=AUGMENT)
    random.seed(1)
    expected = batches(at(data))
    assert [tuple(images.shape) for images, _ in expected] == [(16, 3, 16, 16)] * 4
    assert all(targets.shape == (16, CLASSES) for _, targets in expected)
    assert all(targets.sum(1).allclose(torch.ones(16)) for _, targets in expected)
    random.seed(2)
    torch.manual_seed(2)
    assert same(batches(at(data, step=2)), expected[2:])
    assert not same(batches(at(data, seed=1)), expected)
    assert not same(batches(at(data, step=4)), expected)


# Python 3.12 and later warn at any fork of a process with threads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_batches_do_not_depend_on_the_number_of_workers(folders: Path) -> None:
    alone = config(folders, augment=AUGMENT)
    shared = config(folders, augment=AUGMENT, workers=2)
    assert alone.identity() == shared.identity()
    assert same(batches(at(shared, step=1)), batches(at(alone, step=1)))


def test_drawing_leaves_the_global_generators_alone(folders: Path) -> None:
    data = at(config(folders, augment=AUGMENT))
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    batches(data)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_devices_share_a_batch_and_an_evaluation(folders: Path) -> None:
    """Each of 20 images in five evaluation batches is evaluated once by 3 devices."""
    data = config(folders, batch_size=12, eval_batch_size=4, augment=TimmAugmentation())
    single = batches(at(data, step=1))
    parts = [batches(at(data, rank, 3, step=1)) for rank in range(3)]
    for number, (images, labels) in enumerate(single):
        for rank in range(3):
            assert torch.equal(parts[rank][number][0], images[rank::3])
            assert torch.equal(parts[rank][number][1], labels[rank::3])
    loaders = [at(data, rank, 3).val_dataloader()[0] for rank in range(3)]
    read = [list(loader) for loader in loaders]
    assert {len(part) for part in read} == {5} == {len(loader) for loader in loaders}
    evaluated = torch.cat([images for part in read for images, _ in part])
    (alone,) = at(data).val_dataloader()
    expected = torch.cat([images for images, _ in alone])
    assert len(evaluated) == 20
    assert {image.sum().item() for image in evaluated} == {image.sum().item() for image in expected}


def test_repeated_augmentation_equals_that_of_timm(folders: Path) -> None:
    """An epoch has a third of the images, each three times in a row with new augmentations."""
    data = at(config(folders, repeats=3, batch_size=12))
    order = [place for step in range(5) for place, *_ in data.samples(step)]
    assert order == [place for place in order[::3] for _ in range(3)]
    assert len(set(order)) == 20
    images, labels = next(iter(batches(data)))
    assert torch.equal(labels[0::3], labels[1::3])
    assert not torch.equal(images[0], images[1])
    # Each of 3 devices takes the part of timm's sampler, whose permutation the epoch seeds.
    for rank in range(3):
        sampler = RepeatAugSampler(range(600), 3, rank, num_repeats=3)
        alone = RepeatAugSampler(range(600), 1, 0, num_repeats=3)
        assert list(sampler) == list(alone)[rank::3][: len(sampler)]


def test_without_repeats_an_epoch_is_a_permutation(folders: Path) -> None:
    data = at(config(folders, batch_size=10))
    assert data.steps_per_epoch == 6
    orders = [data.draw_order(epoch).tolist() for epoch in (0, 1)]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert orders[0] != orders[1]


def test_images_grow_with_the_epochs(folders: Path) -> None:
    data = config(folders, sizes=(8, 12), epochs_per_size=2, batch_size=32)
    assert [data.size_in(epoch) for epoch in range(6)] == [8, 8, 12, 12, 16, 16]
    sides = [next(iter(batches(at(data, step=step))))[0].shape[-1] for step in (0, 3, 4, 8, 11)]
    assert sides == [8, 8, 12, 16, 16]
    (evaluation,) = at(data).val_dataloader()
    assert next(iter(evaluation))[0].shape == (7, 3, 16, 16)


def test_evaluation_is_resized_cropped_and_normalised(folders: Path) -> None:
    data = config(folders, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_share=0.8)
    (loader,) = at(data).val_dataloader()
    images, labels = next(iter(loader))
    assert labels.tolist() == [0] * 5 + [1, 1]
    with Image.open(folders / "val" / "n0" / "0.JPEG") as file:
        resized = file.convert("RGB").resize((20, 25), Image.Resampling.BICUBIC)
    # 16 x 20 pixels become 20 x 25, of which the middle 16 x 16 are kept.
    middle = np.asarray(resized)[4:20, 2:18] / 255
    expected = torch.from_numpy((middle - 0.5) / 0.5).permute(2, 0, 1).float()
    torch.testing.assert_close(images[0], expected, rtol=0, atol=1e-6)


def test_a_centre_crop_draws_nothing_but_the_flip(folders: Path) -> None:
    data = config(folders, augment=TimmAugmentation(crop="centre", flip=0), crop_share=1.0)
    files = list_folders(data)
    files |= {"test": files["train"]}
    train = Reader(data, "train", files, UnreadableImages(0))
    plain = Reader(data, "test", files, UnreadableImages(0))
    for place in range(6):
        for seed in range(3):
            one, _ = train.read_or_replace((place, seed, 16))
            other, _ = plain.read_or_replace((place, 0, 16))
            assert torch.equal(one, other)


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_a_centre_crop_halves_large_images_before_it_resizes_them(
    share: float, folders: Path
) -> None:
    """An image of 70 x 100 pixels is halved twice for 16 pixels, and once for 20 pixels."""
    noise = np.random.default_rng(0).integers(256, size=(70, 100, 3)).astype(np.uint8)
    image = Image.fromarray(noise).resize((50, 35), Image.Resampling.BOX)
    if share == 1:
        image = image.resize((25, 17), Image.Resampling.BOX)
    image = image.resize((24, 16) if share == 1 else (29, 20), Image.Resampling.BICUBIC)
    expected = np.asarray(image)[(image.height - 16) // 2 :, (image.width - 16) // 2 :][:16, :16]
    cropped = crop_centre(config(folders), 16, share, Image.fromarray(noise))
    assert np.array_equal(np.asarray(cropped), expected)


def test_held_out_images_are_of_every_class_and_not_trained_on(folders: Path) -> None:
    data = at(config(folders, validation=8))
    assert data.splits == ["val", "test"]
    listing = list_folders(data.data)
    assert np.bincount(listing["val"].labels).tolist() == [2] * CLASSES
    names = set(listing["train"].names.tolist())
    assert len(names) == 56
    assert not names & set(listing["val"].names.tolist())


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Return a folder in which two training images and one evaluation image are unreadable."""
    write(tmp_path, train=6, val=3)
    for name in ("train/n0/1.png", "val/n2/0.JPEG"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:80])
    (tmp_path / "train/n0/2.JPEG").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_one_line(broken: Path, workers: int) -> None:
    data = at(config(broken, batch_size=24, workers=workers))
    with pytest.raises(
        ConfigError, match=r"^data\.path: .*n0/[12]\..* is not a readable image: "
    ) as e:
        batches(data)
    assert "\n" not in str(e.value)
    with pytest.raises(ConfigError, match=r"^data\.path: .*val/n2/0\.JPEG is not a readable image"):
        list(data.val_dataloader()[0])


LEFT_OUT = {("train", "1.png"), ("train", "2.JPEG"), ("test", "0.JPEG")}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_unreadable_images_are_left_out_and_recorded(
    broken: Path, workers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Training takes the next image that can be read; an evaluation covers the others only."""
    folder = tmp_path_factory.mktemp("cell")
    (folder / "unreadable-0.csv").write_text("train,old.png,repaired since then\n")
    data = at(config(broken, batch_size=24, unreadable=2, workers=workers))
    data.trainer.default_root_dir = folder
    for _ in range(2):
        ((images, labels),) = batches(data)
        # Image 3 of its class also takes the places of the images 1 and 2.
        assert len(images) == 24
        assert labels.bincount().tolist() == [6, 6, 6, 6]
        (loader,) = data.val_dataloader()
        evaluated = torch.cat([labels for _, labels in loader])
        assert evaluated.bincount().tolist() == [3, 3, 2, 3]
        places = [place for unit in loader.units for place in unit]
        assert sorted(places) == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
        assert data.evaluated["test"].files.labels[places].tolist() == evaluated.tolist()
    data.stop_workers()
    left_out = read_unreadable(folder)
    assert {(entry.split, Path(entry.image).name) for entry in left_out} == LEFT_OUT
    assert "it is empty (0 bytes)" in next(e.reason for e in left_out if "2.JPEG" in e.image)


def test_a_replaced_image_has_its_own_label(broken: Path) -> None:
    """The last image of a class is replaced by the first one of the next class."""
    last = broken / "train/n0/5.png"
    last.write_bytes(b"")
    reader = ImageFileData(config(broken, unreadable=9), 0, CPU).train
    names = [Path(name.decode()).name for name in reader.files.names]
    assert reader.read_or_replace((names.index("5.png"), 0, 16))[1] == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_processes_count_unreadable_images_together(
    broken: Path, ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cell")

    def read_all() -> None:
        for rank in range(ranks):
            data = on_rank(ImageFileData(config(broken, unreadable=1), 0, CPU), rank, ranks)
            data.trainer.default_root_dir = folder
            data.train_batches(0, 1)
            for place in range(rank, 24, ranks):
                data.train.read_or_replace((place, 0, 16))

    with pytest.raises(
        ConfigError,
        match=r"^data\.unreadable: 2 images of train cannot be read, and the limit is 1; the last "
        r"one: .*n0/[12]\..* is not a readable image",
    ):
        read_all()


@pytest.mark.slow
def test_the_check_before_the_first_cell_counts_unreadable_images(
    broken: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ImageFileData(config(broken, unreadable=2), 0, CPU).check()
    assert len([line for line in caplog.messages if line.startswith("data.unreadable: left")]) == 3
    with pytest.raises(ConfigError, match=r"^data\.unreadable: 2 images of train"):
        ImageFileData(config(broken, unreadable=1), 0, CPU).check()


def test_a_batch_of_unreadable_images_is_padding(broken: Path) -> None:
    data = at(config(broken, eval_batch_size=1, unreadable=2))
    data.trainer.default_root_dir = broken
    (loader,) = data.val_dataloader()
    assert [len(labels) for _, labels in loader] == [1] * 12
    assert [number for number in range(12) if not loader.count_samples(number)] == [6]


def test_a_split_without_a_readable_image_is_an_error(broken: Path) -> None:
    for path in (broken / "val").rglob("*.*"):
        path.write_bytes(b"")
    data = at(config(broken, unreadable=99))
    data.trainer.default_root_dir = broken
    with pytest.raises(ConfigError, match=r"^data\.path: no image of test in .*val can be read"):
        list(data.val_dataloader()[0])


def test_a_batch_without_images_is_empty(folders: Path) -> None:
    read, labels = at(config(folders)).evaluated["test"].collate([])
    assert read.shape == (0, 3, 16, 16)
    assert labels.shape == (0,)


def test_the_fingerprint_depends_on_names_and_evaluated_sizes(broken: Path) -> None:
    first = ImageFileData(config(broken), 0, CPU).fingerprint()
    assert ImageFileData(config(broken, size=8), 1, CPU).fingerprint() == first
    (broken / "val/n2/0.JPEG").write_bytes(b"longer" * 100)
    second = ImageFileData(config(broken), 0, CPU).fingerprint()
    (broken / "train/n3/0.JPEG").rename(broken / "train/n3/zero.JPEG")
    assert len({first, second, ImageFileData(config(broken), 0, CPU).fingerprint()}) == 3


@pytest.mark.slow
def test_the_evaluated_folder_may_be_named_val_or_test(tmp_path: Path) -> None:
    write(tmp_path, train=6, val=2)
    assert ImageFileData(config(tmp_path), 0, CPU).splits == ["test"]
    (tmp_path / "val").rename(tmp_path / "test")
    only_test = ImageFileData(config(tmp_path), 0, CPU)
    assert only_test.splits == ["test"]
    # ImageNet's own folder test: images without class folders.
    (tmp_path / "test").rename(tmp_path / "val")
    (tmp_path / "test").mkdir()
    assert ImageFileData(config(tmp_path), 0, CPU).fingerprint() == only_test.fingerprint()
    shutil.copytree(tmp_path / "val", tmp_path / "test", dirs_exist_ok=True)
    (tmp_path / "test" / "n0" / "0.JPEG").unlink()
    both = ImageFileData(config(tmp_path), 0, CPU)
    assert both.splits == ["val", "test"]
    assert [len(both.evaluated[split]) for split in both.splits] == [8, 7]
    with pytest.raises(ConfigError, match="validation: this data set has a validation split"):
        ImageFileData(config(tmp_path, validation=4), 0, CPU)


def test_folders_that_do_not_match_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no class folders in .*/train"):
        ImageFileData(config(tmp_path), 0, CPU)
    write(tmp_path, train=4, val=1)
    (tmp_path / "val").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"no class folders in .*/test or .*/val"):
        ImageFileData(config(tmp_path), 0, CPU)
    (tmp_path / "val" / "n1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="val has no class folders with images"):
        ImageFileData(config(tmp_path), 0, CPU)
    (tmp_path / "val" / "n1").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "val")
    with pytest.raises(ConfigError, match="batch_size: 18 is more than the 16 samples"):
        ImageFileData(config(tmp_path, batch_size=18), 0, CPU)
    with pytest.raises(ConfigError, match="policy: timm does not know 'rand-x9'"):
        ImageFileData(config(tmp_path, augment={"policy": "rand-x9"}), 0, CPU)


def test_uneven_shares_are_refused(folders: Path) -> None:
    with pytest.raises(
        ConfigError, match="3 devices cannot share a micro-batch of 16 samples evenly"
    ):
        at(config(folders), 0, 3).train_dataloader()
    with pytest.raises(ConfigError, match=r"18 samples evenly in pairs.*multiple of 4"):
        at(config(folders, batch_size=18, augment=AUGMENT), 0, 2).train_dataloader()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 15, "augment": AUGMENT}, "15 images cannot be mixed in pairs"),
        ({"augment": {"policy": "autoaugment"}}, "should match pattern"),
        ({"augment": {"area": [1.0, 0.5]}}, "area: the range from 1.0 to 0.5 is empty"),
        ({"augment": {"mixpu": 0.5}}, "did you mean 'mixup'"),
    ],
)
def test_bad_configurations_are_refused(
    changes: dict[str, Any], message: str, folders: Path
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(folders, **changes)


def test_imagenet_has_a_thousand_classes_and_224_pixels() -> None:
    data = ImageNet()
    assert data.signature() == ImageLabels((3, 224, 224), 1000)
    assert data.identity() == {"kind": "imagenet"}


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "rand-m0", "v0", "augmix-m10"])
def test_policies_posterise_to_black_where_pillow_refuses(policy: str, folders: Path) -> None:
    """timm asks for 0 bits at the largest magnitude, for which Pillow raises since version 12."""
    data = config(folders, augment=TimmAugmentation(policy=policy))
    reader = Reader(data, "train", list_folders(data), UnreadableImages(0))
    transform = reader.transforms[16]
    assert posterize not in auto_augment.NAME_TO_OP.values()
    (step,) = [
        step
        for step in transform.transforms
        if hasattr(step, "ops" if policy != "v0" else "policy")
    ]
    ops = step.ops if policy != "v0" else [op for pair in step.policy for op in pair]
    posterising = [op for op in ops if "osteri" in op.name]
    assert posterising
    image = Image.new("RGB", (4, 4), (200, 100, 255))
    for op in posterising:
        assert op.aug_fn(image, 0).getcolors() == [(16, (0, 0, 0))]
        assert op.aug_fn(image, 1).getcolors() == [(16, (128, 0, 128))]
        for _ in range(5):
            op(image)


def test_a_tmpdir_too_long_for_sockets_is_an_error(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this error the worker drops what it cannot send, and the trainer waits forever."""
    monkeypatch.setattr(loading, "get_temp_dir", lambda: "/" + "deep" * 25)
    (loader,) = at(config(folders, workers=1)).val_dataloader()
    with pytest.raises(ConfigError, match=r"TMPDIR: /deep.* at most 75 characters"):
        next(iter(loader))
    (loader,) = at(config(folders)).val_dataloader()
    assert next(iter(loader))
