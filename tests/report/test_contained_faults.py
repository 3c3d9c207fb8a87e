"""Reports of the other studies when the records of one study are damaged."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_study import make_seal, write_study
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_attn.__main__ import main as lit_attn_main
from lit_attn.cells.records import Metric
from lit_attn.report.__main__ import main
from lit_attn.report.pages import write
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.verdicts import judge as judging
from lit_attn.schema.mistakes import EXIT_CODE

METRIC = Metric(name="test/loss", label="loss", goal="min", scale=1.0)
HUGE = 10**400


@pytest.fixture
def drawn_runs(tmp_path: Path) -> Path:
    """Return a folder with the healthy study `fake` and the study `broken`."""
    for name in ("fake", "broken"):
        write_study(tmp_path / "runs", name=name, seeds=2, variants={"standard": 0.0, "b": 0.1})
    return tmp_path / "runs"


@pytest.fixture
def runs(drawn_runs: Path, no_rendering: None) -> Path:
    """Return the same folder, for faults that reach no figure."""
    return drawn_runs


def change(path: Path, *keys: Any, value: Any) -> None:
    """Set one value of a JSON file."""
    content = json.loads(path.read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(content))


def first_cell(runs: Path) -> Path:
    return next((runs / "broken").glob("v1/0-*"))


def check_others(runs: Path, caplog: pytest.LogCaptureFixture, code: int | None = None) -> None:
    """Fail unless the healthy study has a report, with at most one line of warning for `broken`."""
    reports = runs.parent / "reports"
    returned = main([str(runs), "--reports", str(reports)])
    assert returned in (0, 1)
    assert code is None or returned == code
    assert (reports / "fake" / "table.html").exists()
    assert "fake/table.html" in (reports / "index.html").read_text()
    assert (reports / "broken" / "table.html").exists() == (returned == 0)
    if returned:
        (warning,) = [text for text in caplog.messages if "This study is skipped" in text]
        assert "broken" in warning
        assert "\n" not in warning


def read_broken(runs: Path) -> str:
    """Return the complete table of the study `broken`."""
    return (runs.parent / "reports" / "broken" / "table.full.md").read_text()


@pytest.mark.parametrize(
    ("key", "value", "messages"),
    [
        ("baseline", "other", ["baseline: no variant 'other'"]),
        ("seeds", [], ["broken/plan.json: is not a plan", "seeds: needs 1 or more entries"]),
    ],
)
def test_a_plan_with_a_wrong_value_skips_its_study(
    runs: Path, key: str, value: Any, messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    change(runs / "broken" / "plan.json", key, value=value)
    check_others(runs, caplog, code=1)
    for message in messages:
        assert message in caplog.text


@pytest.mark.parametrize(
    ("keys", "value", "count", "message"),
    [
        (["version"], 2, "1 of a newer version", "was written by a newer version of lit_attn"),
        (
            ["metrics", "test/accuracy"],
            1e300,
            "1 diverged",
            "test/accuracy is 1e+302, which counts as diverged",
        ),
        # Beyond the range of numbers when it is printed in percent.
        pytest.param(
            ["metrics", "test/accuracy"],
            -1e307,
            "1 unreadable",
            "test/accuracy times 100 is not finite",
            marks=pytest.mark.slow,
        ),
        # An integer of 401 digits.
        pytest.param(["flops"], HUGE, "1 unreadable", "", marks=pytest.mark.slow),
    ],
)
def test_a_result_without_a_usable_value_is_counted(
    runs: Path,
    keys: list[str],
    value: float,
    count: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change(first_cell(runs) / "result.json", *keys, value=value)
    check_others(runs, caplog, code=0)
    assert f"1/2, {count}" in read_broken(runs)
    assert message in caplog.text


def test_a_plan_of_a_newer_version_is_not_replaced(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = runs / "broken" / "plan.json"
    change(plan, "version", value=2)
    # A key of this version that the newer one has changed.
    change(plan, "metric", "goal", value="target")
    check_others(runs, caplog, code=1)
    assert "newer version of lit_attn (records of version 2" in caplog.text
    assert "run the study again" not in caplog.text


def test_a_missing_key_of_a_result_is_named(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = first_cell(runs) / "result.json"
    content = json.loads(path.read_text())
    del content["step_time"]
    path.write_text(json.dumps(content))
    check_others(runs, caplog, code=0)
    assert f"{path}: step_time: this key is required" in caplog.text
    assert "1/2, 1 unreadable" in read_broken(runs)


def test_a_criterion_of_a_newer_version_is_named(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(runs / "broken" / "plan.json", "criteria", value=["memory"])
    check_others(runs, caplog, code=0)
    assert "Variants have equal memory." in read_broken(runs)


def test_a_huge_margin_leaves_the_figure(drawn_runs: Path) -> None:
    change(drawn_runs / "broken" / "plan.json", "metric", "margin", value=1e308)
    assert main([str(drawn_runs), "--reports", str(drawn_runs.parent / "reports")]) == 0
    assert (drawn_runs.parent / "reports" / "broken" / "seeds.svg").exists()


def test_a_huge_value_of_one_seed_is_reported(drawn_runs: Path) -> None:
    change(first_cell(drawn_runs) / "result.json", "metrics", "test/accuracy", value=2.3e230)
    reports = drawn_runs.parent / "reports"
    assert main([str(drawn_runs), "--reports", str(reports)]) == 0
    lines = (reports / "broken" / "table.txt").read_text().splitlines()
    assert max(map(len, lines)) < 110
    assert any("e+" in line for line in lines if line.startswith("b "))
    assert (reports / "fake" / "table.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["experiment: &a {b: *a}", "- 1"])
def test_a_config_that_contains_itself(
    runs: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    for cell in (runs / "broken").glob("v*/*"):
        (cell / "config.yaml").write_text(text)
    check_others(runs, caplog)


@pytest.mark.slow
def test_nearly_equal_losses_at_two_sizes(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for level, flops in (("small", 10**6), ("large", 2 * 10**6)):
        study = write_study(
            runs,
            name=f"ladder-{level}",
            seeds=2,
            variants={"standard": 0.0, "b": 0.0},
            metric=METRIC,
            family="ladder",
            level=level,
        )
        for path in study.glob("v*/*/result.json"):
            content = json.loads(path.read_text())
            loss = (2.0 if content["variant"] == "standard" else 1.0) - 1e-15 * flops
            content |= {"metrics": {"test/loss": loss}, "flops": flops, "batch_size": 4}
            path.write_text(json.dumps(content))
    write_study(runs, seeds=2)
    assert main([str(runs), "--reports", str(tmp_path / "reports")]) == 0
    assert (tmp_path / "reports" / "fake" / "table.full.md").exists()
    assert (tmp_path / "reports" / "ladder" / "scaling.md").exists()


def fail(*_: object) -> None:
    raise KeyError("mean\nof nothing")


def check_mistake(warning: str) -> None:
    """Fail unless a warning of one line names a file that has the traceback of `fail`."""
    assert "this is a mistake of lit_attn (KeyError:" in warning
    assert "\n" not in warning
    assert "records cannot be reported" not in warning
    named_file = re.search(r"its traceback is in (\S+\.txt)", warning)
    assert named_file
    text = Path(named_file[1]).read_text()
    assert "raise KeyError" in text
    assert "test_contained_faults.py" in text


def test_a_scaling_that_fails_leaves_the_studies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lit_attn.report.pages.write.make_scaling_files", fail)
    write_study(tmp_path / "runs", seeds=2, family="ladder", level="small")
    assert main([str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]) == EXIT_CODE
    assert (tmp_path / "reports" / "fake" / "table.full.md").exists()
    (warning,) = caplog.messages
    assert warning.startswith("ladder: ")
    assert warning.endswith("Its scaling is skipped.")
    check_mistake(warning)


@pytest.mark.parametrize("name", ["make_variant_frame", "compare_variants"])
def test_a_mistake_of_the_report_is_told_as_such(
    runs: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = getattr(write, name)

    def fail_in_one(study: StudyRecord, *others: object) -> object:
        return fail() if study.plan.study == "broken" else original(study, *others)

    monkeypatch.setattr(write, name, fail_in_one)
    assert main([str(runs), "--reports", str(runs.parent / "reports")]) == EXIT_CODE
    assert (runs.parent / "reports" / "fake" / "table.html").exists()
    assert (runs.parent / "reports" / "index.html").exists()
    (warning,) = caplog.messages
    assert warning.startswith("broken: ")
    assert "This study is skipped" in warning
    check_mistake(warning)


def test_a_mistake_before_the_tables_is_told_as_such(
    runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lit_attn.report.records.looks.compare_variants", fail)
    assert main([str(runs), "--reports", str(runs.parent / "reports")]) == EXIT_CODE
    assert (runs.parent / "reports" / "fake" / "table.html").exists()
    assert (runs.parent / "reports" / "broken" / "table.html").exists()
    assert len(caplog.messages) == 2
    for warning in caplog.messages:
        check_mistake(warning)


def test_a_mistake_that_no_study_survives_has_its_exit_code(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lit_attn.report.records.read._require_metric", fail)
    assert main([str(runs), "--reports", str(runs.parent / "reports")]) == EXIT_CODE
    assert "this is a mistake of lit_attn" in capsys.readouterr().err


def test_a_single_study_that_fails_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    change(study / "plan.json", "baseline", value="other")
    assert main([str(tmp_path / "runs"), "--reports", str(tmp_path / "reports")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_table_across_studies_leaves_out_the_broken_one(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = runs / "broken" / "plan.json"
    change(plan, "baseline", value="other")
    reports = runs.parent / "reports"
    arguments = [str(runs), "--across", "fake", "broken", "--reports", str(reports)]
    assert main(arguments) == 1
    page = (reports / "across.md").read_text()
    assert "fake: " in page
    assert "broken: " not in page
    assert "This study is skipped" in caplog.text


NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [0, -1, 1, HUGE, -HUGE, 2**63, 1e308, -1e308, 5e-324, 0.0, "", "\0", "../..", "a\nb", "NaN"]
    ),
    st.floats(allow_nan=False, allow_infinity=False),
    st.just([]),
    st.just({}),
    st.just([[]]),
)


def list_places(content: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys that lead to every value of a JSON file."""
    entries: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        entries = list(content.items())
    elif isinstance(content, list):
        entries = list(enumerate(content))
    places = [place] if place else []
    for key, value in entries:
        places += list_places(value, (*place, key))
    return places


