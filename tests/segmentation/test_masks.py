"""Tests of segmentation data with classes and colours of the user."""

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lit_attn.schema.errors import ConfigError
from lit_attn.segmentation.mask_sets import MasksConfig

pytest.importorskip("mmseg")

CPU = torch.device("cpu")
COLOURS = {"colours": [[255, 0, 0], [0, 255, 0]], "void": [0, 0, 0]}


def write(root: Path, labels: np.ndarray, suffix: str = ".png") -> None:
    """Write one image and its labels for training, and the same for evaluation."""
    for split in ("training", "validation"):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        size = labels.shape[1::-1]
        Image.new("RGB", size, (5, 6, 7)).save(root / f"images/{split}/a{suffix}")
        Image.fromarray(labels.astype(np.uint8)).save(root / f"annotations/{split}/a.png")


def make_config(root: Path, **choices: Any) -> MasksConfig:
    sizes = {"crop": 4, "short_side": 4, "long_side": 8, "batch_size": 1, "workers": 0}
    data = {"name": "m", "root": root, "classes": ["cat", "dog"], "augment": ["category-crop"]}
    return MasksConfig.model_validate(data | sizes | choices)


def read_labels(config: MasksConfig) -> list[list[int]]:
    (sample,) = next(iter(config.build(0, CPU).val_dataloader()[0]))["data_samples"]
    labels: list[list[int]] = sample.gt_sem_seg.data[0].tolist()
    return labels


@pytest.mark.parametrize("suffix", [".png", ".jpeg"])
def test_numbers_are_classes_from_zero(suffix: str, tmp_path: Path) -> None:
    labels = np.array([[0, 1, 255, 0]] * 4)
    write(tmp_path, labels, suffix)
    config = make_config(tmp_path)
    assert read_labels(config) == labels.tolist()
    data = config.build(0, CPU)
    assert data.classes == ("cat", "dog")
    batch = next(iter(data.train_dataloader()))
    assert batch["data_samples"][0].gt_sem_seg.data[0].tolist() == labels.tolist()


def test_colours_are_classes(tmp_path: Path) -> None:
    colours = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 0], [0, 255, 0]]] * 4)
    write(tmp_path, colours)
    config = make_config(tmp_path, **COLOURS)
    assert read_labels(config) == [[0, 1, 255, 1]] * 4


@pytest.mark.parametrize("void", [2, 11, 300, -1])
def test_void_is_a_number_without_a_class(void: int, tmp_path: Path) -> None:
    """255 stays a number without a class."""
    labels = np.array([[0, 1, void, 255]] * 4)
    write(tmp_path, np.zeros((4, 4)))
    for split in ("training", "validation"):
        path = tmp_path / f"annotations/{split}/a.png"
        path.unlink()
        stored = labels.astype(np.int32 if void < 0 or void > 255 else np.uint8)
        Image.fromarray(stored).save(path.with_suffix(".tif"))
    data = make_config(tmp_path, void=void)
    assert read_labels(data) == [[0, 1, 255, 255]] * 4
    module = data.build(0, CPU)
    module.check()
    (trained,) = next(iter(module.train_dataloader()))["data_samples"]
    assert trained.gt_sem_seg.data[0].tolist() == [[0, 1, 255, 255]] * 4
    if void != 2:
        with pytest.raises(
            ConfigError, match=rf"label {void}; .* 0 to 1 .* 255 for no class \(data"
        ):
            make_config(tmp_path).build(0, CPU).check()
        with pytest.raises(ConfigError, match=rf"label {void}; .* and 2 or 255 for no class"):
            make_config(tmp_path, void=2).build(0, CPU).check()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"void": 1}, "void: 1 is the number of the class 'dog'; the numbers 0 to 1 are"),
        ({"void": [0, 0, 0]}, r"void: \[0, 0, 0\] is a colour, and label files have numbers"),
        ({**COLOURS, "void": 11}, "void: 11 is a number, and label files have `colours`"),
        ({"void": True}, "void"),
        ({"void": 1.5}, "void"),
        ({"classes": ["cat", "dog", "cat"]}, "classes: 'cat' stands there twice"),
        ({"colours": [[1, 1, 1]]}, r"colours: \d for 2 classes"),
        ({"colours": [[1, 1, 1], [1, 1, 1]]}, r"colours: \d for 2 classes"),
        ({"colours": [[0, 0, 0], [1, 1, 1]], "void": [0, 0, 0]}, r"colours: \d for 2 classes"),
    ],
)
def test_choices_that_do_not_fit_are_refused(
    choices: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **choices)


