"""Values of seeds that fall in two groups: how often they are found, and their warning."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from helpers import fake_study
from helpers.fake_study import report
from helpers.paths import ROOT
from numpy.typing import NDArray
from scipy.stats import fisher_exact

from lit_attn.cells.records import Metric, PlannedCell
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics.modes import find_groups
from lit_attn.report.verdicts.judge import judge_study
from lit_attn.report.verdicts.modes import compare_shares, warn_of_modes

pytestmark = pytest.mark.usefixtures("no_rendering")

Floats = NDArray[np.float64]

SHAPES = ((2, 5), (3, 6), (6, 6), (6, 12))
STUDIES = 2000

DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Floats]] = {
    "normal": lambda generator, shape: generator.normal(size=shape),
    "heavy tails": lambda generator, shape: generator.standard_t(3, size=shape),
    "skewed": lambda generator, shape: np.exp(generator.normal(size=shape)),
}
LARGEST = {"normal": 0.01, "heavy tails": 0.01, "skewed": 0.08}


def is_split(values: Floats) -> bool:
    """Return True if the values (variants, seeds) have two groups."""
    return find_groups({str(place): list(row) for place, row in enumerate(values)}) is not None


@pytest.mark.parametrize("kind", DRAWS)
def test_values_with_one_mode_rarely_have_two_groups(kind: str) -> None:
    """docs/simulations.md prints the shares of the simulated studies."""
    generator = np.random.default_rng(0)
    shares = []
    for shape in SHAPES:
        warned = sum(is_split(DRAWS[kind](generator, shape)) for _ in range(STUDIES))
        shares.append(warned / STUDIES)
    assert max(shares) <= LARGEST[kind]
    page = (ROOT / "docs" / "simulations.md").read_text("utf-8")
    printed = " | ".join(f"{share:.4f}".removeprefix("0") for share in shares)
    assert f"| {kind} | {printed} |" in page


@pytest.mark.parametrize(("low_sd", "high", "high_sd"), [(2.0, 99.0, 0.5), (4.0, 95.0, 3.0)])
def test_seeds_that_learn_or_guess_are_found(low_sd: float, high: float, high_sd: float) -> None:
    """Accuracies near 12.5 % or near 100 %; a study in which no variant is split is left out."""
    generator = np.random.default_rng(1)
    for shape in SHAPES:
        missed = 0
        for _ in range(200):
            has_learned = generator.random(shape) < 0.8
            learned = high + high_sd * generator.normal(size=shape)
            values = np.where(has_learned, learned, 12.5 + low_sd * generator.normal(size=shape))
            numbers = has_learned.sum(axis=1)
            if ((numbers > 0) & (numbers < shape[1])).any():
                missed += not is_split(values)
        assert missed <= 2, shape


def test_a_variant_that_is_far_away_is_no_second_group() -> None:
    generator = np.random.default_rng(2)
    near = 99 + generator.normal(size=(3, 6))
    assert not is_split(np.vstack([near, 12.5 + generator.normal(size=(1, 6))]))
    near[0, 0] = 13.0
    assert is_split(near)


def test_few_equal_or_huge_values_have_no_group_and_no_error() -> None:
    assert find_groups({"a": [0.0, 100.0], "b": [0.0, 100.0]}) is None
    assert find_groups({"a": [1.0] * 6, "b": [1.0] * 6}) is None
    huge = find_groups({"a": [1.7e308] * 5 + [-1.7e308], "b": [1.7e308] * 6})
    assert huge is not None
    assert huge.counts == {"a": 5, "b": 6}


def read_two_modes(
    folder: Path,
    goal: Literal["max", "min"] = "max",
    metrics: dict[str, dict[str, float]] | None = None,
) -> StudyRecord:
    """Return a study of eight seeds: the baseline learns in one of them, `good` in all but one.

    `metrics` are further ones of learned and other cells.
    """
    metric = Metric(name="test/accuracy", label="accuracy (%)", goal=goal, scale=100)
    variants = {"base": 0.0, "good": 0.0, "same": 0.0}
    study = fake_study.write_study(folder, variants=variants, seeds=8, metric=metric)

    def change(cell: PlannedCell) -> dict[str, Any]:
        has_learned = cell.seed < {"base": 1, "good": 7, "same": 1}[cell.variant]
        value = (0.99 if has_learned else 0.12) + 0.001 * cell.seed
        further = {} if metrics is None else metrics["learned" if has_learned else "other"]
        return {"metrics": {"test/accuracy": value, **further}}

    return fake_study.change_results(study, change)


def test_the_warning_counts_the_seeds_of_each_group_with_fishers_test(tmp_path: Path) -> None:
    study = read_two_modes(tmp_path / "runs")
    (warning,) = warn_of_modes(study)
    # Two comparisons: Holm's factor of the smallest p is 2.
    p = 2 * fisher_exact([[7, 1], [1, 7]]).pvalue
    assert "accuracy (%) is 12.1 to 12.7 or 99 to 99.6, and never between" in warning
    shares = f"base 1 of 8; good 7 of 8 (p = {p:.2g}); same 1 of 8 (p = 1)"
    assert f"With 99 to 99.6 end {shares}" in warning
    assert "Compare a metric that is 1 for such a seed" in warning
    assert warning in judge_study(study).warnings
    folder = report(tmp_path)
    for name in ("table.txt", "table.full.md", "table.html"):
        text = " ".join((folder / name).read_text("utf-8").split())
        assert "two groups of seeds: accuracy (%)" in text, name


def test_the_better_group_follows_the_goal(tmp_path: Path) -> None:
    (warning,) = warn_of_modes(read_two_modes(tmp_path, goal="min"))
    assert "With 12.1 to 12.7 end base 7 of 8; good 1 of 8" in warning


def test_the_warning_names_a_metric_that_counts_the_seeds(tmp_path: Path) -> None:
    metrics = {
        "learned": {"test/solved": 1.0, "test/loss": 0.1, "val/solved": 1.0},
        "other": {"test/solved": 0.0, "test/loss": 2.0, "val/solved": 0.0},
    }
    (warning,) = warn_of_modes(read_two_modes(tmp_path, metrics=metrics))
    assert warning.endswith("The metric test/solved of the same cells counts them.")


def test_shares_and_usual_values_have_no_warning(tmp_path: Path) -> None:
    assert warn_of_modes(fake_study.read(tmp_path / "usual")) == []
    study = read_two_modes(tmp_path / "shares")
    for cell in study.cells:
        assert cell.folder is not None
        path = cell.folder / "result.json"
        value = cell.value or 0.0
        text = path.read_text().replace(f'"test/accuracy": {value / 100}', '"test/accuracy": ')
        path.write_text(text.replace('"test/accuracy": ', f'"test/accuracy": {value > 50:d}.0'))
    (shares,) = fake_study.read_studies(tmp_path / "shares")
    assert shares.is_two_valued
    assert warn_of_modes(shares) == []


def test_shares_are_corrected_for_all_variants() -> None:
    counts = {"base": 0, "a": 6, "b": 6, "c": 0}
    p_values = compare_shares("base", counts, dict.fromkeys(counts, 6))
    smallest = fisher_exact([[6, 0], [0, 6]]).pvalue
    assert p_values == pytest.approx({"a": 3 * smallest, "b": 3 * smallest, "c": 1.0})
