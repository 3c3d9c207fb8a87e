"""What a study of segmentation shows beside its table: the IoU of each class, and predictions."""

import html
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from lit_attn.report.read import StudyRecord
from lit_attn.report.style import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

IOU = "IoU:"


def per_class(study: StudyRecord) -> pd.DataFrame:
    """A row for each class and variant: mean and sd (ddof 1) of the IoU in percent, over n seeds.

    Of the split, and of the weights (trained or averaged), that the study's metric is of; no row
    where these have no classes.
    """
    split, _, name = study.plan.metric.name.partition("/")
    prefix = f"{split}/{'ema-' * name.startswith('ema-')}{IOU}"
    rows = []
    for variant in study.plan.variants:
        values: dict[str, list[float]] = {}
        for result in study.results(variant.name):
            for logged, value in result.metrics.items():
                if logged.startswith(prefix):
                    values.setdefault(logged.removeprefix(prefix), []).append(100 * value)
        for label, found in values.items():
            sd = statistics.stdev(found) if len(found) > 1 else None
            rows.append((label, variant.name, statistics.fmean(found), sd, len(found)))
    return pd.DataFrame(rows, columns=["class", "variant", "mean", "sd", "n"])


def class_table(classes: pd.DataFrame) -> str:
    """`per_class` as a `<table>`: classes down, variants across, the best mean of a class bold."""
    variants = list(dict.fromkeys(classes["variant"]))
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ["class", *variants])
    rows = []
    for label in dict.fromkeys(classes["class"]):
        of_class = classes[classes["class"] == label].set_index("variant")
        best = of_class["mean"].max()
        cells = ""
        for variant in variants:
            text = "\N{EM DASH}"
            if variant in of_class.index:
                found = of_class.loc[variant]
                text = f"{found['mean']:.2f}"
                text = f"<strong>{text}</strong>" if found["mean"] == best else text
                text += "" if pd.isna(found["sd"]) else f" ± {found['sd']:.2f}"
            cells += f"<td>{text}</td>"
        rows.append(f'<tr><th scope="row">{html.escape(label)}</th>{cells}</tr>')
    return (
        "<table>\n<caption><strong>IoU of each class (%).</strong> Mean ± standard deviation over "
        "the seeds that finished; bold: best mean. Classes that are neither in the images nor "
        f"predicted have none.</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody>\n</table>\n"
    )


def draw_pictures(study: StudyRecord) -> "Figure | None":
    """Images, labels and every variant's predictions with the first seed; None without any."""
    shown = {}
    for variant in study.plan.variants:
        cell = study.of(variant.name)[0]
        if cell.result is not None and (panels := _panels(cell.folder / "pictures")):
            shown[variant.name] = panels
    if not shown:
        return None
    first = next(iter(shown.values()))
    rows = {"image": [panel[0] for panel in first], "labels": [panel[1] for panel in first]}
    rows |= {name: [panel[2] for panel in panels] for name, panels in shown.items()}
    figure = new_figure(1.05 * len(rows))
    grid = figure.subplots(len(rows), len(first), squeeze=False)
    for line, (name, pictures) in zip(grid, rows.items(), strict=True):
        for axes, picture in zip(line, pictures, strict=False):
            _show(axes, picture)
        line[0].set_ylabel(name, rotation="horizontal", ha="right", va="center")
    return figure


def _panels(folder: Path) -> "list[list[NDArray]]":
    """Image, labels and prediction of each picture in a cell's folder, (h, w, 3)."""
    from matplotlib.image import imread

    found = []
    for path in sorted(folder.glob("*.png")):
        picture = imread(path)
        width = picture.shape[1] // 3
        found.append([picture[:, i * width : (i + 1) * width] for i in range(3)])
    return found


def _show(axes: "Axes", picture: "NDArray") -> None:
    axes.imshow(picture, interpolation="nearest")
    axes.grid(False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
