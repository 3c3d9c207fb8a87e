"""Floors of segmentation: against loops over pixels, the task's metric, and files of scenes."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import jaccard_score

from lit_attn.segmentation import floors as pixels
from lit_attn.segmentation.floors import PIXEL_RULES, Pixels, pixel_floors
from lit_attn.segmentation.label_masks import IGNORED
from lit_attn.segmentation.scenes import Scenes
from lit_attn.segmentation.task import Overlap

NAMES = ("sky", "ground", "tree", "never")

Pair = tuple[np.ndarray, np.ndarray]


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Return images of two sizes whose classes follow from place and colour, with some noise."""
    generator = np.random.default_rng(seed)
    pairs = []
    for number in range(count):
        height, width = ((6, 8), (9, 5))[number % 2]
        image = generator.integers(256, size=(height, width, 3)).astype(np.uint8)
        labels = np.zeros((height, width), np.uint8)
        labels[height // 2 :] = 1
        labels[image[..., 2] > 200] = 2
        labels[generator.random((height, width)) < 0.1] = IGNORED
        pairs.append((image, labels))
    return pairs


def test_scores_equal_those_of_the_task_and_of_scikit_learn() -> None:
    train, test = make_pairs(40, 0), make_pairs(10, 1)
    floors = pixel_floors(
        Pixels.gather(train, 40, IGNORED), Pixels.gather(test, 10, IGNORED), NAMES
    )
    assert [floor.rule for floor in floors] == list(PIXEL_RULES)
    counts: Counter[int] = Counter()
    at_place: dict[tuple[int, int], Counter[int]] = {}
    for _, labels in train:
        for (row, column), label in np.ndenumerate(labels):
            if label != IGNORED:
                height, width = labels.shape
                cell = (int((row + 0.5) / height * 32), int((column + 0.5) / width * 32))
                counts[int(label)] += 1
                at_place.setdefault(cell, Counter())[int(label)] += 1
    frequent = counts.most_common(1)[0][0]
    wanted, constant, by_place = [], [], []
    for _, labels in test:
        for (row, column), label in np.ndenumerate(labels):
            if label == IGNORED:
                continue
            height, width = labels.shape
            cell = (int((row + 0.5) / height * 32), int((column + 0.5) / width * 32))
            known = at_place.get(cell, counts)
            wanted.append(int(label))
            constant.append(frequent)
            by_place.append(min(known, key=lambda kind: (-known[kind], kind)))
    for floor, predicted in zip(floors, (constant, by_place), strict=False):
        metric = Overlap(NAMES)
        metric.update(torch.tensor(predicted), torch.tensor(wanted), torch.zeros(len(wanted)))
        expected = {name: value.item() for name, value in metric.compute().items()}
        del expected["loss"]
        assert floor.values == pytest.approx(expected, nan_ok=True)
        overlaps = jaccard_score(wanted, predicted, average=None, zero_division=0.0)
        assert floor.values["mIoU"] == pytest.approx(overlaps.mean())
    # Only the forest sees the colour, which decides on the class of every fifth pixel.
    accuracies = [floor.values["aAcc"] for floor in floors]
    assert accuracies[0] < accuracies[1] < accuracies[2]
    assert floors[2].values["IoU:tree"] > 0.9
    assert "IoU:never" not in floors[2].values


def test_a_large_image_gives_its_share_of_pixels_at_random_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pixels, "MOST_PIXELS", 2_000)
    generator = np.random.default_rng(0)
    image = generator.integers(256, size=(100, 100, 3)).astype(np.uint8)
    # The colour has the place.
    image[..., 0], image[..., 1] = np.mgrid[:100, :100]
    labels = np.zeros((100, 100), np.uint8)
    gathered = Pixels.gather([(image, labels), (image[:5], labels[:5])], 2, IGNORED)
    assert len(gathered.classes) == 1_000 + 500
    places = gathered.places[:1_000] * 100 - 0.5
    np.testing.assert_allclose(places, gathered.colours[:1_000, :2], atol=1e-3)
    assert len(np.unique(gathered.colours[:1_000, 1])) == 100


def test_scenes_have_the_floors_of_their_files(tmp_path: Path) -> None:
    pytest.importorskip("mmseg")
    data = Scenes(root=tmp_path, training_images=60, evaluation_images=5, batch_size=4)
    module = data.build(0, torch.device("cpu"))
    floors = {floor.rule: floor for floor in module.floors("test", 1)}
    assert tuple(floors) == data.floor_rules

    def read(split: str) -> np.ndarray:
        files = sorted(data.prepare().glob(f"annotations/{split}/*.png"))
        labels = np.concatenate([np.asarray(Image.open(path)).ravel() for path in files])
        return labels[labels > 0]

    frequent = np.bincount(read("training")).argmax()
    accuracy = (read("validation") == frequent).mean()
    values = floors["most frequent class"].values
    assert values["aAcc"] == pytest.approx(accuracy)
    # Only the most frequent class is ever right.
    present = set(read("validation").tolist()) | {int(frequent)}
    assert values["mIoU"] == pytest.approx(accuracy / len(present))
    assert "60 training images" in floors["most frequent class"].conditions
    forest = floors["random forest of colour and position"].values
    assert forest["aAcc"] > 1.5 * accuracy
