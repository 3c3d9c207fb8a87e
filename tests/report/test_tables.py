"""Reports from records: numbers, captions, reproducible bytes, escaping."""

import re
from pathlib import Path

import pandas as pd
import pytest
from helpers.fake_study import EFFECTS, accuracy_of, report, result, rows, write_study

from lit_attn.cells.records import Metric, Plan, PlannedVariant, Result, Spread
from lit_attn.cells.rows import csv_lines, read_unreadable
from lit_attn.tasks.metrics import DEFAULT_METRIC

pytestmark = pytest.mark.usefixtures("no_rendering")


def test_the_table_states_which_trainings_stopped_early(tmp_path: Path) -> None:
    runs = write_study(tmp_path / "runs", seeds=3)
    plan = Plan.read(runs / "plan.json")
    assert plan is not None
    first, second = (cell for cell in plan.cells if cell.variant == "belief2" and cell.seed < 2)
    for cell, steps in ((first, 100), (second, 300)):
        early = result(cell, 0.5, steps=steps, stopped_early=True)
        early.write(runs / cell.path / "result.json")
    folder = report(tmp_path)
    text = (folder / "table.full.md").read_text(encoding="utf-8")
    assert "| stopped early |" in text
    assert "Stopped early is the number of seeds" in text
    table = pd.read_csv(folder / "table.csv").set_index("variant")
    last = result(first, 0.5).steps
    assert table.loc["belief2", "steps_run"] == pytest.approx((100 + 300 + last) / 3)
    assert table.loc["belief2", "stopped"] == 2
    assert table.loc["standard", "stopped"] == 0


def index_cells(path: Path) -> list[str]:
    """Return the cells of the index's only row behind the title."""
    page = (path / "reports" / "index.html").read_text()
    return re.findall("<td[^>]*>(.*?)</td>", page)[1:]


def test_a_complete_study_has_these_numbers(tmp_path: Path) -> None:
    write_study(tmp_path / "runs")
    folder = report(tmp_path)
    table = rows(folder)
    standard = pd.Series([100 * accuracy_of(0, s, "standard") for s in range(5)])
    belief2 = pd.Series([100 * accuracy_of(0.02, s, "belief2") for s in range(5)])
    assert table.loc["standard", "mean"] == pytest.approx(standard.mean())
    assert table.loc["standard", "sd"] == pytest.approx(standard.std())
    assert table.loc["belief2", "difference"] == pytest.approx((belief2 - standard).mean())
    assert table.loc["belief2", "p"] == 0.0625
    assert table.loc["belief2", "p_adjusted"] == 0.0625
    assert pd.isna(table.loc["standard", "difference"])
    assert table["best"].tolist() == [False, False, True]
    assert not table["significant"].any()
    markdown = (folder / "table.full.md").read_text()
    # The best mean without a verdict is no finding.
    assert f"| {belief2.mean():.2f} ± {belief2.std():.2f} |" in markdown
    assert "cannot fall below 0.0625 with 5 pairs" in markdown
    assert "needs at least 6 seeds." in markdown
    assert "3,375,076" in markdown
    assert "| FFN width |" in markdown
    assert set(table["ffn_width"]) == {384}
    for text in (markdown, (folder / "table.html").read_text()):
        assert "seeds needed" in text.lower()
        assert "corrected for 2 comparisons by the step-down max-T method" in text
    # Nothing is said about what no cell has recorded.
    assert table["test_error"].isna().all()
    assert "test s.e." not in markdown
    assert "could not be read" not in markdown
    differs, largest, _, *counts = index_cells(tmp_path)
    assert differs == "none"
    assert largest.startswith("belief2 +1.77 [")
    assert counts == ["5", "15 / 15", "its own study alone"]


