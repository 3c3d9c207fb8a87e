"""Comparison of variants with the baseline, from made-up records."""

import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fake_study import change_results, write_study

from lit_attn.cells.records import Metric, PlannedCell
from lit_attn.judging.prepare import Choices, prepare
from lit_attn.judging.table import read_table
from lit_attn.report.records.read import read_studies
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import stats
from lit_attn.report.tables.summary import make_variant_frame
from lit_attn.report.verdicts.comparison import Comparisons, compare_variants


def write(
    root: Path, values: Mapping[str, Sequence[float | None]], margin: float | None = None
) -> StudyRecord:
    """Write a study whose seeds have these values; None is a seed that diverged."""
    seeds = len(next(iter(values.values())))
    failed = {(v, s): "diverged" for v, vs in values.items() for s, x in enumerate(vs) if x is None}
    metric = Metric(name="test/score", label="score", goal="max", scale=1, margin=margin)
    folder = write_study(
        root, variants=dict.fromkeys(values, 0.0), seeds=seeds, failures=failed, metric=metric
    )

    def change(cell: PlannedCell) -> dict[str, Any] | None:
        value = values[cell.variant][cell.seed]
        return None if value is None else {"metrics": {"test/score": value}}

    return change_results(folder, change)


def compare(
    root: Path, values: Mapping[str, Sequence[float | None]], margin: float | None = None
) -> Comparisons:
    return compare_variants(write(root, values, margin))


@pytest.mark.slow
def test_a_star_is_possible_with_six_seeds_however_many_variants(tmp_path: Path) -> None:
    baseline = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    noise = [[0.1, -0.2, 0.3, -0.1, 0.2, -0.25], [-0.3, 0.2, 0.1, -0.2, 0.1, 0.05]] * 10
    values = {"base": baseline, "ahead": [x + 2 + x / 7 for x in baseline]}
    values |= {
        f"v{i}": [b + e for b, e in zip(baseline, n, strict=True)] for i, n in enumerate(noise)
    }
    compared = compare(tmp_path, values)
    assert len(compared.pairs) == 21
    assert compared.records["ahead"]["p_adjusted"] == 2 / 2**6
    assert [name for name, r in compared.records.items() if r.get("significant")] == ["ahead"]


def test_a_variant_without_any_value_has_no_difference(tmp_path: Path) -> None:
    compared = compare(tmp_path, {"base": [1.0, 1.1], "worse": [0.9, 0.8], "lost": [None, None]})
    assert "difference" not in compared.records["lost"]
    assert compared.records["lost"]["significant"] is False
    assert compared.records["lost"]["failed"] == 2


def test_only_a_variant_with_all_planned_seeds_is_best(tmp_path: Path) -> None:
    study = write(tmp_path, {"base": [1.0, 1.1], "worse": [0.9, 0.8], "best": [9.0, None]})
    frame = make_variant_frame(study, compare_variants(study)).set_index("variant")
    assert frame["best"].to_dict() == {"base": True, "worse": False, "best": False}
    assert frame.loc["best", "failed"] == 1


def test_a_star_needs_both_tests_when_seeds_failed(tmp_path: Path) -> None:
    """Some seeds diverge, and the mean of the others alone would earn a star."""
    n = 12
    ahead = [1.0 + i / 50 for i in range(n)]
    compared = compare(
        tmp_path,
        {
            "base": [i / 100 for i in range(n)],
            "unstable": [x if i % 3 else None for i, x in enumerate(ahead)],
            "stable": ahead,
        },
    )
    unstable, stable = compared.records["unstable"], compared.records["stable"]
    assert unstable["p_adjusted"] <= 0.05 < unstable["p_ranked"]
    assert not unstable["significant"]
    assert stable["significant"]
    assert "p_ranked" not in stable
    # Fisher's p of 4 failures of 12 against none is 0.093, and 1 for the stable variant.
    assert unstable["failure_p"] == pytest.approx(2 * 0.0932, abs=1e-3)
    assert stable["failure_p"] == 1


def test_failures_of_the_baseline_count_for_the_variant(tmp_path: Path) -> None:
    n = 8
    baseline = [None, *(i / 100 for i in range(1, n))]
    compared = compare(tmp_path, {"base": baseline, "ahead": [1.0 + i / 50 for i in range(n)]})
    record = compared.records["ahead"]
    assert record["pairs"] == n - 1
    assert record["p_ranked"] == 2 / 2**n
    assert record["significant"]


