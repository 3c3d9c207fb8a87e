"""Images of JiT (nkthiebaut/JiT), and experiments/imagenet_jit/experiment.yaml.

The script is main_jit.py itself with its loader and its loop over batches, and prepare_ref.py
itself, which writes the reference images of the released evaluation; both crop images of 32
pixels instead of 256. Both sides set the same seed before each image. `images` are the batches
that the released loop gives to its model, and `evaluated` are the reference images and this
project's images of evaluation. The readings `resized-*` have random resized crops, which the
released code lacks: `resized` are its batches with torchvision's crop in the place of its own, and
both sides cut the same windows. `windows` compares the distributions of top, left, height and
width of the windows that torchvision and this project draw, by the largest statistic of a
two-sample Kolmogorov-Smirnov test.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from scipy.stats import ks_2samp
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor, nn
from torchvision import transforms

from lit_attn.data.loading import use_seed
from lit_attn.data.module import numpy_generator
from released import pictures
from released.record import Clone
from released.recording import Arrays
from released.replaying import shipped_cell

REPOSITORY, COMMIT, RUNS = "nkthiebaut/JiT", "869190a", ["0"]
EXPERIMENT = "experiments/imagenet_jit/experiment.yaml"
LIBRARIES = ("torchvision",)
TOLERANCES = {"images": 1e-6, "evaluated": 1e-6, "resized": 1e-6, "windows": 0.08}
"""A test at the level 1e-5 rejects 2,000 windows at 0.078."""

SIDE, CLASSES, FILES, BATCH, EPOCHS, EPOCH_STEPS = 32, 4, 17, 16, 3, 4
"""The last 4 of the 68 images of an epoch are left out."""

SIZES = ((180, 240), (240, 180), (200, 200), (90, 300))
"""(height, width) of the pictures whose windows are drawn."""
WINDOWS = 2000


def write_pictures(root: Path, train: str, evaluated: str) -> None:
    """Write the images of both splits below the folders `train` and `evaluated` of `root`."""
    for label in range(CLASSES):
        for split, folder, count in (("train", train, FILES), ("val", evaluated, 5)):
            for number in range(count):
                name = f"n{label}/{number:02}.png"
                pixels = pictures.picture(f"jit {split} {name}")
                pictures.write(root / folder / name, pixels)


def draw_window(image: Image.Image, *_: Any) -> tuple[int, int, int, int]:
    """Draw top, left, height and width of a window from the seeded generator."""
    height, width = (int(torch.randint(8, side + 1, ())) for side in image.size[::-1])
    top = int(torch.randint(image.height - height + 1, ()))
    return top, int(torch.randint(image.width - width + 1, ())), height, width


class Collector(nn.Module):
    """Model that collects the batches of the released loop."""

    def __init__(self, _: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.images: list[Tensor] = []

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        self.images += list(images.clone())
        return self.weight * labels.sum()

    def update_ema(self) -> None:
        """Average nothing."""


def record(clone: Clone, run: str) -> Arrays:
    """Run the released scripts with seed `run`, and describe their images."""
    seed = int(run)
    for name in ("cv2", "torch_fidelity"):
        sys.modules[name] = ModuleType(name)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_pictures(root, "train", "reference/train")
        crop = transforms.RandomResizedCrop(SIDE, interpolation=Image.Resampling.BICUBIC)
        with patch.object(transforms.RandomResizedCrop, "get_params", staticmethod(draw_window)):
            resized = released_batches(
                clone, root, seed, {"center_crop_arr(img, args.img_size)": "CROP(img)"}, crop
            )
        return {
            **pictures.describe("images", released_batches(clone, root, seed, {}, None)),
            **pictures.describe("resized", resized),
            **pictures.describe("evaluated", reference_images(clone, root)),
            "windows": windows(crop, seed),
        }


def released_batches(
    clone: Clone, root: Path, seed: int, replacements: dict[str, str], crop: Any
) -> list[Tensor]:
    """Return the images of all batches that the released script trains on."""
    start = "        if args.distributed:\n    "
    set_epoch = "        data_loader_train.sampler.set_epoch("
    order = {f"{start}{set_epoch}epoch)": f"{set_epoch}order(epoch))"}
    main: Any = clone.load("main_jit", "main_jit.py", order | replacements)
    main.CROP = crop
    main.order = lambda epoch: int(numpy_generator(seed, "order", epoch).integers(2**63))
    read, count = main.datasets.ImageFolder.__getitem__, 0

    def seeded_read(files: Any, index: int) -> Any:
        nonlocal count
        # The loader reads no image of the incomplete last batch.
        step, place = divmod(count, BATCH)
        count += 1
        drawn = numpy_generator(seed, "sample", step).integers(2**32, size=BATCH)[place]
        with use_seed(int(drawn)):
            return read(files, index)

    options = ["--img_size", SIDE, "--batch_size", BATCH, "--epochs", EPOCHS, "--lr", 0]
    options += ["--num_workers", 0, "--data_path", root, "--device", "cpu", "--no_pin_mem"]
    arguments = main.get_args_parser().parse_args([*map(str, options), "--output_dir", str(root)])
    arguments.gpu = None
    collector = Collector(arguments)
    with (
        patch.object(main, "Denoiser", lambda _: collector),
        patch.object(main, "SummaryWriter"),
        patch.object(torch.nn.parallel, "DistributedDataParallel", Parallel),
        patch.object(torch.cuda, "synchronize"),
        patch.object(main.misc, "save_model"),
        patch.object(main.datasets.ImageFolder, "__getitem__", seeded_read),
    ):
        main.main(arguments)
    return collector.images


class Parallel(nn.Module):
    """Model of a single process in the place of DistributedDataParallel."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)


