"""Times until an event: medians, the log-rank test, and tables that count runs at their limit."""

import html
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import fake_study
from helpers.paths import ROOT
from scipy import stats as scipy_stats

from lit_attn.ablate.plan import expand
from lit_attn.ablate.power import find_study_power
from lit_attn.cells.decisions import Seals
from lit_attn.cells.floors import FLOORS_FILE, Floors, FloorValues
from lit_attn.cells.records import Metric, PlannedCell
from lit_attn.config.study import read_studies
from lit_attn.report.__main__ import main
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics.significance import TESTS
from lit_attn.report.statistics.times import Censored, count_events, find_median, find_scores
from lit_attn.report.tables.judgement import draw_values
from lit_attn.report.tables.results import make_metrics_table
from lit_attn.report.verdicts.comparison import compare_variants
from lit_attn.report.verdicts.evidence import describe_values
from lit_attn.report.verdicts.judge import judge_study

TEST = TESTS["log-rank"]
LIMIT = 800

# Weeks of remission of 42 children: Freireich et al. 1963, the example of Cox 1972.
TREATED = [6.0, 6, 6, 7, 10, 13, 16, 22, 23]
TREATED += map(Censored, (6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35))
UNTREATED = [1.0, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23]


def by_seed(values: Sequence[float]) -> dict[int, float]:
    return dict(enumerate(values))


def for_scipy(values: Sequence[float]) -> scipy_stats.CensoredData:
    with_event = [value for value in values if not isinstance(value, Censored)]
    without = [float(value) for value in values if isinstance(value, Censored)]
    return scipy_stats.CensoredData(uncensored=with_event, right=without)


def draw_times(seed: int, count: int = 12) -> list[float]:
    """Return times on a coarse grid, about a third of them censored at the limit or before it."""
    generator = np.random.default_rng(seed)
    times = (20.0 * generator.integers(1, 15, count)).tolist()
    limits = generator.choice([200.0, 240.0], count).tolist()
    return [
        time if time < limit else Censored(limit) for time, limit in zip(times, limits, strict=True)
    ]


def test_a_published_example_has_its_medians_and_its_statistic() -> None:
    """survdiff of R: 9 events where 19.25 are expected, chi-squared 16.79, medians 23 and 8."""
    assert find_median(TREATED) == 23
    assert find_median(UNTREATED) == 8
    treated, _ = TEST.make_sample(by_seed(TREATED), by_seed(UNTREATED))
    assert count_events(TREATED) == 9
    assert treated.sum() == pytest.approx(19.25 - 9, abs=0.001)
    assert TEST.find_p(TEST.make_sample(by_seed(TREATED), by_seed(UNTREATED))) < 0.001


@pytest.mark.parametrize("seed", range(20))
def test_scores_and_medians_are_those_of_scipy(seed: int) -> None:
    """scipy's z is the sum of a group's scores over the root of its hypergeometric variance."""
    group, baseline = draw_times(seed), draw_times(seed + 100)
    pooled = [*group, *baseline]
    variance = 0.0
    for time in {value for value in pooled if not isinstance(value, Censored)}:
        at_risk = sum(value >= time for value in pooled)
        of_group = sum(value >= time for value in group)
        events = sum(value == time and not isinstance(value, Censored) for value in pooled)
        share = of_group / at_risk
        if at_risk > 1:
            variance += events * share * (1 - share) * (at_risk - events) / (at_risk - 1)
    sums = find_scores(pooled)[: len(group)].sum()
    expected = scipy_stats.logrank(for_scipy(group), for_scipy(baseline))
    assert abs(sums) / math.sqrt(variance) == pytest.approx(abs(expected.statistic))
    survival = scipy_stats.ecdf(for_scipy(group)).sf
    median = find_median(group)
    if median is None:
        assert survival.probabilities.min() > 0.5
    else:
        assert survival.evaluate(median) <= 0.5 + 1e-9
        assert survival.evaluate(median - 20) >= 0.5 - 1e-9
    # With many permutations p is near the normal one.
    p = TEST.find_p(TEST.make_sample(by_seed(group), by_seed(baseline)))
    assert p == pytest.approx(expected.pvalue, abs=0.06)


