"""GPT-2 weights in Hugging Face's layout, read into this suite's GPT.

Hugging Face keeps the matrices of a block as (inputs, outputs), transposed to a Linear's (outputs,
inputs); the head is the embedding. A layer with more parameters than the standard one completes
itself (`lit_attn.attention.layer`), so that any mechanism which can compute the standard layer
starts from it.
"""

import pickle
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lit_attn.models.gpt import GPT
from lit_attn.schema.errors import ConfigError

UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)

TOP = {"wte": "tokens", "wpe": "positions", "ln_f": "norm"}
IN_BLOCK = {
    "ln_1": "norm1",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "ln_2": "norm2",
    "mlp.c_fc": "ffn.up",
    "mlp.c_proj": "ffn.down",
}
# Masks that old files store, and the head, which is the embedding.
LEFT_OUT = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight")


def load_gpt2(network: GPT, state: dict[str, Tensor], source: str = "weights") -> None:
    """Fill `network`, in place, with a `gpt2` state dict of transformers.

    The network needs GPT-2's shape: learned positions, layernorm with bias, bias, gelu-tanh, a tied
    head and an FFN. Raises ConfigError, headed by `source`, for what does not fit.
    """
    converted = gpt2_state(state, source)
    expected = network.state_dict()
    for name, value in converted.items():
        if name not in expected:
            raise ConfigError(f"{source}: has {name}, for which this model has no place")
        if value.shape != expected[name].shape:
            given, own = tuple(value.shape), tuple(expected[name].shape)
            raise ConfigError(f"{source}: {name} is {given}, this model's is {own}")
    missing, _ = network.load_state_dict(converted, strict=False)
    if missing:
        raise ConfigError(f"{source}: lacks {missing[0]}, which this model needs")


def gpt2_state(state: dict[str, Tensor], source: str = "weights") -> dict[str, Tensor]:
    """`state` under this suite's names, matrices the way a Linear keeps them."""
    converted = {}
    for full_name, value in state.items():
        name = full_name.removeprefix("transformer.")
        if LEFT_OUT.fullmatch(name):
            continue
        converted["trunk." + _renamed(name, source)] = value.T if _is_matrix(name) else value
    return converted


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` or a torch file; ConfigError where it is neither."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except (*UNREADABLE, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path}: cannot be read as weights: {reason}") from error
    return state


def _renamed(name: str, source: str) -> str:
    path, _, leaf = name.rpartition(".")
    if path in TOP:
        return f"{TOP[path]}.{leaf}"
    block = re.fullmatch(r"h\.(\d+)\.(.+)", path)
    if block is None or block[2] not in IN_BLOCK:
        raise ConfigError(f"{source}: '{name}' is not a name of GPT-2's layout")
    return f"blocks.{block[1]}.{IN_BLOCK[block[2]]}.{leaf}"


def _is_matrix(name: str) -> bool:
    """Whether `name` is a block's matrix, and not a norm's weight or an embedding."""
    return name.endswith(".weight") and ".c_" in name
