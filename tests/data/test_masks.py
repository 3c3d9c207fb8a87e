"""Tests of segmentation data with classes and colours of the user."""

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from lit_attn.config.data.segmentation import MasksConfig
from lit_attn.schema.errors import ConfigError

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


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".jpeg"])
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
    read = "lit_attn.data.segmentation.read_"
    monkeypatch.setattr(f"{read}image", lambda sample: checked.append(sample["img_path"].name))
    monkeypatch.setattr(f"{read}labels", lambda sample, data: {"gt_seg_map": pixel})
    clock = types.SimpleNamespace(monotonic=lambda: seconds * len(checked))
    monkeypatch.setattr("lit_attn.data.loading.time", clock)
    data.check()
    assert checked.pop() == "a.png"
    assert len(set(checked)) == len(checked) == pytest.approx(count, abs=1)
    thirds = [int(name) // 667 for name in checked]
    assert all(thirds.count(third) > count / 4 for third in range(3))


def test_an_image_without_labels_is_named(tmp_path: Path) -> None:
    write(tmp_path, np.zeros((4, 4)))
    (tmp_path / "annotations/validation/a.png").unlink()
    with pytest.raises(ConfigError, match=r"annotations/validation/a\.png is missing"):
        make_config(tmp_path).build(0, CPU)


@pytest.mark.parametrize("colours", [[[1, 1, 1]], [[1, 1, 1], [1, 1, 1]], [[0, 0, 0], [1, 1, 1]]])
def test_every_class_has_a_colour_of_its_own(colours: list[list[int]], tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"colours: \d for 2 classes"):
        make_config(tmp_path, colours=colours, void=[0, 0, 0])


def test_classes_without_a_name_or_a_colour_of_their_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="colours: 0 for 2 classes"):
        make_config(tmp_path, void=[0, 0, 0])
    with pytest.raises(ValidationError, match="classes: 'cat' stands there twice"):
        make_config(tmp_path, classes=["cat", "dog", "cat"])