def test_p_counts_the_divisions_of_the_runs() -> None:
    """Brute force: the share of all divisions with a sum of scores as far from 0."""
    group = [40.0, 60, 60, 100, Censored(240)]
    baseline = [100.0, 140, Censored(240), Censored(240), 220]
    scores = find_scores([*group, *baseline])
    sums = [abs(scores[list(c)].sum()) for c in itertools.combinations(range(10), 5)]
    share = np.mean(np.array(sums) >= abs(scores[:5].sum()) - 1e-9)
    p = TEST.find_p(TEST.make_sample(by_seed(group), by_seed(baseline)))
    assert p == pytest.approx(share)
    # Groups of other sizes, for example after a run without a result.
    few = [40.0, 30, 10]
    many = [50.0, 60, 90, 20, 60, 140, 10, Censored(150), 80]
    scores = find_scores([*few, *many])
    sums = [abs(scores[list(c)].sum()) for c in itertools.combinations(range(12), 3)]
    share = np.mean(np.array(sums) >= abs(scores[:3].sum()) - 1e-9)
    p = TEST.find_p(TEST.make_sample(by_seed(few), by_seed(many)))
    assert p == pytest.approx(share)
    # The normal distribution of the statistic is too optimistic for three runs of each.
    separated = TEST.make_sample(by_seed([1.0, 2, 3]), by_seed([4.0, 5, 6]))
    assert scipy_stats.logrank([1, 2, 3], [4, 5, 6]).pvalue < 0.03
    assert TEST.find_p(separated) == pytest.approx(2 / math.comb(6, 3))


def test_a_median_without_limits_is_the_usual_one_and_can_be_out_of_reach() -> None:
    for count in (1, 2, 7, 8):
        values = np.random.default_rng(count).normal(size=count).tolist()
        assert find_median(values) == pytest.approx(np.median(values))
    never = Censored(240)
    assert find_median([60.0, 80.0, 100.0, never, never]) == 100
    assert find_median([60.0, 80.0, never, never]) == 80
    assert find_median([60.0, 80.0, never, never, never]) is None
    assert find_median([]) is None


def test_the_power_of_a_log_rank_test_is_that_of_simulated_studies() -> None:
    generator = np.random.default_rng(1)
    stars = 0
    for values in generator.normal(size=(600, 10)):
        sample = TEST.make_sample(by_seed(values[:5] + 2), by_seed(values[5:]))
        stars += TEST.find_p(sample) <= 0.05 / 2
    assert TEST.find_power(2.0, [5, 5], 2, 0.05) == pytest.approx(stars / 600, abs=0.05)
    assert TEST.find_power(0.0, [8, 8], 1, 0.05) <= 0.055
    assert TEST.find_power(2.0, [5, 5], 10, 0.05) == 0, "252 divisions are too few for .005"


def read_times(root: Path, pairs: str, steps: int = LIMIT, **times: Sequence[float]) -> StudyRecord:
    """Return a study of times until a probe is solved, whose runs have ended after `steps`."""
    metric = Metric(
        name="test/unsolved_steps",
        label="steps",
        goal="min",
        scale=1,
        event="solved",
        pairs=pairs,
    )
    count = len(next(iter(times.values())))
    folder = fake_study.write_study(
        root, variants=dict.fromkeys(times, 0.0), seeds=count, metric=metric
    )

    def change(cell: PlannedCell) -> dict[str, Any]:
        return {"metrics": {metric.name: float(times[cell.variant][cell.seed])}, "steps": steps}

    return fake_study.change_results(folder, change)


def test_a_run_with_all_steps_is_censored_where_records_are_read(tmp_path: Path) -> None:
    study = read_times(tmp_path, "log-rank", standard=[80, LIMIT], other=[60, 100])
    values = study.values("standard")
    assert values == {0: 80, 1: LIMIT}
    assert isinstance(values[1], Censored)
    assert not isinstance(values[0], Censored)
    assert study.count_events("standard") == 1


@pytest.mark.parametrize(("pairs", "limit"), [("log-rank", 120), ("seed", LIMIT)])
def test_a_run_that_was_stopped_has_its_last_step_in_a_log_rank_test(
    tmp_path: Path, pairs: str, limit: int
) -> None:
    """A mean takes the number of planned steps instead."""
    study = read_times(tmp_path, pairs, 120, standard=[80, LIMIT], other=[60, 100])
    values = study.values("standard")
    assert values == {0: 80, 1: limit}
    assert isinstance(values[1], Censored)


