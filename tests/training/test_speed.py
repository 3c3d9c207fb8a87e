"""Gradient clipping before fused optimisers."""

from types import SimpleNamespace

import pytest
import torch
from helpers.training_cells import text_cell
from torch import nn

from lit_attn.tasks.base import TaskModule
from lit_attn.training import build


def task(precision: str, clip: float | None) -> TaskModule:
    built = build.build(text_cell(), torch.device("cpu")).task
    built.trainer = SimpleNamespace(precision=precision, gradient_clip_val=clip)
    return built


@pytest.mark.slow
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


@pytest.mark.slow
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
