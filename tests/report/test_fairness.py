"""Criteria of equal cost, tuning, sealed plans and the cost of reaching the baseline."""

import html
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.fake_study import make_seal, report, rows, write_study
from helpers.significance import sign_flip_p

from lit_attn.cells.decisions import Seal, Seals
from lit_attn.cells.records import Metric, Plan, StepTimes, Tuning, TuningTrial
from lit_attn.report.figures.drawing import COLOURS, Style
from lit_attn.report.figures.study import draw_cost, draw_seeds
from lit_attn.report.figures.tuning import draw_tuning, read_trials
from lit_attn.report.records.read import read_studies
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.tables.summary import make_variant_frame
from lit_attn.report.verdicts.comparison import compare_variants

pytestmark = pytest.mark.usefixtures("no_rendering")

VARIANTS = {"standard": 0.0, "mgk": 0.03, "mgk@time": -0.02, "xsa": 0.01, "xsa@time": 0.01}


STYLES = {
    "standard": Style(COLOURS[0], "-", "o"),
    "belief": Style(COLOURS[1], "-", "s"),
    "belief2": Style(COLOURS[2], "-", "^"),
}


def read_page(root: Path) -> str:
    return (report(root) / "table.html").read_text()


def seal(results: int, seeds: int, variants: str = "ab") -> Seal:
    names = {name: name for name in variants}
    return make_seal(results=results, variants=names, baseline="a", seeds=list(range(seeds)))


def make_plan() -> Plan:
    """Return the plan of a study of two variants without cells."""
    metric = Metric(name="test/score", label="score", goal="max", scale=1)
    variants = [{"name": "a"}, {"name": "b"}]
    return Plan(
        study="s", title="s", baseline="a", metric=metric, variants=variants, seeds=[0], cells=[]
    )


def test_every_criterion_has_a_block_of_every_table_and_figure(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", variants=VARIANTS, seeds=6)
    plan = Plan.model_validate_json((study / "plan.json").read_bytes())
    variants = []
    for variant in plan.variants:
        name, _, criterion = variant.name.partition("@")
        criterion = criterion or "parameters"
        variants.append(variant.model_copy(update={"variant": name, "criterion": criterion}))
    changes = {"criteria": ["parameters", "time"], "variants": variants}
    plan.model_copy(update=changes).write(study / "plan.json")
    page = read_page(tmp_path)
    folder = tmp_path / "reports" / "fake"
    table_rows = rows(folder)
    first, second = page.split('<table class="results"')[1:]
    for block, inside, other in ((first, "mgk", "mgk@time"), (second, "mgk@time", "mgk")):
        table = block.partition("</table>")[0]
        assert f">{inside}<" in table
        assert f">{other}<" not in table
        # The baseline belongs to every criterion.
        assert f"{table_rows.loc['standard', 'mean']:.2f}" in table
    for name in ("table.md", "table.tex", "table.txt"):
        text = (folder / name).read_text("utf-8")
        # The caption below the blocks names the criteria in other words.
        places = [text.index(part) for part in ("equal parameters", "equal time")]
        assert places[0] < text.index("mgk", places[0]) < places[1] < text.rindex("mgk@time")
        assert "mgk@time" not in text[places[0] : places[1]]
    record = next(read_studies(tmp_path / "runs"))
    comparisons = compare_variants(record)
    figure = draw_cost(record, make_variant_frame(record, comparisons))
    assert figure is not None
    # The variants at equal time have filled points in place of empty ones.
    fills = [line.get_markerfacecolor() for line in figure.axes[0].lines]
    assert [fill == "none" for fill in fills].count(False) == 2
    left, _ = draw_seeds(record, comparisons).axes
    labels = [label.get_text() for label in left.get_yticklabels()]
    assert labels[:2] == ["standard", "equal parameters"]
    second = labels.index("equal time")
    assert sorted(labels[2:second]) == ["mgk", "xsa"]
    assert sorted(labels[second + 1 :]) == ["mgk@time", "xsa@time"]
    # The caption of the table of results explains the names of its rows.
    assert "Variants without @ have equal numbers of parameters and training steps." in page
    # The captions of the figures of the page explain them too.
    assert page.count("Variants with @time have equal training time") > page.count("<figure") > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("criteria", "sentence"),
    [
        (["flops"], "Variants have equal training FLOPs."),
        (["none", "flops"], "Variants without @ have equal numbers of training steps."),
        (["parameters"], None),
        ([], None),
    ],
)
def test_the_caption_states_what_is_equal(
    criteria: list[str], sentence: str | None, tmp_path: Path
) -> None:
    write_study(tmp_path / "runs", seeds=2, criteria=criteria)
    page = read_page(tmp_path)
    if sentence is None:
        assert "Variants have equal" not in page
        assert "Variants without @" not in page
    else:
        assert sentence in page


