"""Segmenter with a mask transformer, and experiments/ade20k_segmenter/experiment.yaml.

The model, the optimizer, the schedule, the loop over batches and the inference are the released
ones, in float64 on a CPU, with dropout, stochastic depth and pixels without a label, for a smaller
model with random weights. Images are random numbers. After training, the probabilities of an image
of another size, from overlapping windows, are compared as well. Losses differ by a factor of
1 - 1.2e-7 / n for n labelled pixels, since mmsegmentation adds float32's epsilon to n.
The released class token starts with deviation 0.02 and timm's with 1e-6; the experiment replaces it
by pretrained weights.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from released.record import Clone
from released.recording import Arrays, Recorder, Tensors, generator, rename, shared_draws
from released.replaying import Replay, shipped_cell

REPOSITORY, COMMIT, RUNS = "rstrudel/segmenter", "20d1bfa", ["0", "1"]
EXPERIMENT = "experiments/ade20k_segmenter/experiment.yaml"
OTHER_INITIAL_VALUES = ("encoder.cls_token",)
TOLERANCES = {"loss": 1e-10, "gradient": 1e-9, "change": 1e-8, "sample": 1e-8, "output": 1e-9}
EPOCHS, EPOCH_STEPS, BATCH, CLASSES, WINDOW, STRIDE, PATCH = 2, 8, 2, 150, 32, 24, 8
WIDTH, DEPTH, DECODER_DEPTH, HEADS, IGNORED = 24, 3, 2, 2, 255
IMAGE, ORIGINAL = (40, 56), (60, 84)
"""(height, width) of the evaluated image, and of its labels."""


def images(seed: int, step: int, size: tuple[int, int]) -> np.ndarray:
    """Return RGB images (BATCH, 3, height, width) uint8."""
    return generator("images", seed, step).integers(256, size=(BATCH, 3, *size), dtype=np.uint8)


def labels(seed: int, step: int) -> torch.Tensor:
    """Return classes (BATCH, WINDOW, WINDOW); a fifth of the pixels has none."""
    drawn = generator("labels", seed, step)
    classes = drawn.integers(CLASSES, size=(BATCH, WINDOW, WINDOW))
    classes[drawn.random(classes.shape) < 0.2] = IGNORED
    return torch.from_numpy(classes)


class Loader:
    """Training batches as the released loader returns them."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch = seed, 0

    def __len__(self) -> int:
        return EPOCH_STEPS

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for step in range(self.epoch * EPOCH_STEPS, (self.epoch + 1) * EPOCH_STEPS):
            pixels = torch.from_numpy(images(self.seed, step, (WINDOW, WINDOW))).double()
            yield {"im": (pixels / 255 - 0.5) / 0.5, "segmentation": labels(self.seed, step)}


def record(clone: Clone, run: str) -> Arrays:
    """Train from the initial values of seed `run` and return the record."""
    seed = int(run)
    torch.set_default_dtype(torch.float64)
    # Both modules import mmsegmentation; the training needs only their label of no class.
    sys.modules["segm.metrics"] = metrics = ModuleType("segm.metrics")
    metrics.gather_data = metrics.compute_metrics = None  # type: ignore
    sys.modules["segm.data"] = data = ModuleType("segm.data")
    data.__path__ = [str(clone.folder / "segm" / "data")]
    factory = clone.load(
        "segm.model.factory",
        "segm/model/factory.py",
        {"n_heads = dim // 64": f"n_heads = {HEADS}"},
    )
    factory.load_custom_pretrained = lambda *_: None  # type: ignore
    engine = clone.load("segm.engine", "segm/engine.py", {})
    training = clone.load("segm.optim.factory", "segm/optim/factory.py", {})
    inference = sys.modules["segm.model.utils"].inference
    decoder = {"name": "mask_transformer", "drop_path_rate": 0.0, "dropout": 0.1}
    options: dict[str, Any] = {
        # No published weights have this name, so none are loaded.
        "backbone": "random",
        "normalization": "vit",
        "distilled": False,
        "image_size": (WINDOW, WINDOW),
        "patch_size": PATCH,
        "d_model": WIDTH,
        "n_heads": HEADS,
        "n_layers": DEPTH,
        "dropout": 0.0,
        "drop_path_rate": 0.1,
        "n_cls": CLASSES,
        "decoder": decoder | {"n_layers": DECODER_DEPTH},
    }
    model = factory.create_segmenter(options)
    recorder = Recorder()
    recorder.start_from(seed, used)(model)
    # The values of train.py and config.yml for ADE20K.
    settings = argparse.Namespace(
        opt="sgd",
        lr=1e-3,
        weight_decay=0.0,
        momentum=0.9,
        clip_grad=None,
        sched="polynomial",
        min_lr=1e-5,
        poly_power=0.9,
        poly_step_size=1,
        iter_max=EPOCHS * EPOCH_STEPS,
        iter_warmup=0.0,
    )
    optimizer = training.create_optimizer(settings, model)
    scheduler = training.create_scheduler(settings, optimizer)
    loader = Loader(seed)
    no_gpu = patch.object(torch.cuda, "synchronize", lambda: None)
    with recorder, shared_draws(seed), no_gpu:
        for epoch in range(EPOCHS):
            engine.train_one_epoch(
                model, loader, optimizer, scheduler, epoch, contextlib.suppress, None
            )
    pixels = (torch.from_numpy(images(seed, -1, IMAGE)[:1]).double() / 255 - 0.5) / 0.5
    model.eval()
    with torch.no_grad():
        output = inference(model, [pixels], [{"flip": False}], ORIGINAL, WINDOW, STRIDE, 1)
    return recorder.arrays() | {"output": reduced(output)}


