"""Layers on a simulated GPU take the kernels that a device of this capability would."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.fake_gpu import H100, Capability, rehearsal
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from lit_attn.attention import flex, fused
from lit_attn.attention.layer import attn_layer

CUDNN, FLASH, EFFICIENT, MATH = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)

CAPABILITIES: list[Capability] = [(8, 0), (8, 6), (8, 9), (9, 0)]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the calls of flex_attention, and the kernels of the merged calls."""
    counted: Counter[str] = Counter()
    flex_sums = flex.weighted_sums
    run = fused.run_forward

    def count_flex(scores: flex.Scores, v: Tensor) -> Tensor:
        counted["flex"] += 1
        return flex_sums(scores, v)

    def count_kernel(kernel: SDPBackend, *arguments: Any) -> fused.Summed:
        counted[kernel.name] += 1
        return run(kernel, *arguments)

    monkeypatch.setattr(flex, "weighted_sums", count_flex)
    monkeypatch.setattr(fused, "run_forward", count_kernel)
    return counted


def train_layer(choices: object, dim: int, heads: int, dtype: torch.dtype, **options: Any) -> None:
    """Compute a forward and a backward pass of a layer on the simulated GPU."""
    layer = attn_layer(choices)(dim, heads, device="cuda", dtype=dtype, **options)
    x = torch.randn(2, 9, dim, device="cuda", dtype=dtype, requires_grad=True)
    out = layer(x, is_causal=True)
    assert out.is_cuda
    assert out.shape == x.shape
    out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("choices", ["belief2", "mgk", {"window": 4}], ids=str)
def test_layers_with_further_terms_take_flex(
    choices: object, dropout: float, dtype: torch.dtype, counts: Counter[str]
) -> None:
    with rehearsal():
        train_layer(choices, 64, 4, dtype, attn_drop=dropout)
    assert counts == {"flex": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_terms_of_single_keys_take_one_plain_call(
    dropout: float, dtype: torch.dtype, counts: Counter[str]
) -> None:
    """A term of a key is a feature, so PyTorch's own attention computes the layer."""
    with rehearsal():
        train_layer("gaussian", 64, 4, dtype, attn_drop=dropout)
    assert counts == {}


@pytest.mark.parametrize(
    ("choices", "dim", "dtype", "kernel"),
    [
        ("mgk", 32, torch.bfloat16, "FLASH_ATTENTION"),
        ("mgk", 32, torch.float32, "EFFICIENT_ATTENTION"),
        ("belief2", 32, torch.float64, "MATH"),
        ("belief2", 4 * 132, torch.float32, "EFFICIENT_ATTENTION"),
    ],
)
def test_widths_and_types_beyond_flex_take_merged_calls(
    choices: str, dim: int, dtype: torch.dtype, kernel: str, counts: Counter[str]
) -> None:
    with rehearsal():
        train_layer(choices, dim, 4, dtype)
    assert set(counts) == {kernel}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("width", [16, 64, 72, 128, 192, 200, 224, 256, 264])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_kernel_of_merged_calls_respects_the_limits_of_training(
    width: int, dtype: torch.dtype, capability: Capability
) -> None:
    """Consumer cards have too little shared memory for wide heads in flash attention's backward."""
    is_consumer_card = capability in ((8, 6), (8, 9))
    expected = EFFICIENT
    if dtype == torch.float64:
        expected = MATH
    elif dtype == torch.float16 and width <= 256:
        is_too_wide = is_consumer_card and 192 < width <= 224
        expected = EFFICIENT if is_too_wide else FLASH
    with rehearsal(capability):
        # No tensor requires a gradient inside an operator.
        q = torch.randn(1, 2, 9, width, device="cuda", dtype=dtype)
        assert fused.choose_kernel(q, q, True) is expected


def test_masks_and_odd_widths_leave_flash_attention() -> None:
    with rehearsal((8, 0)):
        q = torch.randn(1, 2, 9, 64, device="cuda", dtype=torch.float16)
        mask = torch.ones(9, 9, device="cuda", dtype=torch.bool)
        choose = torch._fused_sdp_choice
        assert SDPBackend(choose(q, q, q)) == FLASH
        assert SDPBackend(choose(q, q, q, mask)) == EFFICIENT
        assert SDPBackend(choose(q, q, q[..., :60], mask)) == MATH
        assert SDPBackend(choose(q, q[:, :, :5], q[:, :, :5], None, 0.0, True)) == EFFICIENT


@pytest.mark.parametrize("name", ["standard", "alibi", "t5", "gated"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_layer_with_a_mask_never_takes_the_kernel_of_cudnn(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100 prefers it, and it returns numbers for a query that sees no key."""
    may_be_cudnn = []
    mask_types = []
    attend = functional.scaled_dot_product_attention

    def record(*arguments: Any, **options: Any) -> Tensor:
        may_be_cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
        mask = arguments[3]
        mask_types.append(None if mask is None else mask.dtype)
        return attend(*arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", record)
    with rehearsal(H100):
        layer = attn_layer(name)(64, 4, device="cuda", dtype=dtype)
        x = torch.randn(2, 9, 64, device="cuda", dtype=dtype, requires_grad=True)
        layer(x).sum().backward()
        mask = torch.ones(2, 1, 1, 9, device="cuda", dtype=torch.bool)
        layer(x, mask).sum().backward()
    # A bias is a mask too, and the kernels take it in the precision of the queries.
    if name in ("alibi", "t5"):
        assert may_be_cudnn == [False, False]
        assert mask_types == [dtype, dtype]
    else:
        assert may_be_cudnn == [True, False]
        assert mask_types == [None, torch.bool]