def test_every_test_without_means_gets_the_last_step_of_a_stopped_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records ask the test whether it has means, and not which test it is."""
    monkeypatch.setitem(TESTS, "seed", TEST)
    study = read_times(tmp_path, "seed", 120, standard=[80, LIMIT], other=[60, 100])
    assert study.values("standard") == {0: 80, 1: 120}


def test_a_table_across_studies_has_the_medians_of_times(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    read_times(runs, "log-rank", standard=[160, 180, 200], fast=[60, 80, LIMIT], never=[LIMIT] * 3)
    assert main([str(runs), "--across", "fake", "--reports", str(tmp_path)]) == 0
    text = (tmp_path / "across.md").read_text("utf-8")
    assert "| standard | 180 (3 of 3) | 2.00 |" in text
    assert "| fast | 80 (2 of 3) | 1.00 |" in text
    assert "| never | not reached (0 of 3) | 3.00 |" in text
    assert "Kaplan-Meier median" in text


def test_a_time_beside_the_metric_of_a_study_has_a_median(tmp_path: Path) -> None:
    """A mean would take the limit of a run without the event for the time of one."""
    times = {"standard": [160, 180, LIMIT], "never": [LIMIT] * 3}
    folder = fake_study.write_study(
        tmp_path / "runs",
        variants=dict.fromkeys(times, 0.0),
        seeds=3,
        events={"test/unsolved_steps": "solved"},
    )

    def change(cell: PlannedCell) -> dict[str, Any]:
        # The limit of a run that `training.stop` has ended is its last step.
        steps = 170 if (cell.variant, cell.seed) == ("standard", 2) else LIMIT
        metrics = {
            "test/accuracy": 0.5,
            "test/loss": 0.25,
            "test/unsolved_steps": float(times[cell.variant][cell.seed]),
        }
        return {"metrics": metrics, "steps": steps}

    table = make_metrics_table(fake_study.change_results(folder, change))
    assert table.headings == ["variant", "test/loss", "test/unsolved_steps"]
    texts = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    # At step 180 the run that had ended at 170 is no longer at risk.
    assert texts["standard"] == ["0.2500 ± 0.0000", "180 (2 of 3)"]
    assert texts["never"] == ["0.2500 ± 0.0000", "not reached (0 of 3)"]
    assert "Kaplan-Meier median" in " ".join(table.notes)
    page = fake_study.report(tmp_path) / "table.html"
    assert "180 (2 of 3)" in page.read_text("utf-8")


def test_a_plan_names_the_events_of_all_metrics() -> None:
    source = read_studies(ROOT / "ablations.yaml")["recall-product"]
    plan = expand(source, Path("runs")).plan()
    assert plan.metric.event == ""
    assert plan.events == dict.fromkeys(["val/unsolved_steps", "test/unsolved_steps"], "solved")


def test_the_floor_of_a_time_has_whole_steps(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    read_times(runs, "log-rank", standard=[160, 180, 200], fast=[60, 80, LIMIT])
    floor = FloorValues(
        rule="guessing", split="test", conditions="c", values={"unsolved_steps": float(LIMIT)}
    )
    Floors(data="d", floors=[floor]).write(runs / "fake" / FLOORS_FILE)
    folder = fake_study.report(tmp_path)
    assert f"| floor: guessing | {LIMIT} |" in (folder / "table.md").read_text("utf-8")
    assert f" {LIMIT} " in (folder / "table.txt").read_text("utf-8")


def test_a_study_of_times_has_medians_counts_and_verdicts_without_a_mean(tmp_path: Path) -> None:
    study = read_times(
        tmp_path / "runs",
        "log-rank",
        standard=[160, 180, 200, 220, 240, 200, 160, 240],
        fast=[60, 80, 60, 100, 60, 80, 100, 60],
        never=[LIMIT] * 8,
        rare=[LIMIT] * 5 + [160, 200, 240],
    )
    records = compare_variants(study).records
    verdicts = [records[name]["verdict"] for name in ("fast", "never", "rare")]
    assert verdicts == ["better", "worse", "worse"]
    assert records["fast"]["difference"] == 70 - 200
    assert records["never"]["difference"] is None
    judged = judge_study(study)
    assert [variant.verdict for variant in judged.variants] == verdicts
    assert judged.pairs == "log-rank"
    assert draw_values(describe_values(study, "never"), ".2f") == "not reached (0 of 8)"
    assert draw_values(describe_values(study, "fast"), ".2f") == "70 (8 of 8)"
    folder = fake_study.report(tmp_path)
    rows = fake_study.rows(folder)
    assert rows["mean"].isna().all()
    assert rows["median"].to_dict() == pytest.approx(
        {"standard": 200, "fast": 70, "never": math.nan, "rare": math.nan}, nan_ok=True
    )
    assert rows["reached"].to_list() == [8, 8, 0, 3]
    table = (folder / "table.md").read_text("utf-8")
    text = (folder / "table.txt").read_text("utf-8")
    assert "  difference  " in text, "medians have no interval that a heading could name"
    assert "| never | not reached \\* | 0 of 8 | 8 |" in table
    assert "Kaplan-Meier median" in table
    assert "never" in (folder.parent / "index.html").read_text("utf-8")
    assert not (folder / "progress.svg").exists(), "a curve would average limits"
    events = (folder / "events.svg").read_text("utf-8")
    assert "100% at 100" in html.unescape(events), "all fast runs are solved after 100 steps"
    assert "38% at 240" in html.unescape(events), "three of eight rare runs are"
    seeds = html.unescape((folder / "seeds.svg").read_text("utf-8"))
    assert "median -130" in seeds
    assert "mean" not in seeds


def test_a_study_with_the_test_of_pairs_counts_the_runs_at_their_limit(tmp_path: Path) -> None:
    """A sealed analysis keeps its mean, beside the number of runs that had the event."""
    study = read_times(
        tmp_path / "runs", "seed", standard=[160, 180, 200, 220, LIMIT, 200], other=[60] * 6
    )
    record = compare_variants(study).records["other"]
    differences = [60 - value for value in study.values("standard").values()]
    assert record["difference"] == pytest.approx(np.mean(differences))
    table = (fake_study.report(tmp_path) / "table.md").read_text("utf-8")
    assert "| 5 of 6 | 6 |" in table
    assert "the mean takes the number of their steps for them" in table
    assert draw_values(describe_values(study, "standard"), ".0f") == "293 ± 249 (5 of 6)"


def test_next_runs_of_a_study_of_times_are_seeds_of_all_variants(tmp_path: Path) -> None:
    study = read_times(
        tmp_path, "log-rank", standard=[160, 180, 200, LIMIT, 240], other=[140, 160, 160, 200, 220]
    )
    judged = judge_study(study, lambda *words: " ".join(map(str, words)))
    assert judged.variants[0].verdict == "undecided"
    assert judged.next.kind == "add-seeds"
    assert judged.next.seeds["other"] == judged.next.seeds["standard"]
    assert judged.next.seeds["other"][0] == 5


def test_an_own_time_has_the_log_rank_test_and_sealed_studies_keep_theirs() -> None:
    """The seals in the evidence have the hash that the studies of today have."""
    studies = read_studies(ROOT / "ablations.yaml")
    for name in ("claim-gates", "claim-values", "claim-gates-start"):
        assert expand(studies[name], Path("runs")).baseline.metric.pairs == "seed"
    matrix = expand(studies["claim-gates-start"], Path("runs"))
    committed = Seals.read(ROOT / "reports" / "evidence" / "claim-gates-start" / "seals.json")
    assert committed is not None
    assert matrix.seal(matrix.plan().seeds).decisions == committed.entries[-1].decisions
    assert json.loads(matrix.plan().metric.model_dump_json())["event"] == "solved"
    choice = studies["claim-gates-start"].study.metric
    experiment = matrix.baseline.experiment
    assert choice.model_copy(update={"pairs": None}).resolve(experiment).pairs == "log-rank"
    with pytest.raises(ValueError, match="no interval that could lie within `margin`"):
        choice.model_copy(update={"pairs": None, "margin": 5.0}).resolve(experiment)
    other = choice.model_copy(update={"name": "test/loss", "pairs": "log-rank"})
    with pytest.raises(ValueError, match="'test/loss' is not the time until an event"):
        other.resolve(experiment)


def test_a_dry_run_prints_the_power_of_the_log_rank_test() -> None:
    source = read_studies(ROOT / "ablations.yaml")["claim-gates-start"]
    metric = source.study.metric.model_copy(update={"pairs": None})
    study = source.study.model_copy(update={"metric": metric, "seeds": (0, 1, 2, 3, 4)})
    strength = find_study_power(expand(replace(source, study=study), Path("runs")))
    assert strength is not None
    assert strength.fewest == 5, "252 divisions of ten runs leave 2/252 below .05/4"
    assert strength.power == TEST.find_power(2.0, [5, 5], 4, 0.05) > 0.3
