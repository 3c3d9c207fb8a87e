"""Criteria of equal cost, tuning, sealed plans and the cost of reaching the baseline."""

import html
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.fake_study import write_study

from lit_attn.cells.records import Metric, Plan, Seal, Seals, StepTimes, Tuning
from lit_attn.report import write_reports
from lit_attn.report.comparison import compare_variants
from lit_attn.report.read import CellRecord, StudyRecord

VARIANTS = {"standard": 0.0, "mgk": 0.03, "mgk@time": -0.02, "xsa": 0.01, "xsa@time": 0.01}


def read_page(root: Path) -> str:
    (folder,) = write_reports(root / "runs", root / "reports")
    return (folder / "table.html").read_text()


def seal(results: int, seeds: int, variants: str = "ab") -> Seal:
    metric = Metric(name="test/accuracy", label="accuracy", goal="max", scale=100)
    return Seal(
        time="2026-01-02T03:04:05+00:00",
        results=results,
        hash="5ea1",
        variants={name: name for name in variants},
        baseline="a",
        seeds=list(range(seeds)),
        metric=metric,
        match=["parameters"],
        tune={},
        exclude=[],
    )


def test_criteria_stand_side_by_side(tmp_path: Path) -> None:
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
    table = page[page.index("(equal parameters)") : page.index("Comparison at equal cost.")]
    assert "difference (equal time)" in table
    rows = pd.read_csv(tmp_path / "reports" / "fake" / "table.csv").set_index("variant")
    row = table[table.index(">mgk<") :].split("</tr>")[0]
    assert row.count("<td>") == 4
    assert f"{rows.loc['mgk', 'mean']:.2f}" in row
    assert f"{rows.loc['mgk@time', 'mean']:.2f}" in row
    # The baseline belongs to every criterion.
    row = table[table.index(">standard<") :].split("</tr>")[0]
    assert row.count(f"{rows.loc['standard', 'mean']:.2f}") == 2
    assert ">mgk@time<" not in table


