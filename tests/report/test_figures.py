"""Figures of results: order, ties, outliers, long names."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from helpers.fake_study import write_study
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_attn.cells.records import Metric, Plan, Result
from lit_attn.report.figures import drawing
from lit_attn.report.figures.drawing import appearance, draw_panels, render, short_names, shorten
from lit_attn.report.figures.study import draw_cost, draw_progress, draw_seeds
from lit_attn.report.records.read import read_studies
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.tables.summary import make_variant_frame
from lit_attn.report.verdicts.comparison import compare_variants

LONG = "residual=perpendicular,similarity=gaussian,zz=without,recipe=long"


def study(
    values: Mapping[str, Sequence[float]],
    goal: str = "max",
    margin: float | None = None,
    **costs: float,
) -> StudyRecord:
    """Return a study with these values by seed; costs grow from variant to variant."""
    seeds = range(len(next(iter(values.values()))))
    cells = [
        CellRecord(
            name,
            seed,
            "done",
            values[name][seed],
            {cost: value * (1 + place) for cost, value in costs.items()},
        )
        for place, name in enumerate(values)
        for seed in seeds
    ]
    plan = Plan(
        study="fake",
        title="fake",
        baseline=next(iter(values)),
        metric=Metric(name="test/score", label="score", scale=1, goal=goal, margin=margin),
        variants=[{"name": name} for name in values],
        seeds=list(seeds),
        cells=[],
    )
    return StudyRecord(plan, cells)


def draw(record: StudyRecord) -> Figure:
    with appearance():
        figure = draw_seeds(record, compare_variants(record))
        figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize(
    ("goal", "best", "values", "ends"),
    [
        ("max", 100, [99.0], (94.05, 100.119)),
        ("max", 100, [50.0, 60.0], (49.4, 60.6)),
        ("max", None, [99.0], (94.05, 103.95)),
        ("min", 0, [0.0, 10.0], (-0.212, 10.6)),
    ],
)
def test_an_axis_ends_near_the_best_possible_value(
    goal: Literal["max", "min"], best: float | None, values: list[float], ends: tuple[float, float]
) -> None:
    record = study({"standard": values}, goal)
    metric = record.plan.metric.model_copy(update={"best": best})
    record = replace(record, plan=record.plan.model_copy(update={"metric": metric}))
    assert draw(record).axes[0].get_xlim() == pytest.approx(ends)


def test_a_baseline_alone_has_no_axis_of_differences() -> None:
    (axes,) = draw(study({"standard": [0.2, 0.3]})).axes
    assert axes.get_xlabel().startswith("score")
    assert len(draw(study({"standard": [0.2, 0.3], "other": [0.1, 0.4]})).axes) == 2


def draw_costs(record: StudyRecord) -> Figure | None:
    return draw_cost(record, make_variant_frame(record, compare_variants(record)))


def dots(axes: Axes) -> list[list[tuple[float, float]]]:
    """Return the dots of each row that has any."""
    lines = [line for line in axes.lines if line.get_marker() == "o"]
    return [list(zip(*line.get_data(), strict=True)) for line in lines if len(line.get_xdata())]


@pytest.mark.parametrize(
    ("goal", "order"), [("max", ["base", "up", "low"]), ("min", ["base", "low", "up"])]
)
def test_variants_are_sorted_from_best_to_worst(goal: str, order: list[str]) -> None:
    values = {"base": [1.0, 1.2, 1.1], "low": [0.5, 0.7, 0.61], "up": [2.0, 2.2, 2.13]}
    figure = draw(study(values, goal))
    left, right = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == order
    assert ("better →" if goal == "max" else "← better") in right.get_xlabel()


def test_a_star_of_the_table_is_in_the_figure() -> None:
    base = [i / 10 for i in range(6)]
    values = {"base": base, "up": [b + 2 + b / 9 for b in base], "same": [b + 0.01 for b in base]}
    values["same"][0] -= 0.05
    _, right = draw(study(values)).axes
    (star,) = [text for text in right.texts if text.get_text() == "*"]
    assert star.get_position()[1] == 1


@pytest.mark.parametrize("margin", [0.2, 5.0])
def test_the_margin_is_a_band_of_the_figure(margin: float) -> None:
    values = {"base": [1.0, 1.2, 1.1], "up": [2.0, 2.2, 2.13]}
    left, right = draw(study(values, margin=margin)).axes
    (band,) = right.patches
    assert (band.get_x(), band.get_width()) == pytest.approx((-margin, 2 * margin))
    low, high = right.get_xlim()
    assert low < -margin < margin < high
    assert not left.patches
    (band,) = draw(study(values)).axes[1].patches
    assert band.get_width() == 0


def test_equal_values_stand_above_each_other() -> None:
    left, _ = draw(study({"base": [1.0, 1.0, 1.5], "up": [2.0, 2.0, 2.0]})).axes
    for row in dots(left):
        assert len({(x, y) for x, y in row}) == 3


def test_a_high_stack_stays_within_its_row() -> None:
    left, _ = draw(study({"base": [1.0] * 12, "up": [2.0] * 11 + [3.0]})).axes
    base, up = dots(left)
    assert min(y for _, y in base) >= -0.5  # The upper edge of the axes.
    assert min(y for _, y in up) > max(y for _, y in base)
    assert len({*base, *up}) == 24


def test_a_far_outlier_is_named_at_the_edge() -> None:
    values = {"base": [1.0, 1.1, 1.2, 1.3], "up": [1.2, 1.3, 1.4, 1.5], "far": [90.0, 91.0, 1.3, 1]}
    left, _ = draw(study(values)).axes
    assert left.get_xlim()[1] < 3
    assert [text.get_text().strip() for text in left.texts] == ["90 to 91, mean 45.83"]
    # Its other values are still there.
    assert [len(row) for row in dots(left)] == [4, 2, 4]


def test_a_variant_with_a_star_is_inside_the_axes() -> None:
    """Three quartile ranges of 40 equal variants leave out the only two that differ."""
    values = {f"v{i}": [1 + 0.01 * seed + 0.001 * i for seed in range(10)] for i in range(38)}
    values["far"] = [3 + 0.02 * seed for seed in range(10)]
    values["low"] = [0.1 + 0.02 * seed for seed in range(10)]
    record = study(values, flops=1e6)
    comparisons = compare_variants(record)
    assert comparisons.records["far"]["significant"]
    left, right = draw(record).axes
    assert [text for text in [*left.texts, *right.texts] if text.get_text() != "*"] == []
    assert left.get_xlim()[0] < 0.1 < 3.2 < left.get_xlim()[1]
    assert right.get_xlim()[0] < -0.9 < 2.2 < right.get_xlim()[1]


def test_a_variant_has_one_colour_in_every_figure() -> None:
    """The figure of costs is sorted by the mean, that of progress by the difference."""
    values = {"base": [1.0, 1.2, 1.1], "low": [0.5, 0.7, 0.61], "up": [2.0, 2.2, 2.13]}
    record = study(values, flops=1e6)
    styles = drawing.assign_styles(record.plan)
    assert [style.colour for style in styles.values()] == list(drawing.COLOURS[:3])
    cost = draw_costs(record)
    assert cost is not None
    by_name = {}
    for line in cost.axes[0].lines:
        if line.get_gid():
            name, *_ = json.loads(line.get_gid())
            by_name[name] = line.get_color()
    assert by_name == {name: style.colour for name, style in styles.items()}


def test_forty_variants_have_forty_styles() -> None:
    record = study({f"v{i}": [1.0, 2.0] for i in range(40)})
    styles = drawing.assign_styles(record.plan)
    assert len({(style.colour, style.marker) for style in styles.values()}) == 40
    # The curves that a figure shows can be any of them.
    assert len({(style.colour, style.dash) for style in list(styles.values())[:28]}) == 28


def test_points_of_one_cost_have_its_place() -> None:
    record = study({"base": [1.0, 1.2], "low": [0.5, 0.7], "up": [2.0, 2.2]})
    costs = {"base": 1e6, "low": 2e6, "up": 2e6}
    cells = [
        CellRecord(cell.variant, cell.seed, "done", cell.value, {"flops": costs[cell.variant]})
        for cell in record.cells
    ]
    figure = draw_costs(StudyRecord(record.plan, cells))
    assert figure is not None
    (axes,) = figure.axes
    places = {}
    for line in axes.lines:
        if line.get_gid():
            assert line.get_transform() == axes.transData
            places[json.loads(line.get_gid())[0]] = line.get_xdata().tolist()
    assert places == {name: [cost] for name, cost in costs.items()}


def test_a_mean_outside_the_axis_is_named() -> None:
    values = {"base": [1.0, 1.1, 1.2, 40.0], "up": [1.2, 1.3, 1.4, 1.5], "low": [0.9, 1, 1.1, 1.2]}
    left, _ = draw(study(values)).axes
    assert [text.get_text().strip() for text in left.texts] == ["40, mean 10.82"]


def test_criteria_of_a_variant_share_its_colour() -> None:
    record = study({"base": [1.0, 2.0], "up": [1.0, 2.0], "up@time": [1.0, 2.0], "low": [1.0, 2]})
    by_name = {"base": "base", "up": "up", "up@time": "up", "low": "low"}
    entries = [
        entry.model_copy(update={"variant": by_name[entry.name]}) for entry in record.plan.variants
    ]
    styles = drawing.assign_styles(record.plan.model_copy(update={"variants": entries}))
    assert styles["up"].colour == styles["up@time"].colour
    assert styles["up"].dash != styles["up@time"].dash
    assert len({styles[name].colour for name in ("base", "up", "low")}) == 3


def test_a_panel_has_at_most_four_bands(tmp_path: Path) -> None:
    variants = {"standard": 0.0} | {f"v{place}": 0.01 * place for place in range(6)}
    write_study(tmp_path, variants=variants, seeds=2)
    record = next(read_studies(tmp_path))
    figure = draw_progress(record, compare_variants(record))
    assert figure is not None
    assert figure.legends[0].get_texts()[0].get_text() == "standard"
    assert {len(axes.collections) for axes in figure.axes} == {3, 4}


@pytest.mark.parametrize(("goal", "arrow"), [("max", "↑"), ("min", "↓")])
def test_axes_of_a_metric_say_what_is_better(goal: str, arrow: str) -> None:
    figure = draw_costs(study({"base": [1.0, 1.1], "up": [2.0, 2.2]}, goal, flops=1e6))
    assert figure is not None
    assert figure.axes[0].get_ylabel().split() == ["score,", "better", arrow]


def test_a_long_label_of_a_vertical_axis_fits_the_figure() -> None:
    record = study({"base": [1.0, 1.1], "up": [2.0, 2.2]}, "min", flops=1e6)
    metric = record.plan.metric.model_copy(update={"label": "validation loss (nats per token)"})
    plan = record.plan.model_copy(update={"metric": metric})
    with appearance():
        figure = draw_costs(StudyRecord(plan, record.cells))
        assert figure is not None
        figure.draw_without_rendering()
    box = figure.axes[0].yaxis.label.get_window_extent()
    assert figure.bbox.y0 <= box.y0
    assert box.y1 <= figure.bbox.y1


def test_names_of_a_product_keep_what_differs() -> None:
    residuals = ("full", "split-norm")
    names = [
        f"residual={a},zz={b},lr=0.0{c}" for a in residuals for b in ("with", "no") for c in "16"
    ]
    labels = drawing.short_names(["standard", *names], 20)
    assert labels[:3] == ["standard", "full,with,0.01", "full,with,0.06"]
    assert len(set(labels)) == len(names) + 1


def test_long_names_fit_the_figure() -> None:
    values = {f"{LONG}-{i}": [1.0 + i, 1.1 + i * i, 1.2] for i in range(3)}
    record = study(values, flops=1e6, parameters=1000)
    with appearance():
        cost = draw_costs(record)
        assert cost is not None
        cost.draw_without_rendering()
        for figure in (draw(record), cost):
            box = figure.get_tightbbox()
            assert box.x0 >= -0.01
            assert box.x1 <= figure.get_figwidth() + 0.01


def test_numbers_of_an_axis_do_not_touch() -> None:
    values = [2.5002, 2.5338, 2.4857, 2.5020, 2.5039, 2.5032]
    close = [2.4992, 2.5234, 2.4889, 2.5067, 2.4954, 2.5092]
    record = study({"standard": values, "other": close})
    with appearance():
        figure = draw_seeds(record, compare_variants(record))
        render(figure)
        for axes in figure.axes:
            texts = [text for text in axes.get_xticklabels() if text.get_text()]
            boxes = [text.get_window_extent() for text in texts]
            assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_names_are_shortened_in_the_middle() -> None:
    terms = [f"residual=split,similarity={{kind: mixture, keys: {i}}},lr=0.001" for i in (2, 4)]
    assert short_names(terms, 60) == terms
    short = [f"similarity={{kind: mixture, keys: {i}}}" for i in (2, 4)]
    assert short_names(terms, 36) == short
    assert short_names(terms[:1], 36)[0].startswith("residual=split,si…")
    # A short name, as that of a baseline, has none of the terms.
    assert short_names(["standard", *terms], 36) == ["standard", *short]
    # Without the terms of the long names two names would be equal.
    assert short_names(["a", "a,b-long", "c,b-long"], 6) == ["a", "a,b", "c,b"]
    assert shorten("belief2", 10) == "belief2"
    assert shorten("abcdefghijkl", 7) == "abc…jkl"
    # A floor is never cut in the middle of a word.
    assert shorten("floor: most frequent class", 22) == "floor: most frequent…"


def test_no_two_names_are_shortened_to_one() -> None:
    """Hashes with equal ends, and names with different numbers of words."""
    names = [f"{'a' * 20}{place:02}{'b' * 20}" for place in range(30)]
    names += [f"run-{'long-' * (place + 4)}name" for place in range(9)]
    for letters in (8, 12, 24):
        labels = short_names(names, letters)
        assert len(set(labels)) == len(names)
        assert max(map(len, labels)) <= letters
    # A table of laws has a row of each variant at each cost.
    assert short_names(["base", "xsa", "xsa"], 8) == ["base", "xsa", "xsa"]


def test_the_cost_figure_shows_the_baseline_and_the_best_variants() -> None:
    values = {f"v{place:02}": [float(place), place + 0.1] for place in range(30)}
    figure = draw_costs(study(values, flops=1e6))
    assert figure is not None
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [*(f"v{place}" for place in range(29, 14, -1)), "v00"]


def test_a_far_mean_stands_at_the_edge_of_the_cost_figure_without_an_error_bar() -> None:
    values = {f"v{place}": [1.0 + place / 10, 1.05 + place / 10] for place in range(6)}
    figure = draw_costs(study(values | {"far": [50.0, 60.0]}, flops=1e6))
    assert figure is not None
    (axes,) = figure.axes
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == "far (55)"
    point, _, (bar,) = axes.containers[0].lines
    assert point.get_gid() == '["far", "55 at 7e+06"]'
    assert point.get_ydata()[0] == axes.get_ylim()[1]
    (ends,) = bar.get_segments()
    assert ends[0][1] == ends[1][1]


def test_panel_titles_have_at_most_two_lines() -> None:
    short = "residual=full,zz=without,recipe=long"
    titles = []
    for name in (LONG, short):
        figure = draw_panels({name: []}, "step", "norm", {})
        assert figure is not None
        titles.append(figure.axes[0].get_title())
    assert titles[0].count("\n") == 1
    assert titles[1] == "residual=full,zz=without,\nrecipe=long"


def test_costs_that_do_not_differ_have_no_panel() -> None:
    values = {"base": [1.0, 1.1], "up": [2.0, 2.2]}
    figure = draw_costs(study(values, flops=1e6))
    assert figure is not None
    assert [axes.get_xlabel() for axes in figure.axes] == ["FLOPs per sample, forward"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["up", "base"]
    assert draw_costs(study(values)) is None


def test_step_times_of_a_busy_machine_are_not_drawn() -> None:
    record = study({"base": [1.0, 1.1], "up": [2.0, 2.2], "more": [3.0, 3.3]}, step_time=0.1)
    figure = draw_costs(record)
    assert figure is not None
    assert len(figure.axes[0].containers) == 3
    assert figure.axes[0].get_xlabel() == "time per training step"
    assert figure.axes[0].xaxis.get_major_formatter()(0.03) == "30 ms"
    busy = [
        CellRecord(c.variant, c.seed, "done", c.value, {"step_time": 0.1 * 1.3**c.seed})
        if c.variant == "up"
        else c
        for c in record.cells
    ]
    figure = draw_costs(StudyRecord(record.plan, busy))
    assert figure is not None
    assert len(figure.axes[0].containers) == 2


def test_two_evaluations_are_no_learning_curve(tmp_path: Path) -> None:
    folder = write_study(tmp_path, seeds=2)
    record = next(read_studies(tmp_path))
    assert draw_progress(record, compare_variants(record)) is not None
    for path in folder.glob("*/*/metrics.csv"):
        path.write_text("\n".join([*path.read_text().splitlines()[:3], ""]))
    record = next(read_studies(tmp_path))
    assert draw_progress(record, compare_variants(record)) is None


def test_differences_are_taken_at_equal_cost(tmp_path: Path) -> None:
    """The variant takes 1.1 / 1.0 of the baseline's time per step; its lead in time is smaller."""
    write_study(tmp_path, variants={"standard": 0.0, "up": 0.02}, seeds=2)
    record = next(read_studies(tmp_path))
    comparisons = compare_variants(record)
    figure = draw_progress(record, comparisons)
    assert figure is not None
    _, _, by_step, by_time = figure.axes
    assert [by_step.get_xlabel(), by_time.get_xlabel()] == ["step", "seconds of training"]
    lead = comparisons.records["up"]["difference"]
    assert by_step.lines[0].get_ydata() == pytest.approx(lead)
    times = {name: np.median(record.measurements("step_time", name)) for name in ("standard", "up")}
    base, up = (
        record.curves[record.curves["variant"] == name].groupby("step")["value"].mean()
        for name in ("standard", "up")
    )
    x = up.index.to_numpy() * times["up"]
    x = x[x <= base.index.max() * times["standard"]]
    expected = up.to_numpy()[: len(x)] - np.interp(x, base.index * times["standard"], base)
    assert by_time.lines[0].get_xdata() == pytest.approx(x)
    assert by_time.lines[0].get_ydata() == pytest.approx(expected)
    assert by_time.lines[0].get_ydata()[1] < lead


