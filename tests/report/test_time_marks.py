"""Times that were not measured in turns have a mark, and no figure compares them."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.fake_study import report, write_study
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_attn.cells.records import StepTimes
from lit_attn.report.records.read import read_studies
from lit_attn.report.records.timing import (
    APART,
    NOT_ALONE,
    OTHER_DEVICES,
    RESUMED,
    SHARED,
    TIME_MARK,
    find_time_fault,
)

VARIANTS = {"standard": 0.0, "belief": 0.05, "mgk": 0.1}


def write_times(runs: Path, minutes: dict[str, list[int]], **changes: Any) -> Path:
    """Write a study whose cells end at these minutes of a day, after one minute of work."""
    study = write_study(runs, variants=VARIANTS, seeds=3)
    for place, name in enumerate(VARIANTS):
        for seed, minute in enumerate(minutes[name]):
            (path,) = study.glob(f"v{place}/{seed}-*/result.json")
            content = json.loads(path.read_text())
            content["wall_time"] = 60.0
            content["finished"] = f"2026-01-01T{minute // 60:02d}:{minute % 60:02d}:00+00:00"
            content["evaluation_time"] = {"median": 1.0 + seed / 100, "iqr": 0.0, "count": 1}
            content["step_time"]["median"] = 0.2 - 0.03 * place
            if name == "mgk":
                content |= changes
            path.write_text(json.dumps(content))
    return study


IN_TURNS = {"standard": [1, 4, 7], "belief": [2, 5, 8], "mgk": [3, 6, 9]}
ADDED_LATER = IN_TURNS | {"mgk": [600, 601, 602]}


def test_a_variant_that_was_added_later_has_a_mark(tmp_path: Path) -> None:
    """The tutorial adds mgk to a finished study."""
    write_times(tmp_path / "runs", ADDED_LATER)
    folder = report(tmp_path)
    rows = (folder / "table.full.md").read_text().splitlines()
    marks = {}
    for name in VARIANTS:
        row = next(row for row in rows if f"| {name} |" in row)
        marks[name] = row.count(TIME_MARK)
    # Time per step, seconds to the target, and time of an evaluation.
    assert marks == {"standard": 0, "belief": 0, "mgk": 3}
    assert f"{TIME_MARK}: the time cannot be compared" in (folder / "table.full.md").read_text()
    assert f"mgk: {APART}" in (folder / "table.full.md").read_text()
    table = pd.read_csv(folder / "table.csv", keep_default_na=False).set_index("variant")
    assert table["step_time_fault"].tolist() == ["", "", APART]
    # No figure has the time of this variant.
    cost = (folder / "cost.svg").read_text()
    assert "0.14" not in cost
    assert "<!-- seconds of training -->" not in (folder / "progress.svg").read_text()
    assert TIME_MARK in (folder / "table.html").read_text()
    assert r"\textdaggerdbl" in (folder / "table.tex").read_text()
    assert f"{TIME_MARK} marks a time that cannot" in (folder / "table.md").read_text()


def test_variants_in_turns_have_no_mark(tmp_path: Path) -> None:
    write_times(tmp_path / "runs", IN_TURNS)
    folder = report(tmp_path)
    assert TIME_MARK not in (folder / "table.full.md").read_text()
    assert "<!-- seconds of training -->" in (folder / "progress.svg").read_text()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempts": 2}, RESUMED),
        ({"is_device_shared": True}, SHARED),
        ({"device": "GPU"}, OTHER_DEVICES),
        ({"devices": 2, "strategy": "ddp"}, OTHER_DEVICES),
        ({"recompute": "blocks"}, OTHER_DEVICES),
    ],
)
def test_times_of_another_way_to_train_have_a_mark(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    write_times(tmp_path, IN_TURNS, **changes)
    (study,) = read_studies(tmp_path)
    assert study.time_faults == {"standard": "", "belief": "", "mgk": reason}


def test_the_tables_name_the_strategy_and_the_nodes_of_a_cell(tmp_path: Path) -> None:
    changes = {"devices": 8, "nodes": 2, "strategy": "fsdp", "recompute": "blocks"}
    write_times(tmp_path / "runs", IN_TURNS, **changes)
    folder = report(tmp_path)
    rows = pd.read_csv(folder / "per_seed.csv").set_index("variant")
    assert set(rows.loc["mgk", "device"]) == {"8 x CPU (2 nodes, fsdp, recomputed blocks)"}
    assert set(rows.loc["belief", "device"]) == {"CPU"}
    full = (folder / "table.full.md").read_text()
    assert f"mgk: {OTHER_DEVICES}" in full
    # Other strategies change no metric, so only times are marked.
    assert "†" not in full


def test_times_measured_alone_have_no_mark_and_others_beside_them_have_one(tmp_path: Path) -> None:
    folder = write_times(tmp_path / "runs", ADDED_LATER)
    entry = {"kind": "a", "baseline_kind": "a", "seconds": 0.1, "ratio": 1.0, "spread": 0.0}
    for names in (("standard", "belief"), ("standard", "belief", "mgk")):
        timed = [entry | {"variant": name} for name in names]
        times = StepTimes.model_validate({"device": "CPU", "variants": timed})
        times.write(folder / "step_times.json")
        (study,) = read_studies(tmp_path / "runs")
        expected = "" if "mgk" in names else f"{NOT_ALONE}; {APART}"
        assert study.step_time_faults == {"standard": "", "belief": "", "mgk": expected}
        # Evaluations are not measured again.
        assert study.time_faults["mgk"] == APART


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=6), st.lists(st.integers(0, 23), min_size=1)
)
def test_spans_of_time_that_overlap_are_in_turns(first: list[int], second: list[int]) -> None:
    """A cell of one hour, and one whose hour of work ends when the other starts, overlap."""
    groups = []
    for hours in (first, second):
        cells = [{"finished": f"2026-01-02T{h:02d}:00:00", "wall_time": 3600.0} for h in hours]
        groups.append(cells)
    is_apart = min(first) - 1 > max(second) or min(second) - 1 > max(first)
    assert find_time_fault(*groups) == (APART if is_apart else "")
    assert find_time_fault(*groups[::-1]) == find_time_fault(*groups)


@pytest.mark.parametrize("text", [None, "", "yesterday", "2026-13-01"])
def test_an_unknown_time_of_measurement_is_no_fault(text: str | None) -> None:
    cells = [{"finished": text, "wall_time": None}]
    assert find_time_fault(cells, [{"finished": "2026-01-01T00:00:00+00:00"}]) == ""
    assert find_time_fault([], cells) == ""
