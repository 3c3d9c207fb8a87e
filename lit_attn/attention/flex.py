"""Softmax attention by PyTorch's flex_attention: a compiled kernel for logits with further terms.

The logits of query i and key r of token j are

    s_ijr = scale q_i . k_jr + key_bias_jr + bias_ij,

with masks and order of masks.py. Logits and values can have different widths, the terms of keys and
pairs have gradients, and the kernel forms no tensor of size n x M n'. Uncompiled, flex_attention
forms all logits; so `attend` compiles it, unless it is part of compiled code already.

The M keys of a token are neighbours: key r of token j has the index j M + r. So keys that come from
one projection need no copy, and the causal order compares i with the index divided by M.

Dropout drops a pair of tokens with all of its keys. A hash of (seed, batch, head, i, j) decides
which pairs stay. The kernel sums over these pairs alone, so its softmax is divided by their sum of
exponentials, not by that of all pairs. A second call returns the log-sum-exp of all pairs, and

    dropped sum = sum of the pairs that stay * exp(lse of these - lse of all) / (1 - p).

A hard assignment takes the largest of a token's M logits: the others are hidden by -inf. A kernel
sees one key at a time, so the largest key of every pair of tokens is computed before, from products
with differences of keys, and its number is kept in one to four bits.

Shapes: B batch, n queries, n' tokens with keys, H heads, M keys for every token, E width of the
features, D of the values.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    create_block_mask,
    flex_attention,
)

from lit_attn.attention.derivatives import refuse_forward_mode
from lit_attn.attention.filters import KeyBlocks
from lit_attn.attention.flex_support import NARROWEST
from lit_attn.attention.formed import large_chunk
from lit_attn.attention.masks import Masks, in_chunks
from lit_attn.attention.precision import multiply, wide
from lit_attn.private_names.of_torch import compiler_limits, mark_static

# Odd numbers that spread (batch and head), query and token over the 2^32 values of an int32.
SPREAD_HEADS, SPREAD_QUERIES, SPREAD_TOKENS = 0x1B873593, 0x2545F491, 0x4CF5AD43
# Factor of a published integer hash: two rounds change every output bit with every input bit.
MIXER = 0x45D9F3B

# The lowest bits of a hash that are compared with the probability of dropout.
RANDOM_BITS = 24

# Queries and keys of a tile that the kernel computes or skips as a whole.
TILE = 128

# The kernel for few queries, which PyTorch would choose below 128, writes its sums in parts that a
# second kernel reads.
OPTIONS: FlexKernelOptions = {"BACKEND": "TRITON"}

# Largest number of different calls of uncompiled layers, each of which is compiled: by mechanism,
# number of keys, masks, precision, training or evaluation.
VARIANTS = 128

# Beyond its limit of recompilations PyTorch would form all logits without a word. Numbers of a
# layer, such as the window, the offset and the scale, are constants of the compiled code: as
# variables they would be captured by the functions of scores and masks, where PyTorch fails for
# some of them (https://github.com/pytorch/pytorch/issues/182606).
SETTINGS = {"recompile_limit": VARIANTS, "specialize_int": True, "specialize_float": True}

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Scores(NamedTuple):
    """Everything that the logits and their sums are computed from, beside the values.

    q (B, H, n, E), k (B, H, M, n', E) and key_bias (B, H, M, n') or None. `scale` multiplies the
    products of q and k, not `key_bias`. `dropout` is the probability of dropping a pair.
    `sink` is the logit of a key without value, broadcastable to (B, H, n), or None. `largest` has
    the only key of a token that counts for a query, or is None: all M count. `blocks` are those
    that queries attend to, without other masks than the causal one, or None: all blocks.
    """

    q: Tensor
    k: Tensor
    key_bias: Tensor | None
    masks: Masks
    scale: float
    dropout: float
    sink: Tensor | None
    largest: "LargestKeys | None" = None
    blocks: KeyBlocks | None = None


def attend(scores: Scores, v: Tensor, hard: bool = False) -> Tensor:
    """Return the weighted sums (B, H, n, D) of v (B, H, n', D).

    `hard`: the largest of a token's M logits counts, not their log-sum-exp. q, k and v have one
    dtype. A query that sees no key gets zeros. Raises RuntimeError for derivatives in forward mode;
    second derivatives are an error of PyTorch.
    """
    refuse_forward_mode(scores.q, scores.k, scores.key_bias, v, scores.masks.bias)
    if hard and scores.k.shape[2] > 1:
        # The number of chunks depends on the number of tokens. As a part of `_compiled` this would
        # be compiled anew for every length.
        scores = scores._replace(largest=LargestKeys.find(scores))
    if torch.compiler.is_compiling():
        return weighted_sums(scores, v)
    _mark_static(scores, v)
    with compiler_limits(**SETTINGS):
        return _compiled()(scores, v)


@functools.cache
def _compiled() -> Callable[[Scores, Tensor], Tensor]:
    """Return `weighted_sums`, compiled; all uncompiled layers share it."""
    return torch.compile(weighted_sums)


def _mark_static(scores: Scores, v: Tensor) -> None:
    """Mark the sizes that differ between layers: heads, M keys and widths.

    A size that changes between two calls becomes a variable of the compiled code. The kernels
    accept that for the batch and the tokens, but PyTorch 2.11 fails for M.
    """
    for tensor in (scores.q, scores.k, v):
        mark_static(tensor, 1)
        mark_static(tensor, tensor.ndim - 1)
    mark_static(scores.k, 2)
    if scores.key_bias is not None:
        mark_static(scores.key_bias, 1)
        mark_static(scores.key_bias, 2)


def weighted_sums(scores: Scores, v: Tensor) -> Tensor:
    """Return the sums of `attend` by flex_attention, in compiled code."""
    m, tokens = scores.k.shape[2:4]
    keys = scores.k.transpose(2, 3).flatten(2, 3)
    values = v
    if m > 1:
        values = v.unsqueeze(3).expand(-1, -1, -1, m, -1).flatten(2, 3)
    order = _order(scores.masks, scores.q.shape[2], tokens, m, scores.q.device)
    if scores.blocks is not None:
        order = mask_of_blocks(scores.blocks, tokens, scores.masks.is_causal)
    needs_lse = scores.sink is not None or scores.dropout > 0
    if not needs_lse:
        return flex_attention(
            scores.q,
            keys,
            values,
            _score_mod(scores, None),
            order,
            scores.scale,
            kernel_options=OPTIONS,
        )
    seed = None
    if scores.dropout > 0:
        seed = torch.randint(2**31 - 1, (), dtype=torch.int32, device=v.device)
    out, lse = _with_lse(scores, keys, values, _score_mod(scores, seed), order)
    factor = None
    if seed is not None:
        # The sums of this call are not needed, so it reads as few columns of the values as it can.
        few_values = values[..., :NARROWEST]
        _, lse_of_all = _with_lse(scores, keys, few_values, _score_mod(scores, None), order)
        factor = _exp_of_difference(lse, lse_of_all) / (1 - scores.dropout)
        lse = lse_of_all
    if scores.sink is not None:
        share = torch.sigmoid(lse - scores.sink)
        factor = share if factor is None else factor * share
    assert factor is not None
    return (wide(out) * factor.unsqueeze(-1)).to(out.dtype)


def _with_lse(
    scores: Scores, keys: Tensor, values: Tensor, score_mod: ScoreMod, order: BlockMask | None
) -> tuple[Tensor, Tensor]:
    """Return the sums (B, H, n, D), and the log-sum-exp of the logits of each query (B, H, n)."""
    out, more = flex_attention(
        scores.q,
        keys,
        values,
        score_mod,
        order,
        scores.scale,
        kernel_options=OPTIONS,
        return_aux=AuxRequest(lse=True),
    )
    assert more.lse is not None
    return out, more.lse


def _exp_of_difference(lse: Tensor, lse_of_all: Tensor) -> Tensor:
    """Return exp(lse - lse_of_all), and 0 with a gradient of 0 where no pair stays."""
    is_empty = lse == -math.inf
    difference = lse.masked_fill(is_empty, 0) - lse_of_all.masked_fill(is_empty, 0)
    return difference.exp().masked_fill(is_empty, 0)


def _order(
    masks: Masks, queries: int, tokens: int, m: int, device: torch.device
) -> BlockMask | None:
    """Return the mask of the order of tokens, which lets the kernel skip blocks of pairs."""
    is_causal = masks.is_causal
    window = masks.window
    without_self = masks.without_self
    offset = masks.offset
    if not is_causal and window is None and not without_self:
        return None

    def is_visible(b: Tensor, h: Tensor, i: Tensor, key: Tensor) -> Tensor:
        position = i + offset
        j = key // m
        visible = j >= 0
        if is_causal:
            visible = visible & (j <= position)
        if window is not None:
            visible = visible & ((position - j).abs() < window)
        if without_self:
            visible = visible & (position != j)
        return visible

    return create_block_mask(is_visible, None, None, queries, m * tokens, device)


def mask_of_blocks(blocks: KeyBlocks, tokens: int, is_causal: bool) -> BlockMask:
    """Return the mask of chosen blocks of keys, which lets the kernel skip tiles of pairs.

    A tile of TILE queries and TILE keys is computed if one of its queries has chosen one of its
    keys; within the tile, the mask of pairs holds.
    """
    is_chosen, size = blocks
    queries = is_chosen.shape[2]
    rows = -(-queries // TILE)
    columns = -(-tokens // TILE)
    by_rows = F.pad(is_chosen, (0, 0, 0, rows * TILE - queries)).unflatten(2, (rows, TILE)).any(3)
    of_keys = by_rows.repeat_interleave(size, dim=3)[..., :tokens]
    padded = F.pad(of_keys, (0, columns * TILE - tokens))
    is_needed = padded.unflatten(3, (columns, TILE)).any(4)
    if is_causal:
        is_needed = is_needed & torch.ones_like(is_needed[0, 0]).tril()
    numbers = is_needed.sum(-1, dtype=torch.int32)
    indices = is_needed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)

    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = is_chosen[b, h, i, j // size]
        return visible & (j <= i) if is_causal else visible

    return BlockMask.from_kv_blocks(
        numbers,
        indices.to(torch.int32),
        BLOCK_SIZE=TILE,
        mask_mod=is_visible,
        seq_lengths=(queries, tokens),
    )


def _score_mod(scores: Scores, seed: Tensor | None) -> ScoreMod:
    """Return the function that adds biases to a logit, and hides it by -inf.

    The keys of a token that are not the largest are hidden, and with a `seed` all keys of a pair of
    tokens that dropout drops.
    """
    largest = scores.largest
    heads = scores.q.shape[1]
    m = scores.k.shape[2]
    dropout = scores.dropout
    key_bias = None
    if scores.key_bias is not None:
        # A captured tensor keeps one axis for the tokens and one for the keys of a token. Its
        # gradient needs its sizes, and PyTorch 2.15 cannot compile one that is a product of M and a
        # variable number of tokens.
        key_bias = wide(scores.key_bias).transpose(2, 3)
    bias = None
    if scores.masks.bias is not None:
        bias = _Pairs.from_mask(wide(scores.masks.bias))
    visibility = None
    if scores.masks.visibility is not None:
        visibility = _Pairs.from_mask(scores.masks.visibility)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, key: Tensor) -> Tensor:
        j = key // m
        if key_bias is not None:
            score = score + key_bias[b, h, j, key % m]
        if bias is not None:
            score = score + bias.at(b, h, i, j)
        if visibility is not None:
            score = torch.where(visibility.at(b, h, i, j), score, -math.inf)
        if largest is not None:
            score = torch.where(largest.at(b, h, i, j) == key % m, score, -math.inf)
        if seed is not None:
            stays = is_kept(seed, b * heads + h, i, j, dropout)
            score = torch.where(stays, score, -math.inf)
        return score

    return score_mod


class LargestKeys(NamedTuple):
    """Number of the key with the largest logit for every pair of tokens, in `bits` bits.

    `packed` (B, H, n, bytes) has the numbers of 8 / `bits` neighbouring tokens in every byte. Of
    equal logits the last one counts.
    """

    packed: Tensor
    bits: int

    @classmethod
    @torch.no_grad()
    def find(cls, scores: Scores) -> "LargestKeys":
        """Return the largest keys, from logits relative to those of the first key, in chunks."""
        q = scores.q
        batch, heads, m, tokens = scores.k.shape[:4]
        bits = next(bits for bits in (1, 2, 4, 8) if m <= 2**bits)
        keys = wide(scores.k)
        differences = (keys[:, :, 1:] - keys[:, :, :1]).to(q.dtype)
        bias = None
        if scores.key_bias is not None:
            of_keys = wide(scores.key_bias)
            bias = (of_keys[:, :, 1:] - of_keys[:, :, :1]).unsqueeze(2)
        bytes_of_a_query = batch * heads * (m - 1) * tokens * q.element_size()
        size = large_chunk(q.shape[2], bytes_of_a_query, scores.masks.is_causal)
        tokens_of_a_byte = 8 // bits
        all_bytes = -(-tokens // tokens_of_a_byte)
        parts = []
        for rows in in_chunks(q.shape[2], size):
            visible = scores.masks.visible(rows, tokens)
            first_byte = visible.start // tokens_of_a_byte
            columns = slice(first_byte * tokens_of_a_byte, visible.stop)
            logits = wide(
                multiply(
                    "bhce,bhrme->bhcrm", q[:, :, rows], differences[..., columns, :], scores.scale
                )
            )
            if bias is not None:
                logits = logits + bias[..., columns]
            packed = _pack(_number_of_largest(logits.unbind(3)), bits)
            bytes_after = all_bytes - first_byte - packed.shape[-1]
            parts.append(F.pad(packed, (first_byte, bytes_after)))
        return cls(torch.cat(parts, 2), bits)

    def at(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return the number of the largest key for the indices of batch, head, query and token."""
        tokens_of_a_byte = 8 // self.bits
        byte = self.packed[b, h, i, j // tokens_of_a_byte].to(torch.int32)
        shift = (j % tokens_of_a_byte) * self.bits
        return (byte >> shift) & (2**self.bits - 1)


def _number_of_largest(logits: Sequence[Tensor]) -> Tensor:
    """Return the number of the largest key from logits relative to that of the key 0."""
    largest = torch.zeros_like(logits[0])
    numbers = torch.zeros_like(logits[0], dtype=torch.uint8)
    for number, logit in enumerate(logits, 1):
        is_smaller = largest > logit
        largest = torch.where(is_smaller, largest, logit)
        numbers = torch.where(is_smaller, numbers, number)
    return numbers


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers (..., n') below 2^bits as bytes (..., n' bits / 8), the first the lowest."""
    tokens_of_a_byte = 8 // bits
    missing = -numbers.shape[-1] % tokens_of_a_byte
    of_bytes = F.pad(numbers, (0, missing)).unflatten(-1, (-1, tokens_of_a_byte))
    shifts = bits * torch.arange(tokens_of_a_byte, dtype=torch.int32, device=numbers.device)
    # Compiled code computes the numbers in this sum, and does not write them.
    return (of_bytes.to(torch.int32) << shifts).sum(-1, dtype=torch.int32).to(torch.uint8)


class _Pairs(NamedTuple):
    """Mask (B, H, n, n') or smaller without its axes of size 1, and which axes it has."""

    values: Tensor
    axes: tuple[int, ...]

    @classmethod
    def from_mask(cls, mask: Tensor) -> "_Pairs":
        """Return the mask for look-ups: the axes of size 1 would need copies to be indexed."""
        mask = mask[(None,) * (4 - mask.ndim)]
        axes = tuple(axis for axis in range(4) if mask.shape[axis] > 1)
        kept_sizes = [mask.shape[axis] for axis in axes]
        return cls(mask.reshape(kept_sizes or [1]), axes)

    def at(self, *indices: Tensor) -> Tensor:
        """Return the value for the indices of batch, head, query and token."""
        if not self.axes:
            return self.values[indices[0] * 0]
        return self.values[tuple(indices[axis] for axis in self.axes)]


def is_kept(seed: Tensor, head: Tensor, i: Tensor, j: Tensor, dropout: float) -> Tensor:
    """Return True for the pairs of query i and token j of a head that dropout keeps.

    `head` counts the heads of all sequences. Both passes and every device get the same answer.
    """
    mixed = (
        seed
        + head.to(torch.int32) * SPREAD_HEADS
        + i.to(torch.int32) * SPREAD_QUERIES
        + j.to(torch.int32) * SPREAD_TOKENS
    )
    for _ in range(2):
        mixed = (mixed ^ _upper_half(mixed)) * MIXER
    mixed = mixed ^ _upper_half(mixed)
    limit = round(dropout * 2**RANDOM_BITS)
    return (mixed & (2**RANDOM_BITS - 1)) >= limit


def _upper_half(number: Tensor) -> Tensor:
    """Return the upper 16 bits of an int32 as its lower bits; `>>` alone would copy the sign."""
    return (number >> 16) & 0xFFFF
