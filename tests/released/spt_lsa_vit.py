"""The ViT of SPT_LSA_ViT on CIFAR, and experiments/cifar100_vit/experiment.yaml.

The model, the loss, the schedule and the loop over batches with CutMix and MixUp are the released
ones, in float64 on a CPU, for a smaller model. Augmented images are random numbers. `evaluation` is
the top-1 and top-5 accuracy and the loss on random images whose last batch is shorter, by the
released loop with its normalisation, and by this project's data module and metrics.
"""

import contextlib
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from lit_attn.data.augment.base import ImageFormat
from lit_attn.data.augment.steps import Mix, MixConfig, MixDraw
from released import vision
from released.record import Clone
from released.recording import Arrays, Recorder, generator, shared_draws
from released.replaying import Replay, shipped_cell

REPOSITORY, COMMIT, RUNS = "aanna0701/SPT_LSA_ViT", "54bd796", ["0", "1"]
EXPERIMENT = "experiments/cifar100_vit/experiment.yaml"
TOLERANCES = {
    "loss": 1e-12,
    "gradient": 1e-10,
    "change": 1e-9,
    "sample": 1e-9,
    "evaluation": 1e-6,
}
EPOCHS, EPOCH_STEPS, BATCH, CLASSES, WIDTH, DEPTH, HEADS = 3, 8, 4, 100, 24, 2, 3
EVALUATED, EVALUATION_BATCH = 330, 100


def mixing(seed: int, step: int) -> MixDraw:
    """Return what happens to the batch of `step`: nothing, MixUp or CutMix."""
    drawn = generator("mix", seed, step)
    kind = ("none", "none", "mixup", "cutmix")[drawn.integers(4)]
    weight, centre = drawn.beta(1, 1), drawn.integers(32, size=2)
    others = torch.from_numpy(drawn.permutation(BATCH))
    return MixDraw(kind, weight, (centre[0] / 32, centre[1] / 32), others)


@contextlib.contextmanager
def released_draws(seed: int, steps: list[int]) -> "contextlib.Iterator[None]":
    """Let numpy and torch draw what `mixing` says for the batch that `steps` counts."""
    asked = iter(())

    def rand(_: int) -> float:
        nonlocal asked
        drawn = mixing(seed, steps[0])
        if (second := next(asked, None)) is not None:
            return second
        asked = iter([0.0 if drawn.kind == "cutmix" else 1.0] if drawn.kind != "none" else [])
        return 1.0 if drawn.kind == "none" else 0.0

    corners = iter(())

    def randint(_: int) -> int:
        nonlocal corners
        if (second := next(corners, None)) is not None:
            return second
        row, column = (round(32 * share) for share in mixing(seed, steps[0]).centre)
        corners = iter([column])
        return row

    with (
        patch.object(np.random, "rand", rand),
        patch.object(np.random, "randint", randint),
        patch.object(np.random, "beta", lambda a, b: mixing(seed, steps[0]).weight),
        patch.object(torch, "randperm", lambda n: mixing(seed, steps[0]).others),
    ):
        yield


