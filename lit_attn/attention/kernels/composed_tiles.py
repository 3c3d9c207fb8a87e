"""Functions in Triton of a tile of attention with heads composed before and after the softmax.

For every pair of query i and key j the vectors of all heads are, in this order,

    s_h  = scale q_ih . k_jh                     products
    l    = (A_i + B_j) s                         logits, with H x H matrices before the softmax
    p_h  = exp(l_h - lse_ih)                     softmax over the visible keys of head h
    a    = (C_i + D_j) p                         weights, with H x H matrices after the softmax
    o_ih = sum_j a_h v_jh                        sums

A, C are matrices of the queries and B, D those of the keys; each can be absent. With g = dL/do:

    da_h = g_ih . v_jh              dC_i = sum_j da p^T       dD_j = sum_i da p^T
    dp   = (C_i + D_j)^T da         delta_ih = sum_j p_h dp_h
    dl_h = p_h (dp_h - delta_ih)    dA_i = sum_j dl s^T       dB_j = sum_i dl s^T
    ds   = (A_i + B_j)^T dl         dq_ih = scale sum_j ds_h k_jh    dk_jh = scale sum_i ds_h q_ih
    dv_jh = sum_i a_h g_ih

A program holds a tile of c queries (or m keys) with all heads, and loops over tiles of m keys (or c
queries). It computes everything above again for each tile, so that no tensor of H x n x n numbers
exists in memory. Every program writes its results alone: no sum depends on an order of programs.

`forward` (composed_forward.py) and `backward_of_queries` (composed_backward.py) loop twice: the first
loop computes lse or delta, which the second one needs. `backward_of_keys` reads both.

Shapes: B batch, n queries, n' keys, H heads, E width of q and k, D width of v. Tensors of tokens are
(B, H, n, E); matrices are (B, n, H, H) or (1, 1, H, H) with strides 0. A tile of pairs is (H, c, m).
HEADS, FEATURES and WIDTH are H, E and D up to the next power of two; the missing numbers are 0.
"""

# Triton reads the source of these functions: annotations of tensors would have no effect.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def load_heads(
    pointer,
    stride_head,
    stride_token,
    tokens,
    limit,
    first_column,
    heads,
    width,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return COLUMNS columns of the vectors (H, c, E) of `tokens`, and zeros beyond `limit`."""
    head = tl.arange(0, HEADS)[:, None, None]
    token = tokens[None, :, None]
    column = first_column + tl.arange(0, COLUMNS)[None, None, :]
    exists = (head < heads) & (token < limit) & (column < width)
    place = pointer + head * stride_head + token * stride_token + column
    return tl.load(place, mask=exists, other=0.0)


@triton.jit
def store_heads(
    pointer, values, tokens, limit, heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """Write vectors (H, c, E) of `tokens` to a contiguous tensor (H, limit, E)."""
    head = tl.arange(0, HEADS)[:, None, None]
    token = tokens[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    exists = (head < heads) & (token < limit) & (column < width)
    place = pointer + (head * limit + token) * width + column
    tl.store(place, values.to(pointer.dtype.element_ty), mask=exists)


@triton.jit
def load_rows(pointer, tokens, limit, heads, HEADS: tl.constexpr):
    """Return one number (H, c, 1) of each head and token, from a contiguous tensor (H, limit)."""
    head = tl.arange(0, HEADS)[:, None]
    token = tokens[None, :]
    exists = (head < heads) & (token < limit)
    return tl.load(pointer + head * limit + token, mask=exists, other=0.0)[:, :, None]


@triton.jit
def store_rows(pointer, values, tokens, limit, heads, HEADS: tl.constexpr):
    """Write one number (H, c) of each head and token to a contiguous tensor (H, limit)."""
    head = tl.arange(0, HEADS)[:, None]
    token = tokens[None, :]
    exists = (head < heads) & (token < limit)
    tl.store(pointer + head * limit + token, values, mask=exists)


@triton.jit
def load_matrices(
    pointer, stride_token, tokens, limit, heads, HEADS: tl.constexpr, IS_PRESENT: tl.constexpr
):
    """Return the matrices (c, H, H) of `tokens`, or a number that nobody uses without them."""
    matrices = 0.0
    if IS_PRESENT:
        token = tokens[:, None, None]
        row = tl.arange(0, HEADS)[None, :, None]
        column = tl.arange(0, HEADS)[None, None, :]
        exists = (token < limit) & (row < heads) & (column < heads)
        place = pointer + token * stride_token + row * heads + column
        matrices = tl.load(place, mask=exists, other=0.0)
    return matrices


@triton.jit
def store_matrices(pointer, values, tokens, limit, heads, HEADS: tl.constexpr):
    """Write matrices (c, H, H) of `tokens` to a contiguous tensor (limit, H, H)."""
    token = tokens[:, None, None]
    row = tl.arange(0, HEADS)[None, :, None]
    column = tl.arange(0, HEADS)[None, None, :]
    exists = (token < limit) & (row < heads) & (column < heads)
    tl.store(pointer + (token * heads + row) * heads + column, values, mask=exists)


@triton.jit
def visible_pairs(
    mask_pointer,
    mask_head,
    mask_query,
    mask_key,
    rows,
    columns,
    n,
    keys,
    heads,
    HEADS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Return (1, c, m), or with a mask (H, c, m): True where a query attends to a key."""
    row = rows[None, :, None]
    column = columns[None, None, :]
    visible = (row < n) & (column < keys)
    if IS_CAUSAL:
        visible = visible & (column <= row)
    if HAS_MASK:
        head = tl.arange(0, HEADS)[:, None, None]
        place = mask_pointer + head * mask_head + row * mask_query + column * mask_key
        visible = visible & (head < heads)
        visible = visible & (tl.load(place, mask=visible, other=0) != 0)
    return visible


