"""DCFormer and DCPythia in PyTorch, and experiments/pile_dcmha/405m.yaml.

The models and DCFormer's loss are the released ones, in float64 on a CPU, for smaller models; the
loop and the optimizer are the recorder's, with the values of the experiment. Tokens are random
numbers. DCFormer trains merged copies of the dynamic weights and leaves the original ones unused,
so those are not compared. In training, its window has one key more than in inference, and here the
window is larger by one. DCPythia's path for training fails at layers without a window, so its path
for prompts is trained, without windows and without norms of q and k, against a GPT-NeoX of the
package transformers whose attention this project replaces. Cosines of positions are float32 on
both sides, and differ in the last bit. Initial values are not compared: those of the experiment are
the JAX code's, and DCPythia's code leaves its own to a checkpoint.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from released import dcformer
from released.record import Clone
from released.recording import Arrays, Recorder, Tensors, rename
from released.replaying import Replay

REPOSITORY, COMMIT, RUNS = dcformer.REPOSITORY, dcformer.COMMIT, ["dcformer-0", "pythia-0"]
EXPERIMENT = dcformer.EXPERIMENT
OTHER_INITIAL_VALUES = ("",)
TOLERANCES = {"loss": 5e-8, "gradient": 5e-7, "change": 5e-8, "sample": 5e-9, "output": 5e-8}
STEPS, WARMUP, WINDOW, CHUNK = dcformer.STEPS, dcformer.WARMUP, 4, 5
WIDTH, DEPTH, HEADS, FFN = dcformer.WIDTH, dcformer.DEPTH, dcformer.HEADS, dcformer.FFN
PEAK, END, CLIP, DECAY, BETAS = 3e-4, 3e-5, 1.0, 0.1, (0.9, 0.95)

SIDES = [f"{place}.sides.{side}" for place in ("pre", "post") for side in ("query", "key")]


def rate(step: int) -> float:
    """Return the learning rate of the experiment: linear warm-up, then cosine to a tenth."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    share = (step - WARMUP) / (STEPS - WARMUP)
    return END + (PEAK - END) * (1 + math.cos(math.pi * share)) / 2


def released_model(
    clone: Clone, case: str, sizes: dict[str, Any] | None = None, same_angles: bool = False
) -> nn.Module:
    """Return a released model in the recorded size, with changed `sizes`.

    With `same_angles`, sines and cosines of positions have the same last bit as in this project.
    """
    kind, name = ("dcformer", "DCFormer") if case == "dcformer" else ("dcpythia", "DCPythia")
    folder = f"pytorch/{kind}"
    configuration = clone.load(f"configuration_{kind}", f"{folder}/configuration_{kind}.py", {})
    double = {"x.float().reshape(*x.shape[:-1], 2,-1)": "x.reshape(*x.shape[:-1], 2,-1)"}
    if case == "dcformer":
        double |= {
            "self._norm(x.float())": "self._norm(x)",
            "logits = logits.to(torch.float32)   ##": "##",
            "    probs = logits.softmax(-1)\n    probs = probs.to(torch.bfloat16)\n": (
                "    probs = logits.softmax(-1)\n"
            ),
        }
    else:
        double["return cache.to(dtype=torch.float16)"] = "return cache.to(torch.float64)"
    if same_angles:
        polar = "freqs_cis = torch.polar(torch.ones_like(freqs), freqs)"
        double |= {polar: "", "freqs_cis.real, freqs_cis.imag": "freqs.cos(), freqs.sin()"}
    modeling = clone.load(f"modeling_{kind}", f"{folder}/modeling_{kind}.py", double)
    sizes = {
        "block_size": dcformer.CONTEXT + 1,
        "vocab_size": dcformer.VOCABULARY,
        "n_layer": DEPTH,
        "n_head": HEADS,
        "dim": WIDTH,
        "intermediate_size": FFN,
        "is_training": case == "dcformer",
        "q_chunk_size": CHUNK,
        "use_qk_norm": case == "dcformer",
        "window_size": WINDOW if case == "dcformer" else None,
        "rope_base": 10_000,
        "torch_dtype": torch.float64,
        **(sizes or {}),
    }
    config = getattr(configuration, f"{name}Config")(**sizes)
    model_class = getattr(modeling, name)
    # Newer versions of transformers set it in a method that the released code overrides.
    model_class.all_tied_weights_keys = {}
    model: nn.Module = model_class(config)
    return model.double()