@pytest.mark.parametrize("mode", ["P", "RGBA"])
def test_colours_of_a_palette_count_and_not_its_numbers(mode: str, tmp_path: Path) -> None:
    colours = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 0], [0, 255, 0]]] * 4)
    write(tmp_path, colours)
    path = tmp_path / "annotations/validation/a.png"
    Image.fromarray(colours.astype(np.uint8)).convert(mode).save(path)
    with Image.open(path) as written:
        assert written.mode == mode
    assert read_labels(make_config(tmp_path, **COLOURS)) == [[0, 1, 255, 1]] * 4


def test_grey_levels_are_colours(tmp_path: Path) -> None:
    write(tmp_path, np.array([[0, 255, 255, 0]] * 4))
    config = make_config(tmp_path, colours=[[0, 0, 0], [255, 255, 255]])
    assert read_labels(config) == [[0, 1, 1, 0]] * 4


def test_capitals_end_names_of_files(tmp_path: Path) -> None:
    labels = np.array([[0, 1, 255, 0]] * 4)
    write(tmp_path, labels, ".PNG")
    for path in (tmp_path / "annotations").rglob("*.png"):
        path.rename(path.with_suffix(".PNG"))
    data = make_config(tmp_path).build(0, CPU)
    before = data.fingerprint()
    Image.new("RGB", (4, 4), "red").save(tmp_path / "images/training/a.PNG", compress_level=0)
    assert data.fingerprint() != before
    assert read_labels(make_config(tmp_path)) == labels.tolist()


@pytest.mark.parametrize(
    ("labels", "choices", "message"),
    [
        (
            np.full((4, 4), 2),
            {},
            r"data\.root: .*a\.png has the label 2; labels are 0 to 1 for the classes, and 255 for",
        ),
        (
            np.full((4, 4, 3), 250),
            COLOURS,
            r"data\.colours: .*a\.png has the colour \[250, 250, 250\], which no class has; the "
            r"nearest is \[255, 0, 0\] of 'cat'",
        ),
        (np.full((4, 4, 3), 250), {}, r"data\.root: .*a\.png has pixels of mode RGB"),
    ],
)
def test_unknown_labels_are_named(
    labels: np.ndarray, choices: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, labels)
    data = make_config(tmp_path, **choices).build(0, CPU)
    with pytest.raises(ConfigError, match=message):
        data.check()


