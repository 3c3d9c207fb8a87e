"""The plug-in for the images and the ViT of big_vision, which tests/released compares with it."""

import importlib
import pickle
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import digit_folders
from helpers.paths import EXPERIMENTS
from helpers.training_cells import cell_of, folder_of
from PIL import Image

from lit_attn.cells.records import Result
from lit_attn.data.loading import use_seed
from lit_attn.schema.plugins import load_parts
from lit_attn.signatures import ImageLabels
from lit_attn.train import run_cell

load_parts([EXPERIMENTS / "imagenet_vit_small" / "imagenet_vit_small.py"])
images = importlib.import_module("imagenet_vit_small")

NOISE = np.random.default_rng(0).integers(256, size=(40, 60, 3)).astype(np.uint8)


def test_windows_are_resized_between_the_centres_of_pixels_without_antialiasing() -> None:
    pixels = np.repeat(np.arange(8, dtype=np.uint8)[None, :, None] * 30, 8, 0).repeat(3, 2)
    draw = Mock(return_value=(1, 2, 6, 6))
    small = np.asarray(images.crop_window(draw, 3, Image.fromarray(pixels)))
    # The window has columns 2 to 7; its three samples lie between two columns each.
    assert small[:, :, 0].tolist() == [[75, 135, 195]] * 3
    large = np.asarray(images.crop_window(draw, 12, Image.fromarray(pixels)))
    assert large[0, :3, 0].tolist() == [60, 67, 82]


def test_windows_have_a_uniform_height() -> None:
    image = Image.new("RGB", (200, 100))
    with use_seed(0):
        drawn = [images.draw_window((0.05, 1.0), (0.75, 1.33), image) for _ in range(999)]
    for top, left, height, width in drawn:
        assert 0 <= top <= 100 - height
        assert 0 <= left <= 200 - width
        assert 0.75 - 1 / height <= width / height <= 1.33 + 1 / height
    heights = np.array([height for _, _, height, _ in drawn])
    # The least height lies between sqrt(0.05 x 200 x 100 / aspect) for the aspects 1.33 and 0.75.
    assert 27 <= heights.min() <= 37
    assert heights.max() == 100
    assert np.histogram(heights, bins=[40, 60, 80, 101])[0] == pytest.approx([285] * 3, rel=0.2)


def test_held_out_are_the_last_images_in_the_order_of_tensorflow_datasets(tmp_path: Path) -> None:
    for split, name in (("train", "n0144{}_{}.JPEG"), ("val", "{}_{}.JPEG")):
        for label in (1, 2):
            folder = tmp_path / split / f"n0144{label}"
            folder.mkdir(parents=True)
            for number in range(1, 7):
                (folder / name.format(label, number)).touch()
    chosen = {"path": tmp_path, "classes": 2, "batch_size": 2, "eval_batch_size": 2}
    files = images.BigVisionImages(**chosen, validation=3).list_files()
    # The order by the Hasher of tensorflow-datasets 4.9.10, with "train" as its salt.
    order = ["2_5", "2_3", "2_1", "2_4", "1_6", "1_5", "1_4", "2_6", "1_3", "1_1", "2_2", "1_2"]
    names = {split: [n.decode() for n in listed.names.tolist()] for split, listed in files.items()}
    last = sorted(f"n0144{name[0]}/n0144{name}.JPEG" for name in order[-3:])
    assert sorted(names["val"]) == last
    assert files["val"].labels.tolist() == [name[5] == "2" for name in names["val"]]
    assert set(names["train"]).isdisjoint(last)
    assert len(names["train"]) == 9
    assert len(names["test"]) == 12


def test_evaluated_images_are_means_over_areas() -> None:
    image = Image.fromarray(NOISE)
    halved = np.asarray(images.resize_area(20, image))
    blocks = NOISE.reshape(20, 2, 30, 2, 3).mean((1, 3))
    assert (halved == blocks.astype(np.uint8)).all()
    # Each of 3 new columns covers 4/3 of 4 columns.
    row = np.array([[0, 30, 90, 240]], np.uint8)[..., None].repeat(4, 0).repeat(3, 2)
    thirds = np.asarray(images.resize_area(3, Image.fromarray(row)))[0, :, 0]
    assert thirds.tolist() == [7, 60, 202]
    assert images.resize_area(16, image).size == (24, 16)
    assert images.crop(10, images.resize_area(16, image)).size == (10, 10)


def test_operations_with_another_meaning_than_pillows() -> None:
    image = Image.fromarray(NOISE)
    assert (np.asarray(images.OPERATIONS["Solarize"](image, 1)) == 255 - NOISE).all()
    # The degenerate image has the value 40 x 60 / 256.
    contrast = np.clip(9 + 1.9 * (NOISE.astype(float) - 9), 0, 255)
    assert np.abs(np.asarray(images.OPERATIONS["Contrast"](image, 1)) - contrast).max() < 1.01
    cut = np.asarray(images.OPERATIONS["Cutout"](image, 1))
    is_cut = (cut != NOISE).any(2)
    assert (cut[is_cut] == 128).all()
    assert (np.asarray(image) == NOISE).all()
    moved = np.asarray(images.OPERATIONS["ShearX"](image, 1))
    for y, x in ((0, 5), (10, 5), (20, 50), (39, 30)):
        source = x + round(0.3 * y)
        assert moved[y, x].tolist() == (NOISE[y, source].tolist() if source < 60 else [128] * 3)


