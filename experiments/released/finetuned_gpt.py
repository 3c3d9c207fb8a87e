"""Plug-in with a language model that starts from trained weights: `model: {kind: finetuned-gpt}`.

The weights can be those of a model of this project, or released ones such as GPT-2's.

DCMHA (arXiv:2405.08553, section 4.3) finetunes a Transformer for a tenth of its training steps with
dynamic composition, and finds no significant improvement. A study does the same:

    parts: [experiments/released/finetuned_gpt.py]
    set: {training.epochs: a tenth, model: {kind: finetuned-gpt, start_from: FOLDER, dim: 64, ...}}
    cells:
      standard: {attention: standard}
      dcmha: {attention: dcmha}

The other keys of `model` are those of the trained model, because a new kind replaces all keys.
FOLDER is a finished cell of a GPT (runs/STUDY/VARIANT/SEED-IDENTITY) or a folder of
`lit-attn export hub` or `released_weights.py`. Every parameter that both models have starts with
its trained value. Parameters of attention layers that only the new model has start as in any
training, or copy W if their part says so (`residual: {kind: split, init: copy}`). Any other
difference in names or shapes is refused.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from lit_attn.models.language import GPTConfig
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

NORMS = ("q_norm", "k_norm")
"""Children of an attention layer that the trained model may lack, beside those of EXTRA."""


class FinetunedGPTConfig(GPTConfig, kind="finetuned-gpt"):
    """GPT whose weights start with those of a trained model."""

    start_from: Path = Field(description="folder of a finished cell, or of exported weights")

    def check_files(self) -> None:
        super().check_files()
        self.find_weights()

    def find_weights(self) -> Path:
        """Return the file of the trained weights. Raises ConfigError without one."""
        for name in ("checkpoints/weights.pt", "model.safetensors"):
            if (self.start_from / name).is_file():
                return self.start_from / name
        raise ConfigError(f"model.start_from: {self.start_from} has no trained weights")

    def build(self, signature: Any, device: "torch.device | str | None" = None) -> "nn.Module":
        network = super().build(signature, device)
        if next(network.parameters()).is_meta:
            return network
        path = self.find_weights()
        trained = read_weights(path)
        initial = network.state_dict()
        missing = [n for n in initial if n not in trained and not can_be_fresh(n)]
        wrong = [n for n in trained if n not in initial or trained[n].shape != initial[n].shape]
        misfits = missing + wrong
        if misfits:
            raise ConfigError(f"model.start_from: {path} does not fit this model: {misfits[0]}")
        network.load_state_dict(trained, strict=False)
        return network


def can_be_fresh(name: str) -> bool:
    """Return True for a parameter of an attention layer that the trained model may lack."""
    from lit_attn.attention.layer_parts import EXTRA

    _, is_in_attention, part = name.partition(".attn.")
    return is_in_attention != "" and part.split(".")[0] in (*EXTRA, *NORMS)


def read_weights(path: Path) -> "dict[str, torch.Tensor]":
    """Return the tensors of a file by name."""
    import torch

    if path.suffix != ".safetensors":
        weights: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return weights
    from safetensors.torch import load_file

    return load_file(path)
