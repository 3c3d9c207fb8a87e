"""Floors of segmentation: frequent classes, and a classifier of single pixels.

Shapes: images (h, w, 3) and labels (h, w), or N pixels of any number of images.
"""

from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lit_attn.floors.base import FREQUENT_CLASS, Floor

Ids = NDArray[np.int64]

PIXEL_RULES = (
    FREQUENT_CLASS,
    "most frequent class of each position",
    "random forest of colour and position",
)

MOST_TRAINING_IMAGES = 2_000
"""Most training images that pixels are taken from, evenly spread."""

MOST_EVALUATED_IMAGES = 500
"""Most evaluated images, evenly spread over the split."""

MOST_PIXELS = 2_000_000
"""Most pixels of a split, equally many of each image."""

MOST_FITTED = 50_000
"""Most training pixels that the classifier is fitted to."""

GRID = 32
"""Rows and columns of positions after the resize of every image."""


class Pixels(NamedTuple):
    """Labelled pixels: colours (N, 3), relative rows and columns (N, 2), and classes (N,).

    A relative row or column is above 0 and below 1, so that images of all sizes have equal ones.
    """

    colours: NDArray[np.uint8]
    places: NDArray[np.float32]
    classes: Ids
    images: int

    @classmethod
    def gather(
        cls,
        pairs: Iterable[tuple[NDArray[np.uint8], NDArray[np.uint8]]],
        count: int,
        ignored: int,
    ) -> Self:
        """Return the pixels of `count` pairs of an image and its labels, without label `ignored`.

        Images with more than their share of MOST_PIXELS give pixels at random places.
        """
        generator = np.random.default_rng(0)
        share = max(1, MOST_PIXELS // count)
        colours, places, classes = [], [], []
        for image, labels in pairs:
            height, width = labels.shape
            chosen = np.flatnonzero(labels.ravel() != ignored)
            if len(chosen) > share:
                chosen = np.sort(generator.choice(chosen, share, replace=False))
            rows, columns = np.divmod(chosen, width)
            place = np.stack([(rows + 0.5) / height, (columns + 0.5) / width], axis=1)
            colours.append(image.reshape(-1, 3)[chosen])
            places.append(place.astype(np.float32))
            classes.append(labels.ravel()[chosen].astype(np.int64))
        return cls(np.concatenate(colours), np.concatenate(places), np.concatenate(classes), count)

    @property
    def features(self) -> NDArray[np.float32]:
        """Colours and places (N, 5)."""
        return np.concatenate([self.colours.astype(np.float32), self.places], axis=1)

    @property
    def cells(self) -> Ids:
        """Number of the grid's cell of each pixel (N,)."""
        rows, columns = (self.places * GRID).astype(np.int64).T
        return rows * GRID + columns


def pixel_floors(train: Pixels, evaluated: Pixels, class_names: tuple[str, ...]) -> list[Floor]:
    """Return the scores of frequent classes and of a random forest on single pixels."""
    frequent = np.bincount(train.classes).argmax()
    by_position = _find_frequent(train, len(class_names))
    predictions = (
        np.full_like(evaluated.classes, frequent),
        by_position[evaluated.cells],
        _classify(train, evaluated),
    )
    conditions = (
        f"{len(train.classes):,} pixels of {train.images:,} training images,"
        f" {len(evaluated.classes):,} of {evaluated.images:,} evaluated"
    )
    floors = []
    for rule, predicted in zip(PIXEL_RULES, predictions, strict=True):
        values = _score(predicted, evaluated.classes, class_names)
        floors.append(Floor(rule, values, conditions))
    return floors


def _find_frequent(train: Pixels, classes: int) -> Ids:
    """Return the most frequent class in each cell of the grid, that of all pixels without any."""
    codes = train.cells * classes + train.classes
    counts = np.bincount(codes, minlength=GRID * GRID * classes).reshape(GRID * GRID, classes)
    frequent = counts.argmax(axis=1)
    frequent[counts.sum(axis=1) == 0] = counts.sum(axis=0).argmax()
    return frequent


def _classify(train: Pixels, evaluated: Pixels) -> Ids:
    """Return the classes that a random forest predicts from colour and position."""
    from sklearn.ensemble import RandomForestClassifier

    chosen = np.random.default_rng(0).permutation(len(train.classes))[:MOST_FITTED]
    forest = RandomForestClassifier(50, min_samples_leaf=5, random_state=0)
    forest.fit(train.features[chosen], train.classes[chosen])
    predicted: Ids = forest.predict(evaluated.features)
    return predicted


def _score(predicted: Ids, wanted: Ids, class_names: tuple[str, ...]) -> dict[str, float]:
    """Return mIoU, mAcc and aAcc of mmsegmentation, and the IoU of every class.

    A class that is neither labelled nor predicted has no IoU, and a class that is not labelled has
    no accuracy; the means leave these out.
    """
    classes = len(class_names)
    confusion = np.bincount(wanted * classes + predicted, minlength=classes**2)
    confusion = confusion.reshape(classes, classes)
    correct = confusion.diagonal()
    labelled, union = confusion.sum(1), confusion.sum(0) + confusion.sum(1) - correct
    overlaps = correct[union > 0] / union[union > 0]
    accuracies = correct[labelled > 0] / labelled[labelled > 0]
    values = {
        "mIoU": float(overlaps.mean()),
        "mAcc": float(accuracies.mean()),
        "aAcc": float(correct.sum() / confusion.sum()),
    }
    names = np.array(class_names)[union > 0].tolist()
    for name, overlap in zip(names, overlaps.tolist(), strict=True):
        values[f"IoU:{name}"] = overlap
    return values