@pytest.mark.parametrize("counted", [None, 5_000_000_000])
def test_progress_is_drawn_against_flops_of_both_passes(
    counted: int | None, tmp_path: Path
) -> None:
    folder = write_study(tmp_path, variants={"standard": 0.0, "up": 0.02}, seeds=2)
    plan = Plan.load(folder / "plan.json")
    variants = [v.model_copy(update={"step_flops": counted}) for v in plan.variants]
    plan.model_copy(update={"variants": variants}).write(folder / "plan.json")
    for path in folder.glob("*/*/result.json"):
        result = Result.model_validate_json(path.read_bytes())
        result.model_copy(update={"batch_size": 10}).write(path)
    record = next(read_studies(tmp_path))
    figure = draw_progress(record, compare_variants(record))
    assert figure is not None
    _, axes, *_ = figure.axes[3:]
    assert axes.get_xlabel() == "training FLOPs"
    flops = counted or 3 * 10 * record.measurements("flops", "up")[0]
    steps = record.curves["step"].unique()
    shown = axes.lines[0].get_xdata()
    assert shown == pytest.approx(steps[: len(shown)] * float(flops))


def test_one_variant_has_no_progress_to_compare(tmp_path: Path) -> None:
    write_study(tmp_path, variants={"standard": 0.0}, seeds=2)
    record = next(read_studies(tmp_path))
    assert draw_progress(record, compare_variants(record)) is None
