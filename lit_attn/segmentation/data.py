"""Images with a label for every pixel in ADE20K's layout, augmented by mmsegmentation.

A batch is mmsegmentation's: {"inputs": B images (3, h, w) uint8 BGR, "data_samples": B
SegDataSample}. mmsegmentation's data preprocessor turns it into tensors.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt, field_validator
from torch.utils.data import Dataset

from lit_attn.data.base import Data, require_path
from lit_attn.data.loading import check_samples, use_seed
from lit_attn.data.module import DataModule, EvaluationLoader, numpy_generator
from lit_attn.data.sets import digest, hold_out
from lit_attn.data.splits import warn_of_shared_files
from lit_attn.extras import require_mmseg
from lit_attn.floors.base import Floor, spread_places
from lit_attn.segmentation.floors import (
    MOST_EVALUATED_IMAGES,
    MOST_TRAINING_IMAGES,
    PIXEL_RULES,
    Pixels,
    pixel_floors,
)
from lit_attn.segmentation.label_masks import (
    IGNORED,
    Pair,
    list_pairs,
    read_image,
    read_labels,
    warn_of_absent_classes,
)
from lit_attn.segmentation.scene_steps import (
    CategoryCrop,
    Photometric,
    Rescale,
    SceneAugmentation,
    SceneFlip,
)
from lit_attn.signatures import ImageMasks

Batch = dict[str, list[Any]]
Step = dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]

Byte = Annotated[int, Field(ge=0, le=255)]
Colour = tuple[Byte, Byte, Byte]

Sample = tuple[int, int, bool]
"""Index of an image, the seed of its augmentation, and whether its labels count."""


class Scenery(Data):
    """Images with a label for every pixel, in ADE20K's layout below `root`.

    `images/training/*` train and `images/validation/*` evaluate (split "test"); each image has
    labels of the same name in `annotations/training` or `annotations/validation`. Images are
    resized to a short side of `short_side` pixels and a long side of at most `long_side`. Training
    takes windows of `crop` pixels along each side.
    """

    has_val_files = False
    first_label: ClassVar = 1
    """Number of the first class in a label file; the numbers below it mean no class."""
    prepares_on_cpu: ClassVar = True
    floor_rules: ClassVar = PIXEL_RULES
    void_hint: ClassVar[str] = ""
    """End of the message about an unknown number: the key of further numbers without a class."""

    root: Path = Field(description="folder of the images and annotations")
    crop: PositiveInt = Field(512, description="side of a training window in pixels")
    short_side: PositiveInt = Field(512, description="short side of a resized image in pixels")
    long_side: PositiveInt = Field(2048, description="most pixels of a resized image's long side")
    batch_size: PositiveInt = Field(8, description="windows of a training step, over all devices")
    eval_batch_size: Literal[1] = Field(1, description="1, because images differ in size")
    drop_last: bool = Field(False, description="leave out an epoch's last batch if it is not full")
    validation: int = Field(0, ge=0, description="images held out of training, by a fixed split")
    augment: tuple[SceneAugmentation, ...] = Field(
        (Rescale(), CategoryCrop(), SceneFlip(), Photometric()),
        description="augmentation steps in the order of their application",
    )

    @field_validator("augment")
    @classmethod
    def _check_window(cls, steps: tuple[SceneAugmentation, ...]) -> tuple[SceneAugmentation, ...]:
        """Refuse steps that cut no windows of one size."""
        if not any(step.makes_window for step in steps):
            raise ValueError("needs 'category-crop': all windows of a batch have one size")
        return steps

    def signature(self) -> ImageMasks:
        return ImageMasks((3, self.crop, self.crop), self.num_classes, IGNORED, self.class_names)

    def build(self, seed: int, device: torch.device) -> "SceneryData":
        return SceneryData(self, seed, device)

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; empty if they are ADE20K's, which mmsegmentation knows."""
        return ()

    @property
    def label_colours(self) -> dict[Colour, int]:
        """Label of each colour in label files; empty if the files have numbers."""
        return {}

    @property
    def void_numbers(self) -> tuple[int, ...]:
        """Numbers in label files that mean no class, besides those below `first_label`."""
        return (IGNORED,)

    def prepare(self) -> Path:
        """Return the folder of the images, which are written there first if they are generated."""
        return self.root

    def check_files(self) -> None:
        super().check_files()
        for content in ("images", "annotations"):
            for split in ("training", "validation"):
                require_path("data.root", self.root / content / split)


