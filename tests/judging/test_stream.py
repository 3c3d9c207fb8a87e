"""A stream of ideas: screening, confirmation, and verdicts that later runs do not change."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.answers import read_answer
from helpers.fake_study import make_seal, write_study
from helpers.significance import sign_flip_p

from lit_attn import judge
from lit_attn.__main__ import main
from lit_attn.cells.decisions import Seal, Seals
from lit_attn.cells.records import Metric, Plan, PlannedVariant
from lit_attn.judging.stream import count_runs, find_level, follow_ideas
from lit_attn.report.answers.judged import JudgedStudy, JudgedVariant
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.report.statistics import independent
from lit_attn.report.statistics.significance import TESTS
from lit_attn.report.verdicts.comparison import compare_variants
from lit_attn.schema.errors import ConfigError

Rows = list[dict[str, Any]]


def follow(rows: Rows, pairs: str) -> JudgedStudy:
    return judge(pd.DataFrame(rows), "loss:min", pairs=pairs, stream=True)


def play(effects: dict[str, float], pairs: str, seed: int = 0) -> Rows:
    """Return the rows of an agent that does what `next` says, one idea after the other."""
    generator = np.random.default_rng(seed)
    rows: Rows = []

    def run(name: str, numbers: list[int]) -> None:
        for number in numbers:
            value = 3 + 0.01 * (generator.normal() + effects.get(name, 0.0))
            rows.append({"variant": name, "seed": number, "loss": value, "seconds": 60})

    run("baseline", [0, 1, 2, 3])
    for name in effects:
        run(name, [0, 1])
        while True:
            action = follow(rows, pairs).next
            if action.kind == "none":
                break
            for variant, count in action.runs.items():
                first = 1 + max(row["seed"] for row in rows if row["variant"] == variant)
                run(variant, action.seeds.get(variant, list(range(first, first + count))))
    return rows


def by_name(study: JudgedStudy) -> dict[str, JudgedVariant]:
    return {variant.variant: variant for variant in study.variants}


EFFECTS = {"null-a": 0.0, "real": -3.0, "null-b": 0.0, "other": -3.0}


@pytest.mark.parametrize("pairs", ["none", "seed"])
def test_an_agent_that_follows_next_keeps_the_real_ideas(pairs: str) -> None:
    rows = play(EFFECTS, pairs)
    study = follow(rows, pairs)
    verdicts = {name: variant.verdict for name, variant in by_name(study).items()}
    expected = {"null-a": "undecided", "real": "better", "null-b": "undecided", "other": "better"}
    assert verdicts == expected
    assert all(variant.is_final for variant in study.variants)
    assert not study.is_interim
    for name, variant in by_name(study).items():
        step = variant.stream
        assert step is not None
        if verdicts[name] == "better":
            assert variant.level == find_level(step.confirmation or 0)
            assert variant.p is not None
            assert variant.p <= variant.level
            assert (
                variant.seeds.done == step.confirm_runs == count_runs(variant.level, TESTS[pairs])
            )
        else:
            assert variant.ended is not None


@pytest.mark.parametrize("pairs", ["none", "seed"])
def test_ten_null_ideas_added_later_change_no_earlier_verdict(pairs: str) -> None:
    rows = play(EFFECTS, pairs)
    before = by_name(follow(rows, pairs))
    later = play({**EFFECTS, **{f"later-{number}": 0.0 for number in range(10)}}, pairs)
    assert later[: len(rows)] == rows
    assert len(later) > len(rows) + 20
    after = by_name(follow(later, pairs))
    for name, variant in before.items():
        assert after[name] == variant


@pytest.mark.parametrize("pairs", ["none", "seed"])
def test_a_final_verdict_stands_in_every_longer_file(pairs: str) -> None:
    """A final verdict stays: after further runs of judged or dropped ideas, failures, new ideas."""
    generator = np.random.default_rng(3)
    rows = play({"a": 0.0, "b": -3.0, "c": -1.0}, pairs, seed=1)
    for number in range(60):
        name = generator.choice(["baseline", "a", "b", "c", "d", "e", "f"])
        value = math.nan if number % 9 == 0 else 3 + 0.05 * generator.normal()
        rows.append({"variant": str(name), "seed": 100 + number, "loss": value, "seconds": 60})
    final: dict[str, JudgedVariant] = {}
    for end in range(4, len(rows) + 1):
        for name, variant in by_name(follow(rows[:end], pairs)).items():
            if name in final:
                # Only the cost of further runs is new.
                known = final[name].model_copy(update={"cost": variant.cost})
                assert variant == known, f"row {end}"
            elif variant.is_final:
                final[name] = variant
    assert {name: variant.verdict for name, variant in final.items()}["b"] == "better"
    assert {"a", "b", "c"} <= final.keys()


def test_the_levels_of_all_confirmations_add_up_to_the_error() -> None:
    levels = [find_level(number) for number in range(1, 200_000)]
    assert sum(levels) < 0.05
    assert sum(levels) > 0.0498
    assert levels == sorted(levels, reverse=True)


@pytest.mark.parametrize("number", [1, 4, 20])
def test_a_confirmation_has_the_power_that_its_runs_are_counted_for(number: int) -> None:
    level = find_level(number)
    runs = count_runs(level, TESTS["none"])
    assert TESTS["none"].find_t_power(2.0, runs, level) >= 0.9
    assert TESTS["none"].find_t_power(2.0, runs - 1, level) < 0.9
    pairs = count_runs(level, TESTS["seed"])
    generator = np.random.default_rng(number)
    stars = 0
    for _ in range(300):
        differences = generator.normal(2, 1, pairs) - generator.normal(0, 1, pairs)
        stars += sign_flip_p(differences.tolist()) <= level
    assert stars / 300 == pytest.approx(0.9, abs=0.07)


def test_small_levels_have_enough_permutations() -> None:
    """With 20,000 of them p is never below 5e-5, the level of the fiftieth confirmation."""
    far = np.linspace(10, 11, 20)
    near = np.linspace(0, 1, 20)
    assert independent.group_p(near, far) == 1 / 20_001
    assert independent.group_p(near, far, 200_000) == 1 / 200_001
    assert sign_flip_p((far - near).tolist(), 200_000) == pytest.approx(1 / 200_001, rel=3)
    level = find_level(60)
    assert level < 1 / 20_001
    cells = []
    for name, values in (("baseline", near), ("idea", far)):
        cells += [CellRecord(name, place, "done", value) for place, value in enumerate(values)]
    plan = Plan(
        study="small",
        title="small",
        baseline="baseline",
        metric=Metric(name="loss", label="loss", goal="min", scale=1),
        variants=[PlannedVariant(name="baseline"), PlannedVariant(name="idea")],
        seeds=list(range(20)),
        cells=[],
    )
    for test in TESTS.values():
        study = StudyRecord(plan, cells, test=test, alpha=level)
        assert compare_variants(study, with_power=False).records["idea"]["significant"]


def ideas_of(order: list[tuple[str, float | None]]) -> dict[str, str]:
    """Return the stage of each idea after runs of these variants with these values."""
    seeds: dict[str, int] = {}
    runs = []
    for name, value in order:
        seeds[name] = seeds.get(name, -1) + 1
        runs.append(CellRecord(name, seeds[name], "done" if value else "error", value))
    return {idea.name: idea.stage for idea in follow_ideas(runs, "base", "min", TESTS["none"])}


BASE = [("base", 3.00), ("base", 3.01), ("base", 2.99), ("base", 3.00)]


def test_the_screening_needs_an_improvement_of_one_standard_deviation() -> None:
    much = [("idea", 2.98), ("idea", 2.985)]
    little = [("idea", 2.999), ("idea", 2.997)]
    assert ideas_of([*BASE, *much]) == {"idea": "confirming"}
    assert ideas_of([*BASE, *little]) == {"idea": "screened-out"}
    assert ideas_of([*BASE, ("idea", 2.98), ("idea", None)]) == {"idea": "screened-out"}
    assert ideas_of([*BASE, ("idea", 2.98)]) == {"idea": "screening"}
    assert ideas_of([*BASE[:3], *much]) == {"idea": "screening"}
    # A failed run of the baseline is no run of its screening.
    assert ideas_of([*BASE[:3], ("base", None), *much]) == {"idea": "screening"}
    assert ideas_of([*BASE[:3], ("base", None), BASE[3], *much]) == {"idea": "confirming"}


def test_runs_that_screened_confirm_nothing() -> None:
    """Pairs with a seed of the baseline's screening would favour what the screening chose."""
    rows: Rows = []
    for seed in range(40):
        rows.append({"variant": "baseline", "seed": seed, "loss": 3 + 0.001 * (seed % 5)})
    for seed in range(30):
        rows.append({"variant": "idea", "seed": seed, "loss": 2.9 + 0.001 * (seed % 7)})
    study = follow(rows, "seed")
    (variant,) = study.variants
    runs = count_runs(find_level(1), TESTS["seed"])
    # Seeds 0 to 3 of the baseline and 0 and 1 of the idea have screened.
    expected = [2.9 + 0.001 * (seed % 7) for seed in range(4, 4 + runs)]
    assert variant.values.mean == pytest.approx(np.mean(expected), rel=1e-12)
    assert study.notes[-1].endswith(f"'idea' {30 - 2 - runs}.")
    assert variant.verdict == "better"


