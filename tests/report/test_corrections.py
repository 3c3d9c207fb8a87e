"""Corrections of p for several comparisons and several studies (Holm)."""

import numpy as np
import pytest

from lit_attn.report.statistics import stats


def test_holm_equals_a_computation_by_hand() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]
    assert stats.holm([0.2]) == [0.2]
    assert stats.holm([]) == []
    # Once one comparison fails, all that follow fail (Holm 1979).
    assert stats.holm([0.01, 0.015, 0.9, 0.02]) == pytest.approx([0.04, 0.045, 0.9, 0.045])


def test_holm_keeps_the_order_and_controls_the_error() -> None:
    generator = np.random.default_rng(5)
    p = generator.uniform(size=(4000, 10))
    adjusted = np.array([stats.holm(row.tolist()) for row in p])
    assert (adjusted >= p).all()
    for raw, new in zip(p[:50], adjusted, strict=False):
        assert (np.diff(new[np.argsort(raw)]) >= 0).all()
    assert (adjusted <= 0.05).any(axis=1).mean() == pytest.approx(0.05, abs=0.01)


def test_the_correction_over_studies_equals_a_computation_by_hand() -> None:
    adjusted = stats.holm_over_studies([[0.01, 0.2], [0.02], []])
    # Both studies have a comparison left at 0.01 and 0.02; only the first one has at 0.2.
    assert adjusted == [pytest.approx([0.02, 0.2]), pytest.approx([0.04]), []]


@pytest.mark.parametrize("effect", [0.0, 3.0])
def test_the_correction_over_studies_controls_the_error(effect: float) -> None:
    """Three studies have four comparisons each; the first of each study may have an effect."""
    generator = np.random.default_rng(9)
    errors, runs = 0, 500
    for _ in range(runs):
        studies = []
        for _ in range(3):
            values = generator.normal(size=(5, 9))
            values[1] += effect
            studies.append(stats.joint_sign_flip(values[1:] - values[0]))
        adjusted = stats.holm_over_studies(studies)
        errors += any(min(p[1:] if effect else p) <= 0.05 for p in adjusted)
    assert errors / runs <= 0.07
