"""Code that recordings of image classification share: batches, small cells, names of blocks."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import digit_folders

from lit_attn.config.cell import Cell
from released.recording import Tensors, generator, rename
from released.replaying import shipped_cell


def images(seed: int, number: int, count: int, side: int) -> torch.Tensor:
    """Return the normalised images (count, 3, side, side) of batch `number`."""
    return torch.from_numpy(
        generator("images", seed, number).standard_normal((count, 3, side, side))
    )


def labels(seed: int, number: int, count: int, classes: int) -> torch.Tensor:
    """Return the labels (count,) of batch `number`."""
    return torch.from_numpy(generator("labels", seed, number).integers(classes, size=count))


def evaluated_images(count: int, side: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return RGB images (count, side, side, 3) uint8 and labels (count,) to evaluate on."""
    drawn = generator("files")
    pixels = drawn.integers(256, size=(count, side, side, 3)).astype(np.uint8)
    return pixels, drawn.integers(classes, size=count).astype(np.uint8)


def write_images(folder: Path, count: int, side: int, classes: int, evaluated: int = 8) -> Path:
    """Write a small npz data set, of whose training images a replay uses none."""
    path = folder / "images.npz"
    pixels, marks = evaluated_images(evaluated, side, classes)
    blank, zeros = np.zeros((count, side, side, 3), np.uint8), np.zeros(count, np.uint8)
    np.savez(path, x_train=blank, y_train=zeros, x_test=pixels, y_test=marks)
    return path


def folder_cell(
    experiment: str,
    folder: Path,
    *,
    images: int,
    batch: int,
    side: int,
    changes: dict[str, Any],
    seed: int,
    classes: int = digit_folders.CLASSES,
    evaluated: int = 1,
) -> Cell:
    """Return a shrunk cell of an experiment on class folders, which are written to `folder`.

    A replay feeds batches of its own, so the images do not matter: an epoch has `images` of them.
    `evaluated` is the number of evaluated images of a class. `changes` are further changes of the
    experiment.
    """
    train = -(-images // classes)
    path = digit_folders.write(folder / "images", train=train, val=evaluated, classes=classes)
    data = {"path": str(path), "classes": classes, "size": side, "workers": 0}
    data |= {"batch_size": batch, "eval_batch_size": batch}
    small = {f"data.{key}": value for key, value in data.items()}
    small["training.precision"] = "fp32"
    return shipped_cell(experiment, small | changes, seed, "test/loss")


def small_vit_names(ours: Tensors, pairs: list[tuple[str, str]]) -> Tensors:
    """Rename the parameters of a small ViT as the repositories that derive from vit-pytorch do."""
    return rename(
        ours,
        [
            *pairs,
            ("^norm.", "mlp_head.0."),
            ("^head.", "mlp_head.1."),
            ("^pos_embed", "pos_embedding"),
            ("^blocks.", "transformer.layers."),
            (".norm1.", ".0.norm."),
            (".norm2.", ".1.norm."),
            (".attn.qkv.", ".0.fn.to_qkv."),
            (".attn.proj.", ".0.fn.to_out.0."),
            (".attn.temperature", ".0.fn.temperature"),
            (".mlp.fc1.", ".1.fn.net.0."),
            (".mlp.fc2.", ".1.fn.net.3."),
        ],
    )


def plain_vit_names(ours: Tensors) -> Tensors:
    """Rename a plain small ViT's parameters; a patch is a row of pixels with their channels."""
    renamed = small_vit_names(ours, [("patch_embed.proj.", "to_patch_embedding.1.")])
    kernel = renamed["to_patch_embedding.1.weight"]
    renamed["to_patch_embedding.1.weight"] = kernel.permute(0, 2, 3, 1).flatten(1)
    return renamed
