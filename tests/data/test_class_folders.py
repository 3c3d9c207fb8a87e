"""The class of an image is the first folder below its split, and odd folders are named."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lit_attn.data import loading
from lit_attn.data.folders import natural_order
from lit_attn.data.image_files import ImageFileData
from lit_attn.data.image_folders import ImageFolder, list_folders
from lit_attn.data.image_lists import Files
from lit_attn.schema.errors import ConfigError

CPU = torch.device("cpu")


def write(root: Path, *names: str) -> Path:
    """Write a small picture to each of `names` below `root`; the endings give the formats."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (len(name), 0, 0)).save(path)
    return root


def config(root: Path, classes: int = 2, **choices: Any) -> ImageFolder:
    fields = {"size": 4, "batch_size": 1, "workers": 0, **choices}
    return ImageFolder(name="own", path=root, classes=classes, **fields)


def labels(files: Files) -> dict[str, int]:
    return {
        name.decode(): label
        for name, label in zip(files.names.tolist(), files.labels.tolist(), strict=True)
    }


def error(root: Path, classes: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        list_folders(config(root, classes))
    message = str(caught.value)
    assert "\n" not in message
    message.encode()
    return message.replace(str(root), "ROOT")


def test_folders_inside_a_class_folder_are_no_classes(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in ("dog", "cat"):
            write(tmp_path, f"{split}/{label}/left/1.png", f"{split}/{label}/right/1.png")
    write(tmp_path, "train/cat/0.png", "train/dog/left/deeper/9.png")
    files = list_folders(config(tmp_path))
    assert labels(files["train"]) == {
        "cat/0.png": 0,
        "cat/left/1.png": 0,
        "cat/right/1.png": 0,
        "dog/left/1.png": 1,
        "dog/left/deeper/9.png": 1,
        "dog/right/1.png": 1,
    }
    assert labels(files["test"]) == {
        "cat/left/1.png": 0,
        "cat/right/1.png": 0,
        "dog/left/1.png": 1,
        "dog/right/1.png": 1,
    }


def test_every_ending_is_read_and_others_are_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endings = ["bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp"]
    names = [f"a.{ending}" for ending in endings] + [f"B.{ending.upper()}" for ending in endings]
    for split in ("train", "test"):
        write(tmp_path, *(f"{split}/cat/{name}" for name in names), f"{split}/dog/1.png")
    hidden = ("train/.DS_Store", "train/.cache/1.txt", "train/cat/._a.png", "test/cat/.notes.txt")
    others = ("train/cat/x.heic", "train/dog/y.HEIC", "test/cat/notes.txt", "test/LICENSE")
    for name in (*others, *hidden):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    data = config(tmp_path)
    assert len(list_folders(data)["train"].labels) == len(names) + 1
    (message,) = caplog.messages
    assert message.startswith(
        f"data.path: {tmp_path}: left out 4 files: .heic (2), .txt (1), no ending (1); files that "
        "are read end in .bmp, .gif, .jpeg,"
    )
    reader = ImageFileData(data, 0, CPU).train
    for place in range(len(reader)):
        # A red image remains one in every format; PGM has no colours.
        assert np.asarray(reader.open(place))[0, 0, 0] < 40


def test_empty_class_folders_are_named(tmp_path: Path) -> None:
    write(tmp_path, "train/cat/1.png", "train/dog/1.png", "test/cat/1.png")
    (tmp_path / "train/emu/inner").mkdir(parents=True)
    (tmp_path / "train/emu/1.heic").touch()
    message = error(tmp_path)
    assert message.startswith("data.path: ROOT/train/emu has no images; add images")
    assert " .jpeg" in message


def test_images_outside_of_class_folders_are_named(tmp_path: Path) -> None:
    write(tmp_path, "train/cat/1.png", "train/dog/1.png", "test/cat/1.png", "test/b.png")
    assert error(tmp_path) == (
        "data.path: ROOT/test has 1 image outside of its class folders, as b.png; move each image "
        "into the folder of its class or delete it"
    )


def test_a_split_of_images_without_class_folders_is_named(tmp_path: Path) -> None:
    write(tmp_path, "train/1.png", "train/2.png", "test/cat/1.png")
    assert error(tmp_path) == (
        "data.path: no class folders in ROOT/train; its 2 images belong into one folder for each "
        "class"
    )


@pytest.mark.parametrize(
    "pair", [("Cat", "cat"), ("caf\u00e9", "cafe\u0301"), ("Straße", "STRASSE")]
)
def test_two_spellings_of_a_class_are_named(pair: tuple[str, str], tmp_path: Path) -> None:
    write(tmp_path, *(f"train/{name}/1.png" for name in pair), f"test/{pair[0]}/1.png")
    message = error(tmp_path)
    assert message.startswith("data.path: the class folders '")
    assert all(f"'{name}'" in message for name in pair)
    assert "merge them or rename one" in message


def test_classes_that_train_lacks_are_named_with_the_nearest_one(tmp_path: Path) -> None:
    write(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/Cat/1.png")
    assert error(tmp_path) == (
        "data.path: ROOT/val/Cat: no such class in train; did you mean 'cat'?"
    )


def test_classes_that_an_evaluated_split_lacks_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, *(f"train/{number}/1.png" for number in range(8)), "val/1/1.png")
    (tmp_path / "val/3").mkdir()
    list_folders(config(tmp_path, 8))
    assert caplog.messages == [
        f"data.path: {tmp_path}/val has no image of 7 of the 8 classes of train: 0, 2, 3, 4, 5 and "
        "2 more; metrics on it do not cover them"
    ]


def test_another_number_of_classes_is_named_with_the_classes(tmp_path: Path) -> None:
    write(tmp_path, "train/animals/cat/1.png", "train/animals/dog/1.png", "test/animals/1.png")
    assert error(tmp_path) == (
        "data.classes: 2, but ROOT/train has images of 1 classes: animals; a class is a folder "
        "directly below train"
    )


@pytest.mark.parametrize("place", ["train/cat/caf\udce9.png", "train/caf\udce9/1.png"])
def test_a_name_in_latin_1_is_named(place: str, tmp_path: Path) -> None:
    write(tmp_path, "train/cat/1.png", "train/dog/1.png", "test/cat/1.png")
    path = os.fsencode(tmp_path / place)
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    (tmp_path / "train/cat/1.png").rename(os.fsdecode(path))
    assert "caf\\xe9" in error(tmp_path)
    assert error(tmp_path).endswith("has a name that is not UTF-8; rename it")


def test_broken_links_and_folders_named_as_images_are_named(tmp_path: Path) -> None:
    write(tmp_path, "train/cat/1.png", "train/dog/1.png", "test/cat/1.png")
    (tmp_path / "train/cat/notes.txt").symlink_to(tmp_path / "none.txt")
    list_folders(config(tmp_path))
    (tmp_path / "train/cat/2.png").symlink_to(tmp_path / "none.png")
    assert error(tmp_path).startswith("data.path: ROOT/train/cat/2.png is no file, or a link to a")
    (tmp_path / "train/cat/2.png").unlink()
    (tmp_path / "train/cat/2.png").symlink_to(tmp_path / "train/cat/1.png")
    assert len(list_folders(config(tmp_path))["train"].labels) == 3
    (tmp_path / "test/cat/x.JPG").mkdir()
    assert error(tmp_path).startswith("data.path: ROOT/test/cat/x.JPG is a folder with the ending")


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    write(tmp_path, "elsewhere/1.png", "train/dog/1.png", "test/dog/1.png")
    (tmp_path / "train/cat").symlink_to(tmp_path / "elsewhere")
    assert labels(list_folders(config(tmp_path))["train"]) == {"cat/1.png": 0, "dog/1.png": 1}
    (tmp_path / "train/dog/up").symlink_to(tmp_path / "train/dog")
    assert error(tmp_path).endswith(
        "dog/up is a link to a folder that contains it; delete the link"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    write(tmp_path, "train/cat/in/1.png", "train/dog/1.png", "test/dog/1.png")
    (tmp_path / "train/cat/in").chmod(0)
    assert "cat/in cannot be read: Permission denied" in error(tmp_path)


@given(st.lists(st.text("aB1é-٣0 ²", min_size=1, max_size=5), unique=True))
@settings(max_examples=60, deadline=None)
def test_names_are_sorted_as_people_do(names: list[str]) -> None:
    """The order does not depend on the order of the disk, and numbers count as numbers."""
    backwards = list(reversed(names))
    assert sorted(names, key=natural_order) == sorted(backwards, key=natural_order)
    assert sorted(["x10", "x9", "X1"], key=natural_order) == ["X1", "x9", "x10"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_check_before_the_first_cell_decodes_images(split: str, tmp_path: Path) -> None:
    write(tmp_path, *(f"{s}/{c}/1.png" for s in ("train", "test") for c in ("cat", "dog")))
    path = tmp_path / split / "dog" / "1.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    data = ImageFileData(config(tmp_path), 0, CPU)
    with pytest.raises(ConfigError, match=r"^data\.path: .* is not a readable image: ") as caught:
        data.check()
    assert str(path) in str(caught.value)


def test_the_check_of_many_images_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *(f"train/cat/{n}.png" for n in range(9)), "train/dog/1.png", "test/cat/1.png")
    monkeypatch.setattr(loading, "CHECK_SECONDS", 0.0)
    opened: list[int] = []
    data = ImageFileData(config(tmp_path), 0, CPU)
    monkeypatch.setattr(data.train, "open", opened.append)
    data.check()
    assert len(opened) == 1


def test_16_bit_images_and_turned_images_reach_the_network(tmp_path: Path) -> None:
    """A file of 16 bits is a ramp and not white, and a turned photograph stands upright."""
    write(tmp_path, "train/cat/1.png", "train/dog/1.png", "test/cat/1.png")
    ramp = np.repeat(np.arange(0, 65536, 16384, dtype=np.uint16)[None], 4, 0)
    Image.fromarray(ramp).save(tmp_path / "train/cat/1.png")
    turned = Image.fromarray((ramp // 256).astype(np.uint8))
    exif = Image.Exif()
    exif[274] = 6
    turned.save(tmp_path / "train/dog/1.png", exif=exif)
    augment = {"crop": "centre", "flip": 0}
    plain = {"mean": [0, 0, 0], "std": [1, 1, 1], "augment": augment}
    train = ImageFileData(config(tmp_path, **plain), 0, CPU).train
    for place, axis in ((0, 1), (1, 0)):
        read = train.read((place, 0, 4))
        assert read is not None
        image = (read[0][0] * 255).round()
        assert torch.equal(image.select(1 - axis, 0), torch.tensor([0.0, 64, 128, 192]))
