"""nanochat's training script, and experiments/modern/d4.yaml.

The script is scripts/base_train.py itself, in float64 on a CPU, with a narrower model of four
blocks, windows of five keys and a shorter schedule. Its reader of data, tokenizer and evaluation
are replaced. The rates and the weight decay of the replay come from the rule of the experiments
(write_recipes.py), so the rule is compared too. The norms have the epsilon of float64, and the
rates of the optimiser are not rounded to float32. The script normalises q and k after their
rotation by angles in float32, which changes a norm by about 1e-8, and this project before it. The
run `normalised-first-0` has this project's order on both sides.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from helpers.paths import EXPERIMENTS

from lit_attn.schema.plugins import load_parts
from released.record import Clone
from released.recording import Arrays, Recorder, Tensors, generator, rename
from released.replaying import Replay, shipped_cell

REPOSITORY, COMMIT = "karpathy/nanochat", "92d63d4"
RUNS = ["0", "1", "normalised-first-0"]
EXPERIMENT = "experiments/modern/d4.yaml"
TOLERANCES = {"loss": 1e-12, "gradient": 1e-10, "change": 1e-9, "sample": 1e-9}
"""Largest allowed relative difference of each quantity."""
ROTATED_FIRST = {"loss": 1e-7, "gradient": 1e-6, "change": 1e-6, "sample": 1e-6}
RUN_TOLERANCES = {"0": ROTATED_FIRST, "1": ROTATED_FIRST}

STEPS, WARMUP, BATCH, CONTEXT, VOCABULARY = 20, 4, 3, 16, 256
DEPTH, ASPECT, HEAD_DIM, WINDOW = 4, 16, 32, 5
WIDTH = DEPTH * ASPECT
HEADS = WIDTH // HEAD_DIM
FOLDER = EXPERIMENTS / "modern"
FLOAT64_EPSILON = 2.220446049250313e-16
UNUSED = (
    "wandb",
    "nanochat.dataloader",
    "nanochat.tokenizer",
    "nanochat.checkpoint_manager",
    "nanochat.loss_eval",
    "nanochat.engine",
    "scripts.base_eval",
)
"""Modules of the script that read data, evaluate or log, which are replaced by empty ones."""
NUMBERS = ("step", "lr", "beta1", "beta2", "eps", "wd")


def batch(seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets (BATCH, CONTEXT) of step `number`."""
    ids = generator("batch", seed, number).integers(VOCABULARY, size=(BATCH, CONTEXT + 1))
    tokens = torch.from_numpy(ids.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def find_seed(run: str) -> int:
    """Return the seed of a run, which ends its name."""
    return int(run.rpartition("-")[2])


class Unused(ModuleType):
    """Module whose every name is a function that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Tokenizer:
    """Tokenizer of which the script asks the number of ids."""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def record(clone: Clone, run: str) -> Arrays:
    """Train from the initial values of seed `run` and return the record."""
    seed = find_seed(run)
    torch.set_default_dtype(torch.float64)
    recorder = Recorder()

    def read_batches(*_: Any, **__: Any) -> Iterator[Any]:
        # The script reads the batch after the last one too.
        for number in range(STEPS + 1):
            state = {"epoch": 0, "pq_idx": 0, "rg_idx": 0}
            yield *batch(seed, number), state

    def compile_nothing(function: Any = None, **_: Any) -> Any:
        return (lambda inner: inner) if function is None else function

    options = f"""--depth {DEPTH} --aspect-ratio {ASPECT} --head-dim {HEAD_DIM} --device-type cpu
        --max-seq-len {CONTEXT} --num-iterations {STEPS} --device-batch-size {BATCH}
        --total-batch-size {BATCH * CONTEXT} --warmup-steps {WARMUP} --eval-every -1
        --core-metric-every -1 --sample-every -1"""
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", ["base_train.py", *options.split()]))
        stack.enter_context(patch.object(torch, "compile", compile_nothing))
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        for name in UNUSED:
            sys.modules[name] = Unused(name)
        clone.load("nanochat.common", "nanochat/common.py", {})
        sys.modules["nanochat.common"].COMPUTE_DTYPE = torch.float64  # type: ignore[attr-defined]
        clone.load("nanochat.optim", "nanochat/optim.py", exact_numbers())
        rotate = "q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)"
        normalise = "q, k = norm(q), norm(k) # QK norm"
        order = {}
        if run.startswith("normalised-first"):
            order = {rotate: "q, k = norm(q), norm(k)", normalise: rotate}
        windows = "short_window = -(-long_window // 4 // 128) * 128"
        network = {windows: f"short_window = {WINDOW - 1}", **order}
        clone.load("nanochat.gpt", "nanochat/gpt.py", network)
        start = "model.init_weights() # 3) All tensors get initialized"
        stack.enter_context(recorder)
        reader = "tokenizing_distributed_data_loader_with_state_bos_bestfit("
        clone.run(
            "scripts/base_train.py",
            {
                start: "model.init_weights(); PREPARE(model)",
                "tokenizer = get_tokenizer()": "tokenizer = TOKENIZER",
                f"train_loader = {reader}": "train_loader = READ(",
            },
            {
                "PREPARE": recorder.start_from(seed),
                "READ": read_batches,
                "TOKENIZER": Tokenizer(),
            },
        )
    return recorder.arrays()


def exact_numbers() -> dict[str, str]:
    """Return the replacements that keep the numbers of the optimiser in float64."""
    names = [f"_adamw_{number}_t" for number in NUMBERS]
    names += [f"_muon_{number}_t" for number in ("momentum", "lr", "wd", "beta2")]
    replacements = {}
    for name in names:
        single = f"self.{name} = torch.tensor(0.0, dtype=torch.float32"
        replacements[single] = single.replace("float32", "float64")
    return replacements


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    load_parts([FOLDER / "nanochat.py", FOLDER / "normuon.py"])
    rule = importlib.import_module("write_recipes")
    shape = rule.Shape(ASPECT, HEAD_DIM, CONTEXT, VOCABULARY)
    recipe = rule.make_recipe(DEPTH, shape, batch=BATCH * CONTEXT)
    assert (recipe.dim, recipe.heads) == (WIDTH, HEADS)
    seed = find_seed(run)
    for split in ("train", "val"):
        np.arange(1, 65, dtype=np.uint16).tofile(folder / f"{split}.bin")
    cell = shipped_cell(
        "modern/d4.yaml",
        {
            "data.folder": str(folder),
            "data.tokenizer": "bytes",
            "data.context": CONTEXT,
            "data.batch_size": BATCH,
            "data.accumulate": 1,
            "data.order": "random",
            "data.epoch_steps": STEPS,
            "data.eval_tokens": None,
            "model.dim": recipe.dim,
            "model.heads": recipe.heads,
            "model.ffn.width": 4 * recipe.dim,
            "model.windows": [WINDOW, WINDOW, WINDOW, None],
            "model.norm_eps": FLOAT64_EPSILON,
            "model.qk_norm_eps": FLOAT64_EPSILON,
            "optimizer.lr": recipe.lr,
            "optimizer.weight_decay": recipe.weight_decay,
            "optimizer.head_lr": recipe.head_lr,
            "optimizer.embedding_lr": recipe.embedding_lr,
            "optimizer.scalar_lr": recipe.scalar_lr,
            "schedule.warmup_steps": WARMUP,
            "training.epochs": 1,
            "training.evaluate_every": 1,
            "training.precision": "fp32",
        },
        seed,
    )
    return Replay(cell, lambda step: batch(seed, step), released_names)


def released_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters; q and k turn the other way there, so halves are swapped."""
    renamed = rename(
        ours,
        [
            ("trunk.tokens.", "transformer.wte."),
            ("trunk.blocks.", "transformer.h."),
            (".attn.proj.", ".attn.c_proj."),
            (".ffn.up.", ".mlp.c_fc."),
            (".ffn.down.", ".mlp.c_proj."),
            (".value_embedding.gate.", ".attn.ve_gate."),
            ("^head.", "lm_head."),
            ("trunk.stream_factors", "resid_lambdas"),
            ("trunk.input_factors", "x0_lambdas"),
            ("trunk.smear_gate.", "smear_gate."),
            ("trunk.smear", "smear_lambda"),
            ("trunk.middle_factor", "backout_lambda"),
        ],
    )
    result = {}
    for name, tensor in renamed.items():
        if name.endswith(".value_embedding.embedding.weight"):
            layer = name.split(".")[2]
            result[f"value_embeds.{layer}.weight"] = tensor
        elif ".attn.qkv." in name:
            pieces = tensor.unflatten(0, (3, HEADS, 2, HEAD_DIM // 2)).unbind()
            for letter, piece in zip("qkv", pieces, strict=True):
                turned = piece if letter == "v" else piece.flip(1)
                result[name.replace(".qkv.", f".c_{letter}.")] = turned.flatten(0, 2)
        else:
            result[name] = tensor
    return result
