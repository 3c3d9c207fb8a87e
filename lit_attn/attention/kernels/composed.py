"""Attention with heads that are composed before and after the softmax, by kernels in Triton.

The kernels (composed_tiles.py has the mathematics) form logits and weights of a tile with all heads
and never write them. Forward and backward are torch operators, so compiled code can contain them.

Shapes: B batch, n queries, n' keys, H heads, E width of q and k, D width of v.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_attn.attention.compose import Matrices
from lit_attn.attention.derivatives import raise_no_second, refuse_forward_mode

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# A program holds the vectors of all heads of a tile.
MOST_HEADS = 16
WIDEST = 64

# Triton multiplies matrices of at least 16 x 16 numbers.
SMALLEST = 16

# First capability that multiplies in TF32 and bfloat16.
FIRST_CAPABILITY = (8, 0)

SHARED_MEMORY = {2: 122_880, 4: 196_608}
"""Bytes of shared memory that the largest program needs, by the bytes of a number of q.

As Triton 3.9 compiles it for sm_80 and sm_90. An A100 has 166,912, an H100 232,448."""

# Most columns of q, k, v and gradients that are read at once for a product of two vectors.
CHUNK = 32


class Tile(NamedTuple):
    """Numbers of queries and keys of a tile, and warps of its program."""

    queries: int
    keys: int
    warps: int


FORWARD = Tile(16, 16, 8)
BACKWARD_OF_QUERIES = Tile(16, 16, 8)
BACKWARD_OF_KEYS = Tile(16, 16, 8)


ABSENT = Matrices(None, None)


def supports(q: Tensor, features: int, width: int) -> bool:
    """Return True if the kernels support queries like q, `features` and values of `width`."""
    if q.device.type != "cuda" or q.dtype not in DTYPES:
        return False
    if not _can_run(q.device.index, q.dtype.itemsize):
        return False
    heads, n = q.shape[1:3]
    return n > 1 and heads <= MOST_HEADS and features <= WIDEST and width <= WIDEST


# Compiled code takes the result as a constant.
@torch.compiler.assume_constant_result
def _can_run(number: int, itemsize: int) -> bool:
    """Return True if the GPU with this number has the products and the memory of a program."""
    if torch.cuda.get_device_capability(number) < FIRST_CAPABILITY:
        return False
    properties = torch.cuda.get_device_properties(number)
    return bool(properties.shared_memory_per_block_optin >= SHARED_MEMORY[itemsize])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Matrices,
    after: Matrices,
    visibility: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Return the weighted sums (B, H, n, D) of v (B, H, n', D).

    q (B, H, n, E), k (B, H, n', E) and v have one dtype. `before` and `after` the softmax are the
    matrices of all tokens. `visibility`, boolean and broadcastable to (B, H, n, n'), is True where
    a query attends to a key. Raises RuntimeError for second derivatives and for derivatives in
    forward mode.
    """
    refuse_forward_mode(q, k, v, *before, *after)
    q, k, v = (_with_contiguous_vectors(x) for x in (q, k, v))
    return _attend(q, k, v, *before, *after, visibility, is_causal, scale)[0]


def _with_contiguous_vectors(x: Tensor) -> Tensor:
    """Return x (..., E) with the numbers of each vector side by side in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("lit_attn::attend_composed", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    d: Tensor | None,
    visibility: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the sums (B, H, n, D), and the log-sum-exp (B, H, n) of the logits of each query.

    `a` and `b` are the matrices of queries and keys before the softmax, `c` and `d` those after it.
    """
    from lit_attn.attention.kernels.composed_forward import forward

    out, lse = _new_sums(q, v)
    call = _Call(q, k, v, a, b, c, d, visibility, is_causal, scale)
    programs = _tiles(q.shape[2], FORWARD.queries)
    call.launch(forward, FORWARD, programs, [], [out, lse])
    return out, lse


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    d: Tensor | None,
    visibility: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return _new_sums(q, v)