def record(clone: Clone, run: str) -> Arrays:
    """Train from the initial values of seed `run` and return the record."""
    seed = int(run)
    torch.set_default_dtype(torch.float64)
    for name in ("colorama", "torchsummary", "utils.print_progress", "utils.dataloader"):
        stub = types.ModuleType(name)
        stub.__getattr__ = lambda _: lambda *a, **k: None  # type: ignore
        sys.modules[name] = stub
    colours = types.ModuleType("colours")
    colours.__getattr__ = lambda _: ""  # type: ignore
    sys.modules["colorama"].Fore = sys.modules["colorama"].Style = colours  # type: ignore
    clone.load("utils.mix", "utils/mix.py", {"np.int(W": "int(W", "np.int(H": "int(H"})
    factory = clone.load(
        "models.create_model",
        "models/create_model.py",
        {
            "dim=192, \n                    mlp_dim_ratio=2, depth=9, heads=12, dim_head=192//12": (
                f"dim={WIDTH}, mlp_dim_ratio=2, depth={DEPTH}, heads={HEADS}, "
                f"dim_head={WIDTH // HEADS}"
            )
        },
    )
    main = clone.load("main", "main.py", {})
    main.logger_dict = types.SimpleNamespace(update=lambda *a: None)  # type: ignore
    main.writer = types.SimpleNamespace(add_scalar=lambda *a: None)  # type: ignore
    main.keys = range(4)  # type: ignore
    args = main.init_parser().parse_args([])
    args.epochs, args.warmup, args.no_cuda = EPOCHS, 1, True
    assert (args.batch_size, args.lr, args.weight_decay) == (128, 1e-3, 0.05)
    assert (args.smoothing, args.sd, args.mix_prob) == (0.1, 0.1, 0.5)
    model = factory.create_model(32, CLASSES, args)
    recorder = Recorder()
    recorder.start_from(seed)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    scheduler = main.build_scheduler(args, optimizer, EPOCH_STEPS)
    steps = [-1]

    def batches(epoch: int) -> "contextlib.Iterator[tuple[torch.Tensor, torch.Tensor]]":
        for step in range(epoch * EPOCH_STEPS, (epoch + 1) * EPOCH_STEPS):
            steps[0] = step
            yield (
                vision.images(seed, step, BATCH, 32),
                vision.labels(seed, step, BATCH, CLASSES),
            )

    class Epoch:
        def __init__(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return EPOCH_STEPS

        def __iter__(self) -> "contextlib.Iterator[tuple[torch.Tensor, torch.Tensor]]":
            return batches(self.epoch)

    no_gpu = patch.object(torch.Tensor, "cuda", lambda tensor, *a, **k: tensor)
    with recorder, shared_draws(seed), released_draws(seed, steps), no_gpu:
        for epoch in range(EPOCHS):
            criterion = main.LabelSmoothingCrossEntropy()
            main.train(Epoch(epoch), model, criterion, optimizer, epoch, scheduler, args)
    return recorder.arrays() | {"evaluation": evaluate(clone, main, model, args)}


def evaluate(clone: Clone, main: types.ModuleType, model: torch.nn.Module, args: Any) -> np.ndarray:
    """Return the released top-1 and top-5 accuracies and the loss, the accuracies as fractions."""
    reader = clone.load("dataloader", "utils/dataloader.py", {})
    args.dataset = "CIFAR100"
    mean, deviation = reader.datainfo(types.SimpleNamespace(debug=print), args)["stat"]
    pixels, marks = vision.evaluated_images(EVALUATED, 32, CLASSES)
    images = (torch.from_numpy(pixels) / 255 - torch.tensor(mean)) / torch.tensor(deviation)
    batches = zip(
        images.permute(0, 3, 1, 2).split(EVALUATION_BATCH),
        torch.from_numpy(marks).long().split(EVALUATION_BATCH),
        strict=True,
    )
    losses, fives = [], []
    accuracy, criterion = main.accuracy, torch.nn.CrossEntropyLoss()

    def noted_accuracy(output: torch.Tensor, target: torch.Tensor, top: Any) -> Any:
        result = accuracy(output, target, top)
        losses.append(criterion(output, target).item() * len(target) / EVALUATED)
        fives.append(result[1].item() * len(target) / EVALUATED)
        return result

    main.accuracy = noted_accuracy  # type: ignore
    top1 = main.validate(list(batches), model, criterion, 0.0, args, epoch=0)
    return np.array([top1 / 100, sum(fives) / 100, sum(losses)])


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    seed = int(run)
    path = vision.write_images(folder, EPOCH_STEPS * BATCH, 32, CLASSES, EVALUATED)
    cell = shipped_cell(
        "cifar100_vit/experiment.yaml",
        {
            "data.kind": "npz",
            "data.name": "random",
            "data.path": str(path),
            "data.size": 32,
            "data.classes": CLASSES,
            "data.batch_size": BATCH,
            "data.eval_batch_size": EVALUATION_BATCH,
            "data.epoch_length": 1,
            "model.dim": WIDTH,
            "model.depth": DEPTH,
            "model.heads": HEADS,
            "model.ffn.width": 2 * WIDTH,
            "schedule.warmup": 1,
            "training.epochs": EPOCHS,
        },
        seed,
        "test/loss",
    )
    mix = Mix(MixConfig(), ImageFormat((3, 32, 32), CLASSES, [0.0] * 3, [1.0] * 3))

    def step(number: int) -> tuple[torch.Tensor, ...]:
        images = vision.images(seed, number, BATCH, 32)
        labels = vision.labels(seed, number, BATCH, CLASSES)
        return mix.apply(images, labels, mixing(seed, number))

    metrics = ("test/accuracy", "test/top5", "test/loss")
    return Replay(cell, step, vision.plain_vit_names, draws=True, metrics=metrics)
