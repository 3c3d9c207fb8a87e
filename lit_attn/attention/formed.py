"""Attention from weights that are formed, in pieces: a slice of the batch and a chunk of queries.

The backward pass forms each piece again, so autograd saves no tensor of size n x n.

Shapes: B batch, n queries, n' tokens with keys, H heads, M keys for every token, D head width, E
width of the features, c queries of a chunk, m keys that they can see.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import get_device_states, set_device_states

from lit_attn.attention.derivatives import refuse_forward_mode, refuse_second_derivatives
from lit_attn.attention.masks import CHUNK, Masks, differs_between_heads, in_chunks
from lit_attn.attention.normaliser import Normaliser
from lit_attn.attention.precision import keeps_range, multiply, wide, without_autocast

# Number of keys up to which all queries are one chunk: keeping its weights is then cheaper than
# computing them twice.
ONE_CHUNK_UP_TO = 384

# Bytes of the weights of a piece in compiled code on a CPU, for each thread: a core's cache.
PIECE = 1 << 21


class Formed(NamedTuple):
    """Everything that the weights of a call are computed from.

    q (B, H, n, E), k (B, H, M, n', E). `maps` are the composers' maps of all tokens by place and
    side. `hard`: the largest of a token's M logits counts, not their log-sum-exp. `scale`
    multiplies the products of q and k.
    """

    masks: Masks
    q: Tensor
    k: Tensor
    maps: dict[str, dict[str, Any]]
    composers: nn.ModuleDict
    normaliser: Normaliser
    hard: bool
    scale: float
    dropout: float


def attend_in_pieces(formed: Formed, v: Tensor) -> Tensor:
    """Return the weighted sums (B, H, n, D) of v (B, H, n', D), from weights that are formed."""
    b, heads, n = formed.q.shape[:3]
    keys = formed.k.shape[-2]
    # On the meta device, where FLOPs are counted, all queries attend to all keys, as in the FLOPs
    # of one kernel call.
    is_long = keys > ONE_CHUNK_UP_TO and n > CHUNK and not v.is_meta
    if torch.compiler.is_compiling():
        weights_bytes = b * heads * n * keys * v.element_size()
        is_large = b > 1 and n > 1 and weights_bytes > PIECE
        if is_long or (v.device.type == "cpu" and is_large):
            return attend_with_shared_code(formed, v, is_long)
    elif is_long:
        return _attend_in_turn(_attend_piece, formed, v, len(v), CHUNK)
    return _attend_piece(formed, v, 0, n)


@torch.compiler.disable
def attend_with_shared_code(formed: Formed, v: Tensor, is_long: bool) -> Tensor:
    """Return the sums of all queries, by compiled code that pieces and layers share.

    In one graph with the layer, each chunk would be compiled anew: at 6 heads a chunk of a layer
    took 49 s of a CPU (two layers, 513 tokens), and the steps were not faster. On a CPU the weights
    of a piece stay in a core's cache.
    """
    b, heads, n = formed.q.shape[:3]
    keys = formed.k.shape[-2]
    chunk = CHUNK if is_long else n
    size = b
    if v.device.type == "cpu":
        bytes_of_a_sequence = heads * chunk * keys * v.element_size()
        limit = max(1, PIECE * torch.get_num_threads() // bytes_of_a_sequence)
        # A power of two divides most batches; few sizes need few compilations.
        power_of_two = 1 << (limit.bit_length() - 1)
        size = min(b, power_of_two)
    attend = torch.compile(_attend_piece, dynamic=True if is_long else None)
    return _attend_in_turn(attend, formed, v, size, chunk)


def _attend_in_turn(
    attend: Callable[..., Tensor], formed: Formed, v: Tensor, size: int, chunk: int
) -> Tensor:
    """Return all sums, from pieces of `size` sequences (the last ones of 1) and `chunk` queries."""
    visibility = _for_every_sequence(formed.masks.visibility, len(v))
    bias = _for_every_sequence(formed.masks.bias, len(v))
    # With the tokens last, sums over heads read contiguous rows.
    maps = pytree.tree_map_only(Tensor, _with_tokens_last, formed.maps)
    # `_InTurn` expects q, k and v first.
    leaves, structure = pytree.tree_flatten((formed.q, formed.k, v, maps, visibility, bias))

    # `attend_piece` outlives the backward pass. So it must not refer to `formed` or to any other
    # tensor of the whole batch, only to the modules and numbers that all pieces share.
    masks_without_tensors = formed.masks._replace(visibility=None, bias=None)
    composers = formed.composers
    normaliser = formed.normaliser
    hard = formed.hard
    scale = formed.scale
    dropout = formed.dropout

    def attend_piece(rows: slice, *parts: Tensor | None) -> Tensor:
        q, k, values, maps, visibility, bias = pytree.tree_unflatten(parts, structure)
        piece = Formed(
            masks=masks_without_tensors._replace(visibility=visibility, bias=bias),
            q=q,
            k=k,
            maps=maps,
            composers=composers,
            normaliser=normaliser,
            hard=hard,
            scale=scale,
            dropout=dropout,
        )
        return attend(piece, values, rows.start, rows.stop)

    pieces = _pieces(len(v), size, formed.q.shape[-2], chunk)
    parameters = [*composers.parameters(), *normaliser.parameters()]
    refuse_forward_mode(*leaves, *parameters)
    is_random = dropout > 0
    return _InTurn.apply(attend_piece, pieces, is_random, len(leaves), *leaves, *parameters)


def _with_tokens_last(part: Tensor) -> Tensor:
    """Return a map (B, n, ...) with its tokens last in memory."""
    return part.movedim(1, -1).contiguous().movedim(-1, 1)


def _pieces(batch: int, size: int, n: int, chunk: int) -> list[tuple[slice, slice]]:
    """Return the slices of the batch and of the n queries of every piece.

    Sequences that remain beyond pieces of `size` are pieces of one sequence, so that compiled code
    has two sizes for any batch.
    """
    full = batch - batch % size
    slices_of_batch = in_chunks(full, size)
    for i in range(full, batch):
        slices_of_batch.append(slice(i, i + 1))
    return list(itertools.product(slices_of_batch, in_chunks(n, chunk)))


def _for_every_sequence(mask: Tensor | None, batch: int) -> Tensor | None:
    """Return a mask with an axis of `batch` sequences, without a copy."""
    if mask is None:
        return None
    return mask[(None,) * (4 - mask.ndim)].expand(batch, -1, -1, -1)


class _InTurn(torch.autograd.Function):
    """Sums (B, H, n, D) from pieces; the backward pass computes each piece again.

    With `torch.utils.checkpoint`, which calls hooks for each piece, a dcmha block of 65 tokens took
    1.88 instead of 1.60 times timm's time. Second derivatives raise RuntimeError.
    """

    @staticmethod
    def forward(
        ctx: Any,
        attend: Callable[..., Tensor],
        pieces: list[tuple[slice, slice]],
        is_random: bool,
        sliced: int,
        *tensors: Any,
    ) -> Tensor:
        """`attend` takes the queries of a piece and its part of the first `sliced` tensors.

        The first three tensors are q, k and v, and those after the sliced ones are parameters.
        """
        q, _, v = tensors[:3]
        kind = v.device.type
        ctx.attend = attend
        ctx.pieces = pieces
        ctx.sliced = sliced
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.random = None
        if is_random:
            state = torch.get_rng_state()
            devices, device_states = get_device_states(v)
            ctx.random = state, devices, device_states
        ctx.save_for_backward(*tensors)
        b, heads, n = q.shape[:3]
        out = v.new_empty(b, n, heads, v.shape[-1]).transpose(1, 2)
        for batch, rows in pieces:
            parts = [None if x is None else x[batch] for x in tensors[:sliced]]
            out[batch, :, rows] = attend(rows, *parts)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sliced = ctx.sliced
        tensors = ctx.saved_tensors
        # The first four arguments of `forward` are not tensors.
        needed = ctx.needs_input_grad[4:]
        wanted = [i for i, is_needed in enumerate(needed) if is_needed]
        totals = {i: torch.zeros_like(tensors[i]) for i in wanted}
        with _as_in_forward(ctx.random, ctx.autocast):
            for batch, rows in ctx.pieces:
                parts = [None if x is None else x[batch].detach() for x in tensors[:sliced]]
                inputs = [*parts, *tensors[sliced:]]
                wanted_inputs = [inputs[i].requires_grad_() for i in wanted]
                out = ctx.attend(rows, *parts)
                piece_gradients = torch.autograd.grad(
                    out, wanted_inputs, gradient[batch, :, rows], allow_unused=True
                )
                for i, piece_gradient in zip(wanted, piece_gradients, strict=True):
                    if piece_gradient is None:
                        continue
                    # Parameters belong to all sequences.
                    total = totals[i][batch] if i < sliced else totals[i]
                    total.add_(piece_gradient)
        gradients = [totals.get(i) for i in range(len(tensors))]
        guarded = refuse_second_derivatives(gradients, [gradient, *tensors])
        return None, None, None, None, *guarded


@contextlib.contextmanager
def _as_in_forward(
    random: tuple[Tensor, list[int], list[Tensor]] | None, autocast: tuple[Any, ...]
) -> Iterator[None]:
    """Compute as the forward pass did: with its random numbers, its autocast and a graph.

    `random` are the states of the generators of the CPU and of the devices, or None without
    dropout. `autocast` are the arguments of torch.autocast.
    """
    state, devices, device_states = (None, [], []) if random is None else random
    with (
        torch.random.fork_rng(devices, enabled=state is not None),
        torch.autocast(*autocast),
        torch.enable_grad(),
    ):
        if state is not None:
            torch.set_rng_state(state)
            set_device_states(devices, device_states)
        yield


def _attend_piece(formed: Formed, v: Tensor, start: int, stop: int) -> Tensor:
    """Return the sums of the queries from `start` to `stop`, (B, H, c, D)."""
    rows = slice(start, stop)
    columns = formed.masks.visible(rows, formed.k.shape[-2])
    a = form_weights(formed, rows, columns, v.dtype)
    return F.dropout(a, formed.dropout) @ v[..., columns, :]


def form_weights(formed: Formed, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """Return the weights (B, H, c, m) of the queries `rows` for the keys `columns`, in `dtype`.

    Logits -> maximum or, before a composition, log-sum-exp over M -> composition -> masks ->
    normaliser -> composition. `columns` contains every key that the queries can see.
    """
    masks = formed.masks
    keys = formed.k.shape[-2]
    visible = masks.chunk(rows, columns, keys, formed.q.device)
    logits = _logits(formed, rows, columns)
    bias = masks.bias_of_chunk(rows, columns, keys)
    if bias is not None:
        logits = wide(logits) + wide(bias).unsqueeze(-2)
    if visible is not None:
        logits = logits.masked_fill(~visible.unsqueeze(-2), torch.finfo(logits.dtype).min)
    a = formed.normaliser.over_keys(logits, visible).to(dtype)
    if "post" in formed.composers:
        if visible is not None and differs_between_heads(visible):
            # The softmax of a head that sees no key is uniform; other heads must not take it over.
            a = a.masked_fill(~visible, 0)
        a = _compose("post", formed, a, rows, columns)
    if visible is None:
        return a
    # Composition fills masked positions again, and a query that sees no key gets zero.
    return a.masked_fill(~visible, 0)


def _logits(formed: Formed, rows: slice, columns: slice) -> Tensor:
    """Return the logits (B, H, c, M, m) before masks; M is 1 after a maximum or a composition.

    Logits of float16 features are in float32: products of finite features can overflow float16.
    """
    q = formed.q[:, :, rows]
    k = formed.k[..., columns, :]
    if q.shape[-2] == 1:
        # A cache is not contiguous, and `einsum` would copy its keys.
        logits = multiply_query(q, k, formed.scale).transpose(2, 3)
    else:
        logits = multiply("bhce,bhrme->bhcrm", q, k, formed.scale)
    if formed.hard:
        logits = _largest(logits.unbind(3)).unsqueeze(3)
    if "pre" not in formed.composers:
        return logits
    a = logits.squeeze(3) if logits.shape[3] == 1 else logits.logsumexp(3)
    if keeps_range(q):
        composed = _compose("pre", formed, a, rows, columns)
    else:
        # Autocast would compose the logits, which are in float32, in half precision.
        with without_autocast(q):
            composed = _compose("pre", formed, a, rows, columns)
    return composed.unsqueeze(3)


def _largest(components: Sequence[Tensor]) -> Tensor:
    """Return the largest component at every position.

    `maximum` and `amax` would share the gradient of equal numbers, which costs three times the
    memory uncompiled and 1.6 times the time compiled.
    """
    largest = components[0]
    for component in components[1:]:
        largest = torch.where(largest > component, largest, component)
    return largest


def multiply_query(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scale q k^T (B, H, M, 1, n) of one query (B, H, 1, E), its keys (B, H, M, n, E)."""
    if not keeps_range(k):
        return multiply("bhce,bhrme->bhrcm", q, k, scale)
    q = q * scale
    if k.shape[-1] < 128 or k.device.type != "cpu":
        return q.unsqueeze(2) @ k.mT
    # A CPU multiplies 1,000 such keys in a third of the time if the query is a column, but not if
    # the query is expanded without a copy, or copied after it is transposed.
    return (k @ q.unsqueeze(2).repeat(1, 1, k.shape[2], 1, 1).mT).mT


def _compose(place: str, formed: Formed, a: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return a (B, H, c, m) composed at `place`, by the maps of its queries and of its keys."""
    maps = formed.maps[place]
    query = _maps_of_tokens(maps.get("query"), rows)
    key = _maps_of_tokens(maps.get("key"), columns)
    return formed.composers[place](a, query, key)


def _maps_of_tokens(maps: Any, tokens: slice) -> Any:
    """Return the maps of `tokens`, a NamedTuple as `maps`; None without maps."""
    if maps is None:
        return None
    # With a slice in the comprehension, PyTorch 2.11 would compile each chunk anew.
    start, stop = tokens.start, tokens.stop
    return maps._make(None if part is None else part[:, start:stop] for part in maps)
