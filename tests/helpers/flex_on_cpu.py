"""flex_attention without a GPU, with gradients, where PyTorch's own function refuses them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from lit_attn.attention import flex, flex_support

Output = Tensor | tuple[Tensor, AuxOutput]


def flex_by_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: flex.ScoreMod,
    block_mask: BlockMask | None,
    scale: float,
    *,
    kernel_options: object = None,
    return_aux: object = None,
) -> Output:
    """Return what PyTorch documents for flex_attention, from logits that are formed."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(dtype) @ k.to(dtype).mT) * scale
    # The numbers of batch, head, query and key, broadcastable to the logits.
    places = [torch.arange(size, device=q.device) for size in logits.shape]
    indices = [place.view(-1, *[1] * (3 - axis)) for axis, place in enumerate(places)]
    logits = score_mod(logits, *indices)
    if block_mask is not None:
        logits = torch.where(block_mask.mask_mod(*indices), logits, -torch.inf)
    is_empty = (logits == -torch.inf).all(-1)
    # A row without keys would have weights and gradients that are not numbers.
    filled = logits.masked_fill(is_empty.unsqueeze(-1), 0)
    weights = filled.softmax(-1).masked_fill(is_empty.unsqueeze(-1), 0)
    out = weights.to(v.dtype) @ v
    if return_aux is None:
        return out
    lse = filled.logsumexp(-1).masked_fill(is_empty, -torch.inf)
    return out, AuxOutput(lse=lse)


def flex_of_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: flex.ScoreMod,
    block_mask: BlockMask | None,
    scale: float,
    *,
    kernel_options: object = None,
    return_aux: object = None,
) -> Output:
    """Return the result of PyTorch's operator, which its function calls after checking the device.

    It has to be called in code that torch.compile traces.
    """
    if block_mask is None:
        block_mask = torch.nn.attention.flex_attention.create_block_mask(
            lambda b, h, i, j: j >= 0, None, None, q.shape[2], k.shape[2], q.device
        )
    options = {
        "BACKEND": "AUTO",
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": False,
    }
    operator = torch.ops.higher_order.flex_attention
    out, lse_to_base_2, _ = operator(q, k, v, score_mod, block_mask.as_tuple(), scale, options)
    if return_aux is None:
        return out
    return out, AuxOutput(lse=lse_to_base_2 * math.log(2))


def use_flex(patch: pytest.MonkeyPatch, function: Any, compiled: Any) -> list[flex.Scores]:
    """Let every layer that flex_attention could compute on a GPU use `function` on this CPU.

    `compiled` is what `flex.weighted_sums` is called through. Returns a list that gets the scores
    of every call.
    """
    calls: list[flex.Scores] = []

    def call(scores: flex.Scores, v: Tensor) -> Tensor:
        calls.append(scores)
        return compiled(scores, v)

    patch.setattr(flex, "flex_attention", function)
    patch.setattr(flex, "_compiled", lambda: call)
    patch.setattr(flex_support, "supports", lambda q, features, width: q.shape[-2] > 1)
    return calls