def test_a_variant_that_passes_the_corrected_test_has_a_star(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", seeds=6)
    folder = report(tmp_path)
    assert rows(folder).loc["belief2", "significant"]
    assert rows(folder).loc["belief2", "p_adjusted"] == 2 / 2**6
    markdown = (folder / "table.full.md").read_text()
    assert r" \*" in markdown
    mean, sd = rows(folder).loc["belief2", ["mean", "sd"]]
    assert f"**{mean:.2f} ± {sd:.2f}**" in markdown
    assert r"\textsuperscript{*}" in (folder / "table.tex").read_text()
    assert "<sup>*</sup>" in (folder / "table.html").read_text()
    table = rows(folder)
    differing = re.findall(r"(\w+) \+", index_cells(tmp_path)[0])
    assert differing == list(table.index[table["significant"]])


def test_the_power_of_the_star_is_printed(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", variants={"base": 0.0, "same": 0.0, "ahead": 0.02}, seeds=6)
    folder = report(tmp_path)
    lines = (folder / "table.full.md").read_text().splitlines()
    headings, *cells = ([cell.strip() for cell in line.split("|")] for line in lines if "|" in line)
    column = headings.index("power at n, 2n, 4n")
    # The only variant with an effect is decided, so no seeds are needed.
    assert "seeds needed" not in headings
    printed = {row[1].strip("*"): row[column] for row in cells[1:]}
    assert printed["base"] == printed["same"] == "—"
    assert re.fullmatch(r"[01]\.\d\d, [01]\.\d\d, [01]\.\d\d", printed["ahead"])
    table = rows(folder)
    powers = table.loc["ahead", ["power_n", "power_2n", "power_4n"]]
    assert printed["ahead"] == ", ".join(f"{power:.2f}" for power in powers)
    assert table.loc[["base", "same"], ["effect", "power_n"]].isna().all(axis=None)


def test_missing_and_failed_cells_are_shown_and_never_averaged(tmp_path: Path) -> None:
    write_study(
        tmp_path / "runs",
        skip=(("belief", 0),),
        failures={("belief", 3): "diverged", ("standard", 4): "out-of-memory"},
    )
    folder = report(tmp_path)
    table = rows(folder)
    assert table.loc["belief", ["n", "pairs"]].tolist() == [3, 2]
    assert table.loc["belief", "missing"] == "1 diverged, 1 missing"
    accuracies = pd.Series([100 * accuracy_of(0.004, s, "belief") for s in (1, 2, 4)])
    assert table.loc["belief", "mean"] == pytest.approx(accuracies.mean())
    markdown = (folder / "table.full.md").read_text()
    assert "3/5, 1 diverged, 1 missing" in markdown
    assert "(2 pairs)" in markdown
    assert "enter no mean" in markdown
    seeds = pd.read_csv(folder / "per_seed.csv")
    assert len(seeds) == 15
    assert seeds.set_index(["variant", "seed"]).loc[("belief", 3), "status"] == "diverged"


def test_a_study_without_results_has_a_report(tmp_path: Path) -> None:
    everything = tuple((v, s) for v in EFFECTS for s in range(5))
    write_study(tmp_path / "runs", skip=everything)
    folder = report(tmp_path)
    text = (folder / "table.full.md").read_text()
    assert "0/5, 5 missing" in text
    assert "nan" not in text.lower()
    assert not (folder / "progress.svg").exists()


def test_a_variant_that_is_not_tuned_yet_has_no_cells(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs")
    plan = Plan.model_validate_json((study / "plan.json").read_bytes())
    plan.variants.append(PlannedVariant(name="untuned"))
    plan.write(study / "plan.json")
    assert rows(report(tmp_path)).loc["untuned", ["n", "planned"]].tolist() == [0, 0]


def test_without_a_baseline_there_is_no_difference(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", skip=tuple(("standard", s) for s in range(5)))
    table = rows(report(tmp_path))
    assert table.loc["belief", "n"] == 5
    assert table["difference"].isna().all()


def test_identical_values_have_no_spread(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", variants={"a": 0.0, "b": 0.0}, seeds=3)
    for path in study.glob("*/*/result.json"):
        text = path.read_text()
        start = text.index('"test/accuracy":')
        path.write_text(text[:start] + '"test/accuracy": 0.5' + text[text.index(",", start) :])
    table = rows(report(tmp_path))
    assert table.loc["b", ["difference", "low", "high", "p"]].tolist() == [0, 0, 0, 1]


def test_one_seed_keeps_three_digits_of_small_values(tmp_path: Path) -> None:
    metric = DEFAULT_METRIC.model_copy(update={"scale": 0.1})
    write_study(tmp_path / "runs", seeds=1, metric=metric)
    folder = report(tmp_path)
    markdown = (folder / "table.full.md").read_text()
    assert "nan" not in markdown.lower()
    assert "<NA>" not in markdown
    mean = rows(folder).loc["belief", "mean"]
    assert 0.01 < mean < 0.1
    assert re.search(rf"\| belief \| \**{mean:.4f}\** \| 1 \|", markdown)
    assert "of 1 planned (seed 0)" in markdown
    assert "metric's step" not in markdown


@pytest.mark.slow
def test_the_caption_explains_an_interval_without_zero_beside_a_large_p(tmp_path: Path) -> None:
    """Five pairs cannot have a p below 0.06, however large the difference is."""
    captions = {}
    for effect in (0.0, 0.05):
        root = tmp_path / str(effect)
        write_study(root / "runs", variants={"standard": 0.0, "other": effect})
        captions[effect] = " ".join((report(root) / "table.full.md").read_text("utf-8").split())
    sentence = "The interval of other excludes 0 although p is above 0.05, because the interval"
    assert captions[0.05].count(sentence) == 1
    assert "excludes 0 although" not in captions[0.0]


@pytest.mark.slow
def test_evaluation_time_is_a_column_if_it_was_measured(tmp_path: Path) -> None:
    """Old records lack this time, and their table has no column for it."""
    study = write_study(tmp_path / "runs", seeds=3)
    assert "evaluation (s)" not in (report(tmp_path) / "table.full.md").read_text()
    for seed, cell in enumerate(sorted(study.glob("v1/*/result.json"))):
        old = Result.model_validate_json(cell.read_text())
        assert old.evaluation_time is None
        time = Spread(median=37.0 + seed, iqr=0.1, count=9)
        old.model_copy(update={"evaluation_time": time}).write(cell)
    text = (report(tmp_path) / "table.full.md").read_text()
    assert "| evaluation (s) |" in text
    assert text.count(" 38.00 |") == 1
    assert "usy machine" not in text
    assert "Evaluation is the time of one evaluation of all splits" in text
    assert rows(tmp_path / "reports" / "fake").loc["belief", "evaluation_time"] == 38
    assert pd.isna(rows(tmp_path / "reports" / "fake").loc["standard", "evaluation_time"])
    busy = old.model_copy(update={"evaluation_time": Spread(median=90.0, iqr=0.1, count=9)})
    busy.write(cell)
    text = (report(tmp_path) / "table.full.md").read_text()
    assert "| \N{EM DASH} § |" in text
    assert text.count("§: the machine was busy: the longest time of a seed is more than 1.2") == 1


def test_the_share_of_waiting_is_a_column_if_wall_times_were_measured(tmp_path: Path) -> None:
    """A step of 8 ms on the device that ends every 10 ms has a fifth of waiting."""
    study = write_study(tmp_path / "runs", seeds=3)
    assert "waiting (%)" not in (report(tmp_path) / "table.full.md").read_text()
    for cell in study.glob("v1/*/result.json"):
        old = Result.model_validate_json(cell.read_text())
        times = {
            "step_time": Spread(median=0.008, iqr=0.0, count=9),
            "step_wall_time": Spread(median=0.010, iqr=0.0, count=9),
        }
        old.model_copy(update=times).write(cell)
    text = (report(tmp_path) / "table.full.md").read_text()
    assert "| waiting (%) |" in text
    assert "Waiting is the share of the wall time of a step" in text
    frame = rows(tmp_path / "reports" / "fake")
    assert frame.loc["belief", "waiting"] == pytest.approx(0.2)
    assert pd.isna(frame.loc["standard", "waiting"])


@pytest.mark.slow
def test_the_caption_counts_devices(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=3)
    assert "Device: CPU." in (report(tmp_path) / "table.full.md").read_text()
    (cell,) = study.glob("v1/0-*/result.json")
    one = Result.model_validate_json(cell.read_text())
    one.model_copy(update={"devices": 2}).write(cell)
    text = (report(tmp_path) / "table.full.md").read_text()
    assert "Device: 2 x CPU, CPU." in text
    assert "devices differ between runs: step time and memory cannot be compared" in text
    assert "CUDA" not in text


def test_published_values_are_columns(tmp_path: Path) -> None:
    published = {"standard": (72.01, 0.2), "belief2": (76.15, None)}
    write_study(tmp_path / "runs", published=published, source="Belief2, Table 2")
    folder = report(tmp_path)
    markdown = (folder / "table.full.md").read_text()
    assert "72.01 ± 0.20" in markdown
    assert "| 76.15 |" in markdown
    assert "Published values and their ± are copied from Belief2, Table 2." in markdown
    table = rows(folder)
    difference = table.loc["standard", "published_difference"]
    assert difference == pytest.approx(table.loc["standard", "mean"] - 72.01)


def test_lower_can_be_better(tmp_path: Path) -> None:
    metric = Metric(name="test/loss", label="loss", goal="min", scale=1)
    write_study(tmp_path / "runs", metric=metric)
    table = rows(report(tmp_path))
    assert table["best"].tolist() == [False, False, True]
    assert table.loc["standard", "mean"] < 1


def test_records_of_other_code_cause_a_warning(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs")
    path = next(study.glob("v1/0-*/result.json"))
    path.write_text(path.read_text().replace('"c0de"', '"0ther"'))
    folder = report(tmp_path)
    assert (
        "Warning: code differs between runs (0ther, c0de)" in (folder / "table.full.md").read_text()
    )
    assert 'class="alert"' in (folder / "table.html").read_text()


def test_the_page_lists_every_other_metric_of_the_split(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", variants={"a": 0.0, "b": 0.1}, seeds=2)
    for path in study.glob("*/*/result.json"):
        recorded = Result.model_validate_json(path.read_text())
        added = {"test/F1": 0.25 + recorded.seed / 2, "test/averaged-F1": 0.9, "val/F1": 0.8}
        recorded.model_copy(update={"metrics": recorded.metrics | added}).write(path)
    page = (report(tmp_path) / "table.html").read_text()
    (table,) = [part for part in page.split("<table") if ">test/F1<" in part]
    assert "test/loss" in table
    assert table.count("<td>0.5000 ± 0.3536</td>") == 2
    assert "averaged-F1" not in table
    assert "val/F1" not in table


@pytest.mark.parametrize(
    ("title", "heading"),
    [("A study", "A study."), ("Ends..", "Ends."), ("Which is best?", "Which is best?")],
)
def test_the_title_of_a_table_is_one_sentence(tmp_path: Path, title: str, heading: str) -> None:
    write_study(tmp_path / "runs", variants={"standard": 0.0}, title=title)
    assert f"\n**{heading}**\n" in (report(tmp_path) / "table.md").read_text()


def test_images_that_were_left_out_are_counted_and_named(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "runs")
    cells = sorted(path.parent for path in folder.rglob("result.json"))
    lines = [("train", f"n0/{number}.png", "is empty") for number in range(7)]
    (cells[0] / "unreadable-0.csv").write_text(csv_lines(lines[:4]))
    (cells[0] / "unreadable-1.csv").write_text(csv_lines(lines[3:]) + "test,torn li")
    (cells[1] / "unreadable-0.csv").write_text(csv_lines([("test", "n1/0.png", "is empty")]))
    assert [entry.image for entry in read_unreadable(cells[0])] == [line[1] for line in lines]
    text = (report(tmp_path) / "table.full.md").read_text()
    names = ", ".join(line[1] for line in lines[:5])
    assert (
        f"Images that could not be read were left out in 2 of {len(cells)} results: 7 of train "
        f"({names} and 2 more) and 1 of test (n1/0.png)."
    ) in text
