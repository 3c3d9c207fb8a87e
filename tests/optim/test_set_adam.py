"""SET-Adam equals its published formula, computed in plain Python."""

import math

import pytest
import torch

from lit_attn.optim.base import Optimizer
from lit_attn.optim.set_adam import SetAdamOptimizer

pytestmark = pytest.mark.slow


def plain_step(
    theta: list[float],
    m: list[float],
    v: list[float],
    g: list[float],
    t: int,
    lr: float,
    eps: float,
) -> list[float]:
    """Return theta after one step of the formula with beta = (0.9, 0.999) and tau = 0.5.

    `m` and `v` change in place.
    """
    for i, gradient in enumerate(g):
        m[i] = 0.9 * m[i] + 0.1 * gradient
        v[i] = 0.999 * v[i] + 0.001 * gradient**2
    scale = sum(v) ** 2 / (len(v) * sum(x * x for x in v))
    w = [math.sqrt(x * scale / (1 - 0.999**t) + eps) for x in v]
    smallest = min(w)
    return [
        x - lr / (1 - 0.9**t) * mean / (width - 0.5 * smallest)
        for x, mean, width in zip(theta, m, w, strict=True)
    ]


def test_the_configuration_builds_the_optimizer() -> None:
    config = Optimizer.parse({"kind": "set-adam", "lr": 1e-4})
    optimizer = config.build(torch.nn.Linear(3, 2))
    assert isinstance(optimizer, SetAdamOptimizer)
    assert optimizer.defaults["eps"] == 1e-18


def test_steps_equal_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(7, dtype=torch.double, generator=generator).requires_grad_()
    plain = theta.tolist()
    m = [0.0] * 7
    v = [0.0] * 7
    optimizer = SetAdamOptimizer([theta], lr=1e-2)
    for t in range(1, 6):
        gradient = torch.randn(7, dtype=torch.double, generator=generator)
        theta.grad = gradient.clone()
        optimizer.step()
        plain = plain_step(plain, m, v, gradient.tolist(), t, 1e-2, 1e-18)
        assert theta.tolist() == pytest.approx(plain, rel=1e-10)


def test_equal_gradients_double_the_step_of_adam() -> None:
    """For equal gradients cos^2 is 1 and w - w/2 is w/2, also for a single scalar."""
    for size in ((), (3,)):
        theta = torch.zeros(size).requires_grad_()
        theta.grad = torch.full(size, 5.0)
        SetAdamOptimizer([theta], lr=1e-3).step()
        assert theta.flatten().tolist() == pytest.approx([-2e-3] * theta.numel(), rel=1e-5)


def test_every_tensor_has_its_own_scale_and_count_of_steps() -> None:
    """Tensors do not affect each other, even if one lacks a gradient in some steps."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,), ()]
    together = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    alone = [one.detach().clone().requires_grad_() for one in together]
    optimizer = SetAdamOptimizer(together, lr=1e-2)
    optimizers = [SetAdamOptimizer([one], lr=1e-2) for one in alone]
    for step in range(4):
        for index, (one, other) in enumerate(zip(together, alone, strict=True)):
            one.grad = torch.randn(one.shape, generator=generator)
            if index == 1 and step % 2:
                one.grad = None
            other.grad = one.grad
        optimizer.step()
        for single in optimizers:
            single.step()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_zero_gradients_change_nothing_and_make_no_nan() -> None:
    theta = torch.ones(4).requires_grad_()
    theta.grad = torch.zeros(4)
    SetAdamOptimizer([theta], lr=1e-3).step()
    assert theta.tolist() == [1.0] * 4


def test_tiny_gradients_do_not_underflow() -> None:
    """The square of v is below float32's range for gradients near 1e-8; the step stays the same."""
    results = []
    for scale in (1.0, 1e-8):
        theta = torch.zeros(3).requires_grad_()
        theta.grad = torch.tensor([1.0, 2.0, -3.0]) * scale
        SetAdamOptimizer([theta], lr=1.0, eps=0.0).step()
        results.append(theta.tolist())
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_half_precision_parameters_keep_wide_state() -> None:
    theta = torch.zeros(3, dtype=torch.float16).requires_grad_()
    theta.grad = torch.full((3,), 1e-4, dtype=torch.float16)
    optimizer = SetAdamOptimizer([theta], lr=1e-3)
    optimizer.step()
    assert optimizer.state[theta]["exp_avg_sq"].dtype == torch.float32
    assert torch.isfinite(theta).all()
    assert (theta < 0).all()


def test_weight_decay_is_coupled() -> None:
    decayed, added = (torch.full((2,), 3.0).requires_grad_() for _ in range(2))
    decayed.grad = torch.tensor([1.0, 2.0])
    added.grad = torch.tensor([1.3, 2.3])
    SetAdamOptimizer([decayed], lr=0.1, weight_decay=0.1).step()
    SetAdamOptimizer([added], lr=0.1).step()
    assert decayed.tolist() == pytest.approx(added.tolist())
