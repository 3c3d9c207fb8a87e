"""Segmentation data in ADE20K's layout, read and augmented by mmsegmentation.

A batch is mmsegmentation's: {"inputs": B images (3, h, w) uint8 BGR, "data_samples": B
SegDataSample}. mmsegmentation's data preprocessor turns it into tensors.
"""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from lit_attn.config.data.segmentation import (
    IGNORED,
    Scenery,
    require_scenery,
)
from lit_attn.data.loading import loader
from lit_attn.data.module import DataModule, EvaluationLoader, numpy_generator
from lit_attn.data.sets import SPLIT_SEED
from lit_attn.extras import require_mmseg
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from mmseg.datasets import BaseSegDataset

Batch = dict[str, list[Any]]


class Sample(NamedTuple):
    """Index of a training image, the seed of its augmentation, and whether its labels count."""

    image: int
    seed: int
    labelled: bool = True


class SceneryData(DataModule):
    """Splits of one data set; "test" is ADE20K's validation folder.

    Raises ConfigError if mmsegmentation or files are missing.
    """

    def __init__(self, data: Scenery, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        require_mmseg("data.kind")
        self.data = data
        self.root = data.prepare()
        require_scenery(self.root)
        names = {folder: _names(self.root, folder) for folder in ("training", "validation")}
        held, kept = _hold_out(len(names["training"]), data.validation)
        self.train = _dataset(data, self.root, "training", kept, augmented=True)
        self._evaluated = {"test": _dataset(data, self.root, "validation", None, augmented=False)}
        if held:
            val = _dataset(data, self.root, "training", held, augmented=False)
            self._evaluated = {"val": val, **self._evaluated}
        self.splits: list[str] = list(self._evaluated)
        # One of ADE20K's names ends in a space.
        self.classes = tuple(str(name).strip() for name in self.train.metainfo["classes"])
        self.palette: list[list[int]] = [list(colour) for colour in self.train.metainfo["palette"]]
        whole, rest = divmod(len(self.train), data.batch_size)
        self.steps_per_epoch = whole + (rest > 0 and not data.drop_last)
        if not self.steps_per_epoch:
            raise ConfigError(
                f"data.batch_size: {data.batch_size} is more than the {len(self.train)} samples "
                "of an epoch"
            )

    def fingerprint(self) -> str:
        """Return a hash of all file names and sizes; reading 20,000 images would take minutes."""
        digest = hashlib.sha256()
        for path in sorted(self.root.rglob("*.*g")):
            digest.update(f"{path.relative_to(self.root)} {path.stat().st_size}\n".encode())
        return digest.hexdigest()[:12]

    def require_even_shares(self) -> None:
        """Accept every number of processes: `samples` fills a step's shares up."""

    def train_batches(self, start: int, stop: int) -> Iterator[Batch]:
        return self.load(_Seeded(self.train), [self.samples(step) for step in range(start, stop)])

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        """Return a loader of each image of `split` once over all processes, one at a time."""
        dataset = self._evaluated[split]
        batches = [[index] for index in self.share(range(len(dataset)))]
        return EvaluationLoader(
            batches, lambda batches: self.load(dataset, list(batches)), batches, len(dataset)
        )

    def sample_images(self, count: int) -> Iterator[Batch]:
        """Yield at most `count` images, one at a time, spread evenly over the last of `splits`."""
        dataset = self._evaluated[self.splits[-1]]
        count = min(count, len(dataset))
        return self.load(dataset, [[i * len(dataset) // count] for i in range(count)])

    def load(self, dataset: Dataset[Any], batches: list[list[Any]]) -> Iterator[Batch]:
        """Read `batches` of indices in worker processes; raise ConfigError naming a bad file."""
        guarded = _Guarded(dataset)
        for batch in loader(guarded, batches, _collate, self.data.workers, _single_threaded):
            if isinstance(batch, ConfigError):
                raise batch
            yield batch

    def samples(self, step: int) -> list[Sample]:
        """Return this process's samples of training step `step`.

        If an epoch's last batch cannot be shared evenly, the first images of the epoch are added
        without labels, so that all processes read equally many and no image counts twice.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        order = numpy_generator(self.seed, "order", epoch).permutation(len(self.train)).tolist()
        size = self.data.batch_size
        chosen = order[index * size : (index + 1) * size]
        more = -len(chosen) % self.world
        labelled = [True] * len(chosen) + [False] * more
        chosen += order[:more]
        seeds = (
            numpy_generator(self.seed, "sample", step).integers(2**32, size=len(chosen)).tolist()
        )
        samples: list[Sample] = self.share(list(map(Sample, chosen, seeds, labelled)))
        return samples


class _Seeded(Dataset[Any]):
    """Data set of augmented samples, each drawn from its own seed.

    mmsegmentation's transforms draw from the global generators of NumPy and Python, which are
    restored after each sample.
    """

    def __init__(self, dataset: "BaseSegDataset") -> None:
        self.dataset = dataset

    def __getitem__(self, sample: Sample) -> Any:
        states = np.random.get_state(), random.getstate()
        try:
            np.random.seed(sample.seed)
            random.seed(sample.seed)
            augmented = self.dataset[sample.image]
            if not sample.labelled:
                augmented["data_samples"].gt_sem_seg.data.fill_(IGNORED)
            return augmented
        finally:
            np.random.set_state(states[0])
            random.setstate(states[1])


class _Guarded(Dataset[Any]):
    """Data set that returns ConfigErrors instead of raising them in a worker process."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except ConfigError as error:
            return error


def pipeline(data: Scenery, *, augmented: bool) -> list[dict[str, Any]]:
    """Return mmsegmentation's configuration of the steps from a file to a sample."""
    from lit_attn.data.annotations import CheckedAnnotations, CheckedImage

    read = {"type": CheckedImage}
    labels = {"type": CheckedAnnotations, "num_classes": data.num_classes}
    packed = {"type": "mmseg.PackSegInputs"}
    if augmented:
        return [read, labels, *(step.transform(data) for step in data.augment), packed]
    # Labels are read after the resize: predictions are resized to the labels, not labels to them.
    size = (data.long_side, data.short_side)
    resize = {"type": "mmseg.Resize", "scale": size, "keep_ratio": True}
    return [read, resize, labels, packed]


def _dataset(
    data: Scenery, root: Path, folder: str, indices: list[int] | None, *, augmented: bool
) -> "BaseSegDataset":
    from mmseg.datasets import ADE20KDataset, BaseSegDataset

    arguments: dict[str, Any] = {
        "data_root": str(root),
        "data_prefix": {"img_path": f"images/{folder}", "seg_map_path": f"annotations/{folder}"},
        "pipeline": pipeline(data, augmented=augmented),
        "indices": indices,
        # Packing the paths into one array saves little memory and costs a second.
        "serialize_data": False,
    }
    if not data.class_names:
        return ADE20KDataset(**arguments)
    metainfo = {"classes": data.class_names, "palette": data.palette}
    return BaseSegDataset(**arguments, metainfo=metainfo, reduce_zero_label=True)


def _names(root: Path, folder: str) -> list[str]:
    """Return a folder's image names; raise ConfigError if there are none or one lacks labels."""
    images, annotations = root / "images" / folder, root / "annotations" / folder
    names = sorted(path.stem for path in images.glob("*.jpg"))
    missing = sorted(set(names) - {path.stem for path in annotations.glob("*.png")})
    if not names:
        raise ConfigError(f"data.root: {images} holds no .jpg images")
    if missing:
        raise ConfigError(f"data.root: {annotations / missing[0]}.png is missing")
    return names


def _hold_out(count: int, held: int) -> tuple[list[int], list[int]]:
    """Return `held` of `count` indices, the same for every seed, and the other indices."""
    if held >= count:
        raise ConfigError(
            f"data.validation: {held} of {count} training images leaves none; hold out fewer"
        )
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    return sorted(order[:held].tolist()), sorted(order[held:].tolist())


def _collate(samples: list[dict[str, Any] | ConfigError]) -> Batch | ConfigError:
    """Return the batch of `samples`, or the first ConfigError among them."""
    read = []
    for sample in samples:
        if isinstance(sample, ConfigError):
            return sample
        read.append(sample)
    return {key: [sample[key] for sample in read] for key in read[0]}


def _single_threaded() -> None:
    """Give OpenCV one thread, since many workers with several threads each would be slow."""
    import cv2

    cv2.setNumThreads(0)