def reduced(probabilities: torch.Tensor) -> np.ndarray:
    """Return some of the probabilities (CLASSES, height, width), relative to their mean."""
    return (CLASSES * probabilities[::10, ::4, ::4]).numpy()


def used(theirs: Tensors) -> Tensors:
    """Leave out the encoder's classifier, which the Segmenter does not use."""
    return {n: tensor for n, tensor in theirs.items() if not n.startswith("encoder.head.")}


def write_scenery(root: Path) -> Path:
    """Write images in ADE20K's layout, of whose training images a replay uses none."""
    for split, count in (("training", EPOCH_STEPS * BATCH), ("validation", 1)):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            pixels = generator("files", split, number).integers(1, 151, size=(*IMAGE, 3))
            image = Image.fromarray(pixels.astype(np.uint8))
            image.save(root / "images" / split / f"{number}.jpg")
            image.convert("L").save(root / "annotations" / split / f"{number}.png")
    return root


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    seed = int(run)
    cell = shipped_cell(
        EXPERIMENT.removeprefix("experiments/"),
        {
            "data.root": str(write_scenery(folder / "scenery")),
            "data.batch_size": BATCH,
            "data.crop": WINDOW,
            "data.short_side": IMAGE[0],
            "data.workers": 0,
            "model.pretrained": None,
            "model.dim": WIDTH,
            "model.depth": DEPTH,
            "model.heads": HEADS,
            "model.patch": PATCH,
            "model.ffn": {"width": 4 * WIDTH},
            "model.stride": STRIDE,
            "training.epochs": EPOCHS,
        },
        seed,
        "test/mIoU",
    )

    def batch(pixels: np.ndarray, classes: torch.Tensor, original: tuple[int, int]) -> Any:
        samples = []
        for item in classes:
            meta = {"img_shape": pixels.shape[2:], "ori_shape": original}
            samples.append(SegDataSample(gt_sem_seg=PixelData(data=item[None]), metainfo=meta))
        return {"inputs": list(torch.from_numpy(pixels).flip(1)), "data_samples": samples}

    def step(number: int) -> Any:
        size = (WINDOW, WINDOW)
        return batch(images(seed, number, size), labels(seed, number), size)

    def outputs(network: Any) -> Arrays:
        image = batch(images(seed, -1, IMAGE)[:1], torch.zeros(1, *IMAGE), ORIGINAL)
        with torch.no_grad():
            prepared = network.eval().data_preprocessor(image, training=False)
            (sample,) = network.predict(**prepared)
        return {"output": reduced(sample.seg_logits.data.softmax(0))}

    return Replay(cell, step, released_names, draws=True, outputs=outputs)


def released_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters; two projections are multiplied from the right there."""
    renamed = rename(
        ours,
        [
            ("backbone.vit.", "encoder."),
            ("decode_head.layers.", "decoder.blocks."),
            ("decode_head.", "decoder."),
            ("decoder.dec_proj.", "decoder.proj_dec."),
            ("decoder.patch_proj.weight", "decoder.proj_patch"),
            ("decoder.classes_proj.weight", "decoder.proj_classes"),
        ],
    )
    for name in ("decoder.proj_patch", "decoder.proj_classes"):
        renamed[name] = renamed[name].T
    return renamed
