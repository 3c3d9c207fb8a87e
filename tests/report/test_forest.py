"""Differences of a variant in several studies, their random-effects estimate and forest plot."""

from pathlib import Path

import numpy as np
import pytest
from helpers.fake_study import write_study

from lit_attn.report.__main__ import main
from lit_attn.report.figures.forest import Combined, StudyEffect, combine, read_effects
from lit_attn.report.records.read import read_studies
from lit_attn.report.tables.summary import make_variant_frame
from lit_attn.report.verdicts.comparison import compare_variants


def make_effects(means: list[float], errors: list[float]) -> list[StudyEffect]:
    return [
        StudyEffect(f"s{place}", mean, mean - 2 * error, mean + 2 * error, error)
        for place, (mean, error) in enumerate(zip(means, errors, strict=True))
    ]


def test_equal_studies_have_their_mean_and_no_spread() -> None:
    combined = combine(make_effects([1.0, 1.0, 1.0, 1.0], [0.2] * 4))
    assert combined is not None
    assert combined.mean == pytest.approx(1.0)
    assert combined.spread == 0.0
    # The factor of Hartung and Knapp would be 0; the interval keeps t times 0.2 / 2.
    assert combined.high - combined.mean == pytest.approx(3.1824463 * 0.1)


def test_the_estimate_is_that_of_the_formulas() -> None:
    """Written out for two studies: tau2 = ((m1 - m2)^2 - (v1 + v2)) / 2."""
    (first, second), (v1, v2) = (0.0, 3.0), (1.0, 0.25)
    combined = combine(make_effects([first, second], [v1**0.5, v2**0.5]))
    between = ((first - second) ** 2 - (v1 + v2)) / 2
    assert combined is not None
    assert combined.spread == pytest.approx(between**0.5)
    weights = np.array([1 / (v1 + between), 1 / (v2 + between)])
    assert combined.mean == pytest.approx(weights @ [first, second] / weights.sum())


def test_one_study_and_errors_of_zero_have_no_estimate() -> None:
    assert combine(make_effects([1.0], [0.1])) is None
    assert combine(make_effects([1.0, 2.0], [0.1, 0.0])) is None


@pytest.mark.parametrize(("spread", "fewest", "most"), [(0.0, 950, 1000), (0.5, 920, 980)])
def test_the_interval_covers_the_true_mean(spread: float, fewest: int, most: int) -> None:
    """For five studies; docs/simulations.md states these shares."""
    generator = np.random.default_rng(3)
    errors = [0.1, 0.2, 0.3, 0.2, 0.15]
    covered = 0
    for _ in range(1000):
        truths = generator.normal(1.0, spread, 5)
        combined = combine(make_effects(generator.normal(truths, errors).tolist(), errors))
        assert isinstance(combined, Combined)
        covered += combined.low <= 1.0 <= combined.high
    assert fewest <= covered <= most


def test_the_standard_errors_are_those_of_the_intervals(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", name="one", seeds=4)
    write_study(tmp_path / "runs", name="two", seeds=5)
    frames = {}
    errors = {}
    for study in read_studies(tmp_path / "runs"):
        name = study.plan.study
        frames[name] = make_variant_frame(study, compare_variants(study)).set_index("variant")
        baseline = study.values("standard")
        pairs = [value - baseline[seed] for seed, value in study.values("belief2").items()]
        errors[name] = np.std(pairs, ddof=1) / len(pairs) ** 0.5
    effects = read_effects(frames)
    assert list(effects) == ["belief", "belief2"]
    for effect in effects["belief2"]:
        assert effect.error == pytest.approx(errors[effect.study])


def test_studies_are_drawn_with_their_combined_difference(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        write_study(tmp_path / "runs", name=name, seeds=4)
    loss = {"name": "test/loss", "label": "loss", "goal": "min", "scale": 1}
    write_study(tmp_path / "runs", name="other", seeds=4, metric=loss)
    reports = tmp_path / "reports"
    names = ["one", "two", "three", "other"]
    words = [str(tmp_path / "runs"), "--across", *names, "--reports", str(reports)]
    assert main(words) == 0
    drawing = (reports / "across.svg").read_text()
    assert "<!-- belief2: combined -->" in drawing
    assert "<!-- belief2: three -->" in drawing
    # Differences in another metric have another unit.
    assert "<!-- belief2: other -->" not in drawing
    page = (reports / "across.html").read_text()
    assert "Differences to the baseline, combined over studies" in page
    assert (reports / "across.png").is_file()


def test_studies_without_a_common_variant_have_no_forest_plot(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", name="one", variants={"standard": 0.0, "a": 0.1}, seeds=3)
    write_study(tmp_path / "runs", name="two", variants={"standard": 0.0, "b": 0.1}, seeds=3)
    reports = tmp_path / "reports"
    words = [str(tmp_path / "runs"), "--across", "one", "two", "--reports", str(reports)]
    assert main(words) == 0
    assert not (reports / "across.svg").exists()
