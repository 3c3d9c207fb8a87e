"""Floors in a report: the row of the best rule, and the mark of a baseline below it."""

from pathlib import Path

import pytest
from helpers.fake_study import report, write_study

from lit_attn.cells.floors import Floors, FloorValues
from lit_attn.report.__main__ import main
from lit_attn.report.records.read import read_studies
from lit_attn.report.tables.judgement import describe_answer
from lit_attn.report.verdicts.floors import find_best_floor, find_validity
from lit_attn.report.verdicts.judge import judge_study

pytestmark = pytest.mark.usefixtures("no_rendering")


def write_floors(study: Path, **accuracies: float) -> None:
    """Write the accuracy of each rule on test, and a better one of another split and metric."""
    floors = [
        FloorValues(rule="other", split="val", values={"accuracy": 1.0}, conditions=""),
        FloorValues(rule="loss", split="test", values={"loss": 0.0}, conditions=""),
    ]
    for rule, accuracy in accuracies.items():
        values = {"accuracy": accuracy, "loss": 1.0}
        floors.append(FloorValues(rule=rule, split="test", values=values, conditions="9 images"))
    Floors(data="d", floors=floors).write(study / "floors.json")


def test_the_best_rule_stands_below_the_baseline(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs")
    write_floors(study, frequent=0.1, neighbour=0.6)
    folder = report(tmp_path)
    lines = (folder / "table.txt").read_text().splitlines()
    (baseline,) = (number for number, line in enumerate(lines) if line.startswith("standard "))
    assert lines[baseline + 1].startswith("floor: neighbour")
    assert "60.00" in lines[baseline + 1]
    text = (folder / "table.full.md").read_text()
    assert "a rule without attention reaches" in text
    assert "Below its floor" not in text
    # The record of all numbers has variants only.
    assert "floor" not in (folder / "table.csv").read_text()


def test_a_baseline_below_its_floor_is_marked_in_every_form(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs")
    write_floors(study, neighbour=0.99)
    folder = report(tmp_path)
    for name in ("table.txt", "table.full.md", "table.html"):
        text = " ".join((folder / name).read_text().split())
        assert "Below its floor: standard has accuracy (%)" in text, name
        assert "neighbour 99 without attention (9 images)" in text, name


@pytest.mark.parametrize(
    ("goal", "accuracy", "validity"),
    [
        ("max", 0.99, "below-floor"),
        ("max", 0.5, "above-floor"),
        ("min", 0.5, "below-floor"),
        ("min", 0.99, "above-floor"),
    ],
)
def test_the_direction_of_the_metric_decides(
    tmp_path: Path, goal: str, accuracy: float, validity: str
) -> None:
    metric = {"name": "test/averaged-accuracy", "label": "a", "goal": goal, "scale": 100.0}
    folder = write_study(tmp_path / "runs", metric=metric)
    for path in folder.glob("*/*/result.json"):
        path.write_text(path.read_text().replace('"test/accuracy"', '"test/averaged-accuracy"'))
    write_floors(folder, first=accuracy, second=accuracy)
    (study,) = read_studies(tmp_path / "runs")
    best = find_best_floor(study)
    assert best is not None
    # The first of two equal rules.
    assert best.rule == "first"
    assert best.value == pytest.approx(100 * accuracy)
    assert find_validity(study) == validity


def test_a_study_without_floors_has_no_validity(tmp_path: Path) -> None:
    write_study(tmp_path / "runs")
    (study,) = read_studies(tmp_path / "runs")
    assert find_best_floor(study) is None
    assert find_validity(study) is None
    write_floors(tmp_path / "runs" / "fake")
    (study,) = read_studies(tmp_path / "runs")
    assert find_validity(study) is None


def test_an_unreadable_record_is_told(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs")
    (study / "floors.json").write_text("{")
    text = (report(tmp_path) / "table.full.md").read_text()
    assert "floors.json cannot be read" in text


def test_a_verdict_names_a_baseline_below_its_floor(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "runs", seeds=6)
    (study,) = read_studies(tmp_path / "runs")
    assert judge_study(study).validity is None
    write_floors(folder, neighbour=0.99)
    (study,) = read_studies(tmp_path / "runs")
    judged = judge_study(study)
    assert judged.validity == "below-floor"
    assert judged.warnings[0].startswith("Below its floor: standard has accuracy")
    assert describe_answer(judged).startswith("fake (below its floor): against standard, ")
    write_floors(folder, neighbour=0.1)
    (study,) = read_studies(tmp_path / "runs")
    assert judge_study(study).validity == "above-floor"
    assert describe_answer(judge_study(study)).startswith("fake: against standard, ")


def test_no_variant_of_a_study_below_its_floor_is_called_better(tmp_path: Path) -> None:
    effects = {"standard": 0.0, "belief2": 0.1}
    folder = write_study(tmp_path / "runs", seeds=6, variants=effects)
    verdicts = []
    for accuracy in (0.1, 0.99):
        write_floors(folder, neighbour=accuracy)
        (study,) = read_studies(tmp_path / "runs")
        judged = judge_study(study)
        (variant,) = judged.variants
        printed = (report(tmp_path) / "table.txt").read_text()
        is_printed = " better " in printed.partition("---")[2].partition("Below its floor")[0]
        verdicts.append((variant.verdict, judged.next.kind, is_printed, variant.is_significant))
    assert verdicts == [("better", "none", True, True), ("undecided", "stop", False, True)]
    assert "Add no seeds: train longer" in judged.next.text
    assert variant.pairs_for_verdict is None


def test_the_sentence_and_the_index_mark_a_study_below_its_floor(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=6)
    marks = []
    for accuracy in (0.1, 0.99):
        write_floors(study, neighbour=accuracy)
        folder = report(tmp_path)
        sentence = (folder / "table.txt").read_text()
        index = (folder.parent / "index.html").read_text()
        row = index.partition("<tbody")[2].partition("</tbody>")[0]
        marks.append(("(below its floor)" in sentence, row.count("(below its floor)")))
    assert marks == [(False, 0), (True, 2)]


def test_a_table_across_studies_marks_those_below_their_floors(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name, accuracy in (("low", 0.99), ("high", 0.1)):
        write_floors(write_study(runs, name=name), neighbour=accuracy)
    assert main(["--across", "low", "high", "--reports", str(tmp_path), str(runs)]) == 0
    for name in ("across.md", "across.html", "across.tex"):
        text = " ".join((tmp_path / name).read_text().split())
        assert text.count("low: Below its floor") >= 1, name
        assert "high: Below its floor" not in text, name