@pytest.mark.parametrize(("seconds", "count"), [(0.001, 2001), (0.1, 301)])
def test_all_files_are_checked_if_there_is_time(
    seconds: float, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the time for all, files from everywhere in a split are checked."""
    write(tmp_path, np.zeros((4, 4)))
    data = make_config(tmp_path).build(0, CPU)
    data.train.pairs = [(Path(f"{number}"), Path()) for number in range(2001)]
    checked: list[str] = []
    pixel = np.zeros((1, 1), np.uint8)
    read = "lit_attn.segmentation.data.read_"
    monkeypatch.setattr(f"{read}image", lambda sample: checked.append(sample["img_path"].name))
    monkeypatch.setattr(f"{read}labels", lambda sample, data: {"gt_seg_map": pixel})
    clock = types.SimpleNamespace(monotonic=lambda: seconds * len(checked))
    monkeypatch.setattr("lit_attn.data.loading.time", clock)
    data.check()
    assert checked.pop() == "a.png"
    assert len(set(checked)) == len(checked) == pytest.approx(count, abs=1)
    thirds = [int(name) // 667 for name in checked]
    assert all(thirds.count(third) > count / 4 for third in range(3))


def save_turned(path: Path, pixels: np.ndarray, orientation: int) -> None:
    """Write pixels so that a viewer, which obeys the EXIF orientation, shows them as they are."""
    turn_back = {1: 0, 3: 2, 6: 1, 8: 3}[orientation]
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(np.rot90(pixels, turn_back).astype(np.uint8)).save(path, exif=exif)


@pytest.mark.parametrize(("orientation", "mask_orientation"), [(6, 1), (3, 8)])
def test_images_and_masks_are_turned_by_one_rule(
    orientation: int, mask_orientation: int, tmp_path: Path
) -> None:
    """Each file is turned as its own EXIF orientation says, so shown pixels belong together."""
    write(tmp_path, np.zeros((4, 8)))
    labels = np.arange(32).reshape(4, 8) % 3
    labels[labels == 2] = 255
    pixels = np.repeat(np.arange(32).reshape(4, 8, 1), 3, 2)
    save_turned(tmp_path / "images/validation/a.png", pixels, orientation)
    save_turned(tmp_path / "annotations/validation/a.png", labels, mask_orientation)
    data = make_config(tmp_path).build(0, CPU)
    read = data.evaluated["test"].read(0)
    assert np.array_equal(read["img"], pixels)
    assert np.array_equal(read["gt_seg_map"], labels)


def test_a_mask_in_the_stored_position_of_a_turned_image_is_refused(tmp_path: Path) -> None:
    write(tmp_path, np.zeros((4, 8)))
    save_turned(tmp_path / "images/training/a.png", np.zeros((8, 4, 3)), 6)
    with pytest.raises(ConfigError) as caught:
        make_config(tmp_path).build(0, CPU).check()
    message = str(caught.value).replace(str(tmp_path), "ROOT")
    assert message == (
        "data.root: ROOT/annotations/training/a.png has 8 x 4 pixels, its image "
        "ROOT/images/training/a.png has 4 x 8; turn one of them; files are read as their EXIF "
        "orientation says"
    )


@pytest.mark.parametrize("ending", ["png", "bmp"])
def test_numbers_of_a_palette_are_classes(ending: str, tmp_path: Path) -> None:
    """The colours of the palette contradict its indices. test_pictures.py has the other kinds."""
    write(tmp_path, np.zeros((4, 4)))
    labels = np.array([[0, 1, 255, 0]] * 4)
    image = Image.fromarray(labels.astype(np.uint8), "P")
    image.putpalette(np.arange(768, dtype=np.uint8)[::-1].tobytes())
    (tmp_path / "annotations/validation/a.png").unlink()
    image.save(tmp_path / f"annotations/validation/a.{ending}")
    assert read_labels(make_config(tmp_path)) == labels.tolist()


@pytest.mark.parametrize("label", [2, 256])
def test_unknown_numbers_of_16_bits_are_named(label: int, tmp_path: Path) -> None:
    write(tmp_path, np.zeros((4, 4)))
    path = tmp_path / "annotations/training/a.png"
    Image.fromarray(np.full((4, 4), label, np.uint16)).save(path)
    with pytest.raises(ConfigError, match=rf"a\.png has the label {label}; labels are 0 to 1 for"):
        make_config(tmp_path).build(0, CPU).check()


def warnings_of_check(config: MasksConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    data = config.build(0, CPU)
    caplog.clear()
    data.check()
    return caplog.messages


def test_a_class_without_a_pixel_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, np.array([[0, 255, 0, 255]] * 4))
    assert warnings_of_check(make_config(tmp_path), caplog) == [
        "data.root: no pixel of 1 training label files has the class 'dog', which a model "
        "then cannot learn; "
        "255 means no class; give pixels of 'dog' the number 1, or leave the class out"
    ]
    write(tmp_path / "two", np.array([[0, 1, 0, 255]] * 4))
    assert warnings_of_check(make_config(tmp_path / "two"), caplog) == []
    write(tmp_path / "colours", np.array([[[255, 0, 0]] * 4] * 4))
    assert warnings_of_check(make_config(tmp_path / "colours", **COLOURS), caplog) == [
        "data.root: no pixel of 1 training label files has the class 'dog', which a model "
        "then cannot learn; "
        "give pixels of 'dog' its colour in data.colours, or leave the class out"
    ]


@pytest.mark.parametrize(("labels", "count"), [([0, 255], 1), ([0, 1], 0)])
def test_a_part_of_the_files_says_less_about_rare_classes(
    labels: list[int],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one of three classes absent there is no warning, with two there is."""
    write(tmp_path, np.array([labels * 2] * 4))
    for kind in ("images", "annotations"):
        source = tmp_path / kind / "training/a.png"
        (tmp_path / kind / "training/b.png").write_bytes(source.read_bytes())
    monkeypatch.setattr("lit_attn.data.loading.CHECK_SECONDS", 0.0)
    messages = warnings_of_check(make_config(tmp_path, classes=["a", "b", "c"]), caplog)
    assert len(messages) == count
    if messages:
        beginning = "data.root: no pixel of 1 of the 2 training label files that were read has"
        assert messages[0].startswith(
            f"{beginning} one of the classes 'b', 'c', which a model then"
        )


def test_files_of_other_kinds_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, np.zeros((4, 4)))
    (tmp_path / "images/training/b.heic").touch()
    (tmp_path / "images/training/inner").mkdir()
    (tmp_path / "images/training/.hidden.png").touch()
    (tmp_path / "annotations/training/a.jpg").touch()
    Image.new("L", (4, 4)).save(tmp_path / "annotations/training/c.png")
    make_config(tmp_path).build(0, CPU)
    images = tmp_path / "images/training"
    annotations = tmp_path / "annotations/training"
    assert [message.partition("; files that")[0] for message in caplog.messages] == [
        f"data.root: {images}: left out 1 file: .heic (1)",
        f"data.root: {images}: left out 1 folder; only files directly in a split's folder are read",
        f"data.root: {annotations}: left out 1 file: .jpg (1)",
        f"data.root: {annotations}: left out 1 label file without an image of the same name, as "
        "c.png",
    ]


