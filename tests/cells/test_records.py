"""Records read back as written; torn lines are skipped."""

import json
import math
import os
from pathlib import Path

import pytest
from helpers.fake_study import result
from pydantic import ValidationError

from lit_attn.cells.records import Exit, Plan, PlannedCell, PlannedVariant, Record, Result, Spread
from lit_attn.cells.rows import MetricRow, read_metrics
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.metrics import DEFAULT_METRIC

CELL = PlannedCell(variant="v", seed=0, identity="00", path="v/0-00")
PLAN = Plan(
    study="s",
    title="t",
    baseline="v",
    metric=DEFAULT_METRIC,
    variants=[PlannedVariant(name="v", published=(1.0, None))],
    seeds=[0],
    cells=[CELL],
)


@pytest.mark.parametrize(
    "record",
    [PLAN, result(CELL, 0.5), Exit(failure="killed", returncode=-9, message="m", finished="f")],
)
def test_a_record_reads_back_as_written(record: Record, tmp_path: Path) -> None:
    record.write(tmp_path / "deep" / "record.json")
    text = (tmp_path / "deep" / "record.json").read_text()
    assert type(record).model_validate_json(text) == record
    assert text.endswith("}\n")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["record.json"]


def test_a_record_of_a_newer_version_is_read() -> None:
    newer = {**result(CELL, 0.5).model_dump(), "carbon": 1}
    assert Result.model_validate(newer) == result(CELL, 0.5)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "invalid JSON: EOF while parsing an object at line 1 column 1, not b'{'"),
        ("[]", "input should be an object, not []"),
        (None, "Is a directory"),
    ],
)
def test_a_plan_that_cannot_be_read_is_one_line(
    content: str | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        Plan.load(path)
    hint = "is not a plan; run the study again to write it"
    assert str(caught.value) == f"{path}: {hint}: {reason}"


def test_nothing_waits_for_the_writer_of_a_fifo(tmp_path: Path) -> None:
    """A status or a run would otherwise wait for ever."""
    path = tmp_path / "plan.json"
    os.mkfifo(path)
    assert Result.read_valid(path) is None
    with pytest.raises(ConfigError, match="is not a plan"):
        Plan.load(path)


def test_a_record_is_validated_and_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        CELL.seed = 1
    with pytest.raises(ValidationError, match="failure"):
        Exit(failure="tired", returncode=1, message="", finished="")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_all_numbers_of_a_result_are_finite(value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        result(CELL, value)
    with pytest.raises(ValidationError, match="finite"):
        Spread(median=value, iqr=0, count=1)


def test_metric_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    assert read_metrics(path) == []
    path.write_text("step,epoch,name,value\n10,0,test/accuracy,0.5\n20,1,train/loss,nan\n")
    first, second = read_metrics(path)
    assert first == MetricRow(10, 0, "test/accuracy", 0.5)
    assert math.isnan(second.value)


@pytest.mark.parametrize(
    "torn",
    [
        "20,1,test/acc",
        "20,1,test/accuracy,0.",
        "20,1",
        "20,1,test/acc30,2,test/accuracy,0.9\n",
        "\0\0\0\0\n",
        "20,one,test/accuracy,0.9\n",
        "\n",
    ],
)
def test_only_torn_lines_are_left_out(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    complete_lines = "step,epoch,name,value\n10,0,test/accuracy,0.5\n"
    path.write_text(complete_lines + torn)
    assert read_metrics(path) == [MetricRow(10, 0, "test/accuracy", 0.5)]
    if torn.endswith("\n"):
        path.write_text(complete_lines + torn + "40,3,test/accuracy,0.7\n")
        assert [row.step for row in read_metrics(path)] == [10, 40]


def test_any_prefix_of_a_metrics_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    text = "step,epoch,name,value\n10,0,test/accuracy,0.5\n20,1,test/accuracy,0.75\n"
    for end in range(len(text)):
        path.write_bytes(text.encode()[:end])
        assert [row.value for row in read_metrics(path)] == [0.5, 0.75][
            : text[:end].count("\n", 25)
        ]


def test_a_plan_without_seeds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.model_dump(mode="json") | {"seeds": []}))
    with pytest.raises(ConfigError, match="seeds: needs 1 or more entries"):
        Plan.load(path)
