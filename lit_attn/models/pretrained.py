"""Published weights, loaded into this suite's networks: timm's vision transformers, and GPT-2."""

import pickle
import re
from pathlib import Path

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from lit_attn.models.language import GPT
from lit_attn.schema.errors import ConfigError, suggest

UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError)

# Names of Hugging Face's GPT-2 and of this suite's, outside the blocks and in a block.
TOP = {"wte": "tokens", "wpe": "positions", "ln_f": "norm"}
IN_BLOCK = {
    "ln_1": "norm1",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "ln_2": "norm2",
    "mlp.c_fc": "ffn.up",
    "mlp.c_proj": "ffn.down",
}
# Masks that old files store, and the head, which equals the embedding.
LEFT_OUT = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|lm_head\.weight")


def load_timm(vit: VisionTransformer, name: str, checkpoint: str | Path | None) -> None:
    """Load timm's weights `name` into `vit`, from the file `checkpoint` or from timm's hub.

    The positions are resampled to the grid of `vit` (bicubic, as timm does); the classifier is left
    out. Parameters that the standard attention layer does not have keep their initial values, or
    copy W if their part is defined so. Raises ConfigError if the weights are missing or do not fit.
    """
    names = timm.list_pretrained(["vit_*", "deit*"])
    if name not in names:
        raise ConfigError(f"model.pretrained: timm has no weights '{name}'{suggest(name, names)}")
    overlay = None
    if checkpoint is not None:
        # timm's own reader is only for the .npz files of the original release.
        original = Path(checkpoint).suffix == ".npz"
        overlay = {"file": str(checkpoint), "custom_load": original, "hf_hub_id": None}
    try:
        # The weights are copied, so they are read on the CPU whatever the default device is.
        with torch.device("cpu"):
            published = timm.create_model(
                name,
                pretrained=True,
                pretrained_cfg_overlay=overlay,
                num_classes=0,
                img_size=vit.patch_embed.img_size,
            )
        vit.load_state_dict(published.state_dict())
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        source = "timm's hub" if checkpoint is None else str(checkpoint)
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.pretrained: cannot load '{name}' from {source}: {reason[:200]}; "
            "model.checkpoint can name a local file"
        ) from error


def load_gpt2(network: GPT, state: dict[str, Tensor], source: str = "weights") -> None:
    """Fill `network`, in place, with a `gpt2` state dict of the transformers library.

    The network needs GPT-2's shape: learned positions, layernorm with bias, bias, gelu-tanh, a tied
    head and an FFN. Attention with more parameters than the standard layer completes itself, so any
    mechanism that can compute the standard layer starts from it. Raises ConfigError, headed by
    `source`, for a name or a shape that does not fit.
    """
    converted = convert_gpt2(state, source)
    expected = network.state_dict()
    for name, value in converted.items():
        if name not in expected:
            raise ConfigError(f"{source}: has {name}, which this model lacks")
        if value.shape != expected[name].shape:
            raise ConfigError(
                f"{source}: {name} has the shape {tuple(value.shape)}, this model needs "
                f"{tuple(expected[name].shape)}"
            )
    missing, _ = network.load_state_dict(converted, strict=False)
    if missing:
        raise ConfigError(f"{source}: lacks {missing[0]}, which this model needs")


def convert_gpt2(state: dict[str, Tensor], source: str = "weights") -> dict[str, Tensor]:
    """Return `state` under this suite's names.

    Hugging Face stores the matrices of a block as (inputs, outputs), a Linear as (outputs, inputs).
    """
    converted = {}
    for full_name, value in state.items():
        name = full_name.removeprefix("transformer.")
        if LEFT_OUT.fullmatch(name):
            continue
        is_matrix = name.endswith(".weight") and ".c_" in name
        converted["trunk." + _renamed(name, source)] = value.T if is_matrix else value
    return converted


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors` or torch file; raise ConfigError for any other file."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
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
