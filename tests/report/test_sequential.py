"""Looks at running studies: levels of alpha spending, held to published bounds and simulations."""

from pathlib import Path

import numpy as np
import pytest
from helpers.fake_study import read, report, rows, write_study
from scipy import stats as scipy_stats

from lit_attn.cells.decisions import Looks
from lit_attn.report.records.looks import record_look, record_looks
from lit_attn.report.records.read import read_studies
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.sequential import look_level, spent_alpha
from lit_attn.report.tables.judgement import describe_answer
from lit_attn.report.verdicts.judge import judge_study

pytestmark = pytest.mark.usefixtures("no_rendering")

ALPHA = 0.05


def test_levels_of_few_looks_are_those_of_the_literature() -> None:
    """Two-sided bounds of O'Brien-Fleming type (Lan and DeMets, 1983): z for 2, 3 and 5 looks."""
    published = {
        2: [2.963, 1.969],
        3: [3.710, 2.511, 1.993],
        5: [4.877, 3.357, 2.680, 2.290, 2.031],
    }
    for planned, bounds in published.items():
        levels = [look_level(done, planned, ALPHA) for done in range(1, planned + 1)]
        assert scipy_stats.norm.isf(np.array(levels) / 2) == pytest.approx(bounds, abs=0.01)


def test_all_error_is_spent_at_the_last_seed_and_one_seed_has_one_look() -> None:
    assert spent_alpha(0.0, ALPHA) == 0.0
    assert spent_alpha(1.0, ALPHA) == pytest.approx(ALPHA)
    assert look_level(1, 1, ALPHA) == pytest.approx(ALPHA, abs=1e-3)
    assert look_level(0, 10, ALPHA) == 0.0
    assert look_level(1000, 1000, ALPHA) == pytest.approx(ALPHA / 2)
    assert look_level(101, 101, ALPHA) < look_level(100, 100, ALPHA) < 0.03


def test_a_look_after_every_seed_keeps_the_error_of_a_brownian_motion() -> None:
    generator = np.random.default_rng(0)
    for planned in (6, 10, 20):
        fractions = np.arange(1, planned + 1)
        paths = generator.normal(size=(40_000, planned)).cumsum(axis=1) / np.sqrt(fractions)
        levels = np.array([look_level(done, planned, ALPHA) for done in fractions])
        has_star = (2 * scipy_stats.norm.sf(np.abs(paths)) <= levels).any(axis=1)
        assert has_star.mean() == pytest.approx(ALPHA, abs=0.003)


def smallest_p(differences: np.ndarray) -> np.ndarray:
    """Return the smallest corrected p of each study; `differences` are (studies, variants, n)."""
    norms = np.sqrt((differences**2).sum(axis=2, keepdims=True))
    scaled = differences / norms
    patterns = np.abs(scaled @ stats._signs(differences.shape[2]).T).max(axis=1)
    observed = np.abs(scaled.sum(axis=2)).max(axis=1)
    return (patterns >= observed[:, None] - stats.TIE).mean(axis=1)


@pytest.mark.parametrize(("comparisons", "planned"), [(1, 8), (3, 10), (8, 9)])
def test_looks_after_every_seed_keep_the_error_of_the_joint_test(
    comparisons: int, planned: int
) -> None:
    """The limit is 0.05 and three standard errors of 3,000 simulated studies without effects."""
    values = np.random.default_rng(1).normal(size=(3000, comparisons + 1, planned))
    differences = values[:, 1:] - values[:, :1]
    has_star = np.zeros(len(values), dtype=bool)
    for done in range(4, planned + 1):
        level = look_level(done, planned, ALPHA)
        has_star |= smallest_p(differences[:, :, :done]) <= level
    assert has_star.mean() <= ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / len(values))


def test_an_interim_look_has_the_bound_of_its_seeds(tmp_path) -> None:
    missing = tuple((name, seed) for name in ("standard", "good") for seed in range(8, 10))
    study = read(tmp_path, variants={"standard": 0.0, "good": 0.05}, seeds=10, skip=missing)
    judged = judge_study(study)
    assert judged.interim is not None
    assert judged.interim.model_dump() == {
        "seeds": 8,
        "planned": 10,
        "level": look_level(8, 10, ALPHA),
    }
    assert judged.level == judged.variants[0].level == judged.interim.level
    assert "Interim: 8 of 10 seeds, bound 0.019." in describe_answer(judged)
    assert judged.variants[0].verdict == "better"


def test_a_complete_variant_keeps_its_level_while_another_one_runs(tmp_path) -> None:
    variants = {"standard": 0.0, "good": 0.05, "new": 0.05}
    missing = tuple(("new", seed) for seed in range(4, 8))
    judged = judge_study(read(tmp_path, variants=variants, seeds=8, skip=missing))
    good, new = judged.variants
    assert good.level == ALPHA
    assert good.verdict == "better"
    assert new.level == look_level(4, 8, ALPHA)
    assert new.verdict == "undecided"


def test_a_look_that_could_show_a_star_lowers_the_level_of_the_last_one(tmp_path) -> None:
    variants = {"standard": 0.0, "good": 0.05}
    folder = write_study(tmp_path / "runs", variants=variants, seeds=10, skip=(("good", 9),))
    (study,) = read_studies(tmp_path / "runs")
    record_look(study, folder)
    record_look(next(read_studies(tmp_path / "runs")), folder)
    looks = Looks.read(folder / "looks.json")
    assert looks is not None
    assert [look.seeds for look in looks.entries] == [9]
    write_study(tmp_path / "runs", variants=variants, seeds=10)
    table = rows(report(tmp_path))
    assert table.loc["good", "level"] == pytest.approx(look_level(10, 10, ALPHA))
    caption = (tmp_path / "reports" / "fake" / "table.full.md").read_text("utf-8")
    assert "Results were shown before all planned seeds had ended" in caption


def test_a_damaged_record_of_looks_is_kept_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new file would forget that the results were shown before."""
    folder = write_study(tmp_path / "runs", seeds=10, skip=(("belief2", 9),))
    (folder / "looks.json").write_text('{"entries": [{"seeds": 8, "pl')
    for _ in range(2):
        assert len(list(record_looks(read_studies(tmp_path / "runs"), tmp_path / "runs"))) == 1
        assert "looks.json: cannot be read; move it away" in caplog.text
        caplog.clear()
    assert (folder / "looks.json").read_text().endswith('"pl')


def test_a_look_without_a_possible_star_and_a_complete_study_are_not_recorded(tmp_path) -> None:
    folder = write_study(tmp_path / "runs", seeds=10, skip=(("belief2", 3),))
    few = write_study(tmp_path / "few", seeds=3, skip=(("belief2", 2),))
    record_look(next(read_studies(tmp_path / "few")), few)
    assert not (few / "looks.json").exists()
    write_study(tmp_path / "runs", seeds=10)
    record_look(next(read_studies(tmp_path / "runs")), folder)
    assert not (folder / "looks.json").exists()
