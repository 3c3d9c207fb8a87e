"""Schedules against the published formulas (docs/setups.md)."""

from pathlib import Path

import pytest
import torch
from helpers import studies
from pydantic import ValidationError

from lit_attn.ablate import dry_run
from lit_attn.ablate.plan import expand
from lit_attn.data.log import collect_warnings
from lit_attn.optim.schedules import (
    Constant,
    Cosine,
    InverseSquareRoot,
    OneCycle,
    Polynomial,
    Schedule,
    Trapezoid,
)
from lit_attn.schema.errors import explain
from lit_attn.training.first_step import find_mistake


def test_belief2_cifar100_warms_up_per_step_then_falls_to_the_floor() -> None:
    rate = Cosine(warmup=10, start=1e-6, end=1e-6).rate(1e-3, 1171, 100)
    assert rate(0) == 1e-6
    assert rate(5855) == pytest.approx((1e-6 + 1e-3) / 2)
    assert rate(11_710) == pytest.approx(1e-3)
    halfway = 11_710 + (117_100 - 11_710) // 2
    assert rate(halfway) == pytest.approx((1e-3 + 1e-6) / 2)
    assert rate(117_100) == pytest.approx(1e-6)
    assert rate(10**9) == pytest.approx(1e-6)


@pytest.mark.parametrize("schedule", [Constant(), Trapezoid()], ids=["constant", "no ramps"])
def test_a_constant_rate_never_changes(schedule: Schedule) -> None:
    rate = schedule.rate(0.3, 5, 2)
    assert {rate(step) for step in range(20)} == {0.3}


def test_fairseqs_rate_rises_and_falls_with_the_root_of_the_step() -> None:
    rate = InverseSquareRoot(start=1e-7).rate(5e-4, 1000, 50)
    assert rate(0) == 1e-7
    assert rate(1000) == pytest.approx(1e-7 + (5e-4 - 1e-7) / 4)
    assert rate(4000) == pytest.approx(5e-4)
    assert rate(16_000) == pytest.approx(2.5e-4)
    assert InverseSquareRoot(warmup_steps=100).rate(1.0, 10, 10)(400) == pytest.approx(0.5)


def test_modded_nanogpts_rate_rises_stays_and_falls_to_zero() -> None:
    """The `casted` branch warms up for 256 steps and decays in the last 2,048 of 9,536."""
    rate = Trapezoid(warmup=4, warmdown=32).rate(1.8e-3, 64, 149)
    assert rate(0) == pytest.approx(1.8e-3 / 256)
    assert rate(127) == pytest.approx(0.9e-3)
    assert rate(255) == rate(256) == rate(5000) == rate(7488) == 1.8e-3
    assert rate(8512) == pytest.approx(0.9e-3)
    assert rate(9535) == pytest.approx(1.8e-3 / 2048)
    assert rate(9536) == rate(10**9) == 0


def test_dcmha_warms_up_over_ten_thousand_steps_and_falls_to_a_tenth() -> None:
    rate = Cosine(warmup=7.9936, end=1e-4).rate(1e-3, 1251, 300)
    assert rate(9_999) == pytest.approx(0.9999e-3)
    assert rate(10_000) == 1e-3
    assert rate(300 * 1251) == pytest.approx(1e-4)


def test_one_cycle_equals_the_linear_schedule_of_pytorch() -> None:
    """ListOps of LRA warms up in 1,000 of 5,000 steps; beta1 falls as the rate rises."""
    schedule = OneCycle(warmup=20, start=4e-6, end=4e-10)
    rate, momentum = schedule.rate(1e-4, 50, 100), schedule.momentum(50, 100)
    assert momentum is not None
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    reference = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-4, total_steps=5000, pct_start=0.2, anneal_strategy="linear"
    )
    for step in range(5000):
        group = optimizer.param_groups[0]
        assert rate(step) == pytest.approx(group["lr"], rel=1e-9)
        assert momentum(step) == pytest.approx(group["betas"][0], rel=1e-9)
        optimizer.step()
        if step < 4999:
            reference.step()
    assert rate(0) == 4e-6
    assert (rate(999), momentum(999)) == (1e-4, 0.85)
    assert rate(5000) == pytest.approx(4e-10)
    assert schedule.model_copy(update={"cycle": None}).momentum(50, 100) is None


