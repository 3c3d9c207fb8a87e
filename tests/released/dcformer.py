"""DCFormer and its baseline (JAX, MaxText), and experiments/pile_dcmha/405m.yaml.

The model, the loss, the clipping, the optimizer and the schedule are the released ones with the
values of dcformer_pp_405m.yml and transformer_pp_405m.yml, in float64 on a CPU, for a smaller model
whose layers are not scanned. The training step is the released one; the loop around it is the
recorder's. Tokens are random numbers. `output` is the loss of an evaluation batch. The run
`unclipped` has a clipping norm that no gradient exceeds. In the run `bfloat16`, the parameters that
the released code stores in bfloat16 have this type there, and are rounded after each step here; in
the others they are float64. XLA rounds the products of this type in Adam in float64 and not in
float32, so the recorder widens them. The maps and the norms of q and k have
the options of the study dcmha-ablation (`gelu: tanh`, `gate_init: jax`, `qk_norm_eps: 1e-5`).
Recording needs jax, flax, optax and einops.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from helpers.paths import EXPERIMENTS

from lit_attn.schema.yaml_text import parse_plain
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
from released.replaying import Replay, shipped_cell

REPOSITORY, COMMIT = "Caiyun-AI/DCFormer", "df8671f"
EXPERIMENT = "experiments/pile_dcmha/405m.yaml"
TOLERANCES = {"loss": 1e-8, "gradient": 1e-7, "change": 1e-7, "sample": 1e-8, "output": 1e-8}
# Rounding to bfloat16 enlarges small differences.
RUN_TOLERANCES = {
    "bfloat16-0": {"loss": 1e-5, "gradient": 2e-3, "change": 5e-4, "sample": 1e-5, "output": 1e-5}
}
STEPS, WARMUP, BATCH, CONTEXT, WINDOW, CHUNK = 12, 3, 3, 12, 4, 4
WIDTH, DEPTH, HEADS, FFN, VOCABULARY = 32, 2, 4, 24, 256

# The released configuration, its changes, and this project's `model` by case.
MAPS = {"gelu": "tanh", "gate_init": "jax"}
COMPOSED = {"preset": "dcmha", "compose": MAPS}
NORMS = {"model.qk_norm": True, "model.qk_norm_eps": 1e-5}
ROUNDED = parse_plain((EXPERIMENTS / "pile_dcmha" / "405m.yaml").read_text(), "text")["optimizer"][
    "bfloat16"
]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "standard": ("transformer_pp_405m", {}, {"model.attention": {"preset": "standard"}}),
    "dcformer": (
        "dcformer_pp_405m",
        {"window_size": [WINDOW, None], "query_chunk_size": CHUNK},
        {"model.attention": COMPOSED, "model.windows": [WINDOW, None], **NORMS},
    ),
    "unclipped": (
        "dcformer_pp_405m",
        {
            "window_size": [WINDOW, None],
            "query_chunk_size": None,
            "qk_norm": False,
            "gradient_clipping_threshold": 1e6,
        },
        {
            "model.attention": COMPOSED,
            "model.windows": [WINDOW, None],
            "training.clip": 1e6,
        },
    ),
    "static": (
        "dcformer_pp_405m",
        {"window_size": [None, None], "query_chunk_size": None, "static_proj": True},
        {"model.attention": {"preset": "dcmha-all", "compose": MAPS}, **NORMS},
    ),
    "bfloat16": (
        "dcformer_pp_405m",
        {
            "window_size": [None, None],
            "query_chunk_size": None,
            "static_proj": True,
            "gradient_clipping_threshold": 1e6,
        },
        {
            "model.attention": {"preset": "dcmha-all", "compose": MAPS},
            "training.clip": 1e6,
            "optimizer.bfloat16": ROUNDED,
            **NORMS,
        },
    ),
}
RUNS = [f"{case}-0" for case in CASES]


def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets (BATCH, CONTEXT) of a step."""
    tokens = torch.from_numpy(
        generator("tokens", seed, step).integers(VOCABULARY, size=(BATCH, CONTEXT + 1))
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def shapes(settings: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the released parameters, by their paths."""
    head = WIDTH // HEADS
    layers: dict[str, tuple[int, ...]] = {}
    for number in range(DEPTH):
        base = "decoder/layers_0"
        attention, mlp = f"{base}/self_attention_{number}", f"{base}/mlp_{number}"
        for norm in ("pre", "post"):
            layers[f"{base}/{norm}_self_attention_layer_norm_{number}/scale"] = (WIDTH,)
        for name in ("query", "key", "value"):
            layers[f"{attention}/{name}/kernel"] = (WIDTH, HEADS, head)
        layers[f"{attention}/out/kernel"] = (HEADS, head, WIDTH)
        for name in ("wi_0", "wi_1"):
            layers[f"{mlp}/{name}/kernel"] = (WIDTH, FFN)
        layers[f"{mlp}/wo/kernel"] = (FFN, WIDTH)
        if settings.decoder_block != "dcformer":
            continue
        if settings.qk_norm:
            layers[f"{attention}/q_norm/scale"] = layers[f"{attention}/k_norm/scale"] = (head,)
        maps = f"{attention}/AttentionOp_0"
        layers[f"{maps}/dyn_w_proj/dw1/kernel"] = (WIDTH, 1, 4, 4 * HEADS)
        layers[f"{maps}/dyn_w_proj/qkw"] = (1, 4, 4 * HEADS, 4, HEADS)
        layers[f"{maps}/dyn_w_proj/dd/kernel"] = (WIDTH, 1, 4 * HEADS)
        if settings.static_proj:
            for place in ("pre", "post"):
                layers[f"{maps}/{place}_proj/w"] = (1, HEADS, HEADS)
    return layers | {
        "token_embedder/embedding": (VOCABULARY, WIDTH),
        "decoder/decoder_norm/scale": (WIDTH,),
        "decoder/logits_dense/kernel": (WIDTH, VOCABULARY),
    }


class Absent(ModuleType):
    """Empty module for one that the released code imports and that no recorded step uses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        child = Absent(f"{self.__name__}.{name}")
        sys.modules[child.__name__] = child
        return child


def configuration(clone: Clone, case: str) -> Any:
    """Return the released configuration of a case, in the recorded size."""
    name, changes, _ = CASES[case]
    tree = parse_plain(clone.source(f"jax/MaxText/configs/{name}.yml", {}), "text") | changes
    assert tree["head_dim"] == 64
    return SimpleNamespace(
        **tree
        | {
            "dtype": np.float64,
            "weight_dtype": np.float64,
            "logits_dot_in_fp32": False,
            "emb_dim": WIDTH,
            "num_query_heads": HEADS,
            "num_kv_heads": HEADS,
            "head_dim": WIDTH // HEADS,
            "mlp_dim": FFN,
            # A block holds all layers.
            "num_decoder_layers": 1,
            "num_layers_per_block": DEPTH,
            "vocab_size": VOCABULARY,
            "scan_layers": False,
            "remat_policy": "none",
            "attention": "dot_product",
            "warmup_steps_fraction": WARMUP / STEPS,
            "learning_rate_schedule_steps": STEPS,
            "global_batch_size_to_train_on": BATCH,
        }
    )


def record(clone: Clone, run: str) -> Arrays:
    """Train one case and return the record."""
    import flax
    import jax
    import optax
    from flax.training import train_state

    case, _, number = run.rpartition("-")
    seed = int(number)
    jax.config.update("jax_enable_x64", True)
    jax.tree_map = jax.tree_util.tree_map
    os.environ["HARDWARE"] = "gpu"
    sys.path.insert(0, str(clone.folder / "jax" / "MaxText"))
    for name in (
        "checkpointing",
        "cloud_tpu_diagnostics",
        "cloud_tpu_diagnostics.configuration",
        "google.cloud",
        "google.cloud.storage",
        "grain",
        "grain.python",
        "input_pipeline",
        "input_pipeline.input_pipeline_interface",
        "jax.experimental.shard_map",
        "maxtext_utils",
        "pyconfig",
        "tensorboardX",
        "tensorflow",
    ):
        sys.modules[name] = Absent(name)
    jax.experimental.shard_map = sys.modules["jax.experimental.shard_map"]  # type: ignore
    folder = "jax/MaxText"
    wide = {"x = jnp.asarray(x, jnp.float32)": "x = jnp.asarray(x, jnp.float64)"}
    if case == "bfloat16":
        # The type of activations, which is bfloat16 in the released configuration.
        wide["(features,),\n        self.dtype,"] = "(features,),\n        jnp.bfloat16,"
    clone.load("layers.normalizations", f"{folder}/layers/normalizations.py", wide)
    clone.load(
        "layers.embeddings",
        f"{folder}/layers/embeddings.py",
        {"fprop_dtype: DType = jnp.bfloat16": "fprop_dtype: DType = jnp.float64"},
    )
    for name in ("attentions", "dc_attentions"):
        clone.load(
            f"layers.{name}",
            f"{folder}/layers/{name}.py",
            {
                "attn_weights = attn_weights.astype(jnp.float32)": "pass",
                "query = query.astype(jnp.float32)\n": "pass\n",
                "      key = key.astype(jnp.float32)\n": "",
            },
        )
    optimizers = clone.load(
        "optimizers",
        f"{folder}/optimizers.py",
        {
            "t = step.astype(jnp.float32) + 1.": "t = step.astype(jnp.float64) + 1.",
            # XLA rounds these products to bfloat16 in float64, and not in float32.
            "(update**2)": "update.astype(jnp.float64) ** 2",
            "weight_decay * v,": "DECAY(weight_decay, v),",
        },
    )
    optimizers.DECAY = lambda decay, v: jax.numpy.asarray(decay, v.dtype) * v.astype("float64")  # type: ignore
    max_utils = clone.load("max_utils", f"{folder}/max_utils.py", {})
    models = clone.load("layers.models", f"{folder}/layers/models.py", {})
    clone.load("layers.dcformer", f"{folder}/layers/dcformer.py", {})
    # einops asks every library that has been imported whether an array is its own.
    del sys.modules["tensorflow"]
    train = clone.load("train", f"{folder}/train.py", {})
    config = configuration(clone, case)
    rate = max_utils.create_learning_rate_schedule(config)
    inner = optimizers.get_optimizer(config, rate)

    def paths(tree: Any) -> dict[str, np.ndarray]:
        leaves = flax.traverse_util.flatten_dict(tree, sep="/")
        return {path: np.asarray(value) for path, value in leaves.items()}

    def update(gradients: Any, state: Any, params: Any) -> Any:
        updates, new = inner.update(gradients, state[0], params)
        return updates, (new, gradients)

    model = models.Transformer(config, None, quant=None)
    keys = dict.fromkeys(("params", "dropout", "aqt"), jax.random.PRNGKey(seed))
    ones = np.ones((BATCH, CONTEXT), np.int32)
    drawn = flax.core.meta.unbox(model.init(keys, ones, ones)["params"])
    flat = {
        path: initial_values(path, shape, seed).numpy() for path, shape in shapes(config).items()
    }
    stored = flat
    if case == "bfloat16":
        types = {path: value.dtype for path, value in paths(drawn).items()}
        stored = {path: value.astype(types[path]) for path, value in flat.items()}
    params = jax.tree_map(jax.numpy.asarray, flax.traverse_util.unflatten_dict(stored, sep="/"))
    state = train_state.TrainState.create(
        apply_fn=model.apply,
        params=params,
        tx=optax.GradientTransformation(lambda params: (inner.init(params), params), update),
    )

    def decay(path: str) -> float:
        kind = stored[path].dtype
        return (
            float(kind.type(config.adam_weight_decay))
            if kind.name == "bfloat16"
            else config.adam_weight_decay
        )

    def data(step: int) -> dict[str, Any]:
        inputs, targets = (tensor.numpy() for tensor in batch(seed, step))
        ones = np.ones_like(inputs)
        positions = np.broadcast_to(np.arange(CONTEXT), inputs.shape)
        return {
            "inputs": inputs,
            "targets": targets,
            "inputs_position": positions,
            "inputs_segmentation": ones,
            "targets_segmentation": ones,
        }

    names = sorted(flat)
    steps: dict[str, list[Any]] = {key: [] for key in ("loss", "lr", "gradient")}
    key = jax.random.PRNGKey(0)
    train_step = jax.jit(partial(train.train_step, model, config))
    for step in range(STEPS):
        state, metrics = train_step(state, data(step), key)
        gradients = paths(state.opt_state[1])
        steps["loss"].append(float(metrics["scalar"]["learning/loss"]))
        steps["lr"].append([float(rate(step))] * len(names))
        exact = {path: gradient.astype(np.float64) for path, gradient in gradients.items()}
        steps["gradient"].append([np.linalg.norm(exact[path]) for path in names])
    end = {path: value.astype(np.float64) for path, value in paths(state.params).items()}
    assert {path: value.shape for path, value in end.items()} == shapes(config)
    evaluation = train.eval_step(model, config, state, data(-1), key)
    constant = np.ones((STEPS, len(names)))
    return {name: np.array(values) for name, values in steps.items()} | {
        "names": np.array(names),
        "shapes": np.array([",".join(map(str, flat[path].shape)) for path in names]),
        "beta1": config.adam_b1 * constant,
        "beta2": config.adam_b2 * constant,
        "decay": constant * [decay(path) for path in names],
        "change": np.array([np.linalg.norm(end[path] - flat[path]) for path in names]),
        "sample": np.array([sample(path, torch.from_numpy(end[path].copy())) for path in names]),
        "output": np.array([float(evaluation["scalar"]["evaluation/loss"])]),
        # Some are drawn in bfloat16, which torch does not read.
        **initial_arrays(
            {path: torch.from_numpy(v.astype(np.float64)) for path, v in paths(drawn).items()}
        ),
    }


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    case, _, number = run.rpartition("-")
    return small_replay(int(number), folder, CASES[case][2], released_names)


def small_replay(
    seed: int, folder: Path, changes: dict[str, Any], view: Callable[[Tensors], Tensors]
) -> Replay:
    """Return the shipped experiment in the recorded size, with `changes`."""
    for split in ("train", "val", "test"):
        np.arange(1, 65, dtype=np.uint16).tofile(folder / f"{split}.bin")
    cell = shipped_cell(
        EXPERIMENT.removeprefix("experiments/"),
        {
            "data.folder": str(folder),
            "data.tokenizer": "bytes",
            "data.order": "sequential",
            "data.context": CONTEXT,
            "data.batch_size": BATCH,
            "data.accumulate": 1,
            "data.epoch_steps": STEPS,
            "model.dim": WIDTH,
            "model.depth": DEPTH,
            "model.heads": HEADS,
            "model.ffn.width": FFN,
            "optimizer.bfloat16": [],
            "schedule.warmup": WARMUP / STEPS,
            "training.epochs": 1,
            "training.evaluate_every": 1,
            "training.precision": "fp32",
            **changes,
        },
        seed,
    )

    def outputs(network: torch.nn.Module) -> Arrays:
        inputs, targets = batch(seed, -1)
        with torch.no_grad():
            logits = network.eval()(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"output": np.array([loss.item()])}

    return Replay(cell, lambda step: batch(seed, step), view, outputs=outputs)


def released_names(ours: Tensors) -> Tensors:
    """Rename and transpose this project's parameters, and group those of the maps as there."""
    named = rename(
        ours,
        [
            ("trunk.tokens.weight", "token_embedder/embedding"),
            ("trunk.norm.weight", "decoder/decoder_norm/scale"),
            ("^head.weight", "decoder/logits_dense/kernel"),
        ],
    )
    renamed: Tensors = {}
    blocks: dict[str, Tensors] = {}
    for name, tensor in named.items():
        if not name.startswith("trunk.blocks."):
            renamed[name] = tensor.T if name.endswith("kernel") else tensor
            continue
        number, _, part = name.removeprefix("trunk.blocks.").partition(".")
        blocks.setdefault(number, {})[part] = tensor
    for number, block in blocks.items():
        base, head = "decoder/layers_0", (HEADS, WIDTH // HEADS)
        attention, mlp = f"{base}/self_attention_{number}", f"{base}/mlp_{number}"
        for norm, place in (("norm1", "pre"), ("norm2", "post")):
            path = f"{base}/{place}_self_attention_layer_norm_{number}/scale"
            renamed[path] = block[f"{norm}.weight"]
        parts = block["attn.qkv.weight"].chunk(3)
        for letter, part in zip(("query", "key", "value"), parts, strict=True):
            renamed[f"{attention}/{letter}/kernel"] = part.T.unflatten(1, head)
        renamed[f"{attention}/out/kernel"] = block["attn.proj.weight"].T.unflatten(0, head)
        for letter in "qk":
            if f"attn.{letter}_norm.weight" in block:
                norm_weight = block[f"attn.{letter}_norm.weight"]
                renamed[f"{attention}/{letter}_norm/scale"] = norm_weight
        renamed[f"{mlp}/wi_0/kernel"] = block["ffn.gate.weight"].T
        renamed[f"{mlp}/wi_1/kernel"] = block["ffn.up.weight"].T
        renamed[f"{mlp}/wo/kernel"] = block["ffn.down.weight"].T
        maps = f"{attention}/AttentionOp_0"
        sides = [
            f"attn.composers.{place}.sides.{side}"
            for place in ("pre", "post")
            for side in ("query", "key")
        ]
        if f"{sides[0]}.out" not in block:
            continue
        into = [block[f"{side}.into.weight"].T for side in sides]
        out = [block[f"{side}.out"].unflatten(-1, (4, HEADS)) for side in sides]
        gates = [block[f"{side}.gate.weight"].T for side in sides]
        renamed[f"{maps}/dyn_w_proj/dw1/kernel"] = torch.stack(into, 1).unsqueeze(1)
        renamed[f"{maps}/dyn_w_proj/qkw"] = torch.stack(out).unsqueeze(0)
        renamed[f"{maps}/dyn_w_proj/dd/kernel"] = torch.cat(gates, 1).unsqueeze(1)
        for place in ("pre", "post"):
            if f"attn.composers.{place}.matrix" in block:
                matrix = block[f"attn.composers.{place}.matrix"]
                renamed[f"{maps}/{place}_proj/w"] = matrix.T.unsqueeze(0)
    return renamed