def record(clone: Clone, run: str) -> Arrays:
    """Train one model and return the record."""
    case, _, number = run.rpartition("-")
    seed = int(number)
    torch.set_default_dtype(torch.float64)
    model = released_model(clone, case)
    unused = ("dw1", "qkw", "dd") if case == "dcformer" else ("dw_m", "qkw_m")
    if case == "dcformer":
        model.setup_caches(dcformer.BATCH)  # type: ignore
    else:
        model.setup_caches(dcformer.BATCH, dcformer.CONTEXT, set_kv_cache=False)  # type: ignore
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[2] not in unused)
    recorder = Recorder()
    recorder.start_from(seed)(model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], betas=BETAS, weight_decay=DECAY
    )

    def loss(step: int) -> Tensor:
        inputs, targets = dcformer.batch(seed, step)
        if case == "pythia":
            return F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        tokens = torch.cat([inputs, targets[:, -1:]], 1)
        trained_loss: Tensor = model(tokens, labels=tokens).loss
        return trained_loss

    with recorder:
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.zero_grad()
            loss(step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    with torch.no_grad():
        return recorder.arrays() | {"output": np.array([loss(-1).item()])}


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    case, _, number = run.rpartition("-")
    if case == "dcformer":
        changes: dict[str, Any] = {
            "model.attention": {"preset": "dcmha"},
            "model.windows": [WINDOW + 1, None],
            "model.qk_norm": True,
        }
        return dcformer.small_replay(int(number), folder, changes, dcformer_names)
    model = {
        "kind": "transformers",
        "architecture": "gpt_neox",
        "attention": {"preset": "dcmha"},
        "arguments": {
            "hidden_size": WIDTH,
            "num_hidden_layers": DEPTH,
            "num_attention_heads": HEADS,
            "intermediate_size": FFN,
        },
    }
    return dcformer.small_replay(int(number), folder, {"model": model}, pythia_names)


def pop_maps(ours: Tensors, attention: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Remove the dynamic weights of an attention; return W_1 (d, 4H), W_2 and gates of SIDES."""
    into, out, gates = (
        [ours.pop(f"{attention}.composers.{side}.{part}") for side in SIDES]
        for part in ("into.weight", "out", "gate.weight")
    )
    return [matrix.T for matrix in into], out, [matrix.T for matrix in gates]


def dcformer_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters, and merge those of the maps as DCFormer does."""
    ours = dict(ours)
    merged: Tensors = {}
    for number in range(DEPTH):
        into, out, gates = pop_maps(ours, f"trunk.blocks.{number}.attn")
        maps = f"layers.{number}.attention.dyn_w_proj"
        merged[f"{maps}.dw_m"] = torch.cat([*into, *gates], 1)
        merged[f"{maps}.qkw_m"] = torch.stack(out)
    pairs = [
        ("trunk.tokens.", "tok_embeddings."),
        ("trunk.norm.", "norm."),
        ("^head.", "output."),
        ("trunk.blocks.", "layers."),
        (".attn.qkv.", ".attention.wqkv."),
        (".attn.proj.", ".attention.wo."),
        (".attn.q_norm.weight", ".attention.q_norm.scale"),
        (".attn.k_norm.weight", ".attention.k_norm.scale"),
        (".norm1.", ".attention_norm."),
        (".norm2.", ".ffn_norm."),
        (".ffn.gate.", ".feed_forward.w1."),
        (".ffn.up.", ".feed_forward.w3."),
        (".ffn.down.", ".feed_forward.w2."),
    ]
    return rename(ours, pairs) | merged


def pythia_names(ours: Tensors) -> Tensors:
    """Rename the parameters of GPT-NeoX, and group those of the maps as DCPythia does."""
    ours = dict(ours)
    grouped: Tensors = {}
    for number in range(DEPTH):
        into, out, gates = pop_maps(ours, f"model.gpt_neox.layers.{number}.attention.layer")
        maps = f"layers.{number}.attention.dyn_w_proj"
        grouped[f"{maps}.dw1"] = torch.stack(into, 1).unsqueeze(1)
        grouped[f"{maps}.qkw"] = torch.stack(out).unsqueeze(0).unflatten(-1, (4, HEADS))
        grouped[f"{maps}.dd"] = torch.cat(gates, 1).unsqueeze(1)
    pairs = [
        ("model.gpt_neox.embed_in.", "tok_embeddings."),
        ("model.gpt_neox.final_layer_norm.", "norm."),
        ("model.lm_head.", "output."),
        ("model.gpt_neox.layers.", "layers."),
        (".attention.layer.qkv.", ".attention.wqkv."),
        (".attention.layer.proj.", ".attention.wo."),
        (".input_layernorm.", ".attention_norm."),
        (".post_attention_layernorm.", ".ffn_norm."),
        (".mlp.dense_h_to_4h.", ".feed_forward.w1."),
        (".mlp.dense_4h_to_h.", ".feed_forward.w2."),
    ]
    return rename(ours, pairs) | grouped
