"""Power laws over the levels of a size axis."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import fake_study

from lit_attn.cells.records import Metric, Plan, PlannedCell
from lit_attn.report import write_reports
from lit_attn.report.figures import drawing
from lit_attn.report.figures.scaling import (
    Law,
    Point,
    draw_scaling,
    find_multipliers,
    fit_baseline,
    fit_law,
    make_scaling_table,
    read_points,
)
from lit_attn.report.records.read import read_studies
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics.stats import paired_interval

METRIC = Metric(name="val/loss", label="loss", goal="min", scale=1.0)
PLAN = Plan(
    study="x",
    title="x",
    baseline="a",
    metric=METRIC,
    seeds=list(range(5)),
    cells=[],
    variants=[{"name": "a"}, {"name": "b"}],
)
# Training FLOPs of four sizes, and the loss of a published scaling law.
FLOPS = [3.82e17, 2.81e18, 1.16e19, 3.46e19]
SIZES = {"small": 1e6, "medium": 4e6, "large": 16e6}
STEPS, BATCH = 10, 4


def write_ladder(
    root: Path, leads: dict[str, float], seeds: int = 3, noise: float = 0.0, **plan: object
) -> None:
    """Write levels whose loss is 10 (lead C)^-0.1 for C training FLOPs."""
    generator = np.random.default_rng(0)
    # The reader must not rely on the alphabetical order of the folders.
    for level, flops in SIZES.items():
        settings = {"metric": METRIC, "family": "ladder", "level": level} | plan
        folder = fake_study.write_study(
            root, f"ladder-{level}", dict.fromkeys(leads, 0.0), seeds, **settings
        )
        costs = {"flops": int(flops), "batch_size": BATCH, "steps": STEPS}

        def change(cell: PlannedCell, costs: dict[str, int] = costs) -> dict[str, Any]:
            compute = leads[cell.variant] * 3 * costs["flops"] * BATCH * STEPS
            loss = 10 * compute**-0.1 * math.exp(generator.normal(0, noise))
            return {"metrics": {"val/loss": loss, "val/accuracy": loss}, **costs}

        fake_study.change_results(folder, change)


def read_ladder(root: Path) -> tuple[list[Point], StudyRecord]:
    records = list(read_studies(root))
    return read_points(records), records[0]


def test_a_lead_is_worth_the_compute_that_the_baseline_would_need(tmp_path: Path) -> None:
    write_ladder(tmp_path, {"standard": 1.0, "better": 2.0, "worse": 0.5})
    points, study = read_ladder(tmp_path)
    table = make_scaling_table(points, study.plan)
    assert table.headings[3:] == ["compute at small", "compute at medium", "compute at large"]
    texts = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    exponent, same = "0.1000 [0.1000, 0.1000]", "—"
    assert texts["standard"][0] == texts["better"][0] == exponent
    assert texts["standard"][2:] == [same] * 3
    assert texts["better"][2:] == ["2.00 [2.00, 2.00]"] * 3
    assert texts["worse"][2:] == ["0.50 [0.50, 0.50]"] * 3
    assert all(float(row[1]) < 1e-9 for row in texts.values())
    multipliers = find_multipliers(points, study.plan, "better", "medium")
    assert multipliers == {seed: pytest.approx(2.0) for seed in range(3)}
    assert find_multipliers(points, study.plan, "standard", "medium") == {}


def test_a_wrong_form_of_the_law_shows_as_misfit() -> None:
    costs = [1e9, 1e10, 1e11]
    values = [10 * c**-0.1 + 1.0 for c in costs]
    points = [Point("a", str(c), 0, c, v) for c, v in zip(costs, values, strict=True)]
    line = np.polyfit(np.log(costs), np.log(values), 1)
    fitted = np.exp(np.polyval(line, np.log(costs)))
    plan = PLAN.model_copy(update={"variants": PLAN.variants[:1]})
    (row,) = make_scaling_table(points, plan).rows
    assert float(row[2].text) == pytest.approx(100 * max(abs(fitted / values - 1)), rel=0.05)
    # One seed has no interval.
    assert row[1].text == f"{-line[0]:.4f}"


def test_a_seed_without_a_level_has_no_line() -> None:
    points = [Point("a", str(c), seed, c, 1 / c) for c in (1.0, 2.0) for seed in (0, 1)]
    assert set(fit_law(points).lines) == {0, 1}
    assert set(fit_law(points[:-1]).lines) == {0}
    assert fit_law(points[:1]).lines == {}


def test_the_interval_of_the_multiplier_covers_its_true_value() -> None:
    """Cells of different levels are independent, so the fit itself varies between the seeds."""
    generator = np.random.default_rng(1)
    costs, trials, covered = [1e9, 4e9, 1.6e10, 6.4e10], 400, 0
    for _ in range(trials):
        points = [
            Point(name, f"{c:g}", seed, c, (lead * c) ** -0.1 * math.exp(generator.normal(0, 0.01)))
            for name, lead in (("a", 1.0), ("b", 1.6))
            for c in costs
            for seed in range(5)
        ]
        text = make_scaling_table(points, PLAN).rows[1][4].text
        low, high = (float(x) for x in text.partition("[")[2].rstrip("]").split(","))
        covered += low - 0.005 <= 1.6 <= high + 0.005
    assert 0.92 <= covered / trials <= 0.98


def curved(flops: float) -> float:
    """Return a loss with an asymptote, which is no straight line in logarithms."""
    return 1.6 + 88.32 * flops**-0.0941


def steep(flops: float) -> float:
    """Return a loss with a larger asymptote and a larger exponent."""
    return 2.5 + 40 * flops**-0.12


def draw_points(
    law: Callable[[float], float],
    lead: float,
    seeds: int,
    generator: np.random.Generator,
    noise: float,
) -> list[Point]:
    """Return losses of a baseline a and of b, which has the loss of a with `lead` times as much."""
    points = []
    for level, flops in enumerate(FLOPS):
        for name, factor in (("a", 1.0), ("b", lead)):
            for seed in range(seeds):
                loss = law(factor * flops) * math.exp(generator.normal(0, noise))
                points.append(Point(name, str(level), seed, flops, loss))
    return points


def test_the_slope_passes_through_the_point_of_the_baseline() -> None:
    """A straight line through all sizes gives 1.008, 1.124, 1.084 and 0.988 for a true 1.05."""
    for lead, expected in ((1.0, [1.0] * 4), (1.05, [1.055, 1.050, 1.047, 1.044])):
        points = draw_points(curved, lead, 1, np.random.default_rng(0), 0.0)
        straight: Law = fit_law([point for point in points if point.variant == "a"])
        assert straight.asymptote == 0.0
        for level, multiplier in enumerate(expected):
            multipliers = find_multipliers(points, PLAN, "b", str(level), straight)
            assert multipliers == {0: pytest.approx(multiplier, abs=5e-4)}


def test_four_sizes_have_an_asymptote_and_three_have_none() -> None:
    points = draw_points(curved, 1.05, 3, np.random.default_rng(0), 0.0)
    assert fit_baseline(points, PLAN).asymptote == pytest.approx(1.6, abs=0.02)
    for level in range(4):
        multipliers = find_multipliers(points, PLAN, "b", str(level))
        assert multipliers == dict.fromkeys(range(3), pytest.approx(1.05, abs=1e-3))
    fewer = [point for point in points if point.level != "0"]
    assert fit_baseline(fewer, PLAN).asymptote == 0.0
    notes = [make_scaling_table(some, PLAN).notes[-1] for some in (points, fewer)]
    assert "with the asymptote E = 1.596" in notes[0]
    assert "no asymptote, which needs 4 sizes" in notes[1]


@pytest.mark.slow
@pytest.mark.parametrize(("law", "lead", "seeds"), [(curved, 1.05, 5), (steep, 1.2, 3)])
def test_intervals_cover_the_true_multiplier_of_a_curved_law(
    law: Callable[[float], float], lead: float, seeds: int
) -> None:
    generator = np.random.default_rng(7)
    draws = 2000
    covered = 0
    for draw in range(draws):
        points = draw_points(law, lead, seeds, generator, 0.002)
        multipliers = find_multipliers(points, PLAN, "b", str(draw % len(FLOPS)))
        interval = paired_interval([math.log(value) for value in multipliers.values()])
        assert interval
        covered += interval.low <= math.log(lead) <= interval.high
    # The standard error of a share of 0.95 of 2,000 draws is 0.005.
    assert 0.93 <= covered / draws <= 0.97


@pytest.mark.parametrize("ratio", [1.0, 1 + 1e-9, 1 - 1e-9, 1 - 1e-15, 0.99])
def test_losses_that_hardly_fall_have_no_multiplier(ratio: float) -> None:
    """The lead of a factor of two is far outside of what such a law can say."""
    points = []
    for seed in range(2):
        for name, loss in (("a", 2.0), ("b", 1.0)):
            points.append(Point(name, "0", seed, 1e9, loss))
            points.append(Point(name, "1", seed, 2e9, loss * ratio))
    rows = make_scaling_table(points, PLAN).rows
    assert [cell.text for cell in rows[1][3:]] == ["—", "—"]


def test_one_seed_that_does_not_improve_leaves_out_the_level() -> None:
    """The other seeds alone would be a selection."""
    points = draw_points(curved, 1.05, 3, np.random.default_rng(0), 0.0)
    worse = [
        point._replace(value=9.0)
        if (point.seed, point.level, point.variant) == (1, "3", "a")
        else point
        for point in points
    ]
    assert find_multipliers(worse, PLAN, "b", "1") == {}
    assert len(find_multipliers(points, PLAN, "b", "1")) == 3


@pytest.mark.slow
def test_the_page_of_the_family_is_written_and_listed(tmp_path: Path) -> None:
    leads = {"standard": 1.0, "better": 2.0}
    write_ladder(tmp_path / "runs", leads, noise=0.01, parity="someone/code. The head is ours.")
    write_reports(tmp_path / "runs", tmp_path / "reports")
    page = (tmp_path / "reports/ladder/scaling.html").read_text(encoding="utf-8")
    assert "Scaling of ladder" in page
    assert "3 for each variant and size" in page
    for kind in ("csv", "md", "tex", "svg", "png"):
        assert (tmp_path / f"reports/ladder/scaling.{kind}").stat().st_size > 100
    for kind in ("html", "full.md"):
        text = (tmp_path / f"reports/ladder/scaling.{kind}").read_text(encoding="utf-8")
        # Below the figure too, which only the page has.
        assert text.count("someone/code. The head is ours.") >= (2 if kind == "html" else 1)
    rows = (tmp_path / "reports/ladder/scaling.csv").read_text().splitlines()
    assert rows[0] == "variant,level,seed,flops,value"
    assert len(rows) == 1 + 2 * 3 * 3
    assert "Effective speed-up of ladder" in page
    for kind in ("csv", "svg", "png"):
        assert (tmp_path / f"reports/ladder/speedup.{kind}").stat().st_size > 100
    index = (tmp_path / "reports/index.html").read_text(encoding="utf-8")
    assert 'href="ladder/scaling.html"' in index


def test_the_numbers_of_logarithmic_axes_are_no_mathematical_text(tmp_path: Path) -> None:
    write_ladder(tmp_path, {"standard": 1.0, "better": 2.0})
    points, study = read_ladder(tmp_path)
    with drawing.appearance():
        figure = draw_scaling(points, study.plan)
        drawing.render(figure)
        (axes,) = figure.axes
        labels = [
            label.get_text()
            for axis in (axes.xaxis, axes.yaxis)
            for label in axis.get_ticklabels(which="both")
        ]
    assert {"1e+09"} <= {text for text in labels if text}
    assert not any("$" in text for text in labels)


def test_a_metric_to_maximise_and_a_single_level_have_no_page(tmp_path: Path) -> None:
    metric = Metric(name="val/accuracy", label="accuracy", goal="max", scale=1.0)
    write_ladder(tmp_path / "runs", {"standard": 1.0}, metric=metric)
    write_reports(tmp_path / "runs", tmp_path / "reports")
    write_ladder(tmp_path / "other", {"standard": 1.0})
    write_reports(tmp_path / "other", tmp_path / "reports", ["ladder-small"])
    assert not (tmp_path / "reports/ladder").exists()
