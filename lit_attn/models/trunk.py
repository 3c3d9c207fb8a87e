"""Transformer over tokens, which language models and sequence classifiers share.

Shapes: B batch, n tokens, d width, D head width. tokens: (B, n) int64 -> hidden: (B, n, d).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lit_attn.attention.cache import Cache
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.rotary import Rotary, rotary
from lit_attn.attention.spec import AttentionSpec
from lit_attn.config.models.base import FFN
from lit_attn.config.models.language import TokenTransformer
from lit_attn.models.layers import Device, HeadNorm, norm, quantise
from lit_attn.models.seeded_draws import outside_composers

Memory = tuple[Tensor, Tensor]
"""Tokens (B, m, d) for cross-attention, and their mask (B, 1, 1 or n, m)."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu-tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
    "swiglu": nn.SiLU,
}


class FeedForward(nn.Module):
    """down(activation(up(x))), or down(silu(gate(x)) * up(x)) for swiglu; (B, n, d) -> (B, n, d).

    Dropout follows the activation and the last Linear.
    """

    def __init__(self, model: TokenTransformer, ffn: FFN, device: Device) -> None:
        super().__init__()
        dim, bias, inner = model.dim, model.bias != "none", model.activation_dropout
        gated = ffn.activation == "swiglu"
        self.gate = nn.Linear(dim, ffn.width, bias=bias, device=device) if gated else None
        self.up = nn.Linear(dim, ffn.width, bias=bias, device=device)
        self.activation = ACTIVATIONS[ffn.activation]()
        self.down = nn.Linear(ffn.width, dim, bias=bias, device=device)
        self.dropout = nn.Dropout(model.dropout)
        self.inner_dropout = self.dropout if inner is None else nn.Dropout(inner)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.up(x) if self.gate is None else self.gate(x))
        if self.gate is not None:
            hidden = hidden * self.up(x)
        return self.dropout(self.down(self.inner_dropout(hidden)))


class Block(nn.Module):
    """Attention, then the FFN if there is one, each with its norm and skip connection.

    Pre-norm computes x + f(norm(x)), post-norm computes norm(x + f(x)). Parallel branches compute
    x + attention(norm1(x)) + ffn(norm2(x)). A decoder's block has cross-attention to a memory
    between attention and FFN.
    """

    def __init__(
        self,
        model: TokenTransformer,
        number: int,
        device: Device,
        cross: AttentionSpec | None = None,
    ) -> None:
        """Build the block of layer `number`; layers may have different windows."""
        super().__init__()
        self.pre, self.parallel = model.norm_order == "pre", model.branches == "parallel"
        self.attention_scale = 1.0
        if model.attention_branch == "depth-scaled":
            self.attention_scale = (2 * model.depth) ** -0.5
        self.norm1 = norm(model.norm, model.dim, model.norm_eps, device)
        self.attn = build_attention(model, model.attention_of(number), device)
        self.attn.set_depth(number)
        self.ffn = self.cross = None
        if model.ffn is not None:
            self.norm2 = norm(model.norm, model.dim, model.norm_eps, device)
            self.ffn = FeedForward(model, model.ffn, device)
        if cross is not None:
            self.norm3 = norm(model.norm, model.dim, model.norm_eps, device)
            self.cross = build_attention(model, cross.by_layer(model.depth)[number], device)
            self.cross.set_depth(number)
        if model.weights == "e5m2":
            quantise(self)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        rotary: Rotary | None,
        caches: Sequence[Cache] = (),
        memory: Memory | None = None,
    ) -> Tensor:
        attended = self.attn(
            self.norm1(x) if self.pre else x, attn_mask, is_causal, rotary, *caches[:1]
        )
        block_input, x = x, self._add(x, self.attention_scale * attended, self.norm1)
        if self.cross is not None and memory is not None:
            cache, (tokens, mask) = caches[1] if caches else None, memory
            if cache is not None and cache.position:
                # The cache has the keys and values of the memory since the first call.
                tokens = tokens[:, :0]
            normed = self.norm3(x) if self.pre else x
            attended = self.cross(normed, attn_mask=mask, cache=cache, memory=tokens)
            x = self._add(x, self.attention_scale * attended, self.norm3)
        if self.ffn is None:
            return x
        if self.parallel:
            return x + self.ffn(self.norm2(block_input))
        return self._add(x, self.ffn(self.norm2(x) if self.pre else x), self.norm2)

    def _add(self, x: Tensor, branch: Tensor, norm: nn.Module) -> Tensor:
        """Return x plus the output of a branch; post-norm normalises the sum."""
        total = x + branch
        return total if self.pre else norm(total)


def build_attention(model: TokenTransformer, spec: AttentionSpec, device: Device) -> Attention:
    """Return an attention layer of `spec` with the sizes of `model`."""
    layer = attn_layer(spec)(
        model.dim,
        model.heads,
        attn_head_dim=model.head_dim,
        qkv_bias=model.bias == "all",
        qk_norm=model.qk_norm,
        proj_bias=model.bias == "all",
        attn_drop=model.attention_dropout,
        proj_drop=model.dropout,
        norm_layer=partial(HeadNorm, eps=model.qk_norm_eps),
        device=device,
    )
    layer.in_float32 = model.attention_precision == "float32"
    return layer


