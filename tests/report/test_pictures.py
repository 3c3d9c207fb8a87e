"""The figure of segmented images, from the files of the cells."""

from pathlib import Path

import numpy as np
import pytest
from helpers.fake_study import result, write_study
from PIL import Image

from lit_attn.cells.legend import Legend
from lit_attn.cells.records import Metric, Plan
from lit_attn.report import write_reports
from lit_attn.report.figures import drawing
from lit_attn.report.figures.pictures import draw_pictures, read_panels
from lit_attn.report.records.read import read_studies
from lit_attn.report.records.study_record import StudyRecord

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
CLASSES = {"wall": RED, "floor": GREEN, "sky": BLUE, "no label": (0, 0, 0)}


def write(root: Path, pictures: int = 2, second: str = "b") -> StudyRecord:
    """Write two variants with pictures; the panels are red, green and blue."""
    metric = Metric(name="test/mIoU", label="mIoU (%)", goal="max", scale=100)
    written = write_study(root, variants={"a": 0.0, second: 0.1}, seeds=2, metric=metric)
    plan = Plan.model_validate_json((written / "plan.json").read_bytes())
    for cell in plan.cells:
        folder = written / cell.path
        result(cell, 0.5, metrics={"test/mIoU": 0.5}).write(folder / "result.json")
        (folder / "pictures").mkdir()
        for number in range(pictures):
            panels = [np.full((4, 6, 3), colour, np.uint8) for colour in (RED, GREEN, BLUE)]
            picture = Image.fromarray(np.concatenate(panels, axis=1))
            picture.save(folder / "pictures" / f"{number}.png")
    return next(read_studies(root))


def write_legend(
    study: StudyRecord,
    variant: str,
    shown: list[str],
    weights: str = "trained",
    classes: dict[str, tuple[int, int, int]] = CLASSES,
) -> None:
    """Write the legend of the first cell of a variant."""
    folder = study.variant_cells(variant)[0].folder
    assert folder is not None
    legend = Legend.model_validate({"weights": weights, "classes": classes, "shown": shown})
    legend.write(folder / "pictures" / "legend.json")


def test_every_variant_has_a_row_of_predictions(tmp_path: Path) -> None:
    study = write(tmp_path)
    write_legend(study, "a", ["wall"])
    write_legend(study, "b", ["wall"])
    figure = draw_pictures(study)
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["image", "labels", "a", "b"]
    shown = [axes.images[0].get_array() for axes in figure.axes]
    colours = [tuple(picture[0, 0].tolist()) for picture in shown if picture is not None]
    assert colours == [RED] * 2 + [GREEN] * 2 + [BLUE] * 4


def test_the_legend_has_the_classes_that_occur_for_any_variant(tmp_path: Path) -> None:
    study = write(tmp_path)
    write_legend(study, "a", ["sky", "wall"])
    write_legend(study, "b", ["no label", "wall"], weights="averaged")
    figure = draw_pictures(study)
    assert figure is not None
    (legend,) = figure.legends
    # The order is that of the classes.
    assert [text.get_text() for text in legend.get_texts()] == ["wall", "sky", "no label"]
    faces = [tuple(patch.get_facecolor()[:3]) for patch in legend.get_patches()]
    assert faces == [(1, 0, 0), (0, 0, 1), (0, 0, 0)]
    assert legend.get_title().get_text() == "Predictions of the averaged or trained weights"


def test_a_long_legend_stays_on_the_figure(tmp_path: Path) -> None:
    name = "belief2 with an identity, without zz"
    study = write(tmp_path, second=name)
    classes = {f"a class of some length {i}": (i, i, 255 - i) for i in range(60)}
    write_legend(study, "a", list(classes), classes=classes)
    write_legend(study, name, [], classes=classes)
    with drawing.appearance():
        figure = draw_pictures(study)
        assert figure is not None
        figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y0 >= 0
    assert min(axes.get_window_extent().y0 for axes in figure.axes) >= box.y1


@pytest.mark.parametrize("has_legend", [True, False])
def test_without_pictures_or_legend_there_is_no_figure(has_legend: bool, tmp_path: Path) -> None:
    study = write(tmp_path, pictures=0 if has_legend else 2)
    if has_legend:
        write_legend(study, "a", ["wall"])
    assert draw_pictures(study) is None


@pytest.mark.parametrize("width", [17, 3 * 2**21])
def test_a_file_that_is_no_three_panels_is_refused(width: int, tmp_path: Path) -> None:
    path = tmp_path / "0.png"
    Image.new("1", (width, 1 if width < 100 else 2)).save(path)
    with pytest.raises(ValueError, match=r"0.png: .* pixels are not three panels"):
        read_panels(path)


@pytest.mark.parametrize("file", ["0.png", "legend.json"])
def test_torn_pictures_are_skipped_with_a_warning(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = write(tmp_path)
    write_legend(study, "a", ["wall"])
    write_legend(study, "b", ["wall"])
    folder = study.variant_cells("a")[0].folder
    assert folder is not None
    (folder / "pictures" / file).write_bytes(b"\x89PNG torn {")
    figure = draw_pictures(study)
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["image", "labels", "b"]
    assert "its pictures cannot be read" in caplog.text


@pytest.mark.slow
def test_the_page_shows_the_pictures(tmp_path: Path) -> None:
    study = write(tmp_path / "runs")
    write_legend(study, "a", ["wall"])
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert (folder / "pictures.svg").exists()
    assert '<figure class="pictures">' in (folder / "table.html").read_text()
