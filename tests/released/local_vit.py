"""LocalViT of efficient-vit-training, and experiments/imagenet_local_vit.yaml.

The script is main.py itself with the released options but the growing images, in float64 on a CPU,
with stochastic depth, and with MixUp and CutMix of timm 0.3.2, for a smaller model. Augmented
images are random numbers.
Growing images are not covered: they change the released positions (docs/setups.md, section 5).
`evaluation` is the top-1 and top-5 accuracy and the loss on image files in batches of which the
last is shorter, by the released reader, transforms and loop, and by this project's data module and
metrics.
"""

import collections.abc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from helpers import digit_folders
from timm.data import Mixup

from lit_attn.data.image_files import draw_box
from released import vision
from released.record import Clone, use_library
from released.recording import (
    Arrays,
    Recorder,
    Tensors,
    cut,
    generator,
    rename,
    shared_draws,
)
from released.replaying import Replay

REPOSITORY, COMMIT, RUNS = "BorealisAI/efficient-vit-training", "86e7ca7", ["0", "1"]
EXPERIMENT = "experiments/imagenet_local_vit.yaml"
LIBRARIES = ("timm==0.3.2",)
"""Version that the requirements of the repository name."""
TOLERANCES = {
    "loss": 1e-12,
    "gradient": 1e-10,
    "change": 1e-8,
    "sample": 1e-8,
    "evaluation": 1e-6,
}
EPOCHS, EPOCH_STEPS, BATCH, SIDE, WIDTH, DEPTH, HEADS = 3, 7, 4, 48, 24, 3, 3
CLASSES, EVALUATED = 10, 7


class Loader:
    """Training batches of one epoch after another, or one batch to evaluate."""

    def __init__(self, seed: int, steps: int) -> None:
        self.seed, self.steps, self.first = seed, steps, 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first, self.first = self.first, self.first + self.steps
        for step in range(first, self.first):
            seed_mixing(self.seed, step)
            yield batch(self.seed, step)


def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised images and the labels of a training step."""
    return vision.images(seed, step, BATCH, SIDE), vision.labels(seed, step, BATCH, CLASSES)


def seed_mixing(seed: int, step: int) -> None:
    """Seed the draws of timm's MixUp and CutMix for a training step."""
    np.random.seed(int(generator("mix", seed, step).integers(2**32)))


def import_old_timm() -> None:
    """Import timm 0.3.2 on a CPU; it reads a name that later versions of torch lack."""
    sys.modules["torch._six"] = names = ModuleType("torch._six")
    names.container_abcs = collections.abc  # type: ignore
    use_library("timm", LIBRARIES[0])
    mixing = sys.modules["timm.data.mixup"]
    one_hot = mixing.one_hot
    mixing.one_hot = lambda *a, **k: one_hot(*a, **k | {"device": "cpu"})  # type: ignore


def record(clone: Clone, run: str) -> Arrays:
    """Train from the initial values of seed `run` and return the record."""
    seed = int(run)
    import_old_timm()
    torch.set_default_dtype(torch.float64)
    for name in ("datasets", "samplers"):
        sys.modules[name] = ModuleType(name)
    sys.modules["datasets"].build_dataset = lambda **_: ([], CLASSES)  # type: ignore
    sys.modules["samplers"].RASampler = lambda *_, **__: None  # type: ignore
    factory = clone.load(
        "models",
        "models.py",
        {
            "img_size=img_size, patch_size=16, embed_dim=384, depth=depth, num_heads=6,": (
                f"img_size=img_size, patch_size=16, embed_dim={WIDTH}, depth=depth, "
                f"num_heads={HEADS},"
            )
        },
    )
    main = clone.load("main", "main.py", {})
    recorder = Recorder()
    models: list[torch.nn.Module] = []
    build = factory.deit_small_patch16_224
    loaders = iter([Loader(seed, EPOCH_STEPS), Loader(seed, 1)])

    def prepare(*values: Any, **options: Any) -> torch.nn.Module:
        model: torch.nn.Module = build(*values, **options)
        models.append(recorder.start_from(seed, used)(model))
        return model

    # The options of varsize_1gpu_best.sh that do not concern files and image sizes.
    options = ["--model", "deit_small_patch16_224", "--lr", "1e-3", "--localvit"]
    options += ["--localvit-act", "hs", "--device", "cpu", "--num_workers", "0"]
    options += ["--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--depth", str(DEPTH)]
    options += ["--input-size", str(SIDE), "--no-model-ema"]
    with (
        recorder,
        shared_draws(seed),
        patch.object(factory, "deit_small_patch16_224", prepare),
        patch.object(torch.utils.data, "DataLoader", lambda *_, **__: next(loaders)),
        patch.object(torch.utils.data, "SequentialSampler", lambda _: None),
        patch.object(torch.cuda, "synchronize", lambda: None),
    ):
        drawn = torch.rand
        # A block's two masks have the shapes (B, 1, 1) and (B, 1, 1, 1) there.
        torch.rand = lambda shape, **_: drawn((shape[0], 1, 1)).view(shape)  # type: ignore
        main.main(main.get_args_parser().parse_args(options))
    return recorder.arrays() | {"evaluation": evaluate(clone, main, models[0], options)}


