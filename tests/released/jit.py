"""JiT (LTH14/JiT, in its copy nkthiebaut/JiT), and experiments/imagenet_jit/experiment.yaml.

The blocks, the patch embedding, the positions, the groups of the optimizer, the schedule, the loop
over batches and the average of the weights are the released ones, in float64 on a CPU, for a
smaller model. The released code generates images and no paper has released the classifier, so the
mean over patches, the head, and the formulas of Belief-Attention and Belief2-Attention in the
released attention are the recorder's. Images are random bytes. Averaged weights, and logits after
training, are compared as well; initial values of the recorder's parts are not. Recording needs
einops.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from helpers import digit_folders
from helpers.paths import EXPERIMENTS
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.schema.plugins import load_parts
from released import vision
from released.record import Clone
from released.recording import (
    Arrays,
    Recorder,
    Tensors,
    generator,
    rename,
    shared_draws,
)
from released.replaying import Replay

REPOSITORY, COMMIT = "nkthiebaut/JiT", "869190a"
EXPERIMENT = "experiments/imagenet_jit/experiment.yaml"
PLUG_IN = EXPERIMENTS / "imagenet_jit" / "imagenet_jit.py"
OTHER_INITIAL_VALUES = ("head.", ".w_l.", ".w_p.", ".w_z.")
TOLERANCES = {
    "loss": 1e-12,
    "gradient": 1e-10,
    "change": 1e-9,
    "sample": 1e-9,
    "average": 1e-9,
    "output": 1e-9,
}
EPOCHS, EPOCH_STEPS, WARMUP, BATCH, SIDE, PATCH = 3, 6, 1, 4, 32, 8
WIDTH, DEPTH, HEADS, BOTTLENECK, AVERAGE = 24, 2, 3, 6, 0.9999
CLASSES = digit_folders.CLASSES

SPLIT = {"preset": "belief2", "residual": {"activation": "silu"}}
# This project's `attention` and the hidden width of SwiGLU, by case.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "standard": ({"preset": "standard"}, 64),
    "belief": ({"preset": "belief"}, 64),
    "belief-star": ({"preset": "belief-star"}, 56),
    "belief2": (SPLIT, 48),
    "belief2-without-zz": (SPLIT | {"zz": "without"}, 48),
    "belief2-like-k": (SPLIT | {"zz": "like-k"}, 48),
}
RUNS = ["standard-0", "standard-1", *(f"{case}-0" for case in CASES if case != "standard")]


def images(seed: int, step: int) -> Tensor:
    """Return RGB images (BATCH, 3, SIDE, SIDE) uint8."""
    drawn = generator("images", seed, step).integers(256, size=(BATCH, 3, SIDE, SIDE))
    return torch.from_numpy(drawn.astype(np.uint8))


class Loader:
    """Training batches of one epoch."""

    def __init__(self, seed: int, epoch: int) -> None:
        self.seed, self.first = seed, epoch * EPOCH_STEPS

    def __len__(self) -> int:
        return EPOCH_STEPS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(self.first, self.first + EPOCH_STEPS):
            yield images(self.seed, step), vision.labels(self.seed, step, BATCH, CLASSES)


def along(values: Tensor, heads: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the part of the heads (B, H, n, D) that is parallel to the values over `axes`."""
    product = (heads * values).sum(axes, keepdim=True)
    return product / values.square().sum(axes, keepdim=True) * values