def write_rows(path: Path, rows: Rows) -> Path:
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_the_command_prints_the_stream_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = play({"null": 0.0, "real": -3.0}, "none")
    path = write_rows(tmp_path / "ideas.csv", rows)
    words = ["judge", str(path), "--pairs", "none", "--metric", "loss:min", "--stream"]
    assert main([*words, "--json"]) == 0
    (study,) = read_answer(capsys.readouterr().out)["studies"]
    assert study["next"]["kind"] == "none"
    assert study["stream"]["confirmations"] >= 1
    assert study["variants"][1]["stream"]["stage"] == "judged"
    assert study["variants"][1]["cost"]["seconds_spent"] == 60 * sum(
        row["variant"] == "real" for row in rows
    )
    rows += [{"variant": "new", "seed": 0, "loss": 3.0, "seconds": 60}]
    write_rows(path, rows)
    assert main([*words, "--json"]) == 1
    (study,) = read_answer(capsys.readouterr().out)["studies"]
    assert study["is_interim"]
    assert (study["next"]["kind"], study["next"]["runs"]) == ("screen", {"new": 1})
    assert study["next"]["seconds"] == 60
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "screening 1/2" in printed
    assert "Screen: run new 1 more time." in printed


def test_a_stream_says_when_judged_rows_are_different(tmp_path: Path) -> None:
    """Sorting by name changed 46 of 200 verdicts, and removed losers raised the levels."""
    path = tmp_path / "ideas.csv"
    header = "variant,loss\n"
    lines = [f"baseline,{3 + place / 100}\n" for place in range(4)]
    lines += ["a,3.1\n", "a,3.2\n", "b,2.5\n", "b,2.6\n"]

    def warn(changed: list[str], **choices: Any) -> list[str]:
        path.write_text(header + "".join(changed))
        answer = judge(path, "loss:min", pairs="none", stream=True, **choices)
        return [warning for warning in answer.warnings if "judged before" in warning]

    assert not warn(lines[:5])
    assert not warn(lines)
    memory = tmp_path / "ideas.csv.judged.json"
    remembered = memory.read_text()
    for changed, words in (
        ([*lines[:4], *lines[6:]], "(2 rows gone)"),
        ([*lines[:-1], "b,2.61\n"], "(1 row changed)"),
        ([*lines[:4], lines[6], lines[7], lines[4], lines[5]], "(4 rows moved)"),
        (["baseline,9\n", *lines[1:7], "c,1\n", "c,1\n"], "(1 row changed, 1 row gone)"),
    ):
        (warning,) = warn(changed)
        assert words in warning
        # The warning stays until the rows are as before.
        assert memory.read_text() == remembered
    assert not warn([*lines, "c,3\n"])
    assert not warn(lines[::-1], where=["variant!=c"])
    memory.write_text("{}")
    with pytest.raises(ConfigError, match=r"ideas.csv.judged.json: the rows that were judged"):
        warn(lines)


