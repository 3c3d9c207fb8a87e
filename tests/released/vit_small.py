"""ViT-small and the plain ViT of vision-transformers-cifar10; experiments/cifar_vit_small.

The script is train_cifar10.py itself (`--net vit_small` and, for the run `plain`, `--net vit`, with
`--opt adam --noamp`), in float64 on a CPU, with dropout and a narrower model. The papers put
SET-Adam in Adam's place, so this replay trains with Adam. Augmented images are random numbers.
"""

import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
import torchvision
from helpers.paths import EXPERIMENTS

from lit_attn.schema.plugins import load_parts
from released import vision
from released.record import Clone
from released.recording import Arrays, Recorder, Tensors, shared_draws
from released.replaying import Replay, shipped_cell

REPOSITORY, COMMIT = "kentaroy47/vision-transformers-cifar10", "5bb83d3"
RUNS = ["0", "1", "plain-0"]
EXPERIMENT = "experiments/cifar_vit_small/cifar10.yaml"
TOLERANCES = {"loss": 1e-11, "gradient": 1e-9, "change": 1e-7, "sample": 1e-7}
EPOCHS, EPOCH_STEPS, BATCH, CLASSES, WIDTH = 4, 6, 3, 10, 32


def record(clone: Clone, run: str) -> Arrays:
    """Train from the initial values of seed `run` and return the record."""
    case, _, number = run.rpartition("-")
    seed, net = int(number), "vit" if case == "plain" else "vit_small"
    torch.set_default_dtype(torch.float64)
    sys.modules["wandb"] = stub = ModuleType("wandb")
    for name in ("init", "watch", "log", "save"):
        setattr(stub, name, lambda *a, **k: None)
    stub.config = SimpleNamespace(update=lambda _: None)  # type: ignore
    sys.modules["utils"] = ModuleType("utils")
    sys.modules["utils"].progress_bar = lambda *a: None  # type: ignore
    # A head is 64 wide there whatever the model's width, which is 512.
    clone.load(
        f"models.{net}",
        f"models/{net}.py",
        {"channels = 3, dim_head = 64": f"channels = 3, dim_head = {WIDTH // 8}"},
    )
    recorder = Recorder()
    epochs = iter(range(EPOCHS))

    class Epoch:
        def __len__(self) -> int:
            return EPOCH_STEPS

        def __iter__(self) -> object:
            first = next(epochs) * EPOCH_STEPS
            for step in range(first, first + EPOCH_STEPS):
                yield batch(seed, step)

    arguments = ["", "--net", net, "--noamp", "--noaug", "--n_epochs", str(EPOCHS)]
    arguments += ["--dimhead", str(WIDTH)]
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        patch.object(sys, "argv", arguments),
        patch.object(torchvision.datasets, "CIFAR10", lambda **_: None),
        recorder,
        shared_draws(seed),
    ):
        clone.run(
            "train_cifar10.py",
            {
                "torch.utils.data.DataLoader(trainset, batch_size=bs, shuffle=True, "
                "num_workers=8)": "TRAIN",
                "torch.utils.data.DataLoader(testset, batch_size=100, shuffle=False, "
                "num_workers=8)": "TEST",
                "# Loss is CE\n": "PREPARE(net)\n",
                "net.cuda()\n": "",
            },
            {"TRAIN": Epoch(), "TEST": [batch(seed, -1)], "PREPARE": recorder.start_from(seed)},
        )
    return recorder.arrays()


def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised images and the labels of a training step."""
    return vision.images(seed, step, BATCH, 32), vision.labels(seed, step, BATCH, CLASSES)


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    load_parts([EXPERIMENTS / "cifar_vit_small" / "blanking_randaugment.py"])
    case, _, number = run.rpartition("-")
    seed = int(number)
    plain = {"model.patchify": "plain", "model.local_self_attention": False}
    path = vision.write_images(folder, EPOCH_STEPS * BATCH, 32, CLASSES)
    cell = shipped_cell(
        "cifar_vit_small/cifar10.yaml",
        {
            "data.kind": "npz",
            "data.name": "random",
            "data.path": str(path),
            "data.size": 32,
            "data.classes": CLASSES,
            "data.batch_size": BATCH,
            "model.dim": WIDTH,
            "optimizer": {"kind": "adam", "lr": 1e-4},
            "training.epochs": EPOCHS,
            "training.precision": "fp32",
            **(plain if case == "plain" else {}),
        },
        seed,
        "test/loss",
    )
    return Replay(cell, lambda step: batch(seed, step), released_names, draws=True)


def released_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters; shifted images stand in another order there."""
    if "patch_embed.norm.weight" not in ours:
        return vision.plain_vit_names(ours)
    tokens = "to_patch_embedding.to_patch_tokens"
    renamed = vision.small_vit_names(
        ours, [("patch_embed.norm.", f"{tokens}.1."), ("patch_embed.proj.", f"{tokens}.2.")]
    )
    for name in ("1.weight", "1.bias", "2.weight"):
        key = f"to_patch_embedding.to_patch_tokens.{name}"
        # Ours: image, left, right, up, down; theirs: image, right, left, down, up.
        pixels = renamed[key].unflatten(-1, (5, 3, 4, 4))[..., [0, 2, 1, 4, 3], :, :, :]
        renamed[key] = pixels.flatten(-4, -3).movedim(-3, -1).flatten(-3)
    return renamed