def write_tuning(
    study: Path, means: dict[str, list[float | None]], seeds: tuple[int, ...] = (9,), **keys: object
) -> Tuning:
    """Write trials with the means at three learning rates; the values of seeds differ by 0.2."""
    variants = [
        {
            "variant": name,
            "chosen": {"optimizer.lr": 0.002},
            "at_edge": ["optimizer.lr"] if name == "belief" else [],
            "trials": [
                {
                    "values": {"optimizer.lr": lr},
                    "mean": mean,
                    "by_seed": {
                        str(seed): None if mean is None else mean + 0.2 * place
                        for place, seed in enumerate(seeds)
                    },
                }
                for lr, mean in zip((0.001, 0.004, 0.002), values, strict=True)
            ],
        }
        for name, values in means.items()
    ]
    metric = Metric(name="val/accuracy", label="val accuracy", goal="max", scale=100)
    tuning = Tuning(
        trials=3,
        seeds=list(seeds),
        select=metric,
        keys={"optimizer.lr": [0.001, 0.004, 0.002]},
        variants=variants,
    )
    tuning.write(study / "tuning.json")
    return tuning


def test_tuning_shows_every_value_with_its_lead_and_the_choice(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    write_tuning(study, {"standard": [70.0, 72.0, 71.0], "belief": [71.0, None, 71.5]})
    page = read_page(tmp_path)
    table = page[page.index(">difference to standard [95 %]<") :].split("</table>")[0]
    cells = [
        [re.sub("<.*?>", "", cell) for cell in re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in table.split("<tr>")[1:]
    ]
    assert cells == [
        ["standard", "optimizer.lr=0.001", "70.00", "—", ""],
        ["standard", "optimizer.lr=0.004", "72.00", "—", ""],
        ["standard", "optimizer.lr=0.002", "71.00", "—", "chosen"],
        ["belief", "optimizer.lr=0.001", "71.00", "+1.00", ""],
        ["belief", "optimizer.lr=0.004", "diverged", "—", ""],
        ["belief", "optimizer.lr=0.002", "71.50", "+0.50", "chosen, at the edge of optimizer.lr"],
    ]
    assert "Every variant had 3 trials (grid) with seed 9" in page
    assert "those of the tuning seeds and the validation split" in page
    text = "For each variant, optimizer.lr was chosen by val accuracy in 3 trials (grid) with other"
    assert text in page


def test_the_lead_of_a_trial_is_paired_by_tuning_seed(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    means = {"standard": [70.0, 72.0, 71.0], "belief": [71.0, None, 71.5]}
    tuning = write_tuning(study, means, seeds=(7, 8, 9))
    trials = read_trials(tuning, "standard").set_index(["variant", "optimizer.lr"])
    assert trials["sd"].dropna().tolist() == pytest.approx([0.2] * 5)
    # Seeds add the same to both, so the paired differences do not vary.
    lead = trials.loc[("belief", 0), ["lead", "low", "high"]].tolist()
    assert lead == pytest.approx([1.0, 1.0, 1.0])
    assert trials.loc[("belief", 1), ["mean", "sd", "lead"]].isna().all()


def test_the_figure_of_tuning_marks_the_chosen_value_and_the_best_trial_of_each_value(
    tmp_path: Path,
) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    means = {"standard": [70.0, 72.0, 71.0], "belief": [71.0, None, 71.5]}
    tuning = write_tuning(study, means, seeds=(7, 8))
    figure = draw_tuning(tuning, "standard", STYLES)
    top, bottom = figure.axes
    rings = [line for line in top.lines if line.get_markersize() == 9]
    assert [line.get_ydata().tolist() for line in rings] == [[71.0], [71.5]]
    # Values stand in the order of the grid, and variants beside each other.
    assert [text.get_text() for text in bottom.get_xticklabels()] == ["0.001", "0.004", "0.002"]
    assert [line.get_xdata().round().tolist() for line in rings] == [[2], [2]]
    shown = [c.lines[0].get_ydata().tolist() for c in bottom.containers]
    assert shown[1] == pytest.approx([1.0, 0.5])


def test_a_long_interval_leaves_the_panel_of_leads(tmp_path: Path) -> None:
    """Three times the largest lead is the limit, because two seeds have very long intervals."""
    study = write_study(tmp_path / "runs", seeds=2)
    tuning = write_tuning(study, {"standard": [70.0] * 3, "belief": [70.1] * 3}, seeds=(7, 8))
    trial = tuning.variants[1].trials[0]
    trial.by_seed.update({"7": 65.2, "8": 75.2})
    _, bottom = draw_tuning(tuning, "standard", STYLES).axes
    assert bottom.get_ylim() == pytest.approx((-0.3, 0.3))
    read_page(tmp_path)
    assert (tmp_path / "reports" / "fake" / "tuning.svg").is_file()


def test_points_of_the_figure_are_best_trials_if_several_keys_are_tuned(tmp_path: Path) -> None:
    tuning = write_tuning(tmp_path, {"standard": [70.0, 72.0, 71.0]})
    both = {"optimizer.lr": [0.001, 0.002], "epochs": [5, 9]}
    means = {(0.001, 5): 1.0, (0.001, 9): 4.0, (0.002, 5): 3.0, (0.002, 9): 2.0}
    trials = [
        TuningTrial(values={"optimizer.lr": lr, "epochs": n}, mean=mean, by_seed={"9": mean})
        for (lr, n), mean in means.items()
    ]
    variant = tuning.variants[0].model_copy(
        update={"trials": trials, "chosen": {"optimizer.lr": 0.001, "epochs": 9}}
    )
    for goal, expected in (("max", [[4.0, 3.0], [3.0, 4.0]]), ("min", [[1.0, 2.0], [1.0, 2.0]])):
        select = tuning.select.model_copy(update={"goal": goal})
        changed = {"keys": both, "variants": [variant], "select": select}
        axes = draw_tuning(tuning.model_copy(update=changed), "standard", STYLES).axes[:2]
        assert [a.containers[0].lines[0].get_ydata().tolist() for a in axes] == expected


@pytest.mark.slow
def test_the_caption_states_when_the_plan_was_sealed(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=8)
    Seals(entries=[seal(0, 6)]).write(study / "seals.json")
    page = read_page(tmp_path)
    assert "plan (hash 5ea1) was sealed on 2026-01-02T03:04 UTC, before the first result." in page
    Seals(entries=[seal(3, 6), seal(6, 8, "abc")]).write(study / "seals.json")
    page = read_page(tmp_path)
    assert "was first sealed on 2026-01-02T03:04 UTC, after the first result (cells" in page
    assert "with a result at that time: 3)." in page
    assert "Added after results had been seen: seeds 6, 7. At look 2 a star needs p" in page
    assert "a false star at any look is at most 0.0625." in page
    assert "A star marks p ≤ 0.0125, better or worse, which needs at least 8 seeds" in page
    assert "Variants added or changed after results had been seen: c." in page


def test_an_interval_without_zero_is_explained_with_the_level_of_the_study(tmp_path: Path) -> None:
    """Seven pairs cannot have a p below 0.0156, and the second look needs 0.0125."""
    study = write_study(tmp_path / "runs", variants={"standard": 0.0, "other": 0.05}, seeds=7)
    Seals(entries=[seal(0, 6), seal(3, 7)]).write(study / "seals.json")
    sentence = "The interval of other excludes 0 although p is above 0.0125, because the interval"
    assert sentence in read_page(tmp_path)


@pytest.mark.slow
def test_the_caption_names_planned_seeds_that_were_removed(tmp_path: Path) -> None:
    """Whoever stops at a star would otherwise have a table that looks complete."""
    study = write_study(tmp_path / "runs", seeds=6)
    for results, is_late in ((0, False), (6, True)):
        Seals(entries=[seal(0, 10), seal(results, 6)]).write(study / "seals.json")
        sentence = "Planned seeds removed after results had been seen: 6, 7, 8, 9."
        assert (sentence in read_page(tmp_path)) == is_late


@pytest.mark.slow
def test_the_caption_names_every_decision_that_changed_after_results(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=6)
    first = seal(0, 6, "abc")
    early = first.model_copy(update={"baseline": "b"})
    changed = early.metric.model_copy(
        update={"name": "test/loss", "goal": "min", "margin": 1.5, "selection": "best-validation"}
    )
    decisions = {"match": ["time"], "tune": {"trials": 2}, "exclude": [{"a": 1}]}
    late = {"results": 4, "variants": {"a": "a", "b": "b"}, "baseline": "a", "metric": changed}
    Seals(entries=[first, early]).write(study / "seals.json")
    assert "changed after results" not in read_page(tmp_path)
    last = early.model_copy(update=late | decisions)
    Seals(entries=[first, early, last]).write(study / "seals.json")
    page = html.unescape(read_page(tmp_path))
    assert "Variants removed after results had been seen: c." in page
    assert (
        'Decisions changed after results had been seen: metric.name (before: "test/accuracy"), '
        'metric.goal (before: "max"), metric.selection (before: "last"), '
        'metric.margin (before: null), baseline (before: "b"), match (before: ["parameters"]), '
        "tune (before: {}), exclude (before: [])."
    ) in page


def test_a_second_look_lowers_the_power_of_the_star() -> None:
    """At the second look a star needs p <= 0.0125, which six pairs cannot reach."""
    plan = make_plan()
    values = {"a": [0.0] * 6, "b": [1.0, 1.1, 0.9, 1.2, 0.8, 1.3]}
    cells = [CellRecord(v, seed, "done", x) for v in values for seed, x in enumerate(values[v])]
    first, second = (
        compare_variants(StudyRecord(plan, cells, seals=Seals(entries=entries))).records["b"]
        for entries in ([seal(0, 6)], [seal(0, 4), seal(4, 6)])
    )
    assert first["power_n"] > 0.9
    assert second["power_n"] == 0
    # The interval of the verdict is that of the same level, and the other one stays at 95 %.
    assert second["joint_high"] > first["joint_high"] == first["high"] == second["high"]


def test_looks_at_the_results_are_paid_for() -> None:
    """Seeds are added until a star appears, and every look has the seals of its time."""
    plan = make_plan()
    looks, runs = (8, 10, 12, 14), 3000
    entries = [seal(0, 8), *(seal(1, n) for n in looks[1:])]
    levels = [
        compare_variants(StudyRecord(plan, [], seals=Seals(entries=entries[:look]))).level
        for look in (1, 2, 3, 4)
    ]
    assert levels == [0.05, 0.05 / 4, 0.05 / 8, 0.05 / 16]
    differences = np.random.default_rng(5).normal(size=(runs, looks[-1]))
    p = np.array([[sign_flip_p(d[:n].tolist()) for n in looks] for d in differences])
    assert (p <= levels).any(axis=1).mean() <= 0.055
    # Bonferroni over the looks so far, 0.05 / look, or no correction: more than 5 % of studies.
    assert (p <= 0.05 / np.arange(1, 5)).any(axis=1).mean() > 0.055
    assert (p <= 0.05).any(axis=1).mean() > 0.09


@pytest.mark.slow
def test_the_index_corrects_for_looks_too(tmp_path: Path) -> None:
    """Eight pairs give p = .008: a star at the second look, but not over two studies."""
    study = write_study(tmp_path / "runs", seeds=8)
    variants = {"standard": 0.0, "same": 0.0}
    other = write_study(tmp_path / "runs", name="other", variants=variants, seeds=8)
    plan = other / "plan.json"
    plan.write_text(plan.read_text().replace('"identity": "0', '"identity": "1'))
    for result_file in other.glob("*/*/result.json"):
        text = result_file.read_text()
        result_file.write_text(text.replace('"identity": "0', '"identity": "1'))
    Seals(entries=[seal(0, 8)]).write(other / "seals.json")
    for entries, named in (([seal(0, 8)], 2), ([seal(0, 6), seal(6, 8)], 1)):
        Seals(entries=entries).write(study / "seals.json")
        table = rows(report(tmp_path))
        assert table.loc["belief2", "significant"]
        # "belief2" has the largest difference, and differs at the first look alone.
        assert (tmp_path / "reports/index.html").read_text().count("belief2") == named


def test_times_that_were_measured_alone_replace_those_of_the_cells(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    timed = [
        {"variant": name, "kind": name, "baseline_kind": "standard", "spread": 0.04} | times
        for name, times in (
            ("standard", {"seconds": 0.5, "ratio": 1}),
            # Measured earlier, when the machine was slower: the ratio counts.
            ("belief", {"seconds": 0.75, "ratio": 0.5}),
            ("removed", {"seconds": 0.75, "ratio": 0.5, "spread": 0.09}),
        )
    ]
    StepTimes(device="CPU", variants=timed).write(study / "step_times.json")
    page = read_page(tmp_path)
    assert "for each variant alone (not for belief2), interleaved with the baseline; the" in page
    assert "is at most 4.0 % of the median over five rounds (standard)." in page
    # The median over a run is another time.
    assert "median over the training steps" not in page
    table = rows(tmp_path / "reports" / "fake")
    assert table["step_time"].tolist()[:2] == [0.5, 0.25]


def test_steps_to_target_are_those_of_the_mean_curve(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", seeds=3, variants={"standard": 0, "fast": 0.1, "slow": -0.1})
    table = rows(report(tmp_path))
    assert table.loc["standard", "target_steps"] == 700
    assert table.loc["fast", "target_steps"] < 700
    assert pd.isna(table.loc["slow", "target_steps"])
    seconds = table.loc["fast", "target_steps"] * table.loc["fast", "step_time"]
    assert table.loc["fast", "target_seconds"] == pytest.approx(seconds)


@pytest.mark.slow
def test_the_best_test_epoch_stands_apart_and_selects_nothing(tmp_path: Path) -> None:
    """One variant has the highest value of any epoch, and another one the best last epoch."""
    pages, tables = {}, {}
    for shown in (False, True):
        root = tmp_path / str(shown)
        study = write_study(
            root / "runs", variants={"standard": 0, "noisy": 0.01, "steady": 0.1}, seeds=6
        )
        plan = Plan.model_validate_json((study / "plan.json").read_bytes())
        plan.model_copy(update={"best_test_epoch": shown}).write(study / "plan.json")
        for seed in range(6):
            (path,) = study.glob(f"v1/{seed}-*/metrics.csv")
            with path.open("a") as metrics:
                metrics.write(f"350,3,test/accuracy,{0.9 + seed / 100}\n")
        folder = report(root)
        pages[shown] = (folder / "table.full.md").read_text()
        tables[shown] = rows(folder)
    added = ["best_test_epoch", "best_test_epoch_sd"]
    pd.testing.assert_frame_equal(*(tables[shown].drop(columns=added) for shown in (False, True)))
    assert tables[False][added].isna().all(axis=None)
    assert "best test epoch" not in pages[False].lower()
    table = tables[True]
    assert table.loc["noisy", "best_test_epoch"] == pytest.approx(92.5)
    assert table.loc["noisy", "best_test_epoch_sd"] == pytest.approx(np.std(range(6), ddof=1))
    assert (table["best_test_epoch"] >= table["mean"]).all()
    assert table["best"].tolist() == [False, False, True]
    heading, _, *lines = [line.split(" | ") for line in pages[True].splitlines()[:5]]
    column = heading.index("best test epoch")
    assert lines[1][column].startswith("92.50 ± ")
    assert not any(mark in row[column] for row in lines for mark in ("**", "\\*"))


def test_the_best_test_epoch_of_a_damaged_curve_is_empty(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", best_test_epoch=True)
    (path,) = study.glob("v1/3-*/metrics.csv")
    path.write_text("step,epoch,name,value\n")
    table = rows(report(tmp_path))
    assert table["best_test_epoch"].isna().tolist() == [False, True, False]


def test_every_caption_states_the_agreement_with_released_code(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", parity="someone/code, losses within 1e-12. The head is ours.")
    page = read_page(tmp_path)
    words = "15 and 16, what differs): someone/code, losses within 1e-12. The head is ours."
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    tables = re.findall(r'<div class="caption">(.*?)</div>', page, re.DOTALL)
    assert len(captions) >= 3
    assert len(tables) >= 2
    for caption in captions + tables:
        assert words in html.unescape(caption)
