"""Attention from weights that are formed, in chunks of queries.

The backward pass forms each chunk again, so autograd saves no tensor of size n x n.

Shapes: B batch, n queries, n' tokens with keys, H heads, M keys for every token, D head width, E
width of the features, c queries of a chunk, m keys that they can see.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from lit_attn.attention.cache import Cache
from lit_attn.attention.derivatives import refuse_forward_mode, refuse_second_derivatives
from lit_attn.attention.filters import Filter
from lit_attn.attention.masks import CHUNK, Masks, differs_between_heads, in_chunks
from lit_attn.attention.normaliser import Normaliser
from lit_attn.attention.precision import keeps_range, multiply, wide
from lit_attn.private_names.of_torch import tree_flatten, tree_unflatten

# Number of keys up to which all queries are one chunk: keeping its weights is then cheaper than
# computing them twice.
ONE_CHUNK_UP_TO = 384

# Bytes of the weights of a chunk on a GPU and in compiled code: few for the memory of a GPU.
FEW_BYTES = 1 << 28

# Chunks of a causal layer in compiled code. Each chunk needs the keys up to its last query only.
CAUSAL_CHUNKS = 4


class Formed(NamedTuple):
    """Everything that the weights of a call are computed from.

    q (B, H, n, E), k (B, H, M, n', E). `maps` are the composers' maps of all tokens by place and
    side. `hard`: the largest of a token's M logits counts, not their log-sum-exp. `scale`
    multiplies the products of q and k. `cache` holds the earlier tokens, for a filter.
    """

    masks: Masks
    q: Tensor
    k: Tensor
    maps: dict[str, dict[str, Any]]
    composers: nn.ModuleDict
    normaliser: Normaliser
    filter: Filter
    cache: Cache | None
    hard: bool
    scale: float
    dropout: float


def attend_in_pieces(formed: Formed, v: Tensor) -> Tensor:
    """Return the weighted sums (B, H, n, D) of v (B, H, n', D), from weights that are formed."""
    n = formed.q.shape[-2]
    keys = formed.k.shape[-2]
    # On the meta device, where FLOPs are counted, all queries attend to all keys, as in the FLOPs
    # of one kernel call.
    is_long = keys > ONE_CHUNK_UP_TO and n > CHUNK and not v.is_meta
    # A filter reads the logits of all earlier queries.
    if not is_long or formed.filter.is_active:
        return _attend_chunk(formed, v, 0, n)
    if torch.compiler.is_compiling():
        return _attend_recomputed(formed, v)
    return _attend_in_turn(formed, v)


def _attend_recomputed(formed: Formed, v: Tensor) -> Tensor:
    """Return all sums in one graph; the backward pass forms the weights of each chunk again.

    Every chunk is compiled anew, so there are few of them: as many as `FEW_BYTES` of weights
    require, and in causal order four, which leave out three of eight pairs of tokens.
    """
    n = formed.q.shape[-2]
    size = large_chunk(n, _bytes_of_a_query(formed, v), formed.masks.is_causal)
    sums = []
    for rows in in_chunks(n, size):
        chunk = functools.partial(_attend_chunk, formed, v, rows.start, rows.stop)
        sums.append(checkpoint(chunk, use_reentrant=False))
    if len(sums) == 1:
        return sums[0]
    return torch.cat(sums, -2)


def large_chunk(n: int, bytes_of_a_query: int, is_causal: bool) -> int:
    """Return the number of queries of a chunk on a GPU and in compiled code, at least CHUNK.

    A chunk has FEW_BYTES of logits. In causal order there are at least CAUSAL_CHUNKS of n queries.
    """
    size = FEW_BYTES // bytes_of_a_query
    if is_causal:
        size = min(size, -(-n // CAUSAL_CHUNKS))
    return max(CHUNK, size)


def _bytes_of_a_query(formed: Formed, v: Tensor) -> int:
    b, heads = formed.q.shape[:2]
    return b * heads * formed.k.shape[-2] * v.element_size()


def _attend_in_turn(formed: Formed, v: Tensor) -> Tensor:
    """Return all sums, from chunks of queries that autograd does not keep.

    On a GPU a chunk has FEW_BYTES of weights: every chunk needs the same number of kernels, however
    many queries it has.
    """
    leaves, structure = tree_flatten(
        (
            formed.q,
            formed.k,
            v,
            formed.maps,
            formed.masks.visibility,
            formed.masks.bias,
            formed.masks.terms,
        )
    )
    # `attend_chunk` outlives the backward pass. So it must not refer to `formed` or to any other
    # tensor of a token, only to modules and numbers.
    masks_without_tensors = formed.masks._replace(visibility=None, bias=None, terms=None)
    composers = formed.composers
    normaliser = formed.normaliser
    formed_filter = formed.filter
    hard = formed.hard
    scale = formed.scale
    dropout = formed.dropout

    def attend_chunk(rows: slice, *parts: Tensor | None) -> Tensor:
        q, k, values, maps, visibility, bias, terms = tree_unflatten(parts, structure)
        chunk = Formed(
            masks=masks_without_tensors._replace(visibility=visibility, bias=bias, terms=terms),
            q=q,
            k=k,
            maps=maps,
            composers=composers,
            normaliser=normaliser,
            filter=formed_filter,
            cache=None,
            hard=hard,
            scale=scale,
            dropout=dropout,
        )
        return _attend_chunk(chunk, values, rows.start, rows.stop)

    n = formed.q.shape[-2]
    size = CHUNK
    if v.device.type != "cpu":
        # A GPU that launches kernels one by one is slowed by further chunks in causal order.
        size = large_chunk(n, _bytes_of_a_query(formed, v), is_causal=False)
    chunks = in_chunks(n, size)
    parameters = [*composers.parameters(), *normaliser.parameters()]
    refuse_forward_mode(*leaves, *parameters)
    is_random = dropout > 0
    return _InTurn.apply(attend_chunk, chunks, is_random, len(leaves), *leaves, *parameters)


class _InTurn(torch.autograd.Function):
    """Sums (B, H, n, D) from chunks; the backward pass computes each chunk again.

    With `torch.utils.checkpoint`, which calls hooks for each chunk, a dcmha block of 65 tokens took
    1.88 instead of 1.60 times timm's time. Second derivatives raise RuntimeError.
    """

    @staticmethod
    def forward(
        ctx: Any,
        attend: Callable[..., Tensor],
        chunks: list[slice],
        is_random: bool,
        count: int,
        *tensors: Any,
    ) -> Tensor:
        """Return the sums of `attend(rows, *tensors)` over the chunks, with `count` tensors.

        The first three tensors are q, k and v, and those after the first `count` are parameters.
        """
        q, _, v = tensors[:3]
        kind = v.device.type
        ctx.attend = attend
        ctx.chunks = chunks
        ctx.count = count
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.random = None
        if is_random:
            state = torch.get_rng_state()
            devices, device_states = get_device_states(v)
            ctx.random = state, devices, device_states
        ctx.save_for_backward(*tensors)
        b, heads, n = q.shape[:3]
        out = v.new_empty(b, n, heads, v.shape[-1]).transpose(1, 2)
        for rows in chunks:
            out[:, :, rows] = attend(rows, *tensors[:count])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        count = ctx.count
        tensors = ctx.saved_tensors
        # The first four arguments of `forward` are not tensors.
        needed = ctx.needs_input_grad[4:]
        wanted = [i for i, is_needed in enumerate(needed) if is_needed]
        totals: dict[int, Tensor] = {}
        with _as_in_forward(ctx.random, ctx.autocast):
            for rows in ctx.chunks:
                parts = [None if x is None else x.detach() for x in tensors[:count]]
                inputs = [*parts, *tensors[count:]]
                wanted_inputs = [inputs[i].requires_grad_() for i in wanted]
                out = ctx.attend(rows, *parts)
                chunk_gradients = torch.autograd.grad(
                    out, wanted_inputs, gradient[:, :, rows], allow_unused=True
                )
                for i, chunk_gradient in zip(wanted, chunk_gradients, strict=True):
                    if chunk_gradient is None:
                        continue
                    if i in totals:
                        totals[i].add_(chunk_gradient)
                    else:
                        totals[i] = chunk_gradient
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


def _attend_chunk(formed: Formed, v: Tensor, start: int, stop: int) -> Tensor:
    """Return the sums of the queries from `start` to `stop`, (B, H, c, D)."""
    rows = slice(start, stop)
    columns = formed.masks.visible(rows, formed.k.shape[-2])
    a = form_weights(formed, rows, columns, v.dtype)
    return F.dropout(a, formed.dropout) @ v[..., columns, :]


def form_weights(formed: Formed, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """Return the weights (B, H, c, m) of the queries `rows` for the keys `columns`, in `dtype`.

    Logits -> maximum or, before a composition or a filter, log-sum-exp over M -> composition ->
    biases -> filter -> masks -> normaliser -> filter -> composition. `columns` contains every key
    that the queries can see.
    """
    masks = formed.masks
    keys = formed.k.shape[-2]
    visible = masks.chunk(rows, columns, keys, formed.q.device)
    logits = _logits(formed, rows, columns)
    bias = masks.bias_of_chunk(rows, columns, keys)
    if bias is not None:
        logits = wide(logits) + wide(bias).unsqueeze(-2)
    if formed.filter.is_active:
        logits = _filter_logits(formed, logits, visible)
        visible = formed.filter.choose_keys(logits.squeeze(3), visible)
    hidden = None if visible is None else ~visible
    if hidden is not None:
        logits = logits.masked_fill(hidden.unsqueeze(-2), torch.finfo(logits.dtype).min)
    a = formed.normaliser.over_keys(logits, visible).to(dtype)
    if hidden is not None:
        # The softmax of a query that sees no key is uniform, and other heads must not take it over.
        a = a.masked_fill(hidden, 0)
    if formed.filter.is_active:
        a = formed.filter.filter_weights(a, visible, masks, formed.cache)
        if hidden is not None:
            # A map of the heads fills weights that are hidden from one of them alone.
            a = a.masked_fill(hidden, 0)
    if "post" not in formed.composers:
        return a
    a = _compose("post", formed, a, rows, columns)
    if hidden is None:
        return a
    if formed.composers["post"].keeps_zeros and not differs_between_heads(hidden):
        return a
    # Composition fills masked positions again.
    return a.masked_fill(hidden, 0)


def _filter_logits(formed: Formed, logits: Tensor, visible: Tensor | None) -> Tensor:
    """Return the filtered logits (B, H, c, 1, m) of the logits (B, H, c, M, m) of each key."""
    logits = wide(logits)
    a = logits.squeeze(3) if logits.shape[3] == 1 else logits.logsumexp(3)
    if visible is not None:
        a = a.masked_fill(~visible, torch.finfo(a.dtype).min)
    return formed.filter(a, visible, formed.masks, formed.cache).unsqueeze(3)


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
    return _compose("pre", formed, a, rows, columns).unsqueeze(3)


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
    return (q * scale).unsqueeze(2) @ k.mT


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
    return maps._make(None if part is None else part[:, tokens] for part in maps)
