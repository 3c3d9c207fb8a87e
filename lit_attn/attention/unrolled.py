"""Dynamic composition across heads written out head by head, for compiled code on a CPU.

Compiled, it is one pass over the tensor: all sums over heads and ranks of one position are fused.
At 12 heads, 65 tokens and batch 128 a block takes 1.76 times timm's time and 1.80 times its memory
(reports/evidence/bench/attention-cpu-65-compiled.md); the products of lit_attn.attention.compose
take 2.0 and 2.68 times. A gradient written out in the same way is no faster and needs 2.07 times
the memory. Uncompiled, this form is slower than the products.

Shapes: B batch, c queries, m keys, H heads, R rank, n the tokens of one side (c or m).
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

# Down (B, R, H, n), up (B, R, H, n) and gate (B, H, n) of one side; None if absent.
Side = tuple[Tensor | None, Tensor | None, Tensor | None]


def compose(a: Tensor, query: Side, key: Side) -> Tensor:
    """Return a + sum_r up_r (down_r.a) + gate * a for both sides, (B, H, c, m)."""
    heads = a.unbind(1)
    composed = list(heads)
    for axis, (down, up, gate) in ((-1, query), (-2, key)):
        low = [] if down is None else _low_rank(heads, down, axis)
        for g, head in enumerate(heads):
            for r, term in enumerate(low):
                assert up is not None
                composed[g] = composed[g] + up[:, r, g].unsqueeze(axis) * term
            if gate is not None:
                composed[g] = composed[g] + gate[:, g].unsqueeze(axis) * head
    return torch.stack(composed, 1)


def _low_rank(heads: Sequence[Tensor], down: Tensor, axis: int) -> list[Tensor]:
    """Return down_r.a, (B, c, m) for each r; `axis` is that of the other side's tokens."""
    return [
        functools.reduce(
            torch.add, [down[:, r, h].unsqueeze(axis) * head for h, head in enumerate(heads)]
        )
        for r in range(down.shape[1])
    ]
