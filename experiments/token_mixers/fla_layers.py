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

import importlib.util
import logging
import math
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
        # Read now, because a copy of a parameter loses its attributes.
        self.undecayed: set[str] = set()
        for name, parameter in self.named_parameters():
            if getattr(parameter, "_no_weight_decay", False):
                self.undecayed.add(name)

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
        return self.undecayed

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of one sequence."""
        return self.projection_flops(tokens) + tokens * self.token_flops(min(tokens, CHUNK))

    def projection_flops(self, tokens: int) -> int:
        """Return the FLOPs of all projections and short convolutions for one sequence."""
        weights = 0
        for module in self.modules():
            # A short convolution multiplies each channel by a few numbers per token.
            if isinstance(module, (nn.Linear, nn.Conv1d)):
                weights += module.weight.numel()
        return 2 * tokens * weights

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


class KDA(DeltaNet):
    """S_t = diag(a_t) S_(t-1) + b_t k_t (v_t - S_(t-1)^T diag(a_t) k_t)^T; output S_t^T q_t.

    Kimi Delta Attention: Kimi Team 2025, "Kimi Linear", https://arxiv.org/abs/2510.26692, section
    3. The decay a_t is a number of each coordinate of a key. It computes in bfloat16, as DeltaNet.
    In fla it is called KimiDeltaAttention. Defaults: `head_dim` d / H and `expand_v` 1.
    """

    fla_class = "KimiDeltaAttention"

    def __init__(self, dim: int, heads: int, **arguments: Any) -> None:
        defaults = {"head_dim": dim // heads, "expand_v": 1}
        super().__init__(dim, heads, **(defaults | arguments))


class DeltaProduct(DeltaNet):
    """Gated delta rule with several keys and values of a token, written one after the other.

    Siems et al. 2025, "DeltaProduct", https://arxiv.org/abs/2502.10297, section 3: the state decays
    once for each token, and `num_householder` (2) keys and values follow. It computes in bfloat16,
    as DeltaNet. In fla it is called GatedDeltaProduct. Defaults: `head_dim` d / H, `expand_v` 1.
    """

    fla_class = "GatedDeltaProduct"

    def __init__(self, dim: int, heads: int, **arguments: Any) -> None:
        defaults = {"head_dim": dim // heads, "expand_v": 1}
        super().__init__(dim, heads, **(defaults | arguments))

    def token_flops(self, chunk: int) -> int:
        """Return the FLOPs of one query and of the keys of a token, with `chunk` keys in a chunk.

        A query has q S, q k^T and weights u; a key has w S, k^T u, k k^T, w, u and its share of the
        triangular inverse.
        """
        key, value = self.layer.head_k_dim, self.layer.head_v_dim
        query_flops = 2 * key * value + 2 * chunk * (key + value)
        key_flops = 2 * 2 * key * value + 2 * chunk * (2 * key + value) + chunk * chunk // 3
        return self.layer.num_heads * (query_flops + self.layer.num_householder * key_flops)


class RWKV7(FlaLayer):
    """S_t = diag(w_t) S_(t-1) - kk_t (a_t kk_t)^T S_(t-1) + k_t v_t^T; output S_t^T r_t.

    Peng et al. 2025, "RWKV-7 Goose", https://arxiv.org/abs/2503.14456, section 4. Every layer is a
    first layer of `num_hidden_layers` (12): nothing brings it the values of an earlier layer, and
    initial values do not depend on the depth. fla warns that RWKV's author expects errors in its
    code.
    """

    fla_class = "RWKV7Attention"

    def __init__(self, dim: int, heads: int, **arguments: Any) -> None:
        defaults = {"head_dim": None, "layer_idx": 0, "num_hidden_layers": 12}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__(dim, heads, **(defaults | arguments))

    def set_depth(self, layer: int) -> None:
        """Keep the layer a first one, whatever its number is."""

    def token_flops(self, chunk: int) -> int:
        """Return the FLOPs of the recurrence with a state of rank one more (its chunked form).

        q S, a S, k^T v and b^T u use the state. In a chunk are four products of queries and keys,
        the triangular inverse, three of its products, and two weighted sums.
        """
        key, value = self.layer.head_dim, self.layer.head_v_dim
        state = 4 * 2 * key * value
        inside = 2 * chunk * (5 * key + 4 * value) + chunk * chunk // 3
        return self.layer.num_heads * (state + inside)


class PaTH(FlaLayer):
    """Softmax attention whose logits are q_i^T (H_i ... H_(j+1)) k_j, H_t = I - b_t w_t w_t^T.

    Yang et al. 2025, "PaTH Attention: Position Encoding via Accumulating Householder
    Transformations", https://arxiv.org/abs/2505.16381, section 3. Heads have a width of 16, 32, 64
    or 128. It computes in bfloat16, as DeltaNet. In fla it is called PaTHAttention.
    """

    fla_class = "PaTHAttention"

    def compute(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            output = super().compute(x)
        return output.to(x.dtype)

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of one sequence, with all pairs of tokens as other attention has them.

        A query has q k^T and the weighted sum for every token, and one product with a matrix (D, D)
        for every chunk. In a chunk are w w^T, w k^T, q w^T, its inverse, and three of its products.
        """
        chunk = min(tokens, CHUNK)
        width = self.layer.head_dim
        pairs = 2 * tokens * 2 * width
        transitions = 2 * (tokens // chunk) * width * width
        inside = 2 * chunk * 6 * width + chunk * chunk // 3
        recurrent = tokens * self.layer.num_heads * (pairs + transitions + inside)
        return self.projection_flops(tokens) + recurrent


class LogLinearMamba2(FlaLayer):
    """Mamba-2 whose output sums log2(n) states of growing spans, each with a learned weight.

    Guo et al. 2025, "Log-Linear Attention", https://arxiv.org/abs/2506.04761, section 3. Defaults:
    `expand` 2, `head_dim` 2 d / H, `state_size` 64.
    """

    fla_class = "LogLinearMamba2"

    def __init__(self, dim: int, heads: int, **arguments: Any) -> None:
        expand = arguments.get("expand", 2)
        defaults = {"head_dim": expand * dim // heads, "state_size": 64}
        # fla warns of kernels for convolutions that are not installed.
        logging.getLogger("fla.layers.log_linear_mamba2").setLevel(logging.ERROR)
        super().__init__(dim, heads, **(defaults | arguments))

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of one sequence: those of Mamba-2, with a state read at every level."""
        layer = self.layer
        chunk = min(tokens, layer.chunk_size)
        state, head = layer.ssm_state_size, layer.head_dim
        levels = max(1, math.ceil(math.log2(max(1, tokens / chunk))))
        groups = 2 * chunk * state * layer.n_groups
        heads = layer.num_heads * (2 * chunk * head + (1 + levels) * 2 * state * head)
        return self.projection_flops(tokens) + tokens * (groups + heads)


class NSA(FlaLayer):
    """Sum of attention to means of blocks, to the best blocks and to a window, each with a gate.

    Yuan et al. 2025, "Native Sparse Attention", https://arxiv.org/abs/2502.11089, section 3. The
    kernel needs 16 or more heads of each key head, a power of 2. Defaults: `head_dim` d / H,
    `num_kv_heads` H / 16, and `window_size` 0, because a window needs the package flash_attn.
    """

    fla_class = "NativeSparseAttention"

    def __init__(self, dim: int, heads: int, **arguments: Any) -> None:
        key_heads = arguments.get("num_kv_heads", max(1, heads // 16))
        group = heads // key_heads
        is_power = group & (group - 1) == 0
        if heads % key_heads or group < 16 or not is_power:
            raise ValueError(
                f"NSA needs 16, 32, 64, ... heads of each key head, not {heads} heads for "
                f"{key_heads}; set the model's heads to a multiple of 16"
            )
        defaults = {"head_dim": dim // heads, "num_kv_heads": key_heads, "window_size": 0}
        options = defaults | arguments
        if options["window_size"] and importlib.util.find_spec("flash_attn") is None:
            raise ValueError("NSA with a window needs the package flash_attn; set window_size to 0")
        super().__init__(dim, heads, **options)

    def flops(self, tokens: int) -> int:
        """Return the FLOPs of q k^T and the weighted sum for all keys that a query sees."""
        layer = self.layer
        blocks = math.ceil(tokens / layer.block_size)
        chosen = min(tokens, layer.block_counts * layer.block_size)
        window = min(tokens, layer.window_size)
        keys = blocks + chosen + window
        attended = tokens * layer.num_heads * keys * 2 * 2 * layer.head_dim
        return self.projection_flops(tokens) + attended


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
