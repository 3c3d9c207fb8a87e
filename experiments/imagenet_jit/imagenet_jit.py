"""Plug-in for JiT as a classifier, the model of Belief2's section 4.2.

The study `belief2-imagenet` names this file under `parts`. The network is in
imagenet_jit_network.py, which a cell imports when it is built.

Source: github.com/LTH14/JiT (docs/setups.md, section 6).
"""

from pydantic import Field, PositiveInt

from lit_attn.config.models.base import FFN, ffn_field, require_division
from lit_attn.config.models.vision import Transformer
from lit_attn.schema.base import consistency_check


class JiTConfig(Transformer, kind="jit"):
    """JiT-B/16 (Li & He 2025) as a classifier: SwiGLU, RMSNorm, QK-norm, 2-D RoPE, adaLN-zero.

    Belief2 (section 4.2) states neither the condition of the adaLN nor the pooling. Here the
    condition is the mean of the embedded patches, and the last layer is averaged over patches.
    `ffn.width` is the hidden width of SwiGLU.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    activations = ("swiglu",)
    has_one_size = True

    builder = ("imagenet_jit_network:JiTClassifier", "shape", "outputs")

    dim: PositiveInt = Field(768, description="width of the residual stream")
    heads: PositiveInt = Field(12, description="attention heads of a block")
    ffn: FFN | None = ffn_field(2048, "swiglu")
    bottleneck: PositiveInt = Field(
        128, description="width between the maps of the patch embedding"
    )

    @consistency_check
    def _heads_rotate_by_row_and_column(self) -> None:
        if self.dim % 4:
            raise ValueError(f"dim: {self.dim} is not a multiple of 4, which each head needs")
        noun = "heads of a width that is a multiple of 4"
        require_division("heads", noun, self.heads, self.dim // 4, f"dim {self.dim}")
