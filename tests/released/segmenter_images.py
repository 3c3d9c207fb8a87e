"""Training and evaluation images of Segmenter, and experiments/ade20k_segmenter/experiment.yaml.

The data set is the released one with the pipeline of its configuration for ADE20K: resizing by a
random ratio, crops in which no class has more than 75 %, flips, photometric distortion,
normalisation and padding, by the versions of mmsegmentation and mmcv that its requirements name.
Windows have 64 pixels instead of 512. Both sides set the same seed before each image.
`images` and `labels` are the windows of training, and `evaluated` are the images of evaluation.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_attn.data.loading import use_seed
from lit_attn.data.module import numpy_generator
from released import pictures
from released.record import Clone, use_library
from released.recording import Arrays, generator
from released.replaying import shipped_cell

REPOSITORY, COMMIT, RUNS = "rstrudel/segmenter", "20d1bfa", ["0"]
EXPERIMENT = "experiments/ade20k_segmenter/experiment.yaml"
LIBRARIES = ("mmcv==1.3.8", "mmsegmentation==0.14.1")
TOLERANCES = {"images": 1e-6, "labels": 0.0, "evaluated": 1e-6}
WINDOW, BATCH, TRAINED, EVALUATED, EPOCHS = 64, 8, 40, 12, 5
CLASSES, UNLABELLED = 150, 0


def labels(name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return a class (1 to 150) or UNLABELLED for each pixel, in squares of eight pixels.

    In half of the pictures one class has four squares of five.
    """
    drawn = generator("labels", name)
    squares = drawn.integers(CLASSES + 1, size=(shape[0] // 8 + 1, shape[1] // 8 + 1))
    if drawn.random() < 0.5:
        main = drawn.integers(1, CLASSES + 1)
        squares = np.where(drawn.random(squares.shape) < 0.8, main, squares)
    filled = squares.repeat(8, 0).repeat(8, 1)[: shape[0], : shape[1]]
    return filled.astype(np.uint8)


def write_pictures(root: Path) -> None:
    """Write pictures and their labels in ADE20K's layout."""
    for split, count in (("training", TRAINED), ("validation", EVALUATED)):
        for number in range(count):
            name = f"{split}/{number:02}"
            pixels = pictures.picture(name)
            pictures.write(root / "images" / f"{name}.jpg", pixels)
            pictures.write(root / "annotations" / f"{name}.png", labels(name, pixels.shape))


def samples(seed: int) -> Iterator[tuple[int, int]]:
    """Yield the number and the seed of each training image of all epochs."""
    steps = TRAINED // BATCH
    for step in range(EPOCHS * steps):
        order = numpy_generator(seed, "order", step // steps).permutation(TRAINED)
        seeds = numpy_generator(seed, "sample", step).integers(2**32, size=BATCH)
        rows = order[step % steps * BATCH :][:BATCH]
        yield from zip(rows.tolist(), seeds.tolist(), strict=True)


def record(clone: Clone, run: str) -> Arrays:
    """Read all epochs of the released data set with seed `run`, and describe its images."""
    use_library("mmcv", LIBRARIES[0])
    use_library("mmseg", LIBRARIES[1])
    # The package imports its other data sets too.
    sys.modules["segm.data"] = package = ModuleType("segm.data")
    package.__path__ = [str(clone.folder / "segm" / "data")]
    reader = clone.load("segm.data.ade20k", "segm/data/ade20k.py", {})
    with tempfile.TemporaryDirectory() as root:
        write_pictures(Path(root) / "ade20k" / "ADEChallengeData2016")
        with patch.dict("os.environ", DATASET=root):
            train, evaluated = (
                reader.ADE20KSegmentation(WINDOW, WINDOW, split, normalization="vit")
                for split in ("train", "val")
            )
        read = []
        places = order_of_names(train)
        for number, seed in samples(int(run)):
            with use_seed(seed):
                read.append(train[places[number]])
        whole = [evaluated[place]["im"][0] for place in order_of_names(evaluated)]
    return described([s["im"] for s in read], [s["segmentation"] for s in read], whole)


def order_of_names(files: "torch.utils.data.Dataset[object]") -> list[int]:
    """Return the places of a released data set's images by the order of their names."""
    names = [info["filename"] for info in files.dataset.img_infos]  # type: ignore
    return sorted(range(len(names)), key=names.__getitem__)


def described(images: list[Tensor], labels: list[Tensor], evaluated: list[Tensor]) -> Arrays:
    """Return the descriptions of windows, their labels, and evaluated images."""
    return {
        **pictures.describe("images", images),
        **pictures.describe("labels", labels),
        **pictures.describe("evaluated", evaluated),
    }


def replay(run: str, folder: Path) -> Arrays:
    """Return the same descriptions of the batches of the shipped experiment."""
    write_pictures(folder)
    small = {
        "data.root": str(folder),
        "data.workers": 0,
        "data.crop": WINDOW,
        "data.short_side": WINDOW,
        "data.long_side": 4 * WINDOW,
        "model.pretrained": None,
        "model.dim": 24,
        "model.depth": 1,
        "model.heads": 2,
        "model.ffn": {"width": 24},
    }
    cell = shipped_cell(EXPERIMENT.removeprefix("experiments/"), small, int(run), "test/mIoU")
    experiment = cell.experiment
    data = experiment.data.build(int(run), torch.device("cpu"))
    prepare = experiment.model.build(data.signature).data_preprocessor
    images, marks = [], []
    for batch in data.train_batches(0, EPOCHS * TRAINED // BATCH):
        prepared = prepare(batch, training=True)
        images += list(prepared["inputs"])
        marks += [sample.gt_sem_seg.data.squeeze(0) for sample in prepared["data_samples"]]
    evaluated = [prepare(batch)["inputs"][0] for batch in data.evaluation_loader("test")]
    return described(images, marks, evaluated)
