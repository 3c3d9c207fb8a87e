"""Factorial effects, and the tables across studies."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.fake_study import accuracy_of, read, write_study

from lit_attn.cells.records import Metric, Plan, PlannedVariant
from lit_attn.report import write_reports
from lit_attn.report.__main__ import main
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.significance import TESTS
from lit_attn.report.tables.effects import Effect, find_effects

pytestmark = pytest.mark.usefixtures("no_rendering")

CORNERS = ["a=x,b=x", "a=x,b=y", "a=y,b=x", "a=y,b=y"]


def factorial(interaction: float = 0.03) -> dict[str, float]:
    """Return the true effects of a 2 x 3 design: a=y adds .01, b=y .02, both `interaction`."""
    return {
        f"a={a},b={b}": 0.01 * (a == "y") + 0.02 * (b == "y") + interaction * (a == b == "y")
        for a, b in itertools.product("xy", "xyz")
    }


def by_name(effects: list[Effect]) -> dict[str, Effect]:
    return {effect.effect: effect for effect in effects}


def test_effects_are_differences_of_means_paired_by_seed(tmp_path: Path) -> None:
    design = factorial()
    effects = by_name(find_effects(read(tmp_path, variants=design, seeds=6)))
    assert list(effects) == ["a=y", "b=y", "b=z", "a=y and b=y", "a=y and b=z"]
    values = {
        name: np.array([100 * accuracy_of(effect, seed, name) for seed in range(6)])
        for name, effect in design.items()
    }
    main = np.mean([values[f"a=y,b={b}"] - values[f"a=x,b={b}"] for b in "xyz"], axis=0)
    assert effects["a=y"].by_seed == pytest.approx(main.tolist())
    assert (effects["a=y"].low, effects["a=y"].high) == pytest.approx(
        stats.paired_interval(main.tolist())[1:]
    )
    xx, xy, yx, yy = (values[corner] for corner in CORNERS)
    assert effects["a=y and b=y"].by_seed == pytest.approx((yy - xy - yx + xx).tolist())
    assert effects["a=y and b=y"].difference == pytest.approx(3, abs=0.5)
    assert [effect.combinations for effect in effects.values()] == [3, 2, 2, 1, 1]
    assert effects["a=y and b=y"].p <= 0.05 < effects["a=y and b=z"].p


def test_an_axis_of_named_changes_has_effects(tmp_path: Path) -> None:
    """The names of variants do not state this axis: `a=x,long` and `a=x,short`."""
    design = {
        "a=x,long": 0.0,
        "a=x,short": 0.02,
        "a=y,long": 0.01,
        "a=y,short": 0.06,
        # Not a point of the product.
        "split": 0.05,
    }
    effects = by_name(find_effects(read(tmp_path, variants=design, seeds=6)))
    assert list(effects) == ["a=y", "short", "a=y and short"]
    assert effects["short"].difference == pytest.approx(3.5, abs=0.5)
    assert effects["a=y and short"].difference == pytest.approx(3, abs=0.5)


def test_effects_of_independent_runs_have_no_pairs(tmp_path: Path) -> None:
    """Runs were paired by their order, so that sorting a file changed intervals and p."""
    read_back = []
    for turn in (1, -1):
        record = replace(
            read(tmp_path / str(turn), variants=factorial(), seeds=6), test=TESTS["none"]
        )
        cells = [
            replace(cell, seed=cell.seed if turn > 0 else 5 - cell.seed)
            for cell in record.cells
            if cell.variant != "a=y,b=z" or cell.seed < 5
        ]
        read_back.append(find_effects(replace(record, cells=cells)))
    effects = by_name(read_back[0])
    assert [replace_p(effect) for effect in read_back[1]] == [
        replace_p(effect) for effect in read_back[0]
    ]
    values = {
        name: [100 * accuracy_of(effect, seed, name) for seed in range(6)]
        for name, effect in factorial().items()
    }
    values["a=y,b=z"].pop()
    levels = [[values[f"a={a},b={b}"] for b in "xyz"] for a in "yx"]
    means = [np.mean([np.mean(group) for group in groups]) for groups in levels]
    variance = sum(np.var(group, ddof=1) / len(group) for groups in levels for group in groups) / 9
    main = effects["a=y"]
    assert main.difference == pytest.approx(means[0] - means[1])
    assert main.low is not None
    assert main.high is not None
    # Student's quantile with many degrees of freedom.
    assert (main.high - main.low) / 2 == pytest.approx(2.04 * variance**0.5, rel=0.02)
    assert main.by_seed == []
    assert effects["a=y and b=y"].p <= 0.05 < effects["a=y and b=z"].p


def replace_p(effect: Effect) -> Effect:
    """Return an effect whose numbers are rounded: a sum depends on its order."""
    numbers = {name: round(getattr(effect, name), 9) for name in ("difference", "low", "high", "p")}
    return effect._replace(**numbers)


def test_labels_of_levels_are_the_names_of_effects(tmp_path: Path) -> None:
    labels = {"a=y": "with the second inner product"}
    write_study(tmp_path / "runs", variants=factorial(), seeds=6, levels=labels)
    assert main([str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]) == 0
    folder = tmp_path / "reports" / "fake"
    assert "a=y" in pd.read_csv(folder / "effects.csv")["effect"].tolist()
    text = (folder / "table.txt").read_text()
    assert "fake: main effects against a=x,b=x: " in text
    assert "\nwith the second inner product  " in text
    assert "\na=y" not in text
    hidden = "Hidden: 1 effect and 5 variants; table.full.md has them"
    assert hidden in text
    page = (folder / "table.html").read_text()
    assert "with the second inner product and b=y" in page
    # The effects come first, and the variants are one click away.
    places = [
        '<figure class="effects">',
        "<td>main effect</td>",
        "<summary>All 6 variants</summary>",
    ]
    places += ['<figure class="seeds">', '<table class="results"', '<figure class="progress">']
    offsets = [page.index(text) for text in places]
    assert offsets == sorted(offsets)


def test_missing_combinations_and_seeds_are_left_out(tmp_path: Path) -> None:
    design = factorial()
    del design["a=y,b=z"]
    record = read(tmp_path, variants=design, seeds=4, skip=(("a=x,b=y", 1),))
    effects = by_name(find_effects(record))
    assert list(effects) == ["a=y", "b=y", "b=z", "a=y and b=y"]
    assert effects["a=y"].combinations == 2
    assert {len(effect.by_seed) for effect in effects.values()} == {3}


def test_a_study_whose_variants_share_no_seed_has_no_effects(tmp_path: Path) -> None:
    design = factorial()
    skipped = [(name, 0 if name == "a=y,b=y" else 1) for name in design]
    assert find_effects(read(tmp_path, variants=design, seeds=2, skip=skipped)) == []


def test_effects_without_any_truth_rarely_have_a_star() -> None:
    """Six effects of a 2 x 2 x 2 design of noise: the corrected p controls any false star."""
    generator = np.random.default_rng(0)
    names = [f"a={a},b={b},c={c}" for a, b, c in itertools.product("xy", repeat=3)]
    metric = Metric(name="test/score", label="score", goal="max", scale=1)
    plan = Plan(
        study="noise",
        title="noise",
        baseline=names[0],
        metric=metric,
        variants=[{"name": name} for name in names],
        seeds=list(range(6)),
        cells=[],
    )
    false_stars = 0
    for _ in range(200):
        values = generator.normal(size=(len(names), 6)) + generator.normal(size=6)
        cells = [
            CellRecord(name, seed, "done", float(value))
            for name, row in zip(names, values, strict=True)
            for seed, value in enumerate(row)
        ]
        effects = find_effects(StudyRecord(plan, cells))
        assert len(effects) == 6
        false_stars += any(effect.p <= 0.05 for effect in effects)
    assert false_stars / 200 <= 0.09


@pytest.mark.parametrize("variants", [{"standard": 0.0, "a=x,b=y": 0.1}, {"a=x": 0.0, "a=y": 0.1}])
def test_other_studies_have_no_effects(variants: dict[str, float], tmp_path: Path) -> None:
    assert find_effects(read(tmp_path, variants=variants, seeds=3)) == []


def test_effects_are_those_under_the_first_criterion(tmp_path: Path) -> None:
    """Without that, `b=y@flops` would be a level of the axis b."""
    planned = [{"name": n, "criterion": "parameters"} for n in CORNERS]
    planned += [{"name": f"{n}@flops", "variant": n, "criterion": "flops"} for n in CORNERS[1:]]
    values = {entry["name"]: 0.01 * i for i, entry in enumerate(planned)}
    criteria = ["parameters", "flops"]
    record = read(tmp_path, variants=values, seeds=3, criteria=criteria)
    plan = record.plan.model_copy(
        update={"variants": list(map(PlannedVariant.model_validate, planned))}
    )
    effects = by_name(find_effects(StudyRecord(plan, record.cells)))
    assert list(effects) == ["a=y", "b=y", "a=y and b=y"]


def test_equal_effects_have_an_interval_as_wide_as_the_step_of_their_mean(tmp_path: Path) -> None:
    record = read(tmp_path, variants=factorial(), seeds=4)
    cells = [replace(c, value=float(i % 6 + c.seed)) for i, c in enumerate(record.cells)]
    study = StudyRecord(record.plan, cells)
    effects = find_effects(study)
    for effect in effects:
        assert effect.high - effect.low >= 0.999 * study.resolution / effect.combinations
    assert effects[0].combinations == 3
    assert effects[0].high - effects[0].low == pytest.approx(study.resolution / 3)


@pytest.mark.slow
def test_the_report_shows_effects_and_the_changes_of_leads(tmp_path: Path) -> None:
    loss = Metric(name="test/loss", label="loss", goal="min", scale=1)
    runs = tmp_path / "runs"
    write_study(runs, name="short", variants=factorial(0), seeds=5)
    write_study(runs, name="long", variants=factorial(), seeds=5)
    write_study(runs, name="more", variants=factorial(), seeds=6)
    write_study(runs, name="other", variants=factorial(), seeds=5, metric=loss)
    write_reports(runs, tmp_path / "reports", ["long"])
    folder = tmp_path / "reports" / "long"
    assert (folder / "effects.svg").exists()
    assert pd.read_csv(folder / "effects.csv")["kind"].tolist().count("interaction") == 2
    assert "Main effects and interactions of the axes." in (folder / "table.html").read_text()
    names = ["short", "long", "more", "other"]
    assert main([str(runs), "--across", *names, "--reports", str(tmp_path / "reports")]) == 0
    page = (tmp_path / "reports" / "across.html").read_text()
    assert "Change of each difference to the baseline from short." in page
    rows = page[page.index(">difference in the study<") :].split("</table>")[0]
    cells = [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows.split("<tr>")]
    changes = {(row[0], row[1]): row[2:] for row in cells if len(row) == 5}
    # The baseline has no lead, and the study of another metric none that can be compared.
    assert {study for _, study in changes} == {"long", "more"}
    assert len(changes) == 10
    # The studies draw the same noise, so the change is the interaction exactly.
    assert changes["a=y,b=y", "long"][2] == "+3.00 [+3.00, +3.00]"
    # Other seeds do not pair, so the interval has the noise of both.
    assert changes["a=y,b=y", "more"][1].endswith("(6)")
    assert not changes["a=y,b=y", "more"][2].endswith("[+3.00, +3.00]")


def test_ranks_across_studies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = Metric(name="test/loss", label="loss", goal="min", scale=1)
    write_study(tmp_path / "runs", name="one", seeds=3)
    write_study(tmp_path / "runs", name="two", seeds=3, metric=loss)
    write_study(tmp_path / "runs", name="three", variants={"standard": 0.05, "new": 0.0}, seeds=3)
    out = ["--reports", str(tmp_path / "reports")]
    assert main([str(tmp_path / "runs"), "--across", "one", "two", "three", *out]) == 0
    assert capsys.readouterr().out.strip().endswith("across.html")
    text = (tmp_path / "reports" / "across.md").read_text()
    assert "3 studies are a small sample of tasks" in text
    assert "all planned seeds in every study (1)." in text
    assert main([str(tmp_path / "runs"), "--across", "one", "two", *out]) == 0
    rows = (tmp_path / "reports" / "across.md").read_text().splitlines()
    ranks = {row.split(" | ")[0].strip("| "): row.split(" | ")[-1] for row in rows[2:5]}
    assert ranks == {"standard": "3.00 |", "belief": "2.00 |", "belief2": "1.00 |"}
    table = pd.read_csv(tmp_path / "reports" / "across.csv")
    assert table.columns.tolist() == ["variant", "one", "two"]
    assert main([str(tmp_path / "runs"), "--across", "on", *out]) == 2
    assert "did you mean 'one'?" in capsys.readouterr().err


def test_a_variant_with_failed_seeds_has_no_rank_across_studies(tmp_path: Path) -> None:
    """The seeds that finished would flatter it."""
    failures = {("belief2", 0): "diverged", ("belief2", 2): "diverged"}
    write_study(tmp_path / "runs", name="one", seeds=3, failures=failures)
    write_study(tmp_path / "runs", name="two", seeds=3)
    out = ["--reports", str(tmp_path / "reports")]
    assert main([str(tmp_path / "runs"), "--across", "one", "two", *out]) == 0
    rows = (tmp_path / "reports" / "across.md").read_text().splitlines()[2:5]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [(row[0], row[-1]) for row in cells] == [
        ("standard", "2.00"),
        ("belief", "1.00"),
        ("belief2", "—"),
    ]
    assert cells[2][1].endswith(" (1/3)")
    assert "/" not in cells[2][2]


def test_the_table_across_studies_states_the_departures_of_each_study(tmp_path: Path) -> None:
    words = "someone/code, losses within 1e-12. The head is ours."
    write_study(tmp_path / "runs", name="one", seeds=2, parity=words)
    write_study(tmp_path / "runs", name="two", seeds=2, parity="other/code. Texts are ours.")
    reports = tmp_path / "reports"
    out = ["--reports", str(reports)]
    assert main([str(tmp_path / "runs"), "--across", "one", "two", *out]) == 0
    for kind in ("html", "full.md"):
        text = (reports / f"across.{kind}").read_text()
        first, second = text.index("one: A study"), text.index("two: A study")
        assert first < text.index("losses within 1e-12. The head is ours.") < second
        assert "other/code. Texts are ours." in text[second:]


def test_friedman_and_nemenyi_agree_with_published_numbers() -> None:
    """Demšar (2006), section 3.2.4: four classifiers on 14 data sets differ by 1.25 or more."""
    ranks = np.array([[1.0, 2, 3, 4]] * 14)
    p, critical = stats.friedman_nemenyi(ranks, 0.05)
    assert p < 1e-6
    assert critical == pytest.approx(1.25, abs=0.01)