def _new_sums(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the sums (B, H, n, D) and for the log-sum-exps (B, H, n)."""
    rows = q.shape[:3]
    lse = q.new_empty(rows, dtype=torch.promote_types(q.dtype, torch.float32))
    return v.new_empty(*rows, v.shape[-1]), lse


@torch.library.custom_op("lit_attn::attend_composed_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    d: Tensor | None,
    visibility: Tensor | None,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> list[Tensor]:
    """Return the gradients of q, k, v and of the matrices that are not None, for each token."""
    from lit_attn.attention.kernels.composed_backward import backward_of_keys, backward_of_queries

    call = _Call(q, k, v, a, b, c, d, visibility, is_causal, scale)
    gradients = [_with_contiguous_vectors(gradient)]
    to_q, to_k, to_v = (x.new_empty(x.shape) for x in (q, k, v))
    to_a, to_b, to_c, to_d = _new_gradients_of_matrices(call)
    delta = torch.empty_like(lse)
    call.launch(
        backward_of_queries,
        BACKWARD_OF_QUERIES,
        _tiles(q.shape[2], BACKWARD_OF_QUERIES.queries),
        gradients,
        [lse, delta, to_q, to_a, to_c],
    )
    call.launch(
        backward_of_keys,
        BACKWARD_OF_KEYS,
        _tiles(k.shape[2], BACKWARD_OF_KEYS.keys),
        gradients,
        [lse, delta, to_k, to_v, to_b, to_d],
    )
    return [x for x in (to_q, to_k, to_v, to_a, to_b, to_c, to_d) if x is not None]


@_attend_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    d: Tensor | None,
    visibility: Tensor | None,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> list[Tensor]:
    to_tokens = [x.new_empty(x.shape) for x in (q, k, v)]
    call = _Call(q, k, v, a, b, c, d, visibility, is_causal, scale)
    to_matrices = _new_gradients_of_matrices(call)
    return [*to_tokens, *(x for x in to_matrices if x is not None)]


_attend_backward.register_autograd(raise_no_second)


def _new_gradients_of_matrices(call: "_Call") -> list[Tensor | None]:
    """Return memory for the gradients (B, n, H, H) of the matrices at every token, or None."""
    batch, heads, queries = call.q.shape[:3]
    keys = call.k.shape[2]
    gradients: list[Tensor | None] = []
    for matrices, tokens in zip(call.matrices, (queries, keys, queries, keys), strict=True):
        if matrices is None:
            gradients.append(None)
        else:
            gradients.append(matrices.new_empty(batch, tokens, heads, heads))
    return gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep the inputs and the log-sum-exps for the backward pass."""
    *tensors, is_causal, scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.options = is_causal, scale


def _gradients(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs of `_attend`."""
    *inputs, lse = ctx.saved_tensors
    computed = iter(_attend_backward(gradient, *inputs, lse, *ctx.options))
    gradients: list[Tensor | None] = []
    for tensor in inputs[:-1]:
        if tensor is None:
            gradients.append(None)
        else:
            # A matrix of all tokens has the sum of their gradients.
            gradients.append(next(computed).sum_to_size(tensor.shape))
    # Visibility, order and scale have no gradient.
    return (*gradients, None, None, None)


_attend.register_autograd(_gradients, setup_context=_keep)


class _Call(NamedTuple):
    """Inputs of one call of `attend`, whose matrices are those of `_attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor | None
    b: Tensor | None
    c: Tensor | None
    d: Tensor | None
    visibility: Tensor | None
    is_causal: bool
    scale: float

    @property
    def matrices(self) -> list[Tensor | None]:
        """Matrices of queries and keys before the softmax, then those after it."""
        return [self.a, self.b, self.c, self.d]

    def launch(
        self,
        kernel: Any,
        tile: Tile,
        programs: int,
        gradient: list[Tensor],
        outputs: list[Tensor | None],
    ) -> None:
        """Start `programs` programs of `kernel` for each sequence of the batch.

        `gradient` has the gradient of the sums, or is empty for the kernel that computes the sums.
        """
        vectors = [*gradient, self.q, self.k, self.v]
        pointers = [
            self._pointer(tensor)
            for tensor in (*vectors, *self.matrices, self.visibility, *outputs)
        ]
        batch, heads, queries, features = self.q.shape
        width = self.v.shape[-1]
        sizes = (queries, self.k.shape[2], heads, features, width)
        kernel[(programs, batch)](
            *pointers,
            *self._strides(vectors),
            self.scale,
            *sizes,
            **self._constants(),
            QUERIES=tile.queries,
            KEYS=tile.keys,
            num_warps=tile.warps,
            num_stages=1,
            enable_fp_fusion=True,
        )

    def _pointer(self, tensor: Tensor | None) -> Tensor:
        """Return the tensor that a kernel gets in place of `tensor`."""
        if tensor is None:
            # A kernel does not read absent tensors, but each of its arguments needs a type.
            return self.q
        # Triton reads no numbers of one bit.
        return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor

    def _strides(self, vectors: list[Tensor]) -> list[int]:
        """Return the strides of vectors, matrices and visibility, 0 along axes of size 1."""
        strides: list[int] = []
        for tensor in vectors:
            strides.extend(tensor.stride()[:3])
        for matrices in self.matrices:
            strides.extend((0, 0) if matrices is None else _strides(matrices)[:2])
        if self.visibility is None:
            strides.extend((0, 0, 0, 0))
        else:
            missing = 4 - self.visibility.ndim
            strides.extend([0] * missing + _strides(self.visibility))
        return strides

    def _constants(self) -> dict[str, Any]:
        """Return the constants for which a kernel is compiled, but those of its tile."""
        from triton import language as tl

        is_half = self.q.dtype.itemsize < 4
        is_float64 = self.q.dtype == torch.float64
        # Three products in TF32 have almost the precision of one in float32.
        precision = "tf32x3"
        if is_float64:
            precision = "ieee"
        elif torch.backends.cuda.matmul.allow_tf32:
            precision = "tf32"
        # A product in one chunk needs more shared memory than one in two, and no H100 has it.
        features = max(2 * SMALLEST, _padded(self.q.shape[-1]))
        width = max(2 * SMALLEST, _padded(self.v.shape[-1]))
        return {
            "HEADS": _padded(self.q.shape[1]),
            "FEATURES": features,
            "WIDTH": width,
            "CHUNK": min(CHUNK, features // 2, width // 2),
            "HAS_A": self.a is not None,
            "HAS_B": self.b is not None,
            "HAS_C": self.c is not None,
            "HAS_D": self.d is not None,
            "IS_CAUSAL": self.is_causal,
            "HAS_MASK": self.visibility is not None,
            "PRECISION": precision,
            # Logits and weights are in float32. TF32 rounds them less than bfloat16 or float16.
            "MATRIX_PRECISION": "tf32" if is_half else precision,
            "SUMS": tl.float64 if is_float64 else tl.float32,
        }


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of `tensor`, and 0 along axes of size 1, which broadcast."""
    strides = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        strides.append(0 if size == 1 else stride)
    return strides


def _padded(size: int) -> int:
    """Return the smallest power of two that is not below `size` and that a GPU can multiply."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


def _tiles(tokens: int, size: int) -> int:
    """Return the number of tiles of `size` tokens that cover `tokens`."""
    return -(-tokens // size)