def test_equal_differences_have_an_interval_as_wide_as_the_metrics_step(tmp_path: Path) -> None:
    step = 100 / 360
    correct = [341, 345, 342, 350, 347]
    values = {"base": [step * c for c in correct], "ahead": [step * (c + 3) for c in correct]}
    study = write(tmp_path, values)
    record = compare_variants(study).records["ahead"]
    assert study.resolution == pytest.approx(step)
    assert record["high"] - record["low"] == pytest.approx(step)
    assert record["difference"] == pytest.approx(3 * step)
    assert record["ties"] == 0


def test_ties_are_counted(tmp_path: Path) -> None:
    compared = compare(tmp_path, {"base": [1.0, 2.0, 3.0], "v": [1.0, 2.5, 3.0]})
    assert compared.records["v"]["ties"] == 2


POWER_FIELDS = ("power_n", "power_2n", "power_4n")


def test_the_power_of_the_star_is_that_of_the_measured_effect(tmp_path: Path) -> None:
    baseline = [0.013 * i * i for i in range(6)]
    noise = [0.9, -0.4, 0.3, -0.8, 0.5, -0.6]
    values = {
        "base": baseline,
        "ahead": [b + 0.9 + e for b, e in zip(baseline, noise, strict=True)],
        "behind": [b - 2.0 - e for b, e in zip(baseline, noise, strict=True)],
        "equal": [b + e for b, e in zip(baseline, noise, strict=True)],
    }
    records = compare(tmp_path, values).records
    mean, sd = statistics.fmean(noise), statistics.stdev(noise)
    for name, effect in (("ahead", (0.9 + mean) / sd), ("behind", -(2.0 + mean) / sd)):
        assert records[name]["effect"] == pytest.approx(effect)
        expected = [stats.star_power(effect, n, 3, 0.05) for n in (6, 12, 24)]
        assert [records[name][field] for field in POWER_FIELDS] == pytest.approx(expected, abs=0.01)
        assert 0 < expected[0] < expected[1] <= expected[2]
    # The interval of this difference contains 0, and the baseline has no difference.
    for name in ("equal", "base"):
        assert not {"effect", "seeds_low", *POWER_FIELDS} & records[name].keys()


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1, 5])
def test_a_complete_variant_keeps_its_test_when_another_lacks_seeds(
    tmp_path: Path, missing: int
) -> None:
    """Six pairs can pass the joint test of ten variants, and cannot pass Holm's test."""
    ahead = [1.0, 1.1, 0.9, 1.2, 0.8, 1.3]
    values: dict[str, list[float | None]] = {"base": [0.0] * 6, "ahead": [*ahead]}
    for other in range(9):
        values[f"other{other}"] = [0.1 + other / 100, -0.02, 0.3, -0.01, 0.05, -0.2]
    values["other3"][:missing] = [None] * missing
    study = write(tmp_path, values)
    # Seeds that are still to run, and no failures, which have a test of their own.
    for path in (tmp_path / "fake").glob("*/*/attempts"):
        shutil.rmtree(path)
    record = compare_variants(next(read_studies(tmp_path))).records["ahead"]
    assert record["p_adjusted"] == 2 / 2**6
    assert record["significant"]
    assert record["power_n"] > 0.9
    assert len(study.values("other3")) == 6 - missing


def test_a_table_of_another_program_keeps_the_joint_test(tmp_path: Path) -> None:
    rows = ["variant,seed,score"]
    for seed in range(6):
        rows.append(f"base,{seed},{seed / 100}")
        rows.append(f"ahead,{seed},{1 + seed / 90}")
        for other in range(9):
            row = f"other{other},{seed},{(seed + other) % 3 / 10}"
            rows += [] if (other, seed) == (3, 0) else [row]
    path = tmp_path / "results.csv"
    path.write_text("\n".join(rows) + "\n")
    choices = Choices(metric="score:max", pairs="seed", baseline="base")
    study = prepare(read_table(path), choices).study
    compared = compare_variants(study)
    assert compared.records["ahead"]["p_adjusted"] == 2 / 2**6
    assert compared.records["ahead"]["significant"]
    assert compared.records["other3"]["pairs"] == 5


