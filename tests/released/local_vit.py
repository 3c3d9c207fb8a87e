"""LocalViT of efficient-vit-training, and experiments/imagenet_local_vit/experiment.yaml.

The script is main.py itself with the released options, in float64 on a CPU, with stochastic depth,
and with MixUp and CutMix of timm 0.3.2, for a smaller model. Augmented images are random numbers.
In the runs `growing`, images have 32 and 64 pixels in two epochs each and 96 pixels in the last
epoch. `positions` are the untrained positions at the end, which every change of the image size and
every evaluation has replaced. The other runs have one image size, at which the released code trains
its positions.
`evaluation` is the top-1 and top-5 accuracy and the loss on image files in batches of which the
last is shorter, by the released reader, transforms and loop, and by this project's data module and
metrics.
"""

import collections.abc
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from helpers import digit_folders
from helpers.paths import EXPERIMENTS

from lit_attn.data.augment.timm_augmentation import mix_batch
from lit_attn.schema.plugins import load_parts
from released import vision
from released.record import Clone, use_library
from released.recording import (
    Arrays,
    Recorder,
    Tensors,
    cut,
    generator,
    initial_values,
    rename,
    shared_draws,
)
from released.replaying import Replay

REPOSITORY, COMMIT, RUNS = (
    "BorealisAI/efficient-vit-training",
    "86e7ca7",
    ["0", "1", "growing-0", "growing-1"],
)
EXPERIMENT = "experiments/imagenet_local_vit/experiment.yaml"
PLUG_INS = [EXPERIMENTS / "imagenet_local_vit" / "imagenet_local_vit.py"]
LIBRARIES = ("timm==0.3.2",)
"""Version that the requirements of the repository name."""
TOLERANCES = {
    "loss": 1e-12,
    "gradient": 1e-10,
    "change": 1e-8,
    "sample": 1e-8,
    "evaluation": 1e-6,
    "positions": 1e-10,
}
BATCH, WIDTH, DEPTH, HEADS = 4, 24, 3, 3
CLASSES, EVALUATED = 10, 7


class Images(NamedTuple):
    """Epochs and steps per epoch, image sizes, and the epochs of each size before the last one."""

    epochs: int
    epoch_steps: int
    side: int
    growing: tuple[int, ...] = ()
    epochs_per_size: int = 1


ONE_SIZE, GROWING = Images(3, 7, 48), Images(5, 5, 96, growing=(32, 64), epochs_per_size=2)


def images_of(run: str) -> tuple[int, Images]:
    """Return the seed and the images of a run."""
    kind, _, seed = run.rpartition("-")
    return int(seed), GROWING if kind else ONE_SIZE


class Loader:
    """Training batches of one epoch after another, or one batch to evaluate.

    The loader is also its own `dataset`, whose image size the released code changes.
    """

    def __init__(self, seed: int, steps: int, side: int) -> None:
        self.seed, self.steps, self.side, self.first = seed, steps, side, 0
        self.dataset = self

    def _set_stage(self, side: int, mode: str) -> None:
        self.side = side

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first, self.first = self.first, self.first + self.steps
        for step in range(first, self.first):
            np.random.seed(seed_of_mixing(self.seed, step))
            yield batch(self.seed, step, self.side)


