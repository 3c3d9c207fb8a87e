"""Laws of foreign runs: fits, differences at equal cost, and effective speed-ups."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.answers import read_answer
from helpers.paths import ROOT

from lit_attn import find_laws, judge
from lit_attn.__main__ import main
from lit_attn.judging.answers import LawsAnswer
from lit_attn.report.answers.entry import write_answer
from lit_attn.schema.errors import ConfigError

PAGE = ROOT / "docs" / "laws.md"
FOUR = (3.82e17, 2.81e18, 1.16e19, 3.46e19)


def make_frame(rows: list[tuple[str, float, float]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["variant", "flops", "loss"])


def find(rows: list[tuple[str, float, float]], **options: object) -> LawsAnswer:
    return find_laws(make_frame(rows), "loss:min", cost="flops", baseline="base", **options)


def exact(cost: float) -> float:
    return float(1.6 + 88.32 * cost**-0.0941)


def test_a_law_without_noise_is_recovered() -> None:
    answer = find([("base", cost, exact(cost)) for cost in FOUR], asymptote=1.6)
    (law,) = answer.laws
    assert law.exponent.mean == pytest.approx(0.0941)
    assert law.factor == pytest.approx(88.32)
    assert law.misfit == pytest.approx(0, abs=1e-12)
    assert law.predict(1e21) == pytest.approx(exact(1e21))


def test_the_published_ladder_of_marin() -> None:
    """Law and projections of the README of its mixture of experts, from its six points."""
    losses = {1e18: 3.5273, 3e18: 3.3398, 1e19: 3.1494, 3e19: 3.0066, 1e20: 2.8509, 3e20: 2.7222}
    rows = [("base", cost, loss) for cost, loss in losses.items()]
    (law,) = find(rows, asymptote=1.6, confidence=0.9).laws
    assert law.exponent.low is not None
    assert law.exponent.high is not None
    assert law.exponent.low < 0.0941 < law.exponent.high
    assert law.predict(1e21) == pytest.approx(2.606, abs=0.002)
    assert law.predict(1e23) == pytest.approx(2.252, abs=0.002)


def test_the_worked_example_of_marin() -> None:
    """The speed-up of its guide for agents: A is about 87.7, and time counts."""
    factor = (3.5422 - 1.6) * 3.82e17**0.0941
    assert factor == pytest.approx(87.7, abs=0.1)
    frame = make_frame(
        [
            ("base", 3.82e17, 3.5422),
            ("base", 1e20, 1.6 + factor * 1e20**-0.0941),
            ("variant", 3.82e17, 3.52),
        ]
    )
    frame["rate"] = [433_986, 433_986, 410_000]
    answer = find_laws(frame, "loss:min", cost="flops", baseline="base", rate="rate", asymptote=1.6)
    (entry,) = answer.comparisons
    assert entry.basis == "runs"
    assert entry.speedup is not None
    assert entry.time_speedup is not None
    # At equal cost the speed-up depends on the losses only.
    identity = ((3.5422 - 1.6) / (3.52 - 1.6)) ** (1 / 0.0941)
    assert entry.speedup.mean == pytest.approx(identity)
    assert entry.time_speedup.mean == pytest.approx(identity * 410_000 / 433_986)
    assert entry.time_speedup.mean == pytest.approx(1.067, abs=0.001)
    # Two runs leave no degree of freedom, so nothing shows an interval.
    assert entry.speedup.low is None
    assert entry.p is None


def test_a_variant_between_two_costs_is_compared_with_the_law() -> None:
    rows = [("base", cost, exact(cost)) for cost in FOUR]
    faster = [("idea", 6e18, exact(6e18 * 1.3)), ("idea", 6e19, exact(6e19 * 1.3))]
    inside, outside = find(rows + faster, asymptote=1.6).comparisons
    assert inside.basis == "law"
    assert inside.speedup is not None
    assert inside.speedup.mean == pytest.approx(1.3)
    assert inside.difference is not None
    assert inside.difference.mean == pytest.approx(exact(6e18 * 1.3) - exact(6e18))
    assert not inside.is_extrapolated
    # No run of the baseline has as much cost.
    assert outside.difference is None
    assert outside.is_extrapolated


def test_groups_at_equal_cost_have_the_difference_of_the_judge() -> None:
    generator = np.random.default_rng(1)
    rows = []
    for variant, shift in (("base", 0.0), ("idea", -0.01)):
        for cost in (1e18, 1e19):
            noise = 0.004 * generator.normal(size=6)
            rows += [(variant, cost, exact(cost) + shift + float(part)) for part in noise]
    entry = find(rows).comparisons[0]
    frame = make_frame(rows)
    judged = judge(frame[frame["flops"] == 1e18], "loss:min", pairs="none", baseline="base")
    difference = judged.variants[0].difference
    assert difference is not None
    assert entry.difference is not None
    assert entry.difference.mean == pytest.approx(difference.mean)
    assert entry.difference.low == pytest.approx(difference.low, rel=1e-6)


@pytest.mark.parametrize(("place", "speedup"), [(FOUR[0], 1.0), (FOUR[3], 1.5), (6e18, 1.05)])
def test_an_interval_covers_the_true_speedup(place: float, speedup: float) -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        rows = [("base", cost, exact(cost) * (1 + 0.001 * generator.normal())) for cost in FOUR]
        rows.append(("idea", place, exact(place * speedup) * (1 + 0.001 * generator.normal())))
        interval = find(rows, asymptote=1.6).comparisons[0].speedup
        assert interval is not None
        covered += interval.low <= speedup <= interval.high
    # Three standard deviations of a binomial share of 95 %.
    assert covered >= 180


def test_an_asymptote_is_fitted_to_four_costs_only_and_leaves_no_interval() -> None:
    """An interval that takes the fitted asymptote as known covers the exponent in 18 of 100."""
    rows = [("base", cost, exact(cost)) for cost in FOUR]
    rows += [("idea", FOUR[1], exact(FOUR[1]) - 0.1)]
    answer = find(rows, asymptote=None)
    assert answer.laws[0].asymptote == pytest.approx(1.6, abs=0.02)
    (entry,) = answer.comparisons
    assert entry.p is None
    for interval in (answer.laws[0].exponent, entry.speedup, entry.difference):
        assert (interval.low, interval.high) == (None, None)
    assert "no number that depends on it has an interval" in answer.warnings[0]
    with pytest.raises(ConfigError, match="'base' has 3 values of 'flops', and an asymptote is"):
        find(rows[:3], asymptote=None)
    # Runs at one cost need no law.
    twice = [*rows, ("base", FOUR[1], exact(FOUR[1]) + 0.01), ("idea", FOUR[1], 3.1)]
    (entry,) = find(twice, asymptote=None).comparisons
    assert entry.difference.low is not None


def test_a_baseline_that_does_not_improve_gives_no_speedup() -> None:
    rows = [("base", 1e18, 3.0), ("base", 1e19, 3.1), ("base", 1e20, 3.2), ("idea", 1e19, 2.9)]
    (entry,) = find(rows).comparisons
    assert entry.speedup is None
    assert entry.difference is not None


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([("base", 1e18, 3.0)], {}, "at one value of 'flops' only; a law needs two"),
        ([("base", 0.0, 3.0), ("base", 1.0, 2.0)], {}, "row 0: flops: 0 is not above 0"),
        ([("base", 1.0, 1.5)], {"asymptote": 1.6}, "1.5 is not above the asymptote 1.6"),
        ([("base", 1.0, float("nan"))], {}, "no run has ended without a failure"),
        ([("base", 1.0, 1.5)], {"confidence": 95}, "a number between 0 and 1, not 95"),
        ([("base", 1.0, 1.5)], {"rate": "rates"}, "has no column 'rates'"),
    ],
)
def test_a_mistake_is_one_line(
    rows: list[tuple[str, float, float]], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        find(rows, **options)
    assert "\n" not in str(error.value)


def test_a_metric_that_rises_has_no_law() -> None:
    frame = make_frame([("base", 1.0, 0.9)])
    with pytest.raises(ConfigError, match="a law is about a loss"):
        find_laws(frame, "loss:max", cost="flops", baseline="base")


def test_the_example_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text()
    (table,) = re.findall(r"```csv\n(.*?)```", text, re.DOTALL)
    ((words, printed),) = re.findall(r"\$ lit-attn ([^\n]*)\n(.*?)```", text, re.DOTALL)
    (tmp_path / "ladder.csv").write_text(table)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    assert main(words.split()) == 0
    assert capsys.readouterr().out == printed
    assert main([*words.split(), "--json"]) == 0
    assert read_answer(capsys.readouterr().out)["laws"][0]["runs"] == 6
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("2.604")


def test_a_law_that_is_too_steep_for_floating_point_has_finite_numbers() -> None:
    """Two nearly equal costs with different losses: the factor of the law is beyond 1e300."""
    rows = [("base", 1e20, 1.0), ("base", 1.001e20, 1e-3), ("idea", 1e20, 0.9)]
    answer = find(rows)
    assert all(math.isfinite(law.factor) for law in answer.laws)
    assert answer.laws[0].misfit == pytest.approx(0, abs=1e-6)
    assert answer.comparisons[0].speedup is not None
    json.loads(write_answer(answer), parse_constant=pytest.fail)


def test_runs_without_a_final_loss_are_left_out_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of such a run is that of its last logged step."""
    rows = [("base", cost, exact(cost)) for cost in FOUR] + [("idea", FOUR[1], exact(FOUR[1]))]
    frame = make_frame([*rows, ("base", FOUR[0], 9.0), ("idea", FOUR[1], 8.0)])
    frame["state"] = ["finished"] * len(rows) + ["crashed", "running"]
    options = {"cost": "flops", "baseline": "base", "asymptote": 1.6}
    answer = find_laws(frame, "loss:min", **options)
    expected = find_laws(make_frame(rows), "loss:min", **options)
    assert answer.warnings == [
        "Failed: 1 run with the state 'crashed', whatever the value.",
        "Not ended: 1 run with the state 'running'.",
        "2 runs without a final loss: left out of all laws.",
    ]
    assert answer.model_copy(update={"warnings": []}) == expected
    frame.to_csv(tmp_path / "runs.csv", index=False)
    words = ["--cost", "flops", "--metric", "loss:min", "--baseline", "base"]
    assert main(["laws", str(tmp_path / "runs.csv"), *words]) == 0
    assert "Warning: 2 runs without a final loss" in capsys.readouterr().out
    frame["state"] = "running"
    with pytest.raises(ConfigError, match="frame: no run has ended without a failure"):
        find_laws(frame, "loss:min", **options)


def test_a_loss_of_zero_has_a_law_with_a_negative_asymptote() -> None:
    rows = [("base", 1.0, 1.0), ("base", 2.0, 0.0), ("base", 4.0, -0.5)]
    (law,) = find(rows, asymptote=-1.0).laws
    assert law.exponent.mean == pytest.approx(1.0)
    assert law.misfit == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ConfigError, match="asymptote: needs a finite number, not nan"):
        find(rows, asymptote=math.nan)
