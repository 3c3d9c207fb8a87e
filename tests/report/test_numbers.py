"""Written numbers have the digits that are the same on every processor."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.fake_study import report, write_study
from helpers.processors import assert_same_text
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_attn.report.figures import drawing
from lit_attn.report.numbers import DIGITS, fill, find_magnitude, round_number, write_number
from lit_attn.report.statistics.stats import paired_interval
from lit_attn.report.tables.formats import rows_to_csv, to_csv

finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(finite)
def test_a_written_number_has_twelve_digits_and_is_written_the_same_again(value: float) -> None:
    rounded = round_number(value)
    digits = re.sub(r"e.*|[-.]", "", repr(rounded)).strip("0")
    assert len(digits) <= DIGITS
    assert round_number(rounded) == rounded
    # The smallest numbers have fewer digits themselves.
    if abs(value) > 1e-300:
        assert math.isclose(value, rounded, rel_tol=5.1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**9), 10**9), st.sampled_from([1, 10, 100, 1000]), st.sampled_from([-1, 1]))
def test_a_number_of_few_decimals_is_written_alike_with_another_last_digit(
    count: int, unit: int, direction: int
) -> None:
    value = count / unit
    neighbour = math.nextafter(value, direction * math.inf)
    for form in ("", ".2f", ".4g", "+.1f"):
        assert write_number(neighbour, form).lstrip("+-") in (
            write_number(value, form).lstrip("+-"),
            # The neighbours of 0 are no rounded values.
            repr(neighbour).lstrip("-"),
            write_number(5e-324, form),
        )


def test_a_tie_has_the_same_digits_on_both_sides() -> None:
    for value in (0.125, math.nextafter(0.125, 0), math.nextafter(0.125, 1)):
        assert write_number(value, ".2f") == "0.12"
        assert fill("{x:.2f} of {n}, {text}", x=value, n=10**15, text="b") == "0.12 of " + (
            "1000000000000000, b"
        )
    assert find_magnitude(math.nextafter(0.1, 0)) == find_magnitude(0.1) == -1


def test_every_kind_of_column_is_rounded() -> None:
    third = 1 / 3
    frame = pd.DataFrame(
        {
            "float": [third, math.nan],
            "nullable": pd.array([third, None], dtype="Float64"),
            "mixed": pd.Series([third, "a"], dtype=object),
            "count": pd.array([10**15 + 1, None], dtype="Int64"),
        }
    )
    rounded = "0.333333333333"
    assert to_csv(frame).splitlines()[1:] == [
        f"{rounded},{rounded},{rounded},{10**15 + 1}",
        ",,a,",
    ]
    assert rows_to_csv([[third, np.float64(third), None, 10**15 + 1]]) == (
        f"{rounded},{rounded},,{10**15 + 1}\n"
    )


@pytest.mark.slow
def test_the_last_digit_of_the_records_changes_no_byte_of_a_report(tmp_path: Path) -> None:
    """Every metric moves to the next float64, as on a processor with other rounding."""
    for name in ("a", "b"):
        write_study(tmp_path / name / "runs")
    for path in (tmp_path / "b").rglob("result.json"):
        content = json.loads(path.read_text())
        metrics = content["metrics"]
        content["metrics"] = {key: math.nextafter(x, math.inf) for key, x in metrics.items()}
        path.write_text(json.dumps(content))
    one = report(tmp_path / "a")
    two = report(tmp_path / "b")
    for path in one.iterdir():
        if path.suffix == ".png":
            continue
        text = path.read_text()
        other = (two / path.name).read_text()
        assert_same_text(other, text)
        if path.suffix == ".svg":
            geometry = " ".join(re.findall(r' (?:d|x|y|width|height)="([^"]*)"', text))
            assert re.search(r"\d\.\d{3}", geometry)
            assert not re.search(r"\d\.\d{4,}", geometry), path.name
        elif path.suffix == ".csv":
            assert not re.search(r"\d\.\d{13,}", text), path.name


def test_coordinates_and_ids_of_a_drawing_do_not_depend_on_the_last_digits() -> None:
    texts = []
    for factor in (1.0, 1 + 1e-12):
        with drawing.appearance():
            figure = drawing.new_figure(2.0)
            axes = figure.subplots()
            axes.set(xlim=(0, 3), ylim=(0, 3))
            axes.errorbar([1.0, 2.0 * factor], [0.7, 1.3 * factor], [0.1, 0.2 * factor], fmt="o")
            axes.fill_between([1.0, 2.0], [0.5 * factor, 1.0], [0.7, 1.5], alpha=0.3)
            texts.append(drawing.render(figure)["svg"].decode())
    assert texts[0] == texts[1]
    references = set(re.findall(r'f="#(m\w+)"|url\(#(p\w+)\)', texts[0]))
    defined = set(re.findall(r'id="([mp][0-9a-f]{10})"', texts[0]))
    assert {a or b for a, b in references} <= defined


def test_two_figures_of_a_page_share_no_id_of_different_definitions() -> None:
    texts = []
    for height in (2.0, 3.0):
        with drawing.appearance():
            figure = drawing.new_figure(height)
            figure.subplots().plot([1, 2], [1, 2], "o")
            texts.append(drawing.render(figure)["svg"].decode())
    areas = [dict(re.findall(r'<clipPath id="(\w+)">\s*(.*?)\s*</cl', t, re.S)) for t in texts]
    assert areas[0].keys().isdisjoint(areas[1])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_intervals_are_computed_without_vector_units(differences: list[float]) -> None:
    """Sums are exact, so the order of the values changes nothing."""
    interval = paired_interval(differences)
    assert interval == paired_interval(differences[::-1]) == paired_interval(sorted(differences))


def test_the_tolerance_of_a_processor_is_one_unit_of_the_twelfth_digit() -> None:
    assert_same_text("a,0.607031071267", "a,0.607031071266")
    with pytest.raises(AssertionError):
        assert_same_text("a,0.60703107127", "a,0.60703107126")
    with pytest.raises(AssertionError):
        assert_same_text("a,1", "b,1")
