"""Layers of flash-linear-attention as token mixers: pip install "lit_attn[fla]".

    attention: {kind: module, import: "fla_layers:GatedDeltaNet", arguments: {expand_v: 2}}

`arguments` are those of the class of the same name in `fla.layers`, with fla's default values but
for those that a class names here. All layers are causal, and their kernels need a GPU. Triton
chooses among kernels by their speed, so two trainings can differ in rounding.

FLOPs are those of the chunked algorithms of the papers, multiply-add = 2, without masks, norms,
gates and other operations of single numbers.

Shapes: B batch, n tokens, d width, H heads, K and V numbers of a key and a value of each head,
C tokens of a chunk.
"""

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.extras import require

CHUNK = 64


class FlaLayer(nn.Module):
    """Base of the layers: calls a layer of fla, and declares its FLOPs."""

    needs_gpu = True
    causal_only = True
    fla_class: str

    def __init__(self, dim: int, heads: int, **arguments: Any) -> None:
        super().__init__()
        layer_class = getattr(import_fla(), self.fla_class)
        self.layer = layer_class(hidden_size=dim, num_heads=heads, **arguments)

    # torch.compile cannot trace the tuning of the kernels.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """Return the output (B, n, d) for the tokens x (B, n, d)."""
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """Return the output of fla's layer, which returns a cache beside it."""
        output: Tensor = self.layer(x)[0]
        return output

    def set_depth(self, layer: int) -> None:
        """Set the number of the layer, from 0."""
        self.layer.layer_idx = layer

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that fla exempts from weight decay."""
        exempt = set()
        for name, parameter in self.named_parameters():
            if getattr(parameter, "_no_weight_decay", False):
                exempt.add(name)
        return exempt

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of one sequence."""
        weights = 0
        for module in self.modules():
            # A short convolution multiplies each channel by a few numbers per token.
            if isinstance(module, (nn.Linear, nn.Conv1d)):
                weights += module.weight.numel()
        return 2 * tokens * weights + tokens * self.token_flops(min(tokens, CHUNK))

    def token_flops(self, chunk: int) -> int:
        """Return the FLOPs per token of the recurrence, in chunks of C = `chunk` tokens."""
        raise NotImplementedError


class GatedLinearAttention(FlaLayer):
    """S_t = diag(a_t) S_(t-1) + k_t v_t^T; output S_t^T q_t.

    Yang et al. 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training",
    https://arxiv.org/abs/2312.06635, section 4.
    """

    fla_class = "GatedLinearAttention"

    def token_flops(self, chunk: int) -> int:
        """Return the FLOPs of q S and k v^T for the state, and q k^T and weights v in a chunk."""
        key, value = self.layer.head_k_dim, self.layer.head_v_dim
        state = 2 * 2 * key * value
        inside = 2 * chunk * (key + value)
        return self.layer.num_heads * (state + inside)


class RetNet(GatedLinearAttention):
    """S_t = a S_(t-1) + k_t v_t^T with a constant a of each head; output S_t^T q_t.

    Sun et al. 2023, "Retentive Network: A Successor to Transformer for Large Language Models",
    https://arxiv.org/abs/2307.08621, eq. 7. In fla it is called MultiScaleRetention.
    """

    fla_class = "MultiScaleRetention"


class DeltaNet(FlaLayer):
    """S_t = S_(t-1) + b_t k_t (v_t - S_(t-1)^T k_t)^T; output S_t^T q_t.

    Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
    https://arxiv.org/abs/2406.06484, section 3. fla's kernel takes no float32, so it computes in
    bfloat16, whatever `training.precision` is.
    """

    fla_class = "DeltaNet"

    def compute(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            output = super().compute(x)
        return output.to(x.dtype)

    def token_flops(self, chunk: int) -> int:
        """Return the FLOPs of the recurrence in its WY form.

        Three products use the state: q S, w S and k^T u. In a chunk are k k^T, its triangular
        inverse (C^3 / 3 per chunk), w and u from the inverse, q k^T, and weights u.
        """
        key, value = self.layer.head_k_dim, self.layer.head_v_dim
        state = 3 * 2 * key * value
        inside = 2 * chunk * (3 * key + 2 * value) + chunk * chunk // 3
        return self.layer.num_heads * (state + inside)


class GatedDeltaNet(DeltaNet):
    """S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T; output S_t^T q_t.

    Yang et al. 2025, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
    https://arxiv.org/abs/2412.06464, eq. 10. It computes in bfloat16, as DeltaNet. Defaults:
    `head_dim` d / H and `expand_v` 1.
    """

    fla_class = "GatedDeltaNet"

    def __init__(self, dim: int, heads: int, **arguments: Any) -> None:
        defaults = {"head_dim": dim // heads, "expand_v": 1}
        super().__init__(dim, heads, **(defaults | arguments))


class Mamba2(FlaLayer):
    """h_t = a_t h_(t-1) + dt_t B_t x_t^T; output C_t h_t + D x_t.

    Dao & Gu 2024, "Transformers are SSMs", https://arxiv.org/abs/2405.21060, section 6. Defaults:
    `expand` 2, `head_dim` 2 d / H, `state_size` 64 and `chunk_size` 64. Without the package
    mamba_ssm, fla computes it with PyTorch, which needs much memory for long chunks and states.
    """

    fla_class = "Mamba2"

    def __init__(self, dim: int, heads: int, **arguments: Any) -> None:
        expand = arguments.get("expand", 2)
        defaults = {"head_dim": expand * dim // heads, "state_size": 64, "chunk_size": CHUNK}
        # fla warns of a kernel for convolutions, which the layer does not use.
        logging.getLogger("fla.layers.mamba2").setLevel(logging.ERROR)
        super().__init__(dim, heads, **(defaults | arguments))

    def token_flops(self, chunk: int) -> int:
        """Return the FLOPs of the products of section 6.

        They are C B^T for each group of heads, and weights x, B^T x and C h for each head.
        """
        layer = self.layer
        state, head = layer.ssm_state_size, layer.head_dim
        chunk = min(chunk, layer.chunk_size)
        groups = 2 * chunk * state * layer.n_groups
        return groups + layer.num_heads * (2 * chunk * head + 2 * 2 * state * head)


def import_fla() -> Any:
    """Import and return `fla.layers`; raise ConfigError if it is not installed."""
    with warnings.catch_warnings():
        # fla warns of GPUs and of optional packages that it does not find.
        warnings.simplefilter("ignore")
        return require("fla.layers", "attention", "fla")
