"""Logits of DCFormer and DCPythia in PyTorch, and experiments/released/released_weights.py.

The models are the released classes in their mode of inference, in float64 on a CPU, with random
weights of small sizes; the converter of this project reads the same weights. Tokens are random
numbers. DCFormer reads prompts in pieces of one window, as its ring of cached keys requires, and
the prompt of `dcformer-LGLL` has 520 tokens, since that class fixes its windows at 256 keys.
In the runs `decoded` and `query-wise` a model reads one token after the other, and DCPythia reads
other prompts at once. Cosines of positions, which both sides compute in float32, have the same last
bit where both run on one machine.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.paths import EXPERIMENTS
from torch import Tensor, nn

from lit_attn.models import factory
from lit_attn.schema.plugins import load_parts
from released import dcformer, dcformer_pytorch
from released.record import Clone
from released.recording import Arrays, fill, generator, initial_values, trained

REPOSITORY, COMMIT = dcformer.REPOSITORY, dcformer.COMMIT
EXPERIMENT = "experiments/released/released_weights.py"
TOLERANCE = 1e-10
"""Largest relative difference of the logits on one machine."""

OTHER_MACHINE = 1e-6
"""The same with recorded logits: another processor can round cosines in float32 differently."""

SHOWN = 8
"""Number of the last tokens whose logits are recorded."""

BASE = {
    "block_size": 16,
    "vocab_size": 50,
    "n_layer": 3,
    "n_head": 4,
    "dim": 32,
    "intermediate_size": 24,
    "is_training": False,
    "use_qk_norm": True,
    "window_size": 4,
}

# Class, tokens of the prompt, tokens of one call, and changed keys of the configuration.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "dcformer": ("dcformer", 16, 4, {"rope_base": 500_000}),
    "dcformer-LGLL": (
        "dcformer",
        520,
        256,
        {"block_size": 768, "window_size": 256, "window_type": "LGLL", "dim": 8, "n_layer": 4},
    ),
    "dcformer-decoded": ("dcformer", 16, 1, {}),
    "dcformer-query-wise": ("dcformer", 16, 1, {"query_wise": True}),
    "dcpythia": ("dcpythia", 16, 16, {}),
    "dcpythia-LGL6": ("dcpythia", 16, 16, {"window_type": "LGL6", "n_layer": 4}),
    "dcpythia-sequential": (
        "dcpythia",
        16,
        16,
        {"use_parallel_residual": False, "use_linear_bias": False, "rotary_pct": 1.0},
    ),
    "dcpythia-query-wise": ("dcpythia", 16, 1, {"query_wise": True, "window_size": None}),
}
RUNS = list(CASES)


def configuration(run: str) -> dict[str, Any]:
    """Return the released config.json of a run."""
    kind, _, _, changes = CASES[run]
    base = BASE | {"model_type": kind, "rope_base": 10_000, "norm_eps": 1e-5}
    return base | changes


def prompt(run: str) -> Tensor:
    """Return the tokens (2, n) of a run."""
    vocabulary = configuration(run)["vocab_size"]
    return torch.from_numpy(generator(run).integers(vocabulary, size=(2, CASES[run][1])))


@torch.no_grad()
def record(clone: Clone, run: str) -> Arrays:
    """Return the logits of the last tokens by the released class, and the shapes of its weights."""
    kind, length, size, _ = CASES[run]
    torch.set_default_dtype(torch.float64)
    sizes = {key: value for key, value in configuration(run).items() if key != "model_type"}
    model: Any = dcformer_pytorch.released_model(clone, kind, sizes, same_angles=True).eval()
    for name, parameter in model.named_parameters():
        # Merged copies share their memory with the tensors that they are derived from.
        parameter.requires_grad_(not name.endswith("_m"))
    fill(model, 0)
    shapes = {name: parameter.shape for name, parameter in trained(model).items()}
    tokens, call = prompt(run), reader(model, kind, size < length)
    parts = [
        call(tokens[:, start : start + size], torch.arange(start, min(start + size, length)))
        for start in range(0, length, size)
    ]
    return {
        "logits": torch.cat(parts, 1)[:, -SHOWN:].numpy(),
        "names": np.array(list(shapes)),
        "shapes": np.array([",".join(map(str, shape)) for shape in shapes.values()]),
    }


def reader(model: Any, kind: str, is_cached: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that continues the cached tokens; it returns logits (2, n, V)."""
    if kind == "dcformer":
        model.setup_caches(2)
        model.double()
        rows = torch.arange(2)
        return lambda tokens, places: model(
            tokens,
            input_pos=places.expand(2, -1),
            return_tensor=True,
            batch_indexes=rows,
        )
    model.setup_caches(2, model.config.block_size, set_kv_cache=is_cached)
    model.double()
    return lambda tokens, places: model(tokens, input_pos=places, return_tensor=True)


@torch.no_grad()
def replay(run: str, theirs: Arrays) -> Arrays:
    """Return the logits of the converted model."""
    load_parts([EXPERIMENTS / "released" / "released_weights.py"])
    import released_weights

    config = json.loads(json.dumps(configuration(run)))
    weights = {
        name: initial_values(name, tuple(map(int, shape.split(","))), 0)
        for name, shape in zip(theirs["names"].tolist(), theirs["shapes"].tolist(), strict=True)
    }
    experiment = released_weights.read_cell(config, Path("config.json"), run).experiment
    network: nn.Module = factory.build(experiment.model, experiment.data, "meta")
    released = released_weights.RELEASED[config["model_type"]]
    network.load_state_dict(released.rename(weights, config), assign=True)
    return {"logits": network.eval()(prompt(run))[:, -SHOWN:].numpy()}