def evaluate(
    clone: Clone, main: ModuleType, model: torch.nn.Module, options: list[str]
) -> np.ndarray:
    """Return the released top-1 and top-5 accuracies, as fractions, and the loss on image files.

    The released loop averages losses over batches, here the mean is over images.
    """
    reader = clone.load("released_datasets", "datasets.py", {})
    with tempfile.TemporaryDirectory() as folder:
        train = -(-EPOCH_STEPS * BATCH // CLASSES)
        digit_folders.write(Path(folder), train=train, val=EVALUATED, classes=CLASSES)
        args = main.get_args_parser().parse_args([*options, "--data-path", folder])
        files, _ = reader.build_dataset(is_train=False, args=args)
        loader = torch.utils.data.DataLoader(files, batch_size=int(1.5 * BATCH))
        batches = [(pixels.double(), marks) for pixels, marks in loader]
    results = main.evaluate(batches, model, "cpu")
    with torch.no_grad():
        logits = torch.cat([model(pixels) for pixels, _ in batches])
    marks = torch.cat([marks for _, marks in batches])
    loss = torch.nn.functional.cross_entropy(logits, marks).item()
    return np.array([results["acc1"] / 100, results["acc5"] / 100, loss])


def used(theirs: Tensors) -> Tensors:
    """Leave out the parameters that the released code builds and does not use."""
    unused = (".attn.proj_l.", ".attn.proj_w.", ".conv.bn1.", ".conv.bn2.")
    return {
        name: tensor for name, tensor in theirs.items() if not any(part in name for part in unused)
    }


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    seed = int(run)
    cell = vision.folder_cell(
        EXPERIMENT.removeprefix("experiments/"),
        folder,
        images=EPOCH_STEPS * BATCH,
        batch=BATCH,
        side=SIDE,
        changes={
            "data.sizes": [],
            "data.eval_batch_size": int(1.5 * BATCH),
            "model.dim": WIDTH,
            "model.depth": DEPTH,
            "model.heads": HEADS,
            "model.ffn": {"width": 4 * WIDTH, "activation": "hard-swish"},
            # The released rate is that of 512 images.
            "optimizer.lr": 1e-3 * BATCH / 512,
            "training.epochs": EPOCHS,
        },
        seed=seed,
        classes=CLASSES,
        evaluated=EVALUATED,
    )
    augment = cell.experiment.data.augment
    alphas = (augment.mixup, augment.cutmix)
    mix = Mixup(*alphas, label_smoothing=0.0, num_classes=CLASSES)

    def step(number: int) -> tuple[torch.Tensor, ...]:
        seed_mixing(seed, number)
        with patch("timm.data.mixup.rand_bbox", draw_box):
            images, targets = mix(*batch(seed, number))
        return images, targets

    metrics = ("test/accuracy", "test/top5", "test/loss")
    return Replay(cell, step, released_names, draws=True, metrics=metrics)


def released_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters, and cut q, k and v apart."""
    renamed = rename(ours, [(".mlp.fc", ".conv.fc"), (".mlp.conv.", ".conv.conv.0.")])
    cut(renamed, ".attn.qkv.", [".attn.toq.", ".attn.tok.", ".attn.tov."])
    return renamed
