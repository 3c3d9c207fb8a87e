"""Per-class tables and predictions of a study of segmentation, from its records."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.fake_study import result, write_study
from markupsafe import escape
from PIL import Image

from lit_attn.cells.records import Legend, Metric, Plan
from lit_attn.report import drawing, write_reports
from lit_attn.report.read import StudyRecord, read_studies
from lit_attn.report.segmentation import draw_pictures, make_class_frame, make_class_table
from lit_attn.report.write import Section, render_page

NASTY = 'tree | <b>&"x"</b>'
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
CLASSES = {"wall": RED, "floor": GREEN, "sky": BLUE, NASTY: RED}


def write(
    root: Path, metric: str = "test/mIoU", pictures: int = 2, second: str = "b"
) -> StudyRecord:
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
        metrics["test/ema-IoU:wall"] = 0.8
        if cell.variant == "a":
            metrics[f"test/IoU:{NASTY}"] = 0.25
        result(cell, 0.5, metrics=metrics).write(folder / "result.json")
        (folder / "pictures").mkdir()
        for number in range(pictures):
            panels = [np.full((4, 6, 3), colour, np.uint8) for colour in (RED, GREEN, BLUE)]
            picture = Image.fromarray(np.concatenate(panels, axis=1))
            picture.save(folder / "pictures" / f"{number}.png")
    return next(read_studies(root))


def test_class_means_are_over_seeds(tmp_path: Path) -> None:
    means = make_class_frame(write(tmp_path)).set_index(["variant", "class"])
    assert means.loc[("a", "wall"), "mean"] == pytest.approx(55)
    assert means.loc[("a", "wall"), "sd"] == pytest.approx(np.std([50, 60], ddof=1))
    assert means.loc[("b", "wall"), ["mean", "n"]].tolist() == [pytest.approx(30), 1]
    assert np.isnan(means.loc[("b", "wall"), "sd"])
    assert ("b", NASTY) not in means.index


def test_the_table_follows_the_studys_metric(tmp_path: Path) -> None:
    averaged = make_class_frame(write(tmp_path, metric="test/ema-mIoU"))
    assert set(averaged["mean"]) == {80}
    assert set(averaged["class"]) == {"wall"}
    assert make_class_frame(write(tmp_path / "other", metric="other/mIoU")).empty


def test_names_are_escaped_and_the_best_is_bold(tmp_path: Path) -> None:
    classes = make_class_table(make_class_frame(write(tmp_path)))
    table = render_page("IoU", [Section(tables=[classes])])
    assert "<b>" not in table
    assert str(escape(NASTY)) in table
    assert "<td><strong>55.00 ± 7.07</strong></td><td>30.00</td>" in table
    assert "<td><strong>25.00 ± 0.00</strong></td><td>\N{EM DASH}</td>" in table


def test_every_variant_has_a_row_of_predictions(tmp_path: Path) -> None:
    figure = draw_pictures(write(tmp_path))
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["image", "labels", "a", "b"]
    shown = [axes.images[0].get_array() for axes in figure.axes]
    assert len(shown) == 4 * 2
    colours = [tuple((255 * picture[0, 0, :3]).astype(int)) for picture in shown]
    assert colours == [RED] * 2 + [GREEN] * 2 + [BLUE] * 4
    assert shown[0].shape == (4, 6, 3)
    # Old cells recorded no colours.
    assert figure.legends == []


def test_without_pictures_there_is_no_figure(tmp_path: Path) -> None:
    assert draw_pictures(write(tmp_path, pictures=0)) is None


def write_legend(
    study: StudyRecord,
    variant: str,
    weights: str,
    shown: list[str],
    classes: dict[str, tuple[int, int, int]] = CLASSES,
) -> None:
    """Write the legend of a cell of the first seed."""
    legend = Legend(weights=weights, classes=classes, shown=shown)
    legend.write(study.variant_cells(variant)[0].folder / "pictures" / "legend.json")


def legend_of(study: StudyRecord) -> tuple[str, dict[str, tuple[int, ...]], int]:
    """Return the legend's title, its classes with their colours, and its number of columns."""
    figure = draw_pictures(study)
    assert figure is not None
    (legend,) = figure.legends
    colours = [patch.get_facecolor() for patch in legend.get_patches()]
    shown = [tuple(round(255 * part) for part in colour[:3]) for colour in colours]
    labels = [text.get_text() for text in legend.get_texts()]
    return legend.get_title().get_text(), dict(zip(labels, shown, strict=True)), legend._ncols


def test_the_legend_has_the_classes_that_occur_for_any_variant(tmp_path: Path) -> None:
    study = write(tmp_path)
    write_legend(study, "a", "trained", ["sky", "wall"])
    write_legend(study, "b", "trained", ["wall", NASTY])
    title, classes, columns = legend_of(study)
    assert title == "Predictions of the trained weights"
    # The order is the data set's.
    assert list(classes.items()) == [("wall", RED), ("sky", BLUE), (NASTY, RED)]
    assert columns == 3


def test_the_legend_names_the_weights_that_predict(tmp_path: Path) -> None:
    study = write(tmp_path)
    write_legend(study, "a", "averaged", ["wall"])
    write_legend(study, "b", "averaged", ["wall"])
    assert legend_of(study)[0] == "Predictions of the averaged weights"
    write_legend(study, "b", "trained", ["wall"])
    assert legend_of(study)[0] == "Predictions of the averaged or trained weights"


def test_a_long_legend_stays_on_the_figure(tmp_path: Path) -> None:
    """The same holds for a title with two kinds of weights, one of them in two lines."""
    name = "belief2 with an identity, without zz"
    study = write(tmp_path, second=name)
    classes = {f"a class of some length {i}": (i, i, 255 - i) for i in range(60)}
    write_legend(study, "a", "trained", list(classes), classes)
    write_legend(study, name, "averaged", [], classes)
    with drawing.appearance():
        figure = draw_pictures(study)
        assert figure is not None
        figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y0 >= 0
    assert min(axes.get_window_extent().y0 for axes in figure.axes) >= box.y1
    # The rows of pictures are as high as without a legend.
    assert min(axes.get_window_extent().height for axes in figure.axes) > 85


def test_files_of_an_earlier_report_are_removed(tmp_path: Path) -> None:
    study = write(tmp_path / "runs")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    page = (folder / "table.html").read_text()
    assert '<figure class="pictures">' in page
    assert '<a href="classes.csv">' in page
    assert page.index("IoU of each class") > page.index("pictures.svg")
    assert set(pd.read_csv(folder / "classes.csv")["class"]) == {"wall", NASTY}
    for cell in study.cells:
        if cell.value is not None:
            metrics = {"test/mIoU": 0.5}
            result(cell, 0.5, metrics=metrics).write(cell.folder / "result.json")
            for path in (cell.folder / "pictures").iterdir():
                path.unlink()
    write_reports(tmp_path / "runs", tmp_path / "reports")
    assert {path.name for path in folder.iterdir()} & {"classes.csv", "pictures.svg"} == set()
    assert "classes.csv" not in (folder / "table.html").read_text()


def test_reading_pictures_imports_no_torch() -> None:
    code = "import sys, lit_attn.report.write; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
