"""Tokens per second, MFU, and gradient clipping before fused optimisers."""

from types import SimpleNamespace

import pytest
import torch
from helpers.training_cells import text_cell
from torch import nn

from lit_attn.cells.records import Spread
from lit_attn.tasks.base import TaskModule
from lit_attn.training import build
from lit_attn.training.measurement import peak_flops, speed


def test_speed_follows_from_the_median_step_time() -> None:
    step = Spread(median=0.5, iqr=0.1, count=9)
    actual = speed(step, samples=8, tokens=1024, flops=10**12, peak=1e15)
    # Forward and twice that backward, of 8 samples, in half a second.
    assert actual == {"train/tokens_per_second": 16_384.0, "train/mfu": pytest.approx(0.048)}
    assert speed(step, 8, None, 10**12, None) == {}
    assert speed(Spread(median=0, iqr=0, count=0), 8, 1024, 10**12, 1e15) == {}


@pytest.mark.parametrize(
    ("device", "precision", "teraflops"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA RTX A6000", "bf16", 155),
        ("NVIDIA A100-SXM4-80GB", "fp32", None),
        ("NVIDIA T400", "bf16", None),
        ("CPU", "bf16", None),
    ],
)
def test_peak_flops_follow_from_the_device_name(
    device: str, precision: str, teraflops: float | None
) -> None:
    actual = peak_flops(device, precision)
    assert actual is None if teraflops is None else actual == pytest.approx(teraflops * 1e12)


def task(precision: str, clip: float | None) -> TaskModule:
    built = build.build(text_cell(), torch.device("cpu")).task
    built.trainer = SimpleNamespace(precision=precision, gradient_clip_val=clip)
    return built


@pytest.mark.parametrize(
    ("precision", "clip", "fused"),
    [
        ("32-true", 1.0, True),
        ("bf16-mixed", 1.0, True),
        ("16-mixed", None, True),
        # The optimiser would see scaled gradients, and clipping too.
        ("16-mixed", 1.0, False),
    ],
)
def test_optimisers_are_fused_where_clipping_allows(
    precision: str, clip: float | None, fused: bool
) -> None:
    assert task(precision, clip).configure_optimizers().defaults["fused"] is fused


def test_clipping_scales_all_gradients_as_one_vector() -> None:
    clipped = task("bf16-mixed", 1.0)
    gradients = [torch.full_like(p, 3.0) for p in clipped.parameters()]
    for parameter, gradient in zip(clipped.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    optimizer = torch.optim.SGD(clipped.parameters())
    clipped.configure_gradient_clipping(optimizer, 2 * norm.item())
    assert all(torch.equal(p.grad, g) for p, g in zip(clipped.parameters(), gradients, strict=True))
    clipped.configure_gradient_clipping(optimizer, 1.0)
    assert nn.utils.get_total_norm(p.grad for p in clipped.parameters()) == pytest.approx(
        1, rel=1e-4
    )
    clipped.configure_gradient_clipping(optimizer, None)
    assert nn.utils.get_total_norm(p.grad for p in clipped.parameters()) == pytest.approx(
        1, rel=1e-4
    )