class Trunk(nn.Module):
    """Embedding, positions, blocks and, after pre-norm blocks, a final norm."""

    def __init__(
        self,
        model: TokenTransformer,
        vocabulary: int,
        context: int,
        is_causal: bool,
        device: Device = None,
        cross: AttentionSpec | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.context = context
        self.is_causal = is_causal
        self.embedding_scale = model.dim**0.5 if model.embedding_scale == "sqrt-dim" else 1.0
        self.tokens = nn.Embedding(vocabulary, model.dim, device=device)
        learned = model.positions == "learned"
        self.positions = nn.Embedding(context, model.dim, device=device) if learned else None
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList(
            Block(model, number, device, cross) for number in range(model.depth)
        )
        last = norm(model.norm, model.dim, model.norm_eps, device)
        self.norm = last if model.norm_order == "pre" else nn.Identity()

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay with `decay: weights`: learned positions."""
        return set() if self.positions is None else {"positions.weight"}

    @property
    def can_be_cached(self) -> bool:
        """True if a new token leaves the hidden states of all earlier tokens unchanged."""
        return self.is_causal and self.model.positions != "sinusoidal-reversed"

    def new_caches(self) -> list[Cache]:
        """Return an empty cache for every attention layer, to decode one batch of sequences with.

        Raises ValueError for a bidirectional model and for reversed positions: a new token changes
        all earlier ones.
        """
        if not self.can_be_cached:
            kind = "with reversed positions" if self.is_causal else "that is bidirectional"
            raise ValueError(f"a model {kind} cannot be decoded token by token")
        return [layer.new_cache() for layer in self.modules() if isinstance(layer, Attention)]

    @property
    def max_tokens(self) -> int | None:
        """Largest number of tokens with learned positions; None if no positions are learned."""
        limits = [] if self.positions is None else [self.context]
        similarities = [spec.similarity for spec in self.model.attention.mechanisms]
        limits += [part.max_tokens for part in similarities if part.max_tokens is not None]
        return min(limits, default=None)

    def forward(
        self,
        tokens: Tensor,
        present: Tensor | None = None,
        caches: list[Cache] | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """Return the hidden states; no token attends to padding, where `present` (B, n) is False.

        With `caches` (from `new_caches`), `tokens` follow the tokens already cached. `memory` is
        that of cross-attention. Raises ValueError for more tokens than learned positions.
        """
        caches = caches or []
        before = caches[0].position if caches else 0
        n, device = before + tokens.shape[1], tokens.device
        x = self.tokens(tokens) * self.embedding_scale
        positions = torch.arange(before, n, device=device)
        turn = None
        if self.positions is not None:
            if n > self.context:
                raise ValueError(
                    f"{n} tokens are more than the {self.context} positions this model learned"
                )
            x = x + self.positions(positions)
        elif self.model.positions != "rotary":
            if self.model.positions == "sinusoidal-reversed":
                positions = positions.flip(0)
            is_fairseq = self.model.positions == "fairseq"
            x = x + sinusoids(positions, self.model.dim, is_fairseq).to(x.dtype)
        else:
            turn = rotary(positions, self.model.rotated_width, self.model.rotary_base)
        x = self.dropout(x)
        padding = None if present is None else present[:, None, None, :]
        size = len(caches) // len(self.blocks)
        for number, block in enumerate(self.blocks):
            layer_caches = caches[number * size : (number + 1) * size]
            x = block(x, padding, self.is_causal, turn, layer_caches, memory)
        return self.norm(x)


def sinusoids(positions: Tensor, dim: int, is_fairseq: bool = False) -> Tensor:
    """Return the fixed positions of Vaswani et al. 2017 (section 3.5), sines first; (n, d).

    fairseq begins with position 2, and its last frequency is 1e-4.
    """
    steps = torch.arange((dim + 1) // 2, device=positions.device, dtype=torch.float32)
    # These forms equal those of Transformer-XL's and fairseq's code to the last bit.
    rates = 1 / 10_000.0 ** (steps / (dim / 2))
    if is_fairseq:
        rates = torch.exp(steps * -(math.log(10_000) / max(1, len(steps) - 1)))
    angles = torch.outer(positions.to(torch.float32) + 2 * is_fairseq, rates)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :dim]


@torch.no_grad()
def initialise(network: nn.Module, model: TokenTransformer, tied: bool) -> None:
    """Fill the parameters of a freshly built `network`, in place, as `model.init` says."""
    init = model.init
    for module in outside_composers(network).values():
        if isinstance(module, Attention) and init.matrices == "fairseq":
            _draw_as_fairseq(module)
        elif isinstance(module, nn.Linear) and not isinstance(init.matrices, str):
            nn.init.normal_(module.weight, std=init.matrices)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            if init.embedding != "torch":
                nn.init.normal_(module.weight, std=init.embedding)
            elif tied:
                bound = 1 / math.sqrt(module.embedding_dim)
                nn.init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
            nn.init.normal_(module.weight, 1.0, init.norms)
    for module in network.modules():
        if isinstance(module, Block) and init.depth_scaled:
            # The matrices that write to the residual stream: W, W^l or W_p, and the FFN's last.
            layers = [layer for layer in module.modules() if isinstance(layer, Attention)]
            residuals = (part for layer in layers for part in layer.residual.modules())
            matrices = [part for part in residuals if isinstance(part, nn.Linear)]
            matrices += [
                *(layer.proj for layer in layers),
                *([module.ffn.down] if module.ffn else []),
            ]
            for projection in matrices:
                projection.weight.mul_((2 * model.depth) ** -0.5)


def _draw_as_fairseq(layer: Attention) -> None:
    """Draw q, k and v by Xavier's rule with gain 1 / sqrt(2) and W with gain 1; zero W's bias."""
    bound = (3 / (layer.qkv.in_features + layer.proj.in_features)) ** 0.5
    for weight in (layer.qkv.weight, layer.similarity.extra_key_weights()):
        if weight is not None:
            nn.init.uniform_(weight, -bound, bound)
    nn.init.xavier_uniform_(layer.proj.weight)
    if layer.proj.bias is not None:
        nn.init.zeros_(layer.proj.bias)
