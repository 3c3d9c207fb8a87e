"""ViT-S/16 of big_vision (JAX), and experiments/imagenet_vit_small/experiment.yaml.

The configuration, the model, the loss, the optimizer and the schedule are the released ones, in
float64 on a CPU, for a smaller model; the loop around them is the recorder's. Images and mixed
labels are random numbers. In the run `mixed` the released MixUp mixes images and labels, in ratios
that both sides draw from one generator. In the run `moment` Adam's first moment has the released
type bfloat16, and float64 in the others. Two values that the DCMHA paper changes keep those of
big_vision here: beta2 is 0.999, and the rate ends at 0. Recording needs jax, flax, optax and
ml_collections.
"""

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from helpers import digit_folders
from helpers.paths import EXPERIMENTS

from lit_attn.data.module import numpy_generator
from lit_attn.schema.plugins import load_parts
from released import vision
from released.record import Clone
from released.recording import (
    Arrays,
    Tensors,
    generator,
    initial_arrays,
    initial_values,
    rename,
    sample,
)
from released.replaying import Replay

REPOSITORY, COMMIT, RUNS = (
    "google-research/big_vision",
    "0127fb6",
    ["0", "1", "mixed-0", "moment-0"],
)
EXPERIMENT = "experiments/imagenet_vit_small/experiment.yaml"
PLUG_INS = [EXPERIMENTS / "imagenet_vit_small" / "imagenet_vit_small.py"]
TOLERANCES = {"loss": 1e-7, "gradient": 1e-6, "change": 1e-6, "sample": 1e-7, "output": 1e-6}
STEPS, WARMUP, BATCH, SIDE, PATCH, WIDTH, DEPTH, HEADS = 16, 4, 4, 16, 4, 16, 2, 2
CLASSES, CLIP = digit_folders.CLASSES, 1.0


