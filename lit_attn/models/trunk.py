"""Transformer over tokens, which language models and sequence classifiers share.

Shapes: B batch, n tokens, d width, D head width. tokens: (B, n) int64 -> hidden: (B, n, d).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lit_attn.attention.cache import Cache
from lit_attn.attention.layer import Attention, TokenLayer, attn_layer
from lit_attn.attention.network import connect_layers
from lit_attn.attention.rotary import Rotary, rotary
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.feed_forward import FeedForward
from lit_attn.models.layers import Device, HeadNorm, norm
from lit_attn.models.seeded_draws import outside_composers
from lit_attn.models.token_transformer import Init, Rotation, TokenTransformer
from lit_attn.models.value_embedding import ValueEmbedding

Memory = tuple[Tensor, Tensor]
"""Tokens (B, m, d) for cross-attention, and their mask (B, 1, 1 or n, m)."""


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
        vocabulary: int = 0,
    ) -> None:
        """Build the block of layer `number`; layers may have different windows.

        Value embeddings need the size of the vocabulary.
        """
        super().__init__()
        self.pre = model.norm_order == "pre"
        self.parallel = model.branches == "parallel"
        self.attention_scale = 1.0
        if model.attention_branch == "depth-scaled":
            self.attention_scale = (2 * model.depth) ** -0.5
        self.norm1 = norm(model.norm, model.dim, model.norm_eps, device)
        self.attn = build_attention(model, model.attention_of(number), device)
        self.attn.set_depth(number)
        self.value_embedding: ValueEmbedding | None = None
        value_embeddings = model.value_embeddings_of(number)
        if value_embeddings is not None:
            assert isinstance(self.attn, Attention)
            self.value_embedding = ValueEmbedding(
                value_embeddings, vocabulary, self.attn.key_heads, self.attn.head_dim, device
            )
        self.ffn: FeedForward | None = None
        self.cross: TokenLayer | None = None
        if model.ffn is not None:
            self.norm2 = norm(model.norm, model.dim, model.norm_eps, device)
            inner_dropout = model.activation_dropout
            if inner_dropout is None:
                inner_dropout = model.dropout
            self.ffn = FeedForward(
                model.dim,
                model.ffn,
                has_bias=model.bias != "none",
                dropout=model.dropout,
                inner_dropout=inner_dropout,
                device=device,
            )
        if cross is not None:
            self.norm3 = norm(model.norm, model.dim, model.norm_eps, device)
            self.cross = build_attention(model, cross.by_layer(model.depth)[number], device)
            self.cross.set_depth(number)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        rotary: Rotary | None,
        caches: Sequence[Cache] = (),
        memory: Memory | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the block's output; value embeddings need the `tokens` (B, n)."""
        block_input = x
        attention_input = self._before(x, self.norm1)
        added = {}
        if self.value_embedding is not None:
            added["added_values"] = self.value_embedding(attention_input, tokens)
        attended = self.attn(attention_input, attn_mask, is_causal, rotary, *caches[:1], **added)
        x = self._add(x, self.attention_scale * attended, self.norm1)
        if self.cross is not None and memory is not None:
            cache = caches[1] if caches else None
            x = self._attend_to_memory(self.cross, x, memory, cache)
        if self.ffn is None:
            return x
        if self.parallel:
            return x + self.ffn(self.norm2(block_input))
        return self._add(x, self.ffn(self._before(x, self.norm2)), self.norm2)

    def _attend_to_memory(
        self, cross: TokenLayer, x: Tensor, memory: Memory, cache: Cache | None
    ) -> Tensor:
        """Return x after the cross-attention to `memory` and its skip connection."""
        tokens, mask = memory
        if cache is not None and cache.position:
            # The cache has the keys and values of the memory since the first call.
            tokens = tokens[:, :0]
        attended = cross(self._before(x, self.norm3), attn_mask=mask, cache=cache, memory=tokens)
        return self._add(x, self.attention_scale * attended, self.norm3)

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return the input of a branch: x itself, or its norm with pre-norm."""
        return norm(x) if self.pre else x

    def _add(self, x: Tensor, branch: Tensor, norm: nn.Module) -> Tensor:
        """Return x plus the output of a branch; post-norm normalises the sum."""
        total = x + branch
        return total if self.pre else norm(total)


def build_attention(model: TokenTransformer, spec: AttentionSpec, device: Device) -> TokenLayer:
    """Return an attention layer of `spec` with the sizes of `model`."""
    layer: TokenLayer = attn_layer(spec)(
        model.dim,
        model.heads,
        attn_head_dim=model.head_dim,
        qkv_bias=model.bias == "all",
        qk_norm=bool(model.qk_norm),
        proj_bias=model.bias == "all",
        attn_drop=model.attention_dropout,
        proj_drop=model.dropout,
        norm_layer=partial(
            HeadNorm,
            eps=model.qk_norm_eps,
            is_weighted=model.qk_norm != "unweighted",
            gain=model.qk_gain,
        ),
        device=device,
    )
    if isinstance(layer, Attention):
        layer.in_float32 = model.attention_precision == "float32"
    return layer


DOCUMENT_STARTS = "document starts"
"""Name in a cache of the index at which the current document of each row starts, (B,)."""


class Trunk(nn.Module):
    """Embedding, positions, blocks and, after pre-norm blocks, a final norm."""

    document_end: int | None = None
    """Token that separates documents, each of which is a sequence of its own; None: one sequence"""

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
        self.positions: nn.Embedding | None = None
        if model.positions == "learned":
            self.positions = nn.Embedding(context, model.dim, device=device)
        self.dropout = nn.Dropout(model.dropout)
        blocks = [Block(model, number, device, cross, vocabulary) for number in range(model.depth)]
        self.blocks = nn.ModuleList(blocks)
        connect_layers([block.attn for block in blocks])
        last = norm(model.norm, model.dim, model.norm_eps, device)
        self.norm = last if model.norm_order == "pre" else nn.Identity()

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay with `decay: weights`: learned positions."""
        return set() if self.positions is None else {"positions.weight"}

    @property
    def can_be_cached(self) -> bool:
        """True if a new token leaves the hidden states of all earlier tokens unchanged."""
        return self.is_causal

    def new_caches(self) -> list[Cache]:
        """Return an empty cache for every attention layer, to decode one batch of sequences with.

        Raises ValueError if a new token changes earlier ones, as in a bidirectional model.
        """
        if not self.can_be_cached:
            raise ValueError("a model that is bidirectional cannot be decoded token by token")
        return [layer.new_cache() for layer in self.modules() if isinstance(layer, TokenLayer)]

    @property
    def max_tokens(self) -> int | None:
        """Largest number of tokens with learned positions; None if no positions are learned."""
        limits = []
        if self.positions is not None:
            limits.append(self.context)
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
        cached = caches[0].position if caches else 0
        total = cached + tokens.shape[1]
        if self.positions is not None and total > self.context:
            raise ValueError(
                f"{total} tokens are more than the {self.context} positions this model learned"
            )
        positions = torch.arange(cached, total, device=tokens.device)
        mask = None if present is None else present[:, None, None, :]
        if self.document_end is not None:
            starts = self._find_document_starts(tokens, positions, caches)
            keys = torch.arange(total, device=tokens.device)
            mask = keys >= starts[:, None, :, None]
            positions = positions - starts
        x = self.embed(tokens, positions, caches)
        turns = self._rotate(positions)
        caches_per_block = len(caches) // len(self.blocks)

        def call_block(number: int, x: Tensor) -> Tensor:
            first = number * caches_per_block
            block_caches = caches[first : first + caches_per_block]
            block_mask = mask
            if mask is not None and block_caches:
                # A layer with a window stores the last tokens alone.
                block_mask = mask[..., -(block_caches[0].length + tokens.shape[1]) :]
            block = self.blocks[number]
            turn = turns[number]
            output: Tensor = block(
                x, block_mask, self.is_causal, turn, block_caches, memory, tokens
            )
            return output

        return self.norm(self.pass_blocks(x, call_block))

    def embed(self, tokens: Tensor, positions: Tensor, caches: Sequence[Cache] = ()) -> Tensor:
        """Return the input (B, n, d) of the first block for tokens (B, n) at `positions`.

        `caches` have the earlier tokens, which this network does not read.
        """
        x = self.add_positions(self.tokens(tokens) * self.embedding_scale, positions)
        return self.dropout(x)

    def pass_blocks(self, x: Tensor, call_block: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return the output of the blocks; `call_block(number, x)` is that of one block."""
        for number in range(len(self.blocks)):
            x = call_block(number, x)
        return x

    def _rotate(self, positions: Tensor) -> list[Rotary | None]:
        """Return the angles of `positions`, (n,) or (B, n), for each layer; equal ones are one."""
        if positions.ndim > 1:
            # Positions that differ between rows have an axis of heads.
            positions = positions.unsqueeze(1)
        computed: dict[Rotation | None, Rotary | None] = {None: None}
        turns = []
        for number in range(len(self.blocks)):
            rotation = self.model.rotation_of(number)
            if rotation is not None and rotation not in computed:
                computed[rotation] = rotary(positions, rotation.width, rotation.base)
            turns.append(computed[rotation])
        return turns

    def _find_document_starts(
        self, tokens: Tensor, indices: Tensor, caches: Sequence[Cache]
    ) -> Tensor:
        """Return the index in the sequence at which the document of each token starts, (B, n).

        A document starts with the token that separates it from the one before. `indices` (n,) are
        those of `tokens` in the sequence, after the cached tokens.
        """
        assert self.document_end is not None
        starts = torch.where(tokens.eq(self.document_end), indices, 0)
        if caches and DOCUMENT_STARTS in caches[0].totals:
            starts[:, 0] = torch.maximum(starts[:, 0], caches[0].totals[DOCUMENT_STARTS])
        starts = starts.cummax(1).values
        if caches:
            caches[0].totals[DOCUMENT_STARTS] = starts[:, -1].clone()
        return starts

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings x (B, n, d) plus those of `positions`, if there are any.

        `positions` are (n,), or (B, n) if they start again in each document.
        """
        if self.positions is not None:
            return x + self.positions(positions)
        if self.model.positions in ("rotary", "none"):
            return x
        is_fairseq = self.model.positions == "fairseq"
        return x + sinusoids(positions, self.model.dim, is_fairseq).to(x.dtype)


def sinusoids(positions: Tensor, dim: int, is_fairseq: bool = False) -> Tensor:
    """Return the fixed positions of Vaswani et al. 2017 (section 3.5), sines first; (..., n, d).

    fairseq begins with position 2, and its last frequency is 1e-4.
    """
    steps = torch.arange((dim + 1) // 2, device=positions.device, dtype=torch.float32)
    # These forms equal those of Transformer-XL's and fairseq's code to the last bit.
    rates = 1 / 10_000.0 ** (steps / (dim / 2))
    numbers = positions.to(torch.float32)
    if is_fairseq:
        rates = torch.exp(steps * -(math.log(10_000) / max(1, len(steps) - 1)))
        numbers = numbers + 2
    angles = numbers.unsqueeze(-1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :dim]


@torch.no_grad()
def initialise(network: nn.Module, model: TokenTransformer, tied: bool) -> None:
    """Fill the parameters of a freshly built `network`, in place, as `model.init` says."""
    for module in outside_composers(network).values():
        _initialise_module(module, model.init, tied)
    if model.init.depth_scaled:
        for module in network.modules():
            if isinstance(module, Block):
                _scale_by_depth(module, model.depth)


def _initialise_module(module: nn.Module, init: Init, tied: bool) -> None:
    """Fill the parameters of one module; modules of other classes keep PyTorch's values."""
    if isinstance(module, Attention) and init.matrices == "fairseq":
        _draw_as_fairseq(module)
    elif isinstance(module, nn.Linear) and not isinstance(init.matrices, str):
        nn.init.normal_(module.weight, std=init.matrices)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding) and init.embedding != "torch":
        nn.init.normal_(module.weight, std=init.embedding)
    elif isinstance(module, nn.Embedding) and tied:
        bound = 1 / math.sqrt(module.embedding_dim)
        nn.init.uniform_(module.weight, -bound, bound)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
        nn.init.normal_(module.weight, 1.0, init.norms)


def _scale_by_depth(block: Block, depth: int) -> None:
    """Multiply the matrices that write to the residual stream by 1 / sqrt(2 depth).

    They are W, W^l or W_p of every attention layer, and the last matrix of the FFN.
    """
    matrices: list[nn.Linear] = []
    for layer in block.modules():
        if isinstance(layer, Attention):
            matrices.append(layer.proj)
            residual_parts = layer.residual.modules()
            matrices.extend(part for part in residual_parts if isinstance(part, nn.Linear))
    if block.ffn is not None:
        matrices.append(block.ffn.down)
    for matrix in matrices:
        matrix.weight.mul_((2 * depth) ** -0.5)


def _draw_as_fairseq(layer: Attention) -> None:
    """Draw q, k and v by Xavier's rule with gain 1 / sqrt(2) and W with gain 1; zero W's bias."""
    # sqrt(6 / (inputs + outputs)) / sqrt(2); q, k and v are one matrix here.
    bound = (3 / (layer.qkv.in_features + layer.proj.in_features)) ** 0.5
    nn.init.uniform_(layer.qkv.weight, -bound, bound)
    extra_keys = layer.similarity.extra_key_weights()
    if extra_keys is not None:
        nn.init.uniform_(extra_keys, -bound, bound)
    nn.init.xavier_uniform_(layer.proj.weight)
    if layer.proj.bias is not None:
        nn.init.zeros_(layer.proj.bias)
