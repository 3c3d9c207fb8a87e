"""Comparison of the kernels for compositions, in Triton's interpreter, with the formulas.

Run it as a program with TRITON_INTERPRET=1, which Triton reads when it is imported. The interpreter
computes in float64 on a CPU.
"""

from typing import Any

import torch
from torch import Tensor

from helpers.attention_checks import HEADS, assert_same, make, tokens
from lit_attn.attention.kernels import composed
from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import attention_spec

CHOICES: list[Any] = [
    "talking-heads",
    "dcmha-all",
    {"compose": {"kind": "key", "place": "pre"}},
    {"compose": {"kind": "query+key", "place": "post"}},
    {"preset": "dcmha", "zz": True, "kv_heads": 2},
]
"""Each of the matrices A to D is absent in one of these, and present in another."""

N = 19
"""Tokens of a sequence, more than a tile of 16 has."""


def check(layer: Attention, number: int) -> None:
    """Compare a layer in causal order, or with a mask, which depends on the number of the case."""
    x = tokens(N)
    if number % 3 == 0:
        assert_same(layer, x, is_causal=True)
        return
    lengths = torch.tensor([N, N - 5])
    mask = (torch.arange(N) < lengths.unsqueeze(1)).view(2, 1, 1, N)
    if number % 3 == 1:
        mask = mask & (torch.rand(2, HEADS, N, N, generator=torch.Generator().manual_seed(3)) > 0.3)
        mask[:, :, 4] = False
    assert_same(layer, x, attn_mask=mask)


def main() -> None:
    """Compare every choice. The exit code is 1 with a traceback if one differs."""

    def supports(*arguments: Any) -> bool:
        return True

    calls = []
    attend = composed.attend

    def count_call(*arguments: Any) -> Tensor:
        calls.append(arguments[0].shape)
        return attend(*arguments)

    composed.supports = supports
    composed.attend = count_call
    for number, choice in enumerate(CHOICES):
        layer = make(attention_spec(choice, "test"))
        layer.composes_in_kernel = True
        check(layer, number)
    assert len(calls) == len(CHOICES)
    composed.attend = attend
    layer = make(attention_spec(CHOICES[0], "test"))
    layer.composes_in_kernel = True
    # The compiler traces the operators with tensors that have no memory.
    layer.compile(backend="aot_eager", fullgraph=True)
    check(layer, 0)


if __name__ == "__main__":
    main()