def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (BATCH, 3, SIDE, SIDE) and mixed targets (BATCH, CLASSES) of a step."""
    mixed = generator("targets", seed, step).dirichlet([0.5] * CLASSES, size=BATCH)
    return vision.images(seed, step, BATCH, SIDE), torch.from_numpy(mixed)


def labelled(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return images (BATCH, 3, SIDE, SIDE), their classes (BATCH,) and the number of the step."""
    classes = generator("labels", seed, step).integers(CLASSES, size=BATCH)
    return vision.images(seed, step, BATCH, SIDE), torch.from_numpy(classes), step


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the released parameters, by their paths."""
    head, layers = WIDTH // HEADS, {}
    for number in range(DEPTH):
        block = f"Transformer/encoderblock_{number}"
        for norm in ("LayerNorm_0", "LayerNorm_1"):
            layers[f"{block}/{norm}/scale"] = layers[f"{block}/{norm}/bias"] = (WIDTH,)
        attention = f"{block}/MultiHeadDotProductAttention_0"
        for name in ("query", "key", "value"):
            layers[f"{attention}/{name}/kernel"] = (WIDTH, HEADS, head)
            layers[f"{attention}/{name}/bias"] = (HEADS, head)
        layers[f"{attention}/out/kernel"] = (HEADS, head, WIDTH)
        layers[f"{attention}/out/bias"] = (WIDTH,)
        layers[f"{block}/MlpBlock_0/Dense_0/kernel"] = (WIDTH, 4 * WIDTH)
        layers[f"{block}/MlpBlock_0/Dense_0/bias"] = (4 * WIDTH,)
        layers[f"{block}/MlpBlock_0/Dense_1/kernel"] = (4 * WIDTH, WIDTH)
        layers[f"{block}/MlpBlock_0/Dense_1/bias"] = (WIDTH,)
    return layers | {
        "Transformer/encoder_norm/scale": (WIDTH,),
        "Transformer/encoder_norm/bias": (WIDTH,),
        "embedding/kernel": (PATCH, PATCH, 3, WIDTH),
        "embedding/bias": (WIDTH,),
        "pre_logits/kernel": (WIDTH, WIDTH),
        "pre_logits/bias": (WIDTH,),
        "head/kernel": (WIDTH, CLASSES),
        "head/bias": (CLASSES,),
    }


def record(clone: Clone, run: str) -> Arrays:
    """Train from the initial values of seed `run` and return the record."""
    import flax.training.checkpoints
    import jax
    import optax

    case, _, number = run.rpartition("-")
    seed = int(number)
    jax.config.update("jax_enable_x64", True)
    for name in ("tensorflow", "tensorflow.io", "tensorflow.io.gfile"):
        sys.modules[name] = ModuleType(name)
    sys.modules["tensorflow.io"].gfile = sys.modules["tensorflow.io.gfile"]  # type: ignore
    tools = clone.load(
        "big_vision.utils",
        "big_vision/utils.py",
        {
            "jnp.asarray(lr, dtype=jnp.float32)": "jnp.asarray(lr, dtype=jnp.float64)",
            "a = jax.random.beta(rng_mixup, p, p)": "a = shared_share(p)",
        },
    )
    optimizers = clone.load("big_vision.optax", "big_vision/optax.py", {})
    model_file = clone.load("big_vision.models.vit", "big_vision/models/vit.py", {})
    config = clone.load(
        "vit_s16_i1k",
        "big_vision/configs/vit_s16_i1k.py",
        {
            "variant='S/16',": (
                f"width={WIDTH}, depth={DEPTH}, num_heads={HEADS}, mlp_dim={4 * WIDTH},\n"
                f"      patch_size=({PATCH}, {PATCH}), dtype_mm='float64',"
            ),
            "mu_dtype='bfloat16'": f"mu_dtype='{'bfloat16' if case == 'moment' else 'float64'}'",
            "warmup_steps=10_000": f"warmup_steps={WARMUP}",
        },
    ).get_config()
    model = model_file.Model(CLASSES, **config.model)
    drawn = model.init(jax.random.PRNGKey(seed), np.zeros((1, SIDE, SIDE, 3)))["params"]
    flat = {path: initial_values(path, shape, seed).numpy() for path, shape in shapes().items()}
    params = flax.traverse_util.unflatten_dict(flat, sep="/")
    schedule = {"total_steps": STEPS, "batch_size": BATCH, "data_size": STEPS * BATCH}
    transform, (rate,) = optimizers.make(config, params, sched_kw=schedule)
    state = transform.init(params)

    def apply(params: Any, pixels: Any) -> Any:
        return model.apply({"params": params}, pixels.transpose(0, 2, 3, 1), train=True)[0]

    def read(step: int) -> tuple[Any, Any]:
        if case != "mixed":
            pixels, targets = batch(seed, step)
            return pixels.numpy(), targets.numpy()
        pixels, classes, _ = labelled(seed, step)
        tools.shared_share = lambda p: numpy_generator(seed, "mix", step).beta(p, p)  # type: ignore
        mixup = tools.get_mixup(jax.random.PRNGKey(0), config.mixup.p)
        _, mixed, _ = mixup(pixels.numpy(), np.eye(CLASSES)[classes])
        return mixed

    def loss(params: Any, pixels: Any, targets: Any) -> Any:
        return getattr(tools, config.loss)(logits=apply(params, pixels), labels=targets)

    def paths(tree: Any) -> dict[str, np.ndarray]:
        flat = flax.traverse_util.flatten_dict(tree, sep="/")
        return {path: np.asarray(value) for path, value in flat.items()}

    names = sorted(flat)
    steps: dict[str, list[Any]] = {key: [] for key in ("loss", "lr", "gradient")}
    for step in range(STEPS):
        pixels, targets = read(step)
        value, gradients = jax.value_and_grad(loss)(params, pixels, targets)
        norms = {path: np.linalg.norm(gradient) for path, gradient in paths(gradients).items()}
        clipped = max(1.0, math.hypot(*norms.values()) / config.grad_clip_norm)
        steps["loss"].append(float(value))
        steps["lr"].append([config.lr * float(rate(step))] * len(names))
        steps["gradient"].append([norms[path] / clipped for path in names])
        updates, state = transform.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    end = paths(params)
    assert {path: value.shape for path, value in end.items()} == shapes()
    decays = [config.wd / config.lr * path.endswith("kernel") for path in names]
    constant = np.ones((STEPS, len(names)))
    return {key: np.array(values) for key, values in steps.items()} | {
        "names": np.array(names),
        "shapes": np.array([",".join(map(str, flat[path].shape)) for path in names]),
        # The values that optax.scale_by_adam has by default.
        "beta1": 0.9 * constant,
        "beta2": 0.999 * constant,
        "decay": decays * constant,
        "change": np.array([np.linalg.norm(end[path] - flat[path]) for path in names]),
        "sample": np.array([sample(path, torch.from_numpy(end[path].copy())) for path in names]),
        "output": np.asarray(apply(params, batch(seed, -1)[0].numpy())),
        **initial_arrays({path: torch.from_numpy(v.copy()) for path, v in paths(drawn).items()}),
    }


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    case, _, number = run.rpartition("-")
    seed = int(number)
    load_parts(PLUG_INS)
    cell = vision.folder_cell(
        EXPERIMENT.removeprefix("experiments/"),
        folder,
        images=STEPS * BATCH,
        batch=BATCH,
        side=SIDE,
        changes={
            "model.dim": WIDTH,
            "model.depth": DEPTH,
            "model.heads": HEADS,
            "model.patch": PATCH,
            "model.ffn.width": 4 * WIDTH,
            "data.validation": 0,
            "optimizer.betas": [0.9, 0.999],
            "optimizer.moment": "bfloat16" if case == "moment" else "float32",
            "schedule.warmup": WARMUP / STEPS,
            "schedule.end": 0.0,
            "training.epochs": 1,
        },
        seed=seed,
    )

    def outputs(network: torch.nn.Module) -> Arrays:
        with torch.no_grad():
            return {"output": network.eval()(batch(seed, -1)[0]).numpy()}

    read = labelled if case == "mixed" else batch
    return Replay(cell, lambda step: read(seed, step), released_names, outputs=outputs)


def released_names(ours: Tensors) -> Tensors:
    """Rename and transpose this project's parameters, and cut q, k and v and the heads apart."""
    renamed = {}
    for name, tensor in rename(
        ours,
        [
            ("patch_embed.proj.", "embedding."),
            ("fc_norm.0.", "pre_logits."),
            ("blocks.", "Transformer.encoderblock_"),
            (".norm1.weight", ".LayerNorm_0.scale"),
            (".norm2.weight", ".LayerNorm_1.scale"),
            (".norm1.", ".LayerNorm_0."),
            (".norm2.", ".LayerNorm_1."),
            (".attn.", ".MultiHeadDotProductAttention_0."),
            (".proj.", ".out."),
            (".mlp.fc1.", ".MlpBlock_0.Dense_0."),
            (".mlp.fc2.", ".MlpBlock_0.Dense_1."),
        ],
    ).items():
        if name.startswith("norm."):
            name = "Transformer.encoder_" + name.replace("weight", "scale")
        path = name.replace(".", "/").replace("/weight", "/kernel")
        if path == "embedding/kernel":
            tensor = tensor.permute(2, 3, 1, 0)
        elif path.endswith("kernel"):
            tensor = tensor.T
        if "/qkv/" in path:
            for new, part in zip(("query", "key", "value"), tensor.chunk(3, -1), strict=True):
                renamed[path.replace("qkv", new)] = part.unflatten(-1, (HEADS, -1))
        else:
            heads = path.endswith("/out/kernel")
            renamed[path] = tensor.unflatten(0, (HEADS, -1)) if heads else tensor
    return renamed
