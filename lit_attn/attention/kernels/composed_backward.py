"""Kernels in Triton of the gradients of attention with composed heads.

composed_tiles.py has the formulas.
"""

# Triton reads the source of these functions: annotations of tensors would have no effect.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from lit_attn.attention.kernels.composed_tiles import (
    add_outer_of_keys,
    add_outer_of_queries,
    compose,
    compose_transposed,
    load_heads,
    load_matrices,
    load_rows,
    products,
    store_heads,
    store_matrices,
    store_rows,
    visible_pairs,
)


@triton.jit
def backward_of_queries(
    g_pointer,
    q_pointer,
    k_pointer,
    v_pointer,
    a_pointer,
    b_pointer,
    c_pointer,
    d_pointer,
    mask_pointer,
    lse_pointer,
    delta_pointer,
    dq_pointer,
    da_pointer,
    dc_pointer,
    g_batch,
    g_head,
    g_token,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    a_batch,
    a_token,
    b_batch,
    b_token,
    c_batch,
    c_token,
    d_batch,
    d_token,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    scale,
    n,
    keys,
    heads,
    features,
    width,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    HAS_C: tl.constexpr,
    HAS_D: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    MATRIX_PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Write delta (B, H, n), dq (B, H, n, E), dA and dC (B, n, H, H) of a tile of queries.

    `g_pointer` has the gradient of the sums, and `da_pointer` that of A.
    """
    batch = tl.program_id(1).to(tl.int64)
    g_pointer += batch * g_batch
    q_pointer += batch * q_batch
    k_pointer += batch * k_batch
    v_pointer += batch * v_batch
    a_pointer += batch * a_batch
    b_pointer += batch * b_batch
    c_pointer += batch * c_batch
    d_pointer += batch * d_batch
    mask_pointer += batch * mask_batch
    first_row = tl.program_id(0) * QUERIES
    rows = first_row + tl.arange(0, QUERIES)
    end = keys
    if IS_CAUSAL:
        end = tl.minimum(keys, first_row + QUERIES)

    lse = load_rows(lse_pointer + batch * heads * n, rows, n, heads, HEADS)
    a = load_matrices(a_pointer, a_token, rows, n, heads, HEADS, HAS_A)
    if HAS_A:
        to_a = tl.zeros((QUERIES, HEADS, HEADS), SUMS)
    c = load_matrices(c_pointer, c_token, rows, n, heads, HEADS, HAS_C)
    if HAS_C:
        to_c = tl.zeros((QUERIES, HEADS, HEADS), SUMS)

    delta = tl.zeros((HEADS, QUERIES), SUMS)
    for first_column in range(0, end, KEYS):
        columns = first_column + tl.arange(0, KEYS)
        b = load_matrices(b_pointer, b_token, columns, keys, heads, HEADS, HAS_B)
        d = load_matrices(d_pointer, d_token, columns, keys, heads, HEADS, HAS_D)
        visible = visible_pairs(
            mask_pointer,
            mask_head,
            mask_query,
            mask_key,
            rows,
            columns,
            n,
            keys,
            heads,
            HEADS,
            IS_CAUSAL,
            HAS_MASK,
        )
        s = scale * products(
            q_pointer,
            q_head,
            q_token,
            rows,
            n,
            k_pointer,
            k_head,
            k_token,
            columns,
            keys,
            heads,
            features,
            HEADS,
            FEATURES,
            CHUNK,
            PRECISION,
            SUMS,
        )
        logits = compose(s, a, b, HAS_A, HAS_B, MATRIX_PRECISION)
        p = tl.where(visible, tl.exp(logits - lse), 0.0)
        to_weights = products(
            g_pointer,
            g_head,
            g_token,
            rows,
            n,
            v_pointer,
            v_head,
            v_token,
            columns,
            keys,
            heads,
            width,
            HEADS,
            WIDTH,
            CHUNK,
            PRECISION,
            SUMS,
        )
        if HAS_MASK:
            to_weights = tl.where(visible, to_weights, 0.0)
        to_p = compose_transposed(to_weights, c, d, HAS_C, HAS_D, MATRIX_PRECISION)
        delta += tl.sum(p * to_p, 2)
        if HAS_C:
            to_c = add_outer_of_queries(to_c, to_weights, p, MATRIX_PRECISION)
    store_rows(delta_pointer + batch * heads * n, delta, rows, n, heads, HEADS)
    if HAS_C:
        store_matrices(dc_pointer + batch * n * heads * heads, to_c, rows, n, heads, HEADS)

    to_q = tl.zeros((HEADS, QUERIES, FEATURES), SUMS)
    for first_column in range(0, end, KEYS):
        columns = first_column + tl.arange(0, KEYS)
        b = load_matrices(b_pointer, b_token, columns, keys, heads, HEADS, HAS_B)
        d = load_matrices(d_pointer, d_token, columns, keys, heads, HEADS, HAS_D)
        visible = visible_pairs(
            mask_pointer,
            mask_head,
            mask_query,
            mask_key,
            rows,
            columns,
            n,
            keys,
            heads,
            HEADS,
            IS_CAUSAL,
            HAS_MASK,
        )
        s = scale * products(
            q_pointer,
            q_head,
            q_token,
            rows,
            n,
            k_pointer,
            k_head,
            k_token,
            columns,
            keys,
            heads,
            features,
            HEADS,
            FEATURES,
            CHUNK,
            PRECISION,
            SUMS,
        )
        logits = compose(s, a, b, HAS_A, HAS_B, MATRIX_PRECISION)
        p = tl.where(visible, tl.exp(logits - lse), 0.0)
        to_weights = products(
            g_pointer,
            g_head,
            g_token,
            rows,
            n,
            v_pointer,
            v_head,
            v_token,
            columns,
            keys,
            heads,
            width,
            HEADS,
            WIDTH,
            CHUNK,
            PRECISION,
            SUMS,
        )
        if HAS_MASK:
            to_weights = tl.where(visible, to_weights, 0.0)
        to_p = compose_transposed(to_weights, c, d, HAS_C, HAS_D, MATRIX_PRECISION)
        to_logits = p * (to_p - delta[:, :, None])
        to_s = compose_transposed(to_logits, a, b, HAS_A, HAS_B, MATRIX_PRECISION)
        k = load_heads(
            k_pointer, k_head, k_token, columns, keys, 0, heads, features, HEADS, FEATURES
        )
        to_q += tl.dot(to_s.to(k.dtype), k, input_precision=PRECISION, out_dtype=SUMS)
        if HAS_A:
            to_a = add_outer_of_queries(to_a, to_logits, s, MATRIX_PRECISION)
    store_heads(
        dq_pointer + batch * heads * n * features,
        to_q * scale,
        rows,
        n,
        heads,
        features,
        HEADS,
        FEATURES,
    )
    if HAS_A:
        store_matrices(da_pointer + batch * n * heads * heads, to_a, rows, n, heads, HEADS)


@triton.jit
def backward_of_keys(
    g_pointer,
    q_pointer,
    k_pointer,
    v_pointer,
    a_pointer,
    b_pointer,
    c_pointer,
    d_pointer,
    mask_pointer,
    lse_pointer,
    delta_pointer,
    dk_pointer,
    dv_pointer,
    db_pointer,
    dd_pointer,
    g_batch,
    g_head,
    g_token,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    a_batch,
    a_token,
    b_batch,
    b_token,
    c_batch,
    c_token,
    d_batch,
    d_token,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    scale,
    n,
    keys,
    heads,
    features,
    width,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    HAS_C: tl.constexpr,
    HAS_D: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    MATRIX_PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Write dk (B, H, n', E), dv (B, H, n', D), dB and dD (B, n', H, H) of a tile of keys.

    `g_pointer` has the gradient of the sums, and `db_pointer` that of B.
    """
    batch = tl.program_id(1).to(tl.int64)
    g_pointer += batch * g_batch
    q_pointer += batch * q_batch
    k_pointer += batch * k_batch
    v_pointer += batch * v_batch
    a_pointer += batch * a_batch
    b_pointer += batch * b_batch
    c_pointer += batch * c_batch
    d_pointer += batch * d_batch
    mask_pointer += batch * mask_batch
    lse_pointer += batch * heads * n
    delta_pointer += batch * heads * n
    first_column = tl.program_id(0) * KEYS
    columns = first_column + tl.arange(0, KEYS)
    start = 0
    if IS_CAUSAL:
        start = first_column // QUERIES * QUERIES

    to_k = tl.zeros((HEADS, KEYS, FEATURES), SUMS)
    to_v = tl.zeros((HEADS, KEYS, WIDTH), SUMS)
    b = load_matrices(b_pointer, b_token, columns, keys, heads, HEADS, HAS_B)
    if HAS_B:
        to_b = tl.zeros((KEYS, HEADS, HEADS), SUMS)
    d = load_matrices(d_pointer, d_token, columns, keys, heads, HEADS, HAS_D)
    if HAS_D:
        to_d = tl.zeros((KEYS, HEADS, HEADS), SUMS)

    for first_row in range(start, n, QUERIES):
        rows = first_row + tl.arange(0, QUERIES)
        lse = load_rows(lse_pointer, rows, n, heads, HEADS)
        delta = load_rows(delta_pointer, rows, n, heads, HEADS)
        a = load_matrices(a_pointer, a_token, rows, n, heads, HEADS, HAS_A)
        c = load_matrices(c_pointer, c_token, rows, n, heads, HEADS, HAS_C)
        visible = visible_pairs(
            mask_pointer,
            mask_head,
            mask_query,
            mask_key,
            rows,
            columns,
            n,
            keys,
            heads,
            HEADS,
            IS_CAUSAL,
            HAS_MASK,
        )
        s = scale * products(
            q_pointer,
            q_head,
            q_token,
            rows,
            n,
            k_pointer,
            k_head,
            k_token,
            columns,
            keys,
            heads,
            features,
            HEADS,
            FEATURES,
            CHUNK,
            PRECISION,
            SUMS,
        )
        logits = compose(s, a, b, HAS_A, HAS_B, MATRIX_PRECISION)
        p = tl.where(visible, tl.exp(logits - lse), 0.0)
        weights = compose(p, c, d, HAS_C, HAS_D, MATRIX_PRECISION)
        to_weights = products(
            g_pointer,
            g_head,
            g_token,
            rows,
            n,
            v_pointer,
            v_head,
            v_token,
            columns,
            keys,
            heads,
            width,
            HEADS,
            WIDTH,
            CHUNK,
            PRECISION,
            SUMS,
        )
        if HAS_MASK:
            weights = tl.where(visible, weights, 0.0)
            to_weights = tl.where(visible, to_weights, 0.0)
        g = load_heads(g_pointer, g_head, g_token, rows, n, 0, heads, width, HEADS, WIDTH)
        to_v += tl.dot(
            tl.permute(weights, (0, 2, 1)).to(g.dtype),
            g,
            input_precision=PRECISION,
            out_dtype=SUMS,
        )
        if HAS_D:
            to_d = add_outer_of_keys(to_d, to_weights, p, MATRIX_PRECISION)
        to_p = compose_transposed(to_weights, c, d, HAS_C, HAS_D, MATRIX_PRECISION)
        to_logits = p * (to_p - delta)
        if HAS_B:
            to_b = add_outer_of_keys(to_b, to_logits, s, MATRIX_PRECISION)
        to_s = compose_transposed(to_logits, a, b, HAS_A, HAS_B, MATRIX_PRECISION)
        q = load_heads(q_pointer, q_head, q_token, rows, n, 0, heads, features, HEADS, FEATURES)
        to_k += tl.dot(
            tl.permute(to_s, (0, 2, 1)).to(q.dtype),
            q,
            input_precision=PRECISION,
            out_dtype=SUMS,
        )
    store_heads(
        dk_pointer + batch * heads * keys * features,
        to_k * scale,
        columns,
        keys,
        heads,
        features,
        HEADS,
        FEATURES,
    )
    store_heads(
        dv_pointer + batch * heads * keys * width, to_v, columns, keys, heads, width, HEADS, WIDTH
    )
    if HAS_B:
        store_matrices(db_pointer + batch * keys * heads * heads, to_b, columns, keys, heads, HEADS)
    if HAS_D:
        store_matrices(dd_pointer + batch * keys * heads * heads, to_d, columns, keys, heads, HEADS)