class SceneryData(DataModule):
    """Splits of one data set; raise ConfigError if mmsegmentation or files are missing."""

    def __init__(self, data: Scenery, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        require_mmseg("data.kind")
        self.data = data
        self.root = data.prepare()
        images = self.root / "images"
        folders = {"train": images / "training", "test": images / "validation"}
        warn_of_shared_files(folders, "data.root")
        training = list_pairs(self.root, "training")
        evaluated: dict[str, list[Pair]] = {}
        held_out = hold_out(data.validation, False, np.zeros(len(training)))
        if held_out:
            evaluated["val"] = [training[row] for row in held_out["val"]]
            training = [training[row] for row in held_out["train"]]
        evaluated["test"] = list_pairs(self.root, "validation")
        self.train = SceneryFiles(data, training, augmented=True)
        self.evaluated = {}
        for split, pairs in evaluated.items():
            self.evaluated[split] = SceneryFiles(data, pairs, augmented=False)
        self.splits: list[str] = list(self.evaluated)
        self.classes = data.class_names
        self.colours: list[tuple[int, int, int]] = []
        """Colours of the classes in the files or in mmsegmentation; empty if they have none."""
        labels = data.label_colours
        if labels:
            of_classes = [colour for colour, label in labels.items() if label != IGNORED]
            self.colours = sorted(of_classes, key=lambda colour: labels[colour])
        if not self.classes:
            from mmseg.utils import ade_classes, ade_palette

            # One of ADE20K's names ends in a space.
            self.classes = tuple(name.strip() for name in ade_classes())
            self.colours = [(red, green, blue) for red, green, blue in ade_palette()]
        self.evaluation_workers = self.make_workers(self.evaluated_batch)
        self.set_epoch(len(training), data.drop_last)

    def fingerprint(self) -> str:
        """Return a digest of the names and sizes of all files that are read.

        Reading 20,000 images would take minutes.
        """
        paths: list[Path] = []
        for files in (self.train, *self.evaluated.values()):
            for pair in files.pairs:
                paths.extend(pair)
        paths.sort()
        return digest(f"{path.relative_to(self.root)} {path.stat().st_size}\n" for path in paths)

    def check(self) -> None:
        """Read files of every split for a limited time.

        Raises ConfigError for a wrong label. Warns about classes without a pixel in training.
        """
        # The last count is that of the pixels without a class.
        counts = np.zeros(len(self.classes) + 1, np.int64)

        def count_labels(place: int) -> None:
            numbers = np.bincount(self.train.read(place)["gt_seg_map"].ravel(), minlength=256)
            counts[:-1] += numbers[: len(self.classes)]
            counts[-1] += numbers[IGNORED]

        total = len(self.train)
        checked = check_samples(total, count_labels)
        warn_of_absent_classes(counts, self.classes, checked, total, self.data)
        for files in self.evaluated.values():
            check_samples(len(files), files.read)

    def floors(self, split: str, steps: int) -> list[Floor]:
        """Return the floors of the pixels of whole images, at the size of their files."""
        train = self._gather_pixels(self.train, MOST_TRAINING_IMAGES)
        evaluated = self._gather_pixels(self.evaluated[split], MOST_EVALUATED_IMAGES)
        return pixel_floors(train, evaluated, self.classes)

    def _gather_pixels(self, files: "SceneryFiles", most: int) -> Pixels:
        """Return the labelled pixels of at most `most` images, without augmentation."""
        chosen = spread_places(len(files), most)
        samples = (files.read(place) for place in chosen)
        pairs = ((sample["img"], sample["gt_seg_map"]) for sample in samples)
        return Pixels.gather(pairs, len(chosen), IGNORED)

    def require_even_shares(self) -> None:
        """Accept every number of processes: `samples` completes the shares of a step."""

    def batch(self, step: int) -> Batch:
        return self.collate(self.train, self.samples(step))

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
        samples = list(zip([*rows, *added], seeds, are_counted, strict=True))
        share: list[Sample] = self.share(samples)
        return share

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        dataset = self.evaluated[split]
        units = [[index] for index in self.share(range(len(dataset)))]
        batches = [[(index, 0, True)] for (index,) in units]
        if not units:
            # More processes than images: this process evaluates the first one as padding.
            units = [[len(dataset)]]
            batches = [[(0, 0, True)]]
        return EvaluationLoader(batches, partial(self.read, split), units, len(dataset))

    def sample_images(self, count: int) -> Iterator[Batch]:
        """Yield at most `count` images, one at a time, spread evenly over the first of `splits`."""
        dataset = self.evaluated[self.splits[0]]
        count = min(count, len(dataset))
        for number in range(count):
            yield self.collate(dataset, [(number * len(dataset) // count, 0, True)])

    def read(self, split: str, batches: Sequence[list[Sample]]) -> Iterator[Batch]:
        """Yield the batches of lists of samples of an evaluated split, in their order."""
        return self.evaluation_workers.read((split, samples) for samples in batches)

    def evaluated_batch(self, key: tuple[str, list[Sample]]) -> Batch:
        """Return the batch of some samples of an evaluated split."""
        split, samples = key
        return self.collate(self.evaluated[split], samples)

    def collate(self, files: "SceneryFiles", samples: list[Sample]) -> Batch:
        """Return some samples as a batch of mmsegmentation; raise ConfigError naming a bad file."""
        from mmengine.dataset import pseudo_collate

        batch: Batch = pseudo_collate([files[sample] for sample in samples])
        return batch

    def prepare_worker(self) -> None:
        import cv2

        super().prepare_worker()
        # Many workers with several threads of OpenCV each would be slow.
        cv2.setNumThreads(0)

    def stop_workers(self) -> None:
        super().stop_workers()
        self.evaluation_workers.close()

    def draw_order(self, epoch: int) -> list[int]:
        """Return the images of an epoch in their order."""
        order: list[int] = (
            numpy_generator(self.seed, "order", epoch).permutation(len(self.train)).tolist()
        )
        return order


class SceneryFiles(Dataset[dict[str, Any]]):
    """Data set of the samples of `pairs`; the seed of a sample decides on its augmentation."""

    def __init__(self, data: Scenery, pairs: list[Pair], *, augmented: bool) -> None:
        from mmengine.dataset import Compose

        self.data = data
        self.pairs = pairs
        self.transform = Compose(pipeline(data, augmented=augmented))

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, place: int) -> dict[str, Any]:
        """Return an image and its labels as the files have them; raise ConfigError."""
        image, labels = self.pairs[place]
        return read_labels(read_image({"img_path": image, "seg_map_path": labels}), self.data)

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
        transforms = [step.transform(data) for step in data.augment]
        return [read_image, labels, *transforms, packed]
    # Labels are read after the resize: predictions are resized to the labels, not labels to them.
    size = (data.long_side, data.short_side)
    resize = {"type": "mmseg.Resize", "scale": size, "keep_ratio": True}
    return [read_image, resize, labels, packed]
