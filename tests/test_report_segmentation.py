"""Per-class tables and predictions of a study of segmentation, from its records."""

import html
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_study import result, write_study
from PIL import Image

from lit_attn.records import Metric
from lit_attn.report import write_reports
from lit_attn.report.read import StudyRecord, read_studies
from lit_attn.report.segmentation import class_table, draw_pictures, per_class

NASTY = 'tree | <b>&"x"</b>'
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def write(root: Path, metric: str = "test/mIoU", pictures: int = 2) -> StudyRecord:
    """Two variants and two seeds, the last cell missing; `b` lacks the class that `a` has."""
    write_study(
        root,
        variants={"a": 0.0, "b": 0.1},
        seeds=2,
        skip=(("b", 1),),
        metric=Metric(name=metric, label="mIoU (%)"),
    )
    (study,) = read_studies(root)
    for cell in study.cells:
        if not (cell.folder / "result.json").exists():
            continue
        of = 0.1 * cell.planned.seed + (0.5 if cell.planned.variant == "a" else 0.3)
        metrics = {metric: 0.5, "test/IoU:wall": of, "val/IoU:wall": 0.9}
        metrics["test/ema-IoU:wall"] = 0.8
        if cell.planned.variant == "a":
            metrics[f"test/IoU:{NASTY}"] = 0.25
        result(cell.planned, 0.5, metrics=metrics).write(cell.folder / "result.json")
        (cell.folder / "pictures").mkdir()
        for number in range(pictures):
            panels = [np.full((4, 6, 3), colour, np.uint8) for colour in (RED, GREEN, BLUE)]
            picture = Image.fromarray(np.concatenate(panels, axis=1))
            picture.save(cell.folder / "pictures" / f"{number}.png")
    return read_studies(root)[0]


def test_means_of_each_class_over_seeds(tmp_path: Path) -> None:
    found = per_class(write(tmp_path)).set_index(["variant", "class"])
    assert found.loc[("a", "wall"), "mean"] == pytest.approx(55)
    assert found.loc[("a", "wall"), "sd"] == pytest.approx(np.std([50, 60], ddof=1))
    assert found.loc[("b", "wall"), ["mean", "n"]].tolist() == [pytest.approx(30), 1]
    assert np.isnan(found.loc[("b", "wall"), "sd"])
    assert ("b", NASTY) not in found.index


def test_the_table_is_of_what_the_study_compares(tmp_path: Path) -> None:
    averaged = per_class(write(tmp_path, metric="test/ema-mIoU"))
    assert set(averaged["mean"]) == {80}
    assert set(averaged["class"]) == {"wall"}
    assert per_class(write(tmp_path / "other", metric="other/mIoU")).empty


def test_names_are_escaped_and_the_best_is_bold(tmp_path: Path) -> None:
    table = class_table(per_class(write(tmp_path)))
    assert "<b>" not in table
    assert html.escape(NASTY) in table
    assert "<td><strong>55.00</strong> ± 7.07</td><td>30.00</td>" in table
    assert "<td><strong>25.00</strong> ± 0.00</td><td>\N{EM DASH}</td>" in table


def test_images_labels_and_a_row_of_predictions_for_each_variant(tmp_path: Path) -> None:
    figure = draw_pictures(write(tmp_path))
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["image", "labels", "a", "b"]
    shown = [axes.images[0].get_array() for axes in figure.axes]
    assert len(shown) == 4 * 2
    colours = [tuple((255 * picture[0, 0, :3]).astype(int)) for picture in shown]
    assert colours == [RED] * 2 + [GREEN] * 2 + [BLUE] * 4
    assert shown[0].shape == (4, 6, 3)


def test_without_pictures_there_is_no_figure(tmp_path: Path) -> None:
    assert draw_pictures(write(tmp_path, pictures=0)) is None


def test_the_page_has_both_and_forgets_what_is_gone(tmp_path: Path) -> None:
    study = write(tmp_path / "runs")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    page = (folder / "table.html").read_text()
    assert 'src="pictures.svg"' in page
    assert '<a href="classes.csv">' in page
    assert page.index("IoU of each class") > page.index("pictures.svg")
    assert set(pd.read_csv(folder / "classes.csv")["class"]) == {"wall", NASTY}
    for cell in study.cells:
        if cell.result is not None:
            result(cell.planned, 0.5).write(cell.folder / "result.json")
            for path in (cell.folder / "pictures").iterdir():
                path.unlink()
    write_reports(tmp_path / "runs", tmp_path / "reports")
    assert {path.name for path in folder.iterdir()} & {"classes.csv", "pictures.svg"} == set()
    assert "classes.csv" not in (folder / "table.html").read_text()


def test_reading_pictures_imports_no_torch() -> None:
    code = "import sys, lit_attn.report.write; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
