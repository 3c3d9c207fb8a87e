"""The late cosine of lagged-cosine against the published formula and timm."""

import math

import pytest
import torch
from timm.scheduler import CosineLRScheduler

from lit_attn.optim.schedules import LaggedCosine


def test_the_vit_small_schedule_lags_by_two_epochs() -> None:
    """lr(0) = lr0; lr(e) = lr0 (1 + cos(pi (e - 2) / T)) / 2, about 1.5e-8 in the last of 400."""
    rate = LaggedCosine().rate(1e-4, 98, 400)
    assert rate(0) == rate(97) == 1e-4
    for epoch in (1, 2, 7, 250):
        expected = 0.5e-4 * (1 + math.cos(math.pi * (epoch - 2) / 400))
        assert rate(98 * epoch) == rate(98 * epoch + 97) == pytest.approx(expected)
    assert rate(98 * 2) == 1e-4
    assert rate(98 * 399) == pytest.approx(1.4e-8, rel=0.02)


def test_the_deit_schedule_equals_the_timm_schedule() -> None:
    """In BeliefFormer's ImageNet set-up, `step(epoch)` after an epoch sets the next rate."""
    schedule = LaggedCosine(lag=1, end=1e-5)
    rate = schedule.rate(1.25e-4, 20_018, 300)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.25e-4)
    timms = CosineLRScheduler(optimizer, t_initial=300, lr_min=1e-5)
    for epoch in range(300):
        expected = pytest.approx(optimizer.param_groups[0]["lr"])
        assert rate(20_018 * epoch) == rate(20_018 * epoch + 20_017) == expected
        timms.step(epoch)