def reference_images(clone: Clone, root: Path) -> Iterator[Tensor]:
    """Return the reference images of the released evaluation, with values from -1 to 1."""
    options = ["--data_path", root / "reference", "--output_path", root / "out"]
    arguments = ["", *map(str, options), "--img_size", str(SIDE)]
    with patch.object(sys, "argv", arguments):
        clone.run("prepare_ref.py", {"num_workers=32": "num_workers=0"}, {})
    for path in sorted((root / "out").glob("*.png")):
        pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)
        yield pixels.float().div_(255) * 2.0 - 1.0


def windows(crop: Any, seed: int) -> Any:
    """Return top, left, height and width of random windows (pictures x 4, WINDOWS)."""
    rows: list[Any] = []
    with use_seed(seed):
        for height, width in SIZES:
            picture = Image.new("RGB", (width, height))
            drawn = [crop.get_params(picture, crop.scale, crop.ratio) for _ in range(WINDOWS)]
            rows += list(np.transpose(drawn))
    return np.asarray(rows, dtype=np.int16)


def compare(name: str, ours: Arrays, theirs: Arrays) -> pictures.Comparison:
    """Compare distributions of windows, one in each row, or images."""
    if name != "windows":
        return pictures.compare(name, ours, theirs)
    pairs = zip(ours[name], theirs[name], strict=True)
    differences = np.array([ks_2samp(*pair).statistic for pair in pairs])
    agreeing = int((differences <= TOLERANCES[name]).sum())
    return pictures.Comparison(len(differences), agreeing, float(differences.max()))


def replay(run: str, folder: Path) -> Arrays:
    """Return the same descriptions of the images of the shipped experiment."""
    seed = int(run)
    write_pictures(folder, "train", "val")
    small = {"data.path": str(folder), "data.classes": CLASSES, "data.workers": 0}
    small |= {"data.size": SIDE, "data.batch_size": BATCH}

    def build(changes: dict[str, Any]) -> Any:
        cell = shipped_cell(EXPERIMENT.removeprefix("experiments/"), small | changes, seed)
        return cell.experiment.data.build(seed, torch.device("cpu"))

    def trained_on(data: Any) -> list[Tensor]:
        assert data.steps_per_epoch == EPOCH_STEPS
        batches = data.train_batches(0, EPOCHS * EPOCH_STEPS)
        return [image for batch in batches for image in batch[0]]

    data, other = build({}), build({"data.augment.crop": "resized"})
    evaluated = [image for batch in data.evaluation_loader("test") for image in batch[0]]
    with patch.object(RandomResizedCropAndInterpolation, "get_params", staticmethod(draw_window)):
        resized = trained_on(other)
    return {
        **pictures.describe("images", trained_on(data)),
        **pictures.describe("resized", resized),
        **pictures.describe("evaluated", evaluated),
        "windows": windows(other.train.transforms[SIDE].transforms[0], seed),
    }
