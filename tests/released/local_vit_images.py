"""Training images of LocalViT in efficient-vit-training.

The script is main.py itself with the released options: repeated augmentation, growing images (32,
96, 160 and 224 pixels in one epoch each), random resized crops, flips, RandAugment, erasing, MixUp
and CutMix, by the version of timm that its requirements name. Both sides set the same seed before
each image and each mixed batch. `images` are the images before they are mixed; `mixed` are
the batches, and `targets` their smoothed targets.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image, ImageOps
from torch import Tensor

from lit_attn.data.loading import use_seed
from lit_attn.data.module import numpy_generator
from lit_attn.schema.plugins import load_parts
from released import local_vit, pictures
from released.record import Clone
from released.recording import Arrays
from released.replaying import shipped_cell

REPOSITORY, COMMIT, RUNS = "BorealisAI/efficient-vit-training", "86e7ca7", ["0"]
EXPERIMENT = "experiments/imagenet_local_vit/experiment.yaml"
LIBRARIES = local_vit.LIBRARIES
TOLERANCES = {"images": 1e-6, "mixed": 1e-6, "targets": 1e-6}
CLASSES, FILES, BATCH, EPOCHS, EPOCH_STEPS = 8, 33, 64, 4, 4
"""The sampler uses a multiple of 256 images: all but 8 of the 264 files."""


def write_pictures(root: Path) -> None:
    """Write the training images of each class, and one image to evaluate."""
    for label in range(CLASSES):
        for split, count in (("train", FILES), ("val", 1)):
            for number in range(count):
                name = f"{split}/n{label}/{number:02}.png"
                pictures.write(root / name, pictures.picture(name))


def record(clone: Clone, run: str) -> Arrays:
    """Run the released script with seed `run`, and describe the batches of all epochs."""
    seed = int(run)
    local_vit.import_old_timm()
    folder = clone.load("torchv_data.folder", "torchv_data/folder.py", {})
    clone.load("datasets", "datasets.py", {"nb_classes = 1000": f"nb_classes = {CLASSES}"})
    # The released one-GPU script starts one distributed process.
    start = "        if args.distributed:\n    "
    set_epoch = "        data_loader_train.sampler.set_epoch("
    main = clone.load("main", "main.py", {f"{start}{set_epoch}epoch)": f"{set_epoch}order(epoch))"})
    main.order = lambda epoch: int(numpy_generator(seed, "order", epoch).integers(2**63))
    batches: list[tuple[Tensor, Tensor, Tensor]] = []
    read, count = folder.ImageFolder_multisize.__getitem__, 0

    def seeded_read(files: Any, index: int) -> Any:
        nonlocal count
        step, place = divmod(count, BATCH)
        count += 1
        with use_seed(
            int(numpy_generator(seed, "sample", step).integers(2**32, size=BATCH)[place])
        ):
            return read(files, index)

    def train(*values: Any, **_: Any) -> dict[str, float]:
        loader, mixup = values[2], values[9]
        for images, labels in loader:
            drawn = numpy_generator(seed, "mix 0", len(batches)).integers(2**32)
            with use_seed(int(drawn)):
                batches.append((images, *mixup(images.clone(), labels)))
        return {}

    def posterize(image: Image.Image, bits: int) -> Image.Image:
        # Pillow accepted 0 bits at the time.
        return image.point(lambda value: value & ~(2 ** (8 - bits) - 1))

    with (
        tempfile.TemporaryDirectory() as root,
        patch.object(folder.ImageFolder_multisize, "__getitem__", seeded_read),
        patch.object(ImageOps, "posterize", posterize),
        patch.object(main, "train_one_epoch", train),
        patch.object(main, "evaluate", lambda *_: {"acc1": 0.0}),
    ):
        write_pictures(Path(root))
        # The options of varsize_1gpu_best.sh, with fewer epochs for each size.
        options = ["--model", "deit_small_patch16_224", "--lr", "1e-3", "--localvit"]
        options += ["--localvit-act", "hs", "--batch-size", str(BATCH), "--is-multisize"]
        options += ["--init-size", "32", "--epoch-step", "1", "--patch-step", "4"]
        options += ["--eval-on-final-size", "--data-path", root, "--epochs", str(EPOCHS)]
        options += ["--device", "cpu", "--num_workers", "0", "--depth", "1", "--no-model-ema"]
        main.main(main.get_args_parser().parse_args(options))
    return described(iter(batches))


def described(batches: Iterator[tuple[Tensor, Tensor, Tensor]]) -> Arrays:
    """Return the descriptions of images before mixing, mixed images, and targets."""
    images, mixed, targets = (torch_list(part) for part in zip(*batches, strict=True))
    return {
        **pictures.describe("images", images),
        **pictures.describe("mixed", mixed),
        **pictures.describe("targets", targets),
    }


def torch_list(batches: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the rows of all batches."""
    return [row for batch in batches for row in batch]


def replay(run: str, folder: Path) -> Arrays:
    """Return the same descriptions of the batches of the shipped experiment."""
    write_pictures(folder)
    sizes = {"data.sizes": [32, 96, 160], "data.epochs_per_size": 1}
    small = {"data.path": str(folder), "data.classes": CLASSES, "data.workers": 0}
    load_parts(local_vit.PLUG_INS)
    cell = shipped_cell(EXPERIMENT.removeprefix("experiments/"), small | sizes, int(run))
    experiment = cell.experiment
    data = experiment.data.build(int(run), torch.device("cpu"))
    assert data.steps_per_epoch == EPOCH_STEPS
    smoothing = experiment.loss.label_smoothing

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for batch in data.train_batches(0, EPOCHS * EPOCH_STEPS):
            mixed, targets = data.on_after_batch_transfer([batch[0].clone(), *batch[1:]], 0)
            yield batch[0], mixed, targets * (1 - smoothing) + smoothing / CLASSES

    return described(batches())
