"""Adapters of mmsegmentation's attention modules for `replace_attention`: Swin, BEiT and MAE.

Its ViT and MiT contain torch.nn.MultiheadAttention, which torch_layers.py replaces.

Shapes: B batch, n tokens of a window, d width, H heads.
"""

from typing import Any

from torch import Tensor

from lit_attn.replace.timm_biases import Swin
from lit_attn.replace.timm_layers import TimmAdapter

OPTIONS = ("embed_dims", "init_cfg")
"""Attributes of mmsegmentation's modules that timm's lack; `init_cfg` only draws initial values."""


class MMSwin(Swin):
    """mmsegmentation's Swin: timm's, with another layout of the table of position biases."""

    known = (*Swin.known, *OPTIONS)

    def _get_rel_pos_bias(self) -> Tensor:
        return read_bias(self.original)


class MMBeit(TimmAdapter):
    """mmsegmentation's BEiT and MAE: a position bias of each layer, without a bias of keys."""

    keeps_tokens = True

    known = (
        *TimmAdapter.known,
        *OPTIONS,
        "bias",
        "num_relative_distance",
        "relative_position_bias_table",
        "relative_position_index",
    )

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        if self.relative_position_bias_table is not None:
            bias = read_bias(self.original)
        return self.attend(x, bias)


def read_bias(original: Any) -> Tensor:
    """Return the position bias of a layer, (1, H, n, n), from its table (distances, H)."""
    bias: Tensor = original.relative_position_bias_table[original.relative_position_index]
    return bias.permute(2, 0, 1).unsqueeze(0)