def batch(seed: int, step: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised images, with `side` pixels, and the labels of a training step."""
    return vision.images(seed, step, BATCH, side), vision.labels(seed, step, BATCH, CLASSES)


def seed_of_mixing(seed: int, step: int) -> int:
    """Return the seed of the draws of MixUp and CutMix for a training step."""
    return int(generator("mix", seed, step).integers(2**32))


def import_old_timm() -> None:
    """Import timm 0.3.2 on a CPU; it reads a name that later versions of torch lack."""
    sys.modules["torch._six"] = names = ModuleType("torch._six")
    names.container_abcs = collections.abc  # type: ignore
    use_library("timm", LIBRARIES[0])
    mixing = sys.modules["timm.data.mixup"]
    one_hot = mixing.one_hot
    mixing.one_hot = lambda *a, **k: one_hot(*a, **k | {"device": "cpu"})  # type: ignore


def record(clone: Clone, run: str) -> Arrays:
    """Train from the initial values of the seed of `run` and return the record."""
    seed, sizes = images_of(run)
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
    loaders = iter([Loader(seed, steps, sizes.side) for steps in (sizes.epoch_steps, 1)])
    view = untrained if sizes.growing else used

    def prepare(*values: Any, **options: Any) -> torch.nn.Module:
        model: torch.nn.Module = build(*values, **options)
        models.append(recorder.start_from(seed, view)(model))
        return model

    # The options of varsize_1gpu_best.sh that do not concern files.
    options = ["--model", "deit_small_patch16_224", "--lr", "1e-3", "--localvit"]
    options += ["--localvit-act", "hs", "--device", "cpu", "--num_workers", "0"]
    options += ["--batch-size", str(BATCH), "--epochs", str(sizes.epochs)]
    options += ["--depth", str(DEPTH), "--input-size", str(sizes.side), "--no-model-ema"]
    if sizes.growing:
        options += ["--is-multisize", "--eval-on-final-size", "--patch-step", "2"]
        options += ["--init-size", str(sizes.growing[0])]
        options += ["--epoch-step", str(sizes.epochs_per_size)]
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
    train = -(-sizes.epoch_steps * BATCH // CLASSES)
    evaluated = {"evaluation": evaluate(clone, main, models[0], options, train)}
    return recorder.arrays() | evaluated | positions(models[0])


def positions(model: torch.nn.Module) -> Arrays:
    """Return the positions of a trained network."""
    return {"positions": model.get_parameter("pos_embed").detach().numpy()}


def evaluate(
    clone: Clone, main: ModuleType, model: torch.nn.Module, options: list[str], train: int
) -> np.ndarray:
    """Return the released top-1 and top-5 accuracies, as fractions, and the loss on image files.

    The released loop averages losses over batches, here the mean is over images.
    """
    reader = clone.load("released_datasets", "datasets.py", {})
    with tempfile.TemporaryDirectory() as folder:
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


def untrained(theirs: Tensors) -> Tensors:
    """Leave out unused parameters and the positions, which growing images leave untrained."""
    return {name: tensor for name, tensor in used(theirs).items() if name != "pos_embed"}


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    seed, sizes = images_of(run)
    load_parts(PLUG_INS)
    cell = vision.folder_cell(
        EXPERIMENT.removeprefix("experiments/"),
        folder,
        images=sizes.epoch_steps * BATCH,
        batch=BATCH,
        side=sizes.side,
        changes={
            "data.sizes": list(sizes.growing),
            "data.epochs_per_size": sizes.epochs_per_size,
            # Without growing images, the released code trains its positions.
            **({} if sizes.growing else {"model.positions": "learned"}),
            "data.eval_batch_size": int(1.5 * BATCH),
            "model.dim": WIDTH,
            "model.depth": DEPTH,
            "model.heads": HEADS,
            "model.ffn": {"width": 4 * WIDTH, "activation": "hard-swish"},
            # The released rate is that of 512 images.
            "optimizer.lr": 1e-3 * BATCH / 512,
            "training.epochs": sizes.epochs,
        },
        seed=seed,
        classes=CLASSES,
        evaluated=EVALUATED,
    )
    augment = cell.experiment.data.augment

    def step(number: int) -> tuple[torch.Tensor, ...]:
        side = cell.experiment.data.size_in(number // sizes.epoch_steps)
        images, labels = batch(seed, number, side)
        return mix_batch(images, labels, CLASSES, augment, seed_of_mixing(seed, number))

    metrics = ("test/accuracy", "test/top5", "test/loss")
    replay = Replay(cell, step, released_names, draws=True, outputs=positions, metrics=metrics)
    return replay._replace(start=partial(fill_positions, seed=seed)) if sizes.growing else replay


def fill_positions(network: torch.nn.Module, seed: int) -> None:
    """Give untrained positions their initial values, for training and for evaluation."""
    for tensor in (network.get_parameter("pos_embed"), network.get_buffer("next_pos_embed")):
        tensor.copy_(initial_values("pos_embed", tuple(tensor.shape), seed))


def released_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters, and cut q, k and v apart."""
    renamed = rename(ours, [(".mlp.fc", ".conv.fc"), (".mlp.conv.", ".conv.conv.0.")])
    cut(renamed, ".attn.qkv.", [".attn.toq.", ".attn.tok.", ".attn.tov."])
    return renamed
