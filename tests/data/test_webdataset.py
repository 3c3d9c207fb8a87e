"""Tests of images in tar files."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data_ranks import on_rank
from helpers.tar_files import write_tar
from PIL import Image

from lit_attn.data.image_files import ImageFileData
from lit_attn.data.image_folders import WebDataset
from lit_attn.schema.errors import ConfigError

CPU = torch.device("cpu")
NEEDED = r"sample 'a' needs an image \(\.jpg, \.jpeg, \.png, .*\) and a class \(\.cls\) from 0 to 2"


def make_image(number: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(content, format="PNG")
    return content.getvalue()


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    write_tar(path, members.items())


def make_samples(first: int, count: int) -> dict[str, bytes]:
    """Return samples whose red value is their number, and whose class is its remainder by 3."""
    members = {}
    for number in range(first, first + count):
        members[f"dir/{number:04d}.png"] = make_image(number)
        members[f"dir/{number:04d}.json"] = b"{}"
        members[f"dir/{number:04d}.cls"] = str(number % 3).encode()
    return members


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_shard(tmp_path / "train/a-0.tar", make_samples(0, 7))
    write_shard(tmp_path / "train/a-1.tar", make_samples(7, 5))
    write_shard(tmp_path / "val/a.tar", make_samples(100, 5))
    return tmp_path


def make_config(root: Path, **choices: Any) -> WebDataset:
    data = {"name": "w", "path": root, "classes": 3, "size": 8, "batch_size": 4}
    augment = {"crop": "centre", "flip": 0}
    fixed = {"workers": 0, "augment": augment, "mean": [0, 0, 0], "std": [1, 1, 1]}
    return WebDataset.model_validate(data | fixed | choices)


def numbers(images: torch.Tensor) -> list[int]:
    return [round(float(value) * 255) for value in images[:, 0, 4, 4]]


def read_epoch(config: WebDataset, rank: int = 0, world: int = 1) -> list[tuple[int, int]]:
    data = ImageFileData(config, 0, CPU)
    on_rank(data, rank, world)
    samples = []
    for images, labels, _ in data.train_batches(0, data.steps_per_epoch):
        samples += list(zip(numbers(images), labels.tolist(), strict=True))
    return samples


@pytest.mark.parametrize("workers", [0, 2])
def test_every_image_is_read_once_with_its_class(root: Path, workers: int) -> None:
    config = make_config(root, workers=workers)
    samples = read_epoch(config)
    assert sorted(samples) == [(number, number % 3) for number in range(12)]
    assert samples != sorted(samples)
    data = ImageFileData(config, 0, CPU)
    assert data.splits == ["test"]
    batches = list(data.val_dataloader()[0])
    assert [n for images, _ in batches for n in numbers(images)] == [*range(100, 105)]


def test_a_class_beyond_the_first_sample_is_named_once(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.path: .*tar: sample '.*' needs an image"):
        ImageFileData(make_config(root, classes=2), 0, CPU).check()


def test_processes_share_the_same_batches(root: Path) -> None:
    shares = [read_epoch(make_config(root), rank, 2) for rank in range(2)]
    alone = read_epoch(make_config(root))
    steps = [alone[start : start + 4] for start in (0, 4, 8)]
    for step, batch in enumerate(steps):
        part = slice(2 * step, 2 * step + 2)
        assert shares[0][part] == batch[0::2]
        assert shares[1][part] == batch[1::2]


def test_a_resumed_epoch_continues_with_the_same_images(root: Path) -> None:
    data = ImageFileData(make_config(root), 0, CPU)
    ((images, _, _),) = data.train_batches(2, 3)
    assert numbers(images) == [number for number, _ in read_epoch(make_config(root))[8:]]


def test_images_can_be_held_out(root: Path) -> None:
    data = ImageFileData(make_config(root, validation=3, batch_size=2), 0, CPU)
    assert data.splits == ["val", "test"]
    assert (len(data.train), len(data.evaluated["val"])) == (9, 3)


def test_the_fingerprint_sees_another_image(root: Path) -> None:
    before = ImageFileData(make_config(root), 0, CPU).fingerprint()
    write_shard(root / "val/a.tar", make_samples(100, 4))
    assert ImageFileData(make_config(root), 0, CPU).fingerprint() != before


def test_an_unreadable_image_is_named(root: Path) -> None:
    write_shard(root / "val/a.tar", make_samples(100, 2) | {"dir/0100.png": b"text"})
    data = ImageFileData(make_config(root), 0, CPU)
    damaged = r"^data\.path: .*a\.tar: the image of 4 bytes at byte [\d,]+ is not a readable image"
    with pytest.raises(ConfigError, match=damaged):
        list(data.val_dataloader()[0])


IMAGE, CLASS = ("a.png", make_image(0)), ("a.cls", b"1")
OTHER_IMAGE, OTHER_CLASS = ("b.png", make_image(1)), ("b.cls", b"1")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([CLASS], NEEDED),
        ([IMAGE], NEEDED),
        ([IMAGE, ("a.cls", b"3")], NEEDED),
        ([IMAGE, ("a.cls", b"cat")], NEEDED + ", not 'cat'"),
        ([IMAGE, ("a.cls", b"1.0")], NEEDED + r", not '1\.0'"),
        ([IMAGE, ("a.cls", b"-1")], NEEDED + ", not '-1'"),
        ([IMAGE, CLASS, ("a.PNG", b"")], "sample 'a' has two members"),
        ([IMAGE, CLASS, IMAGE, CLASS], r"sample 'a' has two members 'a\.png'"),
        ([IMAGE, CLASS, OTHER_IMAGE, OTHER_CLASS, IMAGE, CLASS], "sample 'a' occurs twice"),
        ([IMAGE, OTHER_IMAGE, CLASS, OTHER_CLASS], "sample 'a' needs an image"),
    ],
)
def test_bad_samples_are_named(members: list[tuple[str, bytes]], message: str, root: Path) -> None:
    write_tar(root / "train/a-0.tar", members)
    with pytest.raises(ConfigError, match=r"^data\.path: .*a-0\.tar: " + message):
        make_config(root).list_files()


def test_missing_and_torn_shards_are_named(root: Path) -> None:
    (root / "train/a-0.tar").write_bytes(np.random.default_rng(0).bytes(700))
    with pytest.raises(ConfigError, match=r"data\.path: .*a-0\.tar: "):
        make_config(root).list_files()
    with pytest.raises(ConfigError, match=r"data\.path: no \*\.tar files in .*none/train"):
        make_config(root / "none").list_files()


def test_joined_archives_are_refused(root: Path) -> None:
    first, second = root / "train/a-0.tar", root / "train/a-1.tar"
    first.write_bytes(first.read_bytes() + second.read_bytes())
    second.unlink()
    with pytest.raises(ConfigError, match=r"a-0\.tar: a second archive follows the end of the"):
        make_config(root).list_files()


def test_files_beside_shards_are_counted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split in ("train", "val"):
        (root / split / "inner").mkdir()
        (root / split / ".hidden.tar").touch()
    (root / "train/b.tar.gz").touch()
    files = make_config(root).list_files()
    assert len(files["train"].labels) == 12
    assert caplog.messages == [
        f"data.path: {root}: left out 1 file: .gz (1); files that are read end in .tar",
        f"data.path: {root}: left out 2 folders; only files directly in a split's folder are read",
    ]


def test_shards_without_a_sample_are_named(root: Path) -> None:
    write_shard(root / "val/a.tar", {})
    with pytest.raises(ConfigError, match=r"^data\.path: the tar files of .*val have no samples$"):
        make_config(root).list_files()


@pytest.mark.parametrize("kind", ["JPEG", "tif", "webp"])
def test_images_of_every_kind_are_samples(kind: str, root: Path) -> None:
    content = io.BytesIO()
    pillow_kind = {"tif": "TIFF"}.get(kind, kind.upper())
    Image.new("RGB", (8, 8), (250, 0, 0)).save(content, pillow_kind)
    hidden = {"dir/._0000.png": b"not a sample", "dir/._0000.cls": b"x"}
    members = {f"dir/0000.{kind}": content.getvalue(), "dir/0000.cls": b"2"}
    write_shard(root / "val/a.tar", hidden | members)
    ((images, labels),) = list(ImageFileData(make_config(root), 0, CPU).val_dataloader()[0])
    assert numbers(images)[0] > 245
    assert labels.tolist() == [2]


def test_16_bit_images_of_shards_keep_their_range(root: Path) -> None:
    content = io.BytesIO()
    Image.fromarray(np.full((8, 8), 100 * 256 + 7, np.uint16)).save(content, "PNG")
    write_shard(root / "val/a.tar", {"a.png": content.getvalue(), "a.cls": b"0"})
    ((images, _),) = list(ImageFileData(make_config(root), 0, CPU).val_dataloader()[0])
    assert numbers(images) == [100]


def test_a_file_that_is_cut_at_any_block_is_refused(root: Path) -> None:
    path = root / "train/a-0.tar"
    content = path.read_bytes()
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1]
    end = last.offset_data + tarfile.BLOCKSIZE
    assert content[end:].strip(b"\0") == b""
    for size in range(0, end + 1, tarfile.BLOCKSIZE):
        path.write_bytes(content[:size])
        with pytest.raises(ConfigError, match=r"^data\.path: .*a-0\.tar: "):
            make_config(root).list_files()
    # One block of zeros is an end, too.
    path.write_bytes(content[: end + tarfile.BLOCKSIZE])
    assert len(make_config(root).list_files()["train"].labels) == 12


@pytest.mark.parametrize(
    ("program", "mode"), [("gzip", "w:gz"), ("bzip2", "w:bz2"), ("xz", "w:xz")]
)
def test_a_compressed_file_is_refused(program: str, mode: Any, root: Path) -> None:
    with tarfile.open(root / "train/a-0.tar", mode) as archive:
        archive.add(root / "val/a.tar", "a.png")
    with pytest.raises(ConfigError, match=f"it is compressed by {program}; decompress it"):
        make_config(root).list_files()


def test_hard_links_are_the_file_that_they_name(root: Path) -> None:
    members = [
        ("a.png", make_image(50)),
        ("a.cls", b"2"),
        ("b.png", b"->a.png"),
        ("b.cls", b"->a.cls"),
    ]
    write_tar(root / "val/a.tar", members)
    data = ImageFileData(make_config(root), 0, CPU)
    ((images, labels),) = data.val_dataloader()[0]
    assert numbers(images) == [50, 50]
    assert labels.tolist() == [2, 2]
    write_tar(root / "val/a.tar", [("a.png", b"->elsewhere.png"), ("a.cls", b"1")])
    with pytest.raises(
        ConfigError, match=r"'a\.png' is a link to 'elsewhere\.png'; write the file"
    ):
        make_config(root).list_files()


@pytest.mark.parametrize(
    "name", ["README", "dir/README", "._a.png", ".hidden/a.png", "x/._y/a.cls"]
)
def test_members_that_are_no_part_of_a_sample_change_nothing(name: str, root: Path) -> None:
    members = [("./a.png", make_image(50)), (name, b"text"), ("./a.cls", b"2")]
    write_tar(root / "val/a.tar", members)
    assert make_config(root).list_files()["test"].labels.tolist() == [2]


def test_shards_are_read_in_natural_order(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        write_shard(
            tmp_path / f"train/{number}.tar",
            {"a.png": make_image(0), "a.cls": b"%d" % (number % 3)},
        )
    write_shard(tmp_path / "val/a.tar", make_samples(100, 2))
    names = make_config(tmp_path).list_files()["train"].names
    assert [name.split()[0] for name in names.tolist()] == [b"1.tar", b"2.tar", b"10.tar"]
