"""Per-class tables and predictions of a study of segmentation, from its records."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.fake_study import result, write_study
from markupsafe import escape

from lit_attn.cells.records import Metric, Plan
from lit_attn.report import write_reports
from lit_attn.report.pages.write import Section, render_page
from lit_attn.report.records.read import read_studies
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.tables.results import make_class_frame, make_class_table

pytestmark = pytest.mark.usefixtures("no_rendering")

NASTY = 'tree | <b>&"x"</b>'
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
CLASSES = {"wall": RED, "floor": GREEN, "sky": BLUE, NASTY: RED}


def write(root: Path, metric: str = "test/mIoU", second: str = "b") -> StudyRecord:
    """Write two variants and two seeds without the last cell; `second` lacks a class of `a`."""
    written = write_study(
        root,
        variants={"a": 0.0, second: 0.1},
        seeds=2,
        skip=((second, 1),),
        metric=Metric(name=metric, label="mIoU (%)", goal="max", scale=100),
    )
    plan = Plan.model_validate_json((written / "plan.json").read_bytes())
    for cell in plan.cells:
        folder = written / cell.path
        if not (folder / "result.json").exists():
            continue
        iou = 0.1 * cell.seed + (0.5 if cell.variant == "a" else 0.3)
        metrics = {metric: 0.5, "test/IoU:wall": iou, "val/IoU:wall": 0.9}
        metrics["test/averaged-IoU:wall"] = 0.8
        if cell.variant == "a":
            metrics[f"test/IoU:{NASTY}"] = 0.25
        result(cell, 0.5, metrics=metrics).write(folder / "result.json")
    return next(read_studies(root))


def test_class_means_are_over_seeds(tmp_path: Path) -> None:
    means = make_class_frame(write(tmp_path)).set_index(["variant", "class"])
    assert means.loc[("a", "wall"), "mean"] == pytest.approx(55)
    assert means.loc[("a", "wall"), "sd"] == pytest.approx(np.std([50, 60], ddof=1))
    assert means.loc[("b", "wall"), ["mean", "n"]].tolist() == [pytest.approx(30), 1]
    assert np.isnan(means.loc[("b", "wall"), "sd"])
    assert ("b", NASTY) not in means.index


def test_the_table_follows_the_studys_metric(tmp_path: Path) -> None:
    averaged = make_class_frame(write(tmp_path, metric="test/averaged-mIoU"))
    assert set(averaged["mean"]) == {80}
    assert set(averaged["class"]) == {"wall"}
    assert make_class_frame(write(tmp_path / "other", metric="other/mIoU")).empty


def test_names_are_escaped_and_no_class_has_a_finding(tmp_path: Path) -> None:
    classes = make_class_table(make_class_frame(write(tmp_path)))
    table = render_page("IoU", [Section(tables=[classes])], [])
    assert "<b>" not in table
    assert str(escape(NASTY)) in table
    assert "<td>55.00 ± 7.07</td><td>30.00</td>" in table
    assert "<td>25.00 ± 0.00</td><td>\N{EM DASH}</td>" in table


def test_files_of_an_earlier_report_are_removed(tmp_path: Path) -> None:
    study = write(tmp_path / "runs")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    page = (folder / "table.html").read_text()
    assert '<a href="classes.csv">' in page
    assert "IoU of each class" in page
    assert set(pd.read_csv(folder / "classes.csv")["class"]) == {"wall", NASTY}
    for cell in study.cells:
        if cell.value is not None:
            metrics = {"test/mIoU": 0.5}
            result(cell, 0.5, metrics=metrics).write(cell.folder / "result.json")
    write_reports(tmp_path / "runs", tmp_path / "reports")
    assert not (folder / "classes.csv").exists()
    assert "classes.csv" not in (folder / "table.html").read_text()