def test_a_square_is_cut_around_a_place_of_the_image() -> None:
    white = Image.new("RGB", (200, 200), "white")
    areas = []
    with use_seed(0):
        for _ in range(300):
            cut = (np.asarray(images.cut_square(white, 1)) == 128).all(2)
            rows, columns = np.flatnonzero(cut.any(1)), np.flatnonzero(cut.any(0))
            assert cut[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
            areas.append((len(rows), len(columns)))
    assert max(areas) == (80, 80)
    # The centre is within 40 pixels of an edge in 64 % of the cases.
    assert 0.56 < np.mean([area != (80, 80) for area in areas]) < 0.72


def test_two_of_sixteen_operations_are_applied_to_every_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[tuple[str, int]] = []

    def note(name: str) -> Mock:
        return Mock(side_effect=lambda image, sign: applied.append((name, sign)) or image)

    for name in images.OPERATIONS:
        monkeypatch.setitem(images.OPERATIONS, name, note(name))
    with use_seed(0):
        for _ in range(800):
            images.augment(Image.new("RGB", (4, 4)))
    assert len(applied) == 1600
    counts = Counter(name for name, _ in applied)
    assert len(counts) == 16
    assert all(60 < count < 140 for count in counts.values())
    assert 700 < sum(sign > 0 for _, sign in applied) < 900


def test_a_tanh_layer_precedes_the_head() -> None:
    torch.manual_seed(0)
    small = {"dim": 32, "depth": 1, "heads": 2, "patch": 4}
    model = images.BigVisionViT(**small, ffn={"width": 64, "activation": "gelu-tanh"})
    network = model.build(ImageLabels((3, 16, 16), 5))
    layer = network.fc_norm[0]
    assert layer.weight.std().item() == pytest.approx(32**-0.5, rel=0.05)
    assert not layer.bias.any()
    assert not network.head.weight.any()
    torch.nn.init.normal_(network.head.weight)
    x = torch.randn(2, 3, 16, 16)
    mean = network.forward_features(x).mean(1)
    torch.testing.assert_close(network(x), network.head(torch.tanh(layer(mean))))


def test_an_image_is_mixed_with_the_one_before_it(tmp_path: Path) -> None:
    folder = digit_folders.write(tmp_path / "images")
    data = {"kind": "big-vision-imagenet", "augment": {"mixup": 0.2}}
    actual = digit_folders.experiment(folder, data=data)
    built = cell_of(actual).experiment.data.build(0, torch.device("cpu"))
    pixels, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    shares = []
    for step in range(40):
        mixed, targets = built.on_after_batch_transfer((pixels, labels, step), 0)
        share = targets[0, 0].item()
        assert 0.5 <= share <= 1
        torch.testing.assert_close(mixed, share * pixels + (1 - share) * pixels[[3, 0, 1, 2]])
        assert targets.diagonal().tolist() == pytest.approx([share] * 4)
        assert targets[1, 0].item() == pytest.approx(1 - share, abs=1e-6)
        shares.append(share)
    assert len(set(shares)) > 20
    # Evaluation has no step and mixes nothing.
    assert built.on_after_batch_transfer((pixels, labels), 0) == (pixels, labels)


@pytest.mark.parametrize(
    ("key", "value"),
    [("crop", "centre"), ("policy", "rand-m9"), ("cutmix", 1.0), ("interpolation", "bilinear")],
)
def test_keys_without_effect_are_refused(key: str, value: object, tmp_path: Path) -> None:
    data: dict[str, object] = {"kind": "big-vision-imagenet", "augment": {}}
    data |= {key: value} if key == "interpolation" else {"augment": {key: value}}
    actual = digit_folders.experiment(tmp_path, data=data)
    with pytest.raises(ValueError, match=rf"{key}: '?{value}'? has no effect on big-vision-imag"):
        cell_of(actual)


@pytest.mark.slow
def test_a_cell_trains_on_class_folders(tmp_path: Path) -> None:
    folder = digit_folders.write(tmp_path / "images")
    data = {"kind": "big-vision-imagenet", "crop_share": 0.8, "augment": {"mixup": 0.2}}
    changes = {"model": {"kind": "big-vision-vit"}, "training": {"epochs": 1}}
    actual = digit_folders.experiment(folder, data=data, **changes)
    actual["model"]["ffn"] = {"width": 16, "activation": "gelu-tanh"}
    cell = cell_of(actual)
    built = cell.experiment.data.build(0, torch.device("cpu"))
    crop, flip, augment, *_ = pickle.loads(pickle.dumps(built.train)).transforms[16].transforms
    assert (crop.func, augment) == (images.crop_window, images.augment)
    assert type(flip).__name__ == "RandomHorizontalFlip"
    resize, *_ = built.evaluated["test"].transforms[16].transforms
    assert (resize.func, resize.args) == (images.resize_area, (20,))
    run = folder_of(cell, tmp_path / "run")
    run_cell(run)
    result = Result.model_validate_json((run / "result.json").read_text())
    assert result.steps == 4
    assert np.isfinite(result.metrics["test/loss"])
