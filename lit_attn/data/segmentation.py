"""Images with a label for every pixel in ADE20K's layout, augmented by mmsegmentation.

A batch is mmsegmentation's: {"inputs": B images (3, h, w) uint8 BGR, "data_samples": B
SegDataSample}. mmsegmentation's data preprocessor turns it into tensors.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from lit_attn.config.data.segmentation import IGNORED, IMAGE_SUFFIXES, Pair, Scenery, list_pairs
from lit_attn.data.loading import read_batches, use_seed
from lit_attn.data.module import DataModule, EvaluationLoader, numpy_generator
from lit_attn.data.sets import digest, hold_out
from lit_attn.extras import require_mmseg
from lit_attn.schema.errors import ConfigError

Batch = dict[str, list[Any]]
Step = dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]

CHECK_SECONDS = 30.0  # Time after which no further files of a split are checked.

Sample = tuple[int, int, bool]
"""Index of an image, the seed of its augmentation, and whether its labels count."""


class SceneryData(DataModule):
    """Splits of one data set; raise ConfigError if mmsegmentation or files are missing."""

    def __init__(self, data: Scenery, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        require_mmseg("data.kind")
        self.data = data
        self.root = data.prepare()
        pairs = list_pairs(self.root, "training")
        rows = hold_out(data.validation, False, np.zeros(len(pairs)))
        training = [pairs[row] for row in rows.get("train", range(len(pairs)))]
        evaluated = {"val": [pairs[row] for row in rows["val"]]} if rows else {}
        evaluated["test"] = list_pairs(self.root, "validation")
        self.train = SceneryFiles(data, training, augmented=True)
        evaluate = partial(SceneryFiles, data, augmented=False)
        self.evaluated = {split: evaluate(pairs) for split, pairs in evaluated.items()}
        self.splits: list[str] = list(self.evaluated)
        self.classes = data.class_names
        if not self.classes:
            from mmseg.utils import ade_classes

            # One of ADE20K's names ends in a space.
            self.classes = tuple(name.strip() for name in ade_classes())
        self.set_epoch(len(training), data.drop_last)

    def fingerprint(self) -> str:
        """Return a digest of all file names and sizes; reading 20,000 images would take minutes."""
        paths = sorted(p for p in self.root.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
        return digest(f"{path.relative_to(self.root)} {path.stat().st_size}\n" for path in paths)

    def check(self) -> None:
        """Read the files of every split for CHECK_SECONDS; raise ConfigError for a wrong label."""
        for files in (self.train, *self.evaluated.values()):
            end = time.monotonic() + CHECK_SECONDS
            for image, labels in np.random.default_rng(0).permutation(np.array(files.pairs)):
                read_labels(read_image({"img_path": image, "seg_map_path": labels}), self.data)
                if time.monotonic() > end:
                    break

    def require_even_shares(self) -> None:
        """Accept every number of processes: `samples` completes the shares of a step."""

    def train_batches(self, start: int, stop: int) -> Iterator[Batch]:
        return self.load(self.train, [self.samples(step) for step in range(start, stop)])

    def samples(self, step: int) -> list[Sample]:
        """Return this process's samples of training step `step`.

        If the processes cannot share an epoch's last batch evenly, the first images of the epoch
        are added without labels: all processes read equally many, and no image counts twice.
        """
        rows = self.rows(step, self.draw_order)
        added = self._order[1][: -len(rows) % self.world]
        generator = numpy_generator(self.seed, "sample", step)
        seeds = generator.integers(2**32, size=len(rows) + len(added)).tolist()
        are_counted = [True] * len(rows) + [False] * len(added)
        return self.share(list(zip([*rows, *added], seeds, are_counted, strict=True)))

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        dataset = self.evaluated[split]
        units = [[index] for index in self.share(range(len(dataset)))]
        batches = [[(index, 0, True)] for (index,) in units]
        if not units:
            # More processes than images: this process evaluates the first one as padding.
            units, batches = [[len(dataset)]], [[(0, 0, True)]]
        return EvaluationLoader(batches, partial(self.load, dataset), units, len(dataset))

    def load(self, dataset: "SceneryFiles", batches: Iterable[list[Sample]]) -> Iterator[Batch]:
        """Read `batches` in worker processes; raise ConfigError naming a bad file."""
        import cv2
        from mmengine.dataset import pseudo_collate

        # Many workers with several threads of OpenCV each would be slow.
        prepare = partial(cv2.setNumThreads, 0)
        return read_batches(dataset, batches, pseudo_collate, self.data.workers, prepare)

    def draw_order(self, epoch: int) -> list[int]:
        order = numpy_generator(self.seed, "order", epoch).permutation(len(self.train))
        return [int(index) for index in order]


class SceneryFiles(Dataset[dict[str, Any]]):
    """Data set of the samples of `pairs`; the seed of a sample decides on its augmentation."""

    def __init__(self, data: Scenery, pairs: list[Pair], *, augmented: bool) -> None:
        from mmengine.dataset import Compose

        self.pairs = pairs
        self.transform = Compose(pipeline(data, augmented=augmented))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, sample: Sample) -> dict[str, Any]:
        index, seed, is_counted = sample
        image, labels = self.pairs[index]
        with use_seed(seed):
            read: dict[str, Any] = self.transform({"img_path": image, "seg_map_path": labels})
        if not is_counted:
            read["data_samples"].gt_sem_seg.data.fill_(IGNORED)
        return read


def pipeline(data: Scenery, *, augmented: bool) -> list[Step]:
    """Return the steps from the paths of a pair to a sample, as mmsegmentation configures them."""
    labels = partial(read_labels, data=data)
    packed = {"type": "mmseg.PackSegInputs"}
    if augmented:
        return [read_image, labels, *(step.transform(data) for step in data.augment), packed]
    # Labels are read after the resize: predictions are resized to the labels, not labels to them.
    size = (data.long_side, data.short_side)
    resize = {"type": "mmseg.Resize", "scale": size, "keep_ratio": True}
    return [read_image, resize, labels, packed]


def read_image(sample: dict[str, Any]) -> dict[str, Any]:
    """Add the image (h, w, 3), BGR, and its size; raise ConfigError if it cannot be read."""
    import cv2

    try:
        content = np.frombuffer(sample["img_path"].read_bytes(), np.uint8)
        image = cv2.imdecode(content, cv2.IMREAD_COLOR)
    except (OSError, cv2.error):
        image = None
    if image is None:
        raise ConfigError(f"data.root: {sample['img_path']} cannot be read as an image")
    size = image.shape[:2]
    return sample | {"img": image, "img_shape": size, "ori_shape": size}


def read_labels(sample: dict[str, Any], data: Scenery) -> dict[str, Any]:
    """Add the labels (h, w) uint8: the number of a class from 0 on, or IGNORED.

    Raises ConfigError for a malformed file, or for one without the image's size, `ori_shape`.
    """
    path, first, classes = sample["seg_map_path"], data.first_label, data.num_classes
    try:
        with Image.open(path) as file:
            _require_matching(sample, file, data)
            values = np.asarray(file.convert("RGB") if data.label_colours else file)
    except (OSError, SyntaxError) as error:
        # Pillow raises SyntaxError for a broken PNG.
        raise ConfigError(f"data.root: {path} cannot be read as an image") from error
    if values.ndim == 3:
        labels = _read_colours(path, values, data)
    else:
        values = values.astype(np.uint8)
        unknown = np.unique(values[(values >= classes + first) & (values != IGNORED)])
        if len(unknown):
            none = f"0 or {IGNORED}" if first else IGNORED
            text = f"{first} to {classes - 1 + first} for the classes, and {none} for no class"
            raise ConfigError(f"data.root: {path} has the label {unknown[0]}; labels are {text}")
        # Without a class, 0 wraps to IGNORED.
        labels = np.where(values == IGNORED, values, values - np.uint8(first))
    return sample | {"gt_seg_map": labels, "seg_fields": ["gt_seg_map"], "reduce_zero_label": True}


def _read_colours(path: Path, colours: NDArray[np.uint8], data: Scenery) -> NDArray[np.uint8]:
    """Return the labels (h, w) of pixels (h, w, 3); raise ConfigError for an unknown colour."""
    numbers = data.label_colours
    packed = colours.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    values, places = np.unique(packed, return_inverse=True)
    labels = np.empty(len(values), np.uint8)
    for place, value in enumerate(values.tolist()):
        colour = (value >> 16, value >> 8 & 255, value & 255)
        if colour not in numbers:
            classes = [key for key, label in numbers.items() if label != IGNORED]
            nearest = classes[int(np.abs(np.array(classes) - colour).sum(1).argmin())]
            near = f"the nearest is {list(nearest)} of '{data.class_names[numbers[nearest]]}'"
            text = f"which no class has; {near} (data.void: the colour of pixels without a class)"
            raise ConfigError(f"data.colours: {path} has the colour {list(colour)}, {text}")
        labels[place] = numbers[colour]
    return labels[places].reshape(packed.shape)


def _require_matching(sample: dict[str, Any], labels: Image.Image, data: Scenery) -> None:
    """Raise ConfigError if the header of `labels` does not match the image."""
    path = sample["seg_map_path"]
    # Pillow's modes of images with one 8-bit value per pixel, and with colours.
    if labels.mode not in {"1", "L", "P"} | ({"RGB", "RGBA"} if data.label_colours else set()):
        text = "labels are a PNG of mode L with the number of a class in each pixel"
        raise ConfigError(f"data.root: {path} has pixels of mode {labels.mode}; {text}")
    height, width = sample["ori_shape"]
    if labels.size != (width, height):
        text = f"its image {sample['img_path']} has {width} x {height}"
        raise ConfigError(f"data.root: {path} has {labels.width} x {labels.height} pixels, {text}")