SEALS = {
    "entries": [
        make_seal(results=results, seeds=seeds, metric=METRIC).model_dump()
        for results, seeds in ((0, [0]), (2, [0, 1]))
    ]
}


@pytest.mark.slow
@settings(
    max_examples=10,
    deadline=None,
    # The same values in every run, so that a change is judged by what it changed.
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_changed_value_of_a_record_is_contained(
    data: st.DataObject, tmp_path: Path, no_rendering: None
) -> None:
    root = tmp_path / "fuzz"
    shutil.rmtree(root, ignore_errors=True)
    write_study(root / "runs", seeds=1, variants={"standard": 0.0})
    write_study(root / "runs", name="broken", seeds=2, variants={"standard": 0.0, "b": 0.1})
    broken = root / "runs" / "broken"
    (broken / "seals.json").write_text(json.dumps(SEALS))
    files = [broken / "plan.json", broken / "seals.json", first_cell(root / "runs") / "result.json"]
    path = data.draw(st.sampled_from(files))
    places = list_places(json.loads(path.read_text()))
    place = data.draw(st.sampled_from(places))
    change(path, *place, value=data.draw(NASTY))
    reports = root / "reports"
    assert main([str(root / "runs"), "--reports", str(reports)]) in (0, 1)
    assert (reports / "fake" / "table.html").exists()
    assert "fake/table.html" in (reports / "index.html").read_text()


def judge(runs: Path, *names: str) -> int:
    return lit_attn_main(["judge", *names, "--runs", str(runs)])


def test_a_damaged_study_does_not_end_the_verdicts_of_others(
    runs: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    change(runs / "broken" / "plan.json", "baseline", value="other")
    assert judge(runs) == 1
    assert "fake: against standard" in " ".join(capsys.readouterr().out.split())
    (warning,) = [text for text in caplog.messages if "has no verdict" in text]
    assert "baseline: no variant 'other'" in warning
    # A study that is asked for alone is a wrong command line.
    assert judge(runs, "broken") == 2
    assert "baseline: no variant 'other'" in capsys.readouterr().err


def test_a_mistake_in_a_verdict_is_told_as_one(
    runs: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare = judging.compare_variants

    def fail(study: StudyRecord) -> Any:
        if study.plan.study == "broken":
            raise KeyError("mean")
        return compare(study)

    monkeypatch.setattr(judging, "compare_variants", fail)
    assert judge(runs) == EXIT_CODE
    assert "fake: against standard" in " ".join(capsys.readouterr().out.split())
    assert "this is a mistake of lit_attn (KeyError: 'mean'" in caplog.text


def test_a_finite_divergence_is_told(runs: Path) -> None:
    (cell,) = (runs / "broken").glob("v1/0-*")
    change(cell / "result.json", "diverged", value=True)
    assert main([str(runs), "--reports", str(runs.parent / "reports")]) == 0
    table = " ".join(read_broken(runs).split())
    assert "trainings of b have diverged with a finite loss" in table
    other = (runs.parent / "reports" / "fake" / "table.full.md").read_text()
    assert "diverged with a finite loss" not in other


def test_a_wall_time_of_two_thousand_years_is_contained(drawn_runs: Path) -> None:
    change(first_cell(drawn_runs) / "result.json", "wall_time", value=63902825115.0)
    assert main([str(drawn_runs), "--reports", str(drawn_runs.parent / "reports")]) == 0
