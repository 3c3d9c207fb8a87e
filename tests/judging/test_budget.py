"""`judge --budget`: what to run next within a time or a number of trainings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.answers import read_answer
from helpers.fake_study import write_study

from lit_attn import judge
from lit_attn.__main__ import main
from lit_attn.cells.budget import Budget
from lit_attn.cells.records import Origin
from lit_attn.judging.budget import predict_verdict, read_budget
from lit_attn.judging.prepare import Choices, prepare
from lit_attn.judging.runs import make_table
from lit_attn.report.answers.judged import JudgedStudy
from lit_attn.report.verdicts.evidence import make_sample
from lit_attn.schema.errors import ConfigError

SECONDS = 61.5
"""Seconds of a fake cell."""


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("40", Budget(None, 40)),
        ("2h", Budget(7200, None)),
        ("90min", Budget(5400, None)),
        ("1.5d", Budget(129_600, None)),
        ("30 s", Budget(30, None)),
        ("8:00:00", Budget(28_800, None)),
    ],
)
def test_a_budget_is_a_time_or_a_number_of_trainings(text: str, budget: Budget) -> None:
    assert read_budget(text) == budget


@pytest.mark.parametrize("text", ["", "0", "0h", "-2h", "2.5", "2 hours", "1:75:00", "2m"])
def test_another_budget_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"write a time \(90min, 2h, 1.5d or 8:00:00\) or a number"
    ):
        read_budget(text)


def judge_own(
    root: Path, budget: str, capsys: pytest.CaptureFixture[str], code: int = 1
) -> dict[str, Any]:
    words = ["judge", "--runs", str(root / "runs"), "--budget", budget, "--json"]
    assert main(words) == code
    (study,) = read_answer(capsys.readouterr().out)["studies"]
    assert study["budget"]["seconds"] == read_budget(budget).seconds
    assert study["budget"]["trainings"] == read_budget(budget).trainings
    return study


def test_a_plan_that_costs_more_than_the_budget_is_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip = tuple(("good", seed) for seed in range(4, 8))
    folder = write_study(
        tmp_path / "runs", variants={"standard": 0.0, "good": 0.05}, seeds=8, skip=skip
    )
    Origin(file="../../ablations.yaml").write(folder / "origin.json")
    study = judge_own(tmp_path, "5min", capsys)
    assert study["next"]["kind"] == "run"
    assert study["next"]["seconds"] == 4 * SECONDS
    study = judge_own(tmp_path, "4min", capsys)
    assert study["next"]["kind"] == "stop"
    assert study["next"]["command"] is None
    assert study["next"]["text"] == (
        "Stop: nothing can be decided with this budget (0.067 hours): the next step needs"
        " 4 trainings (about 0.068 hours)."
    )
    assert judge_own(tmp_path, "4", capsys)["next"]["kind"] == "run"
    assert judge_own(tmp_path, "3", capsys)["next"]["kind"] == "stop"


SMALL = {"standard": 0.0, "same": 0.0, "small": 0.0015}


@pytest.mark.parametrize("budget", ["2", "9", "24", "60", "10min", "1h", "5h"])
def test_the_next_runs_cost_at_most_the_budget(
    budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "runs", variants=SMALL, seeds=6)
    study = judge_own(tmp_path, budget, capsys)
    action = study["next"]
    limit = read_budget(budget)
    if limit.trainings is not None:
        assert action["cells"] <= limit.trainings
    else:
        assert action["seconds"] <= (limit.seconds or 0)
    assert action["cells"] == sum(action["runs"].values())
    if limit.trainings == 2:
        assert action["kind"] == "stop"
        assert action["text"].startswith("Stop: nothing can be decided with this budget")
        assert action["variants"] == ["same", "small"]
    if action["kind"] != "stop":
        assert sum(study["budget"]["power"].values()) >= 0.05
        assert action["kind"] in ("confirm", "add-seeds")
        assert "Probability of a verdict: " in action["text"]


def test_a_larger_budget_decides_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_study(tmp_path / "runs", variants=SMALL, seeds=6)
    powers = []
    for budget in ("14", "20", "30", "60", "120"):
        study = judge_own(tmp_path, budget, capsys)
        powers.append(sum(study["budget"]["power"].values()))
    assert powers == sorted(powers)
    assert powers[0] < powers[-1] - 0.2


def test_a_confirmation_has_fresh_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    effects = {f"v{number}": 0.0005 * number for number in range(12)}
    write_study(tmp_path / "runs", variants={"standard": 0.0, **effects}, seeds=3)
    action = judge_own(tmp_path, "60", capsys)["next"]
    assert action["kind"] == "confirm"
    names = ["standard", *action["variants"]]
    assert action["runs"].keys() == set(names)
    for name in names:
        assert action["seeds"][name] == list(range(3, 3 + action["runs"][name]))


def test_decided_studies_have_nothing_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "runs", variants={"standard": 0.0, "good": 0.05}, seeds=8)
    assert judge_own(tmp_path, "2h", capsys, code=0)["next"]["kind"] == "none"


LEDGER = """variant,loss,seconds
base,3.00,300
a,2.98,300
b,3.02,300
c,2.95,600
d,3.01,300
e,2.99,300
"""


def judge_ledger(root: Path, budget: str, **changes: str) -> JudgedStudy:
    path = root / "ledger.csv"
    path.write_text(LEDGER)
    words = {"pairs": "none", "baseline": "base", "budget": budget, **changes}
    return judge(path, "loss:min", **words)  # type: ignore[arg-type]


def test_single_runs_are_a_screening_of_the_best_ideas(tmp_path: Path) -> None:
    """The mean of one run says which variants are promising, and no more."""
    answer = judge_ledger(tmp_path, "30")
    action = answer.next
    assert action.kind == "confirm"
    assert action.cells <= 30
    assert action.variants[:2] == ["c", "a"]
    assert answer.budget is not None
    assert answer.budget.power == {}
    assert "better by 2 standard deviations" in action.text
    assert judge_ledger(tmp_path, "7").next.kind == "stop"
    # A training of c takes twice as long as another one.
    hours = judge_ledger(tmp_path, "2h").next
    assert hours.seconds is not None
    assert 3600 < hours.seconds <= 7200


def test_a_time_needs_a_measured_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("variant,loss\nbase,3.0\nidea,2.9\n")
    words = ["judge", str(path), "--pairs", "none", "--metric", "loss:min", "--baseline", "base"]
    assert main([*words, "--budget", "2h", "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert message.startswith("--budget: no run of runs has a cost in seconds; write a number")
    assert main([*words, "--budget", "20"]) == 1
    assert (
        "Next: Confirm: run base 10 more times and idea 10 more times." in capsys.readouterr().out
    )


def test_a_budget_is_for_one_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        write_study(tmp_path / "runs", name=name)
    assert main(["judge", "--runs", str(tmp_path / "runs"), "--budget", "2h"]) == 2
    assert capsys.readouterr().err == "--budget: is for one study; name it\n"
    assert main(["judge", "nothing.csv", "--budget", "soon"]) == 2
    assert capsys.readouterr().err.startswith("--budget soon: write a time")


def test_a_stream_stops_before_a_confirmation_that_is_too_long(tmp_path: Path) -> None:
    rows = [{"variant": "base", "loss": 3.0 + 0.001 * number, "seconds": 60} for number in range(4)]
    rows += [{"variant": "idea", "loss": 2.9, "seconds": 60} for _ in range(2)]
    words: dict[str, Any] = {"pairs": "none", "baseline": "base", "stream": True}
    frame = pd.DataFrame(rows)
    assert judge(frame, "loss:min", budget="18", **words).next.kind == "confirm"
    assert judge(frame, "loss:min", budget="17", **words).next.kind == "stop"
    assert judge(frame, "loss:min", budget="18min", **words).next.kind == "confirm"
    assert judge(frame, "loss:min", budget="1000s", **words).next.kind == "stop"


@pytest.mark.parametrize("pairs", ["seed", "none"])
@pytest.mark.parametrize("is_fresh", [True, False])
def test_the_probability_of_a_verdict_is_that_of_the_complete_test(
    pairs: str, is_fresh: bool
) -> None:
    """Continue the study value by value, and test it as the table does."""
    generator = np.random.default_rng(5)
    base = 3 + 0.01 * generator.normal(size=6)
    idea = 3 - 0.012 + 0.01 * generator.normal(size=6)
    rows = []
    for name, values in (("base", base), ("idea", idea)):
        for seed, value in enumerate(values):
            rows.append({"variant": name, "seed": seed, "loss": value})
    choices = Choices(metric="loss:min", pairs=pairs, baseline="base")
    study = prepare(make_table(pd.DataFrame(rows)), choices).study
    runs = 10
    is_added = study.test.is_paired or is_fresh
    predicted = predict_verdict(study, "idea", runs if is_added else 16, 0.05, 1, is_fresh=is_fresh)
    stars = 0
    studies = 200
    groups = make_sample(study, "idea")
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(((group - group.mean()) ** 2).sum() for group in groups)
    for _ in range(studies):
        spread = np.sqrt(squares / generator.chisquare(freedom))
        completed = []
        for group in groups:
            mean = group.mean() + spread * generator.normal() / np.sqrt(len(group))
            fresh = mean + spread * generator.normal(size=runs)
            completed.append(fresh if is_fresh else np.concatenate([group, fresh]))
        stars += study.test.find_p(completed) <= 0.05
    assert 0.2 < predicted < 0.95
    assert predicted == pytest.approx(stars / studies, abs=0.09)
