"""Record single layers of released code: `PYTHONPATH=tests:. python -m released.mechanisms FOLDER`.

FOLDER contains the files of `SOURCES` at their commits, each below a folder OWNER+NAME; the SHA-256
of each file is checked. A case is a mechanism: the released class or function computes the output
of a chain of layers, from parameters that are named and drawn as those of this project, and
autograd its gradients. Only numbers are stored.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from lit_attn.attention.layer import attn_layer
from lit_attn.attention.network import number_layers
from released import mechanism_layers
from released.mechanism_layers import BATCH, DIM, HEADS, TOKENS
from released.mechanism_sources import SOURCES, Released
from released.record import FOLDER
from released.recording import Arrays, Tensors, fill, generator

SAMPLES = 200
"""Largest number of values of a tensor that a record keeps."""


class Case(NamedTuple):
    """Mechanism, and the released layer: `compute(released, x, parameters, layer)`, without skip.

    `parameters` are those of one layer, named as in this project. `tolerance` is the largest
    difference, relative to the largest value of a tensor.
    """

    attention: Any
    source: str
    compute: Callable[[Released, Tensor, Tensors, int], Tensor]
    depth: int = 1
    is_causal: bool = True
    tolerance: float = 1e-10


def build(case: Case, seed: int = 0) -> nn.ModuleList:
    """Return this project's layers of a case, in float64, with the shared initial values."""
    layer_class = attn_layer(case.attention)
    chain = nn.ModuleList()
    for _ in range(case.depth):
        layer = layer_class(DIM, HEADS, qkv_bias=False, proj_bias=False)
        chain.append(layer.double().eval())
    number_layers(chain)
    fill(chain, seed)
    return chain


def inputs() -> tuple[Tensor, Tensor]:
    """Return the input of a chain, and the weights of its outputs in the loss."""
    size = (BATCH, TOKENS, DIM)
    x = generator("mechanisms", "x").standard_normal(size)
    weights = generator("mechanisms", "loss").standard_normal(size)
    return torch.from_numpy(x), torch.from_numpy(weights)


def record_chain(
    layers: Sequence[Callable[[Tensor], Tensor]], parameters: Mapping[str, Tensor]
) -> Arrays:
    """Return the output of layers with skip connections, and all gradients, as arrays."""
    x, weights = inputs()
    x.requires_grad_()
    out = x
    for layer in layers:
        out = out + layer(out)
    gradients = torch.autograd.grad((out * weights).sum(), [x, *parameters.values()])
    arrays = {"out": sample(out.detach())}
    for name, gradient in zip(["x", *parameters], gradients, strict=True):
        arrays[f"gradient {name}"] = sample(gradient)
    return arrays


def sample(values: Tensor) -> Any:
    """Return at most SAMPLES values, spaced by an odd number, so that no column is left out."""
    step = math.ceil(values.numel() / SAMPLES) | 1
    return values.flatten()[::step].numpy()


def replay(case: Case) -> Arrays:
    """Return the record of this project's layers."""
    chain = build(case)
    parameters = dict(chain.named_parameters())

    def call(layer: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: cast(Tensor, layer(x, is_causal=case.is_causal))

    return record_chain([call(layer) for layer in chain], parameters)


def record_case(case: Case, released: Released) -> Arrays:
    """Return the record of the released layers."""
    parameters = dict(build(case).named_parameters())

    def call(number: int) -> Callable[[Tensor], Tensor]:
        prefix = f"{number}."
        layer_parameters = {}
        for name, parameter in parameters.items():
            if name.startswith(prefix):
                layer_parameters[name.removeprefix(prefix)] = parameter
        return lambda x: case.compute(released, x, layer_parameters, number)

    return record_chain([call(number) for number in range(case.depth)], parameters)


T5: dict[str, Any] = {"bias": {"kind": "t5", "buckets": 8, "max_distance": 16}}
GROUPED: dict[str, Any] = {"preset": "multi-token", "filter": {"group": 3, "queries": 3, "keys": 5}}
TOY_TASK: dict[str, Any] = {
    "filter": {
        "kind": "multi-token",
        "queries": 2,
        "keys": 9,
        "weights": False,
        "head_maps": False,
        "norm": False,
        "gate": False,
    }
}
CASES = {
    "gated": Case("gated", "gated", mechanism_layers.gated),
    "gated-heads": Case("gated-heads", "gated", mechanism_layers.gated),
    "sink": Case("sink", "gpt-oss", mechanism_layers.eager("gpt-oss", {})),
    "off-by-one": Case("off-by-one", "gpt-oss", mechanism_layers.eager("gpt-oss", {})),
    "capped": Case(
        {"normaliser": {"kind": "capped-softmax", "cap": 1.0}},
        "gemma-2",
        mechanism_layers.eager("gemma-2", {"torch.float32": "torch.float64"}, softcap=1.0),
    ),
    "alibi": Case("alibi", "bloom", mechanism_layers.alibi),
    "t5": Case(T5, "t5", mechanism_layers.t5_encoder, is_causal=False),
    # The released code differentiates the largest logit too, by which its epsilon of 1e-8 scales.
    "softpick": Case("softpick", "softpick", mechanism_layers.softpick, tolerance=1e-7),
    "differential": Case("differential", "differential", mechanism_layers.differential, depth=2),
    "ssmax": Case("ssmax", "ssmax", mechanism_layers.ssmax, is_causal=False),
    "forgetting": Case("forgetting", "forgetting", mechanism_layers.forgetting),
    "sigmoid": Case("sigmoid", "sigmoid", mechanism_layers.sigmoid, is_causal=False),
    "value-residual": Case(
        "value-residual", "value-residual", mechanism_layers.value_residual, depth=3
    ),
    "selective": Case("selective", "selective", mechanism_layers.selective),
    "differential-2": Case("differential-2", "differential-2", mechanism_layers.differential_2),
    "multi-token": Case(GROUPED, "multi-token", mechanism_layers.multi_token),
    "multi-token-toy-task": Case(TOY_TASK, "multi-token", mechanism_layers.multi_token),
}
"""The recorded mechanisms, by the name of the preset, or of a choice of its parts."""

RECORDS = FOLDER / "mechanisms.npz"


def main(folder: str) -> None:
    """Write the records of all cases, with the origin of each, as one npz file."""
    released = Released(Path(folder))
    arrays: Arrays = {}
    for name, case in CASES.items():
        source = SOURCES[case.source]
        origin = [source.repository, source.commit, source.licence, source.path]
        arrays[f"{name}/origin"] = np.array(origin)
        for key, array in record_case(case, released).items():
            arrays[f"{name}/{key}"] = array
        print(name)
    np.savez_compressed(RECORDS, **arrays)  # type: ignore


if __name__ == "__main__":
    main(*sys.argv[1:])