def test_segmenters_polynomial_falls_from_the_first_step_to_its_floor() -> None:
    """(1e-3 - 1e-5) (1 - i / 161,728)^0.9 + 1e-5 at iteration i."""
    rate = Polynomial(power=0.9, end=1e-5).rate(1e-3, 2527, 64)
    assert rate(0) == 1e-3
    for step in (1, 2527, 100_000, 161_727):
        assert rate(step) == pytest.approx((1e-3 - 1e-5) * (1 - step / 161_728) ** 0.9 + 1e-5)
    assert rate(161_728) == rate(10**9) == 1e-5


@pytest.mark.parametrize(
    ("schedule", "steps", "rising"),
    [
        (Cosine(warmup=2), 20, 20),
        (Cosine(warmup=2), 21, 0),
        (Cosine(warmup=0.5), 5, 5),
        (Trapezoid(warmup=1), 10, 10),
        (OneCycle(warmup=1), 3, 10),
        (OneCycle(warmup="12 steps"), 12, 12),
        (Trapezoid(warmup="1 step"), 2, 0),
        (InverseSquareRoot(warmup_steps=100), 99, 100),
        (InverseSquareRoot(warmup_steps=100), 101, 0),
        (Cosine(), 1, 0),
        (Constant(), 1, 0),
        (Polynomial(), 1, 0),
    ],
)
def test_a_training_that_ends_in_the_warm_up_is_a_warning(
    schedule: Schedule, steps: int, rising: int
) -> None:
    """An epoch has 10 steps."""
    warning = schedule.warn_of_steps(steps, 10)
    text = f"the training ends after {steps} steps and the warm-up takes {rising}, so the learning"
    assert warning is None if not rising else (warning or "").startswith(text)


@pytest.mark.parametrize("kind", [Cosine, OneCycle, Trapezoid])
def test_a_warm_up_in_steps_is_the_one_in_epochs(kind: type[Schedule]) -> None:
    """An epoch has 8 steps."""
    in_steps = kind.model_validate({"warmup": "12 steps"})
    in_epochs = kind.model_validate({"warmup": 1.5})
    steps, epochs = in_steps.rate(0.3, 8, 4), in_epochs.rate(0.3, 8, 4)
    assert [steps(step) for step in range(32)] == [epochs(step) for step in range(32)]
    assert in_steps.ramps() == {}


@pytest.mark.parametrize("warmup", ["12", "1.5 steps", "-2 steps", "two steps", "steps", -1, [1]])
def test_another_value_is_no_warm_up(warmup: object) -> None:
    message = "schedule: warmup: needs epochs, as 0.5, or steps, as '200 steps'"
    if isinstance(warmup, list):
        message = "schedule: warmup: input should be a valid number, not [1]"
    with pytest.raises(ValidationError) as caught:
        Cosine.model_validate({"warmup": warmup})
    assert str(explain(caught.value, "schedule")).startswith(message)


def test_the_check_before_a_run_warns_once_of_max_steps_below_the_warm_up(tmp_path: Path) -> None:
    body = "baseline: a\nset: {training.max_steps: 3}\ncells: {a: {}, b: {attention: belief2}}"
    matrix = expand(studies.study(tmp_path, body), tmp_path)
    with collect_warnings() as messages:
        find_mistake([job.config for job in matrix.jobs])
    assert len(messages) == 1
    assert messages[0].startswith("schedule: the training ends after 3 steps and the warm-up takes")
    assert messages[0].endswith(
        "shorten the warm-up, or raise training.epochs or training.max_steps"
    )


def test_a_dry_run_warns_of_a_training_that_never_leaves_its_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = "b: {training.epochs: 1}, d: {training.epochs: 1, zz: with}"
    body = f"baseline: a\ncells: {{a: {{}}, {short}, c: {{schedule: constant}}}}"
    dry_run.print_cells([expand(studies.study(tmp_path, body), tmp_path)], with_costs=False)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    text = "schedule.warmup takes all 1 epochs, so the rate only rises; shorten it or raise "
    text += "training.epochs"
    assert warnings == [f"  warning: b, d: {text}"]