@triton.jit
def compose(
    pairs,
    of_queries,
    of_keys,
    HAS_QUERIES: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return (A_i + B_j) x for the vectors x of all heads in `pairs` (H, c, m).

    `of_queries` (c, H, H) are the matrices A, and `of_keys` (m, H, H) the matrices B.
    """
    result = pairs
    if HAS_QUERIES:
        product = tl.dot(
            of_queries,
            tl.permute(pairs, (1, 0, 2)),
            input_precision=PRECISION,
            out_dtype=pairs.dtype,
        )
        result = tl.permute(product, (1, 0, 2))
    if HAS_KEYS:
        product = tl.dot(
            of_keys,
            tl.permute(pairs, (2, 0, 1)),
            input_precision=PRECISION,
            out_dtype=pairs.dtype,
        )
        product = tl.permute(product, (1, 2, 0))
        result = result + product if HAS_QUERIES else product
    return result


@triton.jit
def compose_transposed(
    pairs,
    of_queries,
    of_keys,
    HAS_QUERIES: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return (A_i + B_j)^T x for the vectors x of all heads in `pairs` (H, c, m)."""
    queries = of_queries
    if HAS_QUERIES:
        queries = tl.permute(of_queries, (0, 2, 1))
    keys = of_keys
    if HAS_KEYS:
        keys = tl.permute(of_keys, (0, 2, 1))
    return compose(pairs, queries, keys, HAS_QUERIES, HAS_KEYS, PRECISION)


@triton.jit
def add_outer_of_queries(total, left, right, PRECISION: tl.constexpr):
    """Return `total` (c, H, H) plus sum_j x_ij y_ij^T for vectors x and y of heads (H, c, m)."""
    return total + tl.dot(
        tl.permute(left, (1, 0, 2)),
        tl.permute(right, (1, 2, 0)),
        input_precision=PRECISION,
        out_dtype=total.dtype,
    )


@triton.jit
def add_outer_of_keys(total, left, right, PRECISION: tl.constexpr):
    """Return `total` (m, H, H) plus sum_i x_ij y_ij^T for vectors x and y of heads (H, c, m)."""
    return total + tl.dot(
        tl.permute(left, (2, 0, 1)),
        tl.permute(right, (2, 1, 0)),
        input_precision=PRECISION,
        out_dtype=total.dtype,
    )


@triton.jit
def products(
    x_pointer,
    x_head,
    x_token,
    rows,
    n,
    y_pointer,
    y_head,
    y_token,
    columns,
    keys,
    heads,
    width,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Return x_ih . y_jh (H, c, m) for the vectors x of the rows and y of the columns.

    They are read in chunks of columns, because all columns of both would need too much memory.
    """
    result = tl.zeros((HEADS, rows.shape[0], columns.shape[0]), SUMS)
    for first in range(0, WIDTH, CHUNK):
        x = load_heads(x_pointer, x_head, x_token, rows, n, first, heads, width, HEADS, CHUNK)
        y = load_heads(y_pointer, y_head, y_token, columns, keys, first, heads, width, HEADS, CHUNK)
        result += tl.dot(x, tl.permute(y, (0, 2, 1)), input_precision=PRECISION, out_dtype=SUMS)
    return result
