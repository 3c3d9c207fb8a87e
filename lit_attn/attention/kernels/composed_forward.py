"""Kernel in Triton of attention with composed heads; composed_tiles.py has the formulas."""

# Triton reads the source of these functions: annotations of tensors would have no effect.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from lit_attn.attention.kernels.composed_tiles import (
    compose,
    load_heads,
    load_matrices,
    products,
    store_heads,
    store_rows,
    visible_pairs,
)


@triton.jit
def forward(
    q_pointer,
    k_pointer,
    v_pointer,
    a_pointer,
    b_pointer,
    c_pointer,
    d_pointer,
    mask_pointer,
    out_pointer,
    lse_pointer,
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
    """Write the sums o (B, H, n, D) and lse (B, H, n) of a tile of queries."""
    batch = tl.program_id(1).to(tl.int64)
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

    a = load_matrices(a_pointer, a_token, rows, n, heads, HEADS, HAS_A)
    c = load_matrices(c_pointer, c_token, rows, n, heads, HEADS, HAS_C)

    largest = tl.full((HEADS, QUERIES), float("-inf"), SUMS)
    total = tl.zeros((HEADS, QUERIES), SUMS)
    for first_column in range(0, end, KEYS):
        columns = first_column + tl.arange(0, KEYS)
        b = load_matrices(b_pointer, b_token, columns, keys, heads, HEADS, HAS_B)
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
        logits = tl.where(visible, logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 2))
        # A row without a visible key so far has no largest logit.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(logits - shift[:, :, None]), 2)
        largest = new_largest
    # A query that sees no key has an lse of 0, and all of its weights are hidden.
    is_empty = total == 0.0
    lse = tl.where(is_empty, 0.0, largest + tl.log(tl.where(is_empty, 1.0, total)))
    store_rows(lse_pointer + batch * heads * n, lse, rows, n, heads, HEADS)

    out = tl.zeros((HEADS, QUERIES, WIDTH), SUMS)
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
        p = tl.where(visible, tl.exp(logits - lse[:, :, None]), 0.0)
        weights = compose(p, c, d, HAS_C, HAS_D, MATRIX_PRECISION)
        if HAS_MASK:
            # The mask can differ between heads, and C and D fill what is hidden from one of them.
            weights = tl.where(visible, weights, 0.0)
        v = load_heads(v_pointer, v_head, v_token, columns, keys, 0, heads, width, HEADS, WIDTH)
        out += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION, out_dtype=SUMS)
    store_heads(out_pointer + batch * heads * n * width, out, rows, n, heads, width, HEADS, WIDTH)