def test_tuning_shows_chosen_values_edges_and_leads(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    means = {"standard": [70.0, 72.0, 71.0], "belief": [71.0, None, 71.5]}
    variants = [
        {
            "variant": name,
            "chosen": {"optimizer.lr": 0.002},
            "at_edge": ["optimizer.lr"] if name == "belief" else [],
            "trials": [
                {"values": {"optimizer.lr": lr}, "mean": mean, "by_seed": {"9": mean}}
                for lr, mean in zip((0.001, 0.004, 0.002), values, strict=True)
            ],
        }
        for name, values in means.items()
    ]
    metric = Metric(name="val/accuracy", label="val accuracy", goal="max", scale=100)
    Tuning(
        sampler="grid",
        trials=3,
        seeds=[9],
        select=metric,
        keys={"optimizer.lr": [0.001, 0.004, 0.002]},
        variants=variants,
    ).write(study / "tuning.json")
    page = read_page(tmp_path)
    row = page[page.index("best val accuracy") :]
    row = row[row.index(">belief<") :].split("</tr>")[0]
    cells = [cell.split("</td>")[0] for cell in row.split("<td>")[1:]]
    assert cells == ["optimizer.lr=0.002", "optimizer.lr", "71.5", "+0.5 to +1 (2)", "1"]
    assert "Every variant had 3 trials (grid) with seeds 9" in page


def test_the_caption_states_when_the_plan_was_sealed(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=8)
    Seals(entries=[seal(0, 6)]).write(study / "seals.json")
    page = read_page(tmp_path)
    assert "The plan (5ea1) was sealed on 2026-01-02T03:04 UTC, before the first result." in page
    Seals(entries=[seal(3, 6), seal(6, 8, "abc")]).write(study / "seals.json")
    page = read_page(tmp_path)
    assert "was first sealed on 2026-01-02T03:04 UTC, when 3 cells had a result" in page
    assert "Seeds 6, 7 were added after results had been seen. For 2 looks a star needs p" in page
    assert "A star marks p ≤ 0.025, better or worse, which needs at least 7 seeds" in page
    assert "Variants added or changed after results had been seen: c." in page


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


def test_looks_at_the_results_are_paid_for() -> None:
    """Seeds are added until a star appears: with the corrected level false stars stay rare."""
    generator = np.random.default_rng(5)
    false_stars, uncorrected = 0, 0
    metric = Metric(name="test/score", label="score", goal="max", scale=1)
    plan = Plan(
        study="s",
        title="s",
        baseline="a",
        metric=metric,
        variants=[{"name": "a"}, {"name": "b"}],
        seeds=list(range(14)),
        cells=[],
    )
    looks = (8, 10, 12, 14)
    seals = Seals(entries=[seal(0, 8), *(seal(1, n) for n in looks[1:])])
    for _ in range(300):
        values = generator.normal(size=(14, 2))
        stars = []
        for sealed in (seals, None):
            has_star = False
            for n in looks:
                cells = [
                    CellRecord(name, seed, "done", float(values[seed, column]))
                    for column, name in enumerate("ab")
                    for seed in range(n)
                ]
                comparisons = compare_variants(StudyRecord(plan, cells, seals=sealed))
                has_star |= comparisons.records["b"]["significant"]
            stars.append(has_star)
        false_stars += stars[0]
        uncorrected += stars[1]
    assert false_stars / 300 <= 0.05
    assert uncorrected / 300 > 0.06


def test_times_that_were_measured_alone_replace_those_of_the_cells(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    timed = [
        {"variant": name, "kind": "k", "baseline_kind": "k", "seconds": s, "ratio": 1, "spread": 0}
        for name, s in (("standard", 0.5), ("belief", 0.25))
    ]
    StepTimes(device="CPU", variants=timed).write(study / "step_times.json")
    page = read_page(tmp_path)
    assert "measured for each variant alone, interleaved with the baseline." in page
    table = pd.read_csv(tmp_path / "reports" / "fake" / "table.csv").set_index("variant")
    assert table["step_time"].tolist()[:2] == [0.5, 0.25]


def test_steps_to_target_are_those_of_the_mean_curve(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", seeds=3, variants={"standard": 0, "fast": 0.1, "slow": -0.1})
    read_page(tmp_path)
    table = pd.read_csv(tmp_path / "reports" / "fake" / "table.csv").set_index("variant")
    assert table.loc["standard", "target_steps"] == 700
    assert table.loc["fast", "target_steps"] < 700
    assert pd.isna(table.loc["slow", "target_steps"])
    seconds = table.loc["fast", "target_steps"] * table.loc["fast", "step_time"]
    assert table.loc["fast", "target_seconds"] == pytest.approx(seconds)


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
        (folder,) = write_reports(root / "runs", root / "reports")
        pages[shown] = (folder / "table.md").read_text()
        tables[shown] = pd.read_csv(folder / "table.csv").set_index("variant")
    added = ["best_test_epoch", "best_test_epoch_sd"]
    pd.testing.assert_frame_equal(*(tables[shown].drop(columns=added) for shown in (False, True)))
    assert tables[False][added].isna().all(axis=None)
    assert "best test epoch" not in pages[False].lower()
    table = tables[True]
    assert table.loc["noisy", "best_test_epoch"] == pytest.approx(92.5)
    assert table.loc["noisy", "best_test_epoch_sd"] == pytest.approx(np.std(range(6), ddof=1))
    assert (table["best_test_epoch"] >= table["mean"]).all()
    assert table["best"].tolist() == [False, False, True]
    heading, _, *rows = [line.split(" | ") for line in pages[True].splitlines()[:5]]
    column = heading.index("best test epoch")
    assert rows[1][column].startswith("92.50 ± ")
    assert not any(mark in row[column] for row in rows for mark in ("**", "\\*"))
    assert "It is never used for selection, bold, stars, differences or intervals." in pages[True]


def test_the_best_test_epoch_of_a_damaged_curve_is_empty(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", best_test_epoch=True)
    (path,) = study.glob("v1/3-*/metrics.csv")
    path.write_text("step,epoch,name,value\n")
    read_page(tmp_path)
    table = pd.read_csv(tmp_path / "reports" / "fake" / "table.csv").set_index("variant")
    assert table["best_test_epoch"].isna().tolist() == [False, True, False]


def test_the_caption_states_the_agreement_with_released_code(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", parity="someone/code, losses within 1e-12")
    page = read_page(tmp_path)
    assert "released code: someone/code, losses within 1e-12 (relative; docs/parity.md" in page