@pytest.mark.parametrize("kind", ["images", "annotations"])
def test_two_files_of_one_name_are_named(kind: str, tmp_path: Path) -> None:
    write(tmp_path, np.zeros((4, 4)))
    Image.new("L", (4, 4)).save(tmp_path / kind / "validation/a.tif")
    message = rf"{kind}/validation/a\.png and a\.tif have one name"
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path).build(0, CPU)


def test_names_in_latin_1_and_broken_links_are_named(tmp_path: Path) -> None:
    write(tmp_path, np.zeros((4, 4)))
    image = tmp_path / "images/training/a.png"
    (tmp_path / "images/training/caf\udce9.png").write_bytes(image.read_bytes())
    with pytest.raises(ConfigError, match=r"caf\\xe9\.png has a name that is not UTF-8; rename it"):
        make_config(tmp_path).build(0, CPU)
    (tmp_path / "images/training/caf\udce9.png").unlink()
    image.unlink()
    image.symlink_to(tmp_path / "none.png")
    with pytest.raises(ConfigError, match=r"training/a\.png is no file, or a link to a missing"):
        make_config(tmp_path).build(0, CPU)


@pytest.mark.parametrize("content", [b"", b"text", b"P5 18200 10000 255\n"])
@pytest.mark.parametrize("kind", ["images", "annotations"])
def test_damaged_files_are_named_before_training(kind: str, content: bytes, tmp_path: Path) -> None:
    write(tmp_path, np.zeros((4, 4)))
    (tmp_path / kind / "training/a.png").write_bytes(content)
    message = rf"^data\.root: .*{kind}/training/a\.png is not a readable image: .*; "
    with pytest.raises(ConfigError, match=message) as caught:
        make_config(tmp_path).build(0, CPU).check()
    assert "\n" not in str(caught.value)