def mechanism(attention: Any, case: str) -> None:
    """Give a released attention the formulas of a paper.

    They are equations 10 and 13 of BeliefFormer and equations 9 to 11 of Belief2-Attention.
    """
    width, count = attention.proj.in_features, attention.num_heads
    has_z = case.startswith("belief2") and "without" not in case
    if case == "belief-star":
        attention.w_l = nn.Linear(width, width)
    if case.startswith("belief2"):
        attention.w_p = nn.Linear(width, width)
    if has_z:
        attention.w_z = nn.Linear(width, width, bias=False)
    if case.endswith("like-k"):
        attention.z_norm = type(attention.k_norm)(width // count)

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    def merge(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def forward(x: Tensor, rope: Any) -> Tensor:
        q, k, v = map(split, attention.qkv(x).chunk(3, -1))
        q, k = rope(attention.q_norm(q)), rope(attention.k_norm(k))
        logits = q @ k.mT
        if has_z:
            z = split(attention.w_z(x))
            if case.endswith("like-k"):
                z = rope(attention.z_norm(z))
            logits = logits + z @ z.mT
        heads = (logits / math.sqrt(q.shape[-1])).softmax(-1) @ v
        parallel = along(v, heads, (1, 3))
        out = attention.proj(merge(heads - parallel))
        if case == "belief-star":
            out = out + attention.w_l(merge(heads - along(v, heads, (3,))))
        if case.startswith("belief2"):
            out = out + attention.w_p(merge(F.silu(parallel)))
        return out

    attention.forward = forward


def record(clone: Clone, run: str) -> Arrays:
    """Train one case and return the record."""
    case, _, number = run.rpartition("-")
    seed = int(number)
    for name in ("cv2", "torch_fidelity"):
        sys.modules[name] = ModuleType(name)
    torch.compile = lambda function: function  # type: ignore
    torch.Tensor.cuda = lambda tensor: tensor  # type: ignore
    clone.load(
        "util.model_util",
        "util/model_util.py",
        {"hidden_states.to(torch.float32)": "hidden_states.to(torch.float64)"},
    )
    released = clone.load(
        "model_jit",
        "model_jit.py",
        {"query.float() @ key.float()": "query.double() @ key.double()"},
    )
    denoiser = clone.load("denoiser", "denoiser.py", {})
    engine = clone.load(
        "engine_jit",
        "engine_jit.py",
        {".to(torch.float32).div_(255)": ".to(torch.float64).div_(255)"},
    )
    from util import misc  # type: ignore[import-not-found]

    ratio = CASES[case][1] * 3 / 2 / WIDTH

    class Classifier(denoiser.Denoiser):  # type: ignore
        ema_decay1, ema_decay2 = AVERAGE, AVERAGE

        def __init__(self) -> None:
            nn.Module.__init__(self)
            # Positions and angles are float32 in the released code.
            self.net = released.JiT(
                input_size=SIDE,
                patch_size=PATCH,
                hidden_size=WIDTH,
                depth=DEPTH,
                num_heads=HEADS,
                mlp_ratio=ratio,
                num_classes=CLASSES,
                bottleneck_dim=BOTTLENECK,
                in_context_len=0,
            )
            for name in ("t_embedder", "y_embedder", "final_layer"):
                delattr(self.net, name)
            for block in self.net.blocks:
                if case != "standard":
                    mechanism(block.attn, case)
            self.norm = type(self.net.blocks[0].norm1)(WIDTH)
            self.head = nn.Linear(WIDTH, CLASSES)

        def logits(self, x: Tensor) -> Tensor:
            x = self.net.x_embedder(x)
            condition = x.mean(1)
            x = x + self.net.pos_embed
            for block in self.net.blocks:
                x = block(x, condition, self.net.feat_rope)
            output: Tensor = self.head(self.norm(x).mean(1))
            return output

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(x), labels)

    recorder = Recorder()
    model = recorder.start_from(seed)(Classifier().double())
    model.ema_params1 = [p.detach().clone() for p in model.parameters()]  # type: ignore
    model.ema_params2 = [p.detach().clone() for p in model.parameters()]  # type: ignore
    # The rate and the betas are the paper's, the other settings the defaults of main_jit.py.
    groups = misc.add_weight_decay(model, 0.0)
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.999))
    args = Namespace(
        warmup_epochs=WARMUP, lr_schedule="constant", lr=1e-4, epochs=EPOCHS, min_lr=0.0
    )
    with recorder, shared_draws(seed), patch.object(torch.cuda, "synchronize", lambda: None):
        for epoch in range(EPOCHS):
            engine.train_one_epoch(
                model, model, Loader(seed, epoch), optimizer, "cpu", epoch, args=args
            )
    names = [name for name, _ in model.named_parameters()]
    averaged = dict(zip(names, model.ema_params1, strict=True))  # type: ignore
    with torch.no_grad():
        output = model.eval().logits(images(seed, -1).double() / 255 * 2 - 1)
    average = recorder.average(averaged, AVERAGE)
    return recorder.arrays() | {"average": average, "output": output.numpy()}


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    case, _, number = run.rpartition("-")
    seed, (attention, width) = int(number), CASES[case]
    load_parts([PLUG_IN])
    cell = vision.folder_cell(
        EXPERIMENT.removeprefix("experiments/"),
        folder,
        images=EPOCH_STEPS * BATCH,
        batch=BATCH,
        side=SIDE,
        changes={
            "model.dim": WIDTH,
            "model.depth": DEPTH,
            "model.heads": HEADS,
            "model.patch": PATCH,
            "model.bottleneck": BOTTLENECK,
            "model.ffn.width": width,
            "model.attention": attention,
            "schedule.warmup": WARMUP,
            "training.epochs": EPOCHS,
        },
        seed=seed,
    )

    def scaled(step: int) -> Tensor:
        return (images(seed, step).double() / 255 - 0.5) / 0.5

    def outputs(network: nn.Module) -> Arrays:
        with torch.no_grad():
            return {"output": network.eval()(scaled(-1)).numpy()}

    return Replay(
        cell,
        lambda step: (scaled(step), vision.labels(seed, step, BATCH, CLASSES)),
        released_names,
        outputs=outputs,
    )


def released_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters.

    The coordinates of a head that turn together are neighbours there, and lie in the two halves of
    the head here. The gate and the input of SwiGLU are one matrix there.
    """
    renamed = rename(
        ours,
        [
            ("^patches.", "net.x_embedder.proj1."),
            ("^embed.", "net.x_embedder.proj2."),
            ("^blocks.", "net.blocks."),
            (".modulation.", ".adaLN_modulation.1."),
            (".ffn.fc2.", ".mlp.w3."),
            (".residual.local.", ".w_l."),
            (".residual.projected.", ".w_p."),
            (".attn.z.", ".attn.w_z."),
        ],
    )
    for name in [name for name in renamed if ".ffn.fc1_g." in name]:
        gate, other = renamed.pop(name), renamed.pop(name.replace("fc1_g", "fc1_x"))
        renamed[name.replace("ffn.fc1_g", "mlp.w12")] = torch.cat([gate, other])
    is_turned = any(".z_norm." in name for name in renamed)
    for name, tensor in renamed.items():
        if ".qkv." in name:
            q, k, v = tensor.chunk(3)
            renamed[name] = torch.cat([neighbours(q), neighbours(k), v])
        elif name.endswith(("q_norm.weight", "k_norm.weight", "z_norm.weight")) or (
            is_turned and ".w_z." in name
        ):
            renamed[name] = neighbours(tensor)
    return renamed


def neighbours(rows: Tensor) -> Tensor:
    """Order the rows (heads * D, ...) of each head as the released rotation pairs them."""
    halves = rows.unflatten(0, (-1, 2, 2, WIDTH // HEADS // 4))
    return halves.permute(0, 2, 3, 1, *range(4, halves.ndim)).flatten(0, 3)