def test_the_spread_of_a_screening_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new computation for every later idea took minutes for 2,000 ideas."""
    groups = []
    variance = statistics.variance

    def count(values: list[float]) -> float:
        groups.append(values)
        return variance(values)

    monkeypatch.setattr(statistics, "variance", count)
    order = [*BASE, *((f"idea{place // 2}", 3.1 + place % 2) for place in range(200))]
    assert set(ideas_of(order).values()) == {"screened-out"}
    assert len(groups) == 101


def test_a_run_that_has_not_ended_is_no_row_of_a_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ideas.csv"
    path.write_text("variant,loss,state\nbaseline,3.0,finished\nidea,2.9,running\n")
    words = ["judge", str(path), "--pairs", "none", "--metric", "loss:min", "--stream", "--json"]
    assert main(words) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["file"], error["line"]) == (str(path), 3)
    assert "this run has not ended" in error["message"]


VARIANTS = {"standard": 0.0, "good": 0.05, "same": 0.0}


def seal(variants: dict[str, str], seeds: int, results: int) -> Seal:
    return make_seal(results=results, variants=variants, seeds=list(range(seeds)))


def judge_sealed(
    root: Path, entries: list[Seal], capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    Seals(entries=entries).write(root / "runs" / "fake" / "seals.json")
    main(["judge", "--runs", str(root / "runs"), "--stream", "--json"])
    (study,) = read_answer(capsys.readouterr().out)["studies"]
    return {variant["variant"]: variant for variant in study["variants"]}


def test_variants_that_are_added_to_a_study_change_no_earlier_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check what fails without --stream, where p is corrected for all variants."""
    first = seal({name: name for name in VARIANTS}, 9, 0)
    write_study(tmp_path / "runs", variants=VARIANTS, seeds=9)
    before = judge_sealed(tmp_path, [first], capsys)
    assert before["good"]["verdict"] == "better"
    assert before["good"]["is_final"]
    assert before["good"]["level"] == pytest.approx(find_level(1))
    assert before["same"]["level"] == pytest.approx(find_level(2))
    assert before["same"]["ended"]["rule"] == "confirmation"
    # New ones stand anywhere in the file; their place is that of their seal.
    later = {f"null-{number}": 0.0 for number in range(10)}
    variants = {"standard": 0.0, **later, "good": 0.05, "same": 0.0}
    write_study(tmp_path / "runs", variants=variants, seeds=9)
    second = seal({name: name for name in variants}, 9, 27)
    after = judge_sealed(tmp_path, [first, second], capsys)
    for name, variant in before.items():
        # The fake cells of a later place in the plan cost more.
        assert {**after[name], "cost": None} == {**variant, "cost": None}
    assert after["null-0"]["stream"]["place"] == 3


def test_seeds_and_changes_after_the_seal_of_an_idea_do_not_change_its_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: name for name in VARIANTS}
    write_study(tmp_path / "runs", variants=VARIANTS, seeds=9)
    before = judge_sealed(tmp_path, [seal(names, 9, 0)], capsys)
    write_study(tmp_path / "runs", variants=VARIANTS, seeds=12)
    entries = [seal(names, 9, 0), seal(names, 12, 27)]
    after = judge_sealed(tmp_path, entries, capsys)
    assert after["good"]["values"] == before["good"]["values"]
    assert after["good"]["level"] == before["good"]["level"]
    # Other settings under an old name are a new idea, with all seeds of its plan.
    entries.append(seal({**names, "good": "other"}, 12, 36))
    changed = judge_sealed(tmp_path, entries, capsys)
    assert changed["good"]["stream"]["place"] == 3
    assert changed["good"]["values"]["n"] == 12
    assert changed["same"]["stream"]["place"] == 2


def test_a_study_without_a_seal_has_no_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "runs", variants=VARIANTS, seeds=8)
    assert main(["judge", "--runs", str(tmp_path / "runs"), "--stream"]) == 2
    assert "has no seal" in capsys.readouterr().err