def test_no_variant_with_fewer_pairs_falls_below_its_floor(tmp_path: Path) -> None:
    values: dict[str, list[float | None]] = {
        "base": [0.0] * 8,
        "few": [2.0, 2.1, 2.2, None, None, None, None, None],
        "all": [1.0, 1.1, 0.9, 1.2, 0.8, 1.3, 1.1, 0.7],
    }
    records = compare(tmp_path, values).records
    assert records["few"]["p_adjusted"] >= 2 / 2**3
    assert records["all"]["p_adjusted"] == 2 / 2**8


def test_the_joint_test_with_missing_seeds_controls_any_false_star() -> None:
    generator = np.random.default_rng(0)
    studies = 600
    false_stars = 0
    for _ in range(studies):
        values = generator.normal(size=(6, 8))
        differences = values[1:] - values[0]
        # The first variants lack up to four seeds.
        for variant in range(4):
            differences[variant, : variant + 1] = 0.0
        false_stars += min(stats.joint_sign_flip(differences)) <= 0.05
    assert 0.02 <= false_stars / studies <= 0.075


@pytest.mark.parametrize(
    ("shift", "spread", "verdict"),
    [
        (2.0, 0.1, "better"),
        (-2.0, 0.1, "worse"),
        (0.1, 0.1, "equivalent"),
        (0.1, 3.0, "undecided"),
    ],
)
def test_a_margin_leads_to_a_verdict(
    shift: float, spread: float, verdict: str, tmp_path: Path
) -> None:
    baseline = [0.013 * i * i for i in range(6)]
    other = [b + shift + spread * (-1) ** i for i, b in enumerate(baseline)]
    compared = compare(tmp_path, {"base": baseline, "v": other}, margin=0.5)
    assert compared.records["v"]["verdict"] == verdict


def test_a_margin_makes_no_verdict_that_a_star_does_not_make(tmp_path: Path) -> None:
    """Five seeds with p = .062 were "better" with any margin below the interval."""
    baseline = [0.013 * i * i for i in range(5)]
    ahead = [b + 2 + 0.1 * (-1) ** i for i, b in enumerate(baseline)]
    compared = compare(tmp_path, {"base": baseline, "v": ahead}, margin=1e-4)
    assert compared.records["v"]["joint_low"] > 1.8
    assert compared.records["v"]["verdict"] == "undecided"


@pytest.mark.parametrize(
    ("shift", "failed", "verdict"),
    [(0.1, 1, "undecided"), (2.0, 4, "undecided"), (2.0, 1, "better")],
)
def test_a_verdict_needs_the_failed_seeds(
    shift: float, failed: int, verdict: str, tmp_path: Path
) -> None:
    """The seeds that finished are equivalent or better; failed ones are worse than any value."""
    baseline = [0.013 * i * i for i in range(12)]
    finished = [b + shift + 0.1 * (-1) ** i for i, b in enumerate(baseline)]
    values = {"base": baseline, "v": [*finished[:-failed], *[None] * failed]}
    record = compare(tmp_path, values, margin=0.5).records["v"]
    assert (record["verdict"], record["margin"]) == (verdict, None)


def test_without_a_margin_the_smallest_one_is_given(tmp_path: Path) -> None:
    compared = compare(tmp_path, {"base": [1.0, 2.07, 3.0], "v": [1.1, 2.4, 3.2]})
    record = compared.records["v"]
    assert record["verdict"] is None
    assert record["margin"] == pytest.approx(record["joint_high"])
    assert record["margin"] > record["difference"]


def test_intervals_for_verdicts_are_wider_with_more_variants(tmp_path: Path) -> None:
    values = {"base": [1.0, 2.07, 3.0], "v": [1.1, 2.4, 3.2]}
    one = compare(tmp_path / "one", values).records["v"]
    many = values | {f"w{i}": [1.0, 2.0 + i / 7, 3.0] for i in range(5)}
    several = compare(tmp_path / "several", many).records["v"]
    assert (one["joint_low"], one["joint_high"]) == pytest.approx((one["low"], one["high"]))
    assert several["joint_high"] > one["joint_high"]
    assert (several["low"], several["high"]) == pytest.approx((one["low"], one["high"]))


def test_a_margin_is_positive() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        Metric(margin=0)
