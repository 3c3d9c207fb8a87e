"""One call of torch's scaled-dot-product attention, with widths and kernels that every device has.

Shapes: B batch, H heads, n queries, m keys, E width of the queries and keys, D of the values.
"""

import contextlib
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_attn.attention.fused import padded, supported_width

# PyTorch's kernels that take a mask, without cuDNN's.
MASKED_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def call_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Return softmax(scale q k^T + mask) v: (B, H, n, D) of q (B, H, n, E) and m keys.

    Flash attention needs one width of q, k and v, on a GPU a multiple of 8: zeros pad them.
    """
    features = q.shape[-1]
    width = v.shape[-1]
    full = features if features == width else supported_width(max(features, width), q)
    with _kernels_for(mask):
        out = F.scaled_dot_product_attention(
            padded(q, full),
            padded(k, full),
            padded(v, full),
            mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
        )
    return out[..., :width]


def _kernels_for(mask: Tensor | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context without cuDNN's kernel if there is a mask on a GPU.

    From PyTorch 2.11 on, Hopper and Blackwell cards prefer it. For a query that sees no key it
    returns numbers instead of zeros, and with some lengths its gradients are not numbers
    (https://github.com/pytorch/pytorch/issues/196678).
    """
    if mask is None or mask.device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(MASKED_KERNELS)
