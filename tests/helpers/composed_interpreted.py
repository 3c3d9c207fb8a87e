"""Comparison of the kernels for compositions, in Triton's interpreter, with the formulas.

Run it as a program with TRITON_INTERPRET=1, which Triton reads when it is imported. The interpreter
computes in float64 on a CPU.
"""

from typing import Any

import torch

from helpers.attention_checks import HEADS, assert_same, make, tokens
from lit_attn.attention import dispatch
from lit_attn.attention.kernels import composed
from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import attention_spec
from lit_attn.doctor.layers import read_path

CHOICES: list[Any] = [
    "talking-heads",
    "static-projection",
    "dcmha-all",
    "dcmha-query",
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

    composed.supports = supports
    for number, choice in enumerate(CHOICES):
        layer = make(attention_spec(choice, "test"))
        layer.composes_in_kernel = True
        path = read_path(layer, torch.device("cpu"))
        assert path == dispatch.Path.COMPOSED.name
        check(layer, number)


if __name__ == "__main__":
    main()
