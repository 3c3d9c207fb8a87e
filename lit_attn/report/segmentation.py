"""What a study of segmentation shows beside its table: the IoU of each class, and predictions."""

import html
import statistics
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from lit_attn.cells.records import Legend
from lit_attn.report.read import StudyRecord
from lit_attn.report.style import GREY, WIDTH, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

IOU = "IoU:"

# Inches: a line of the legend, and a letter of it on average.
LINE, LETTER = 0.17, 0.07

WEIGHTS = {
    "trained": "the weights after the last step",
    "averaged": "the moving average of the weights (EMA) after the last step",
}


def per_class(study: StudyRecord) -> pd.DataFrame:
    """A row for each class and variant: mean and sd (ddof 1) of the IoU in percent, over n seeds.

    Of the split, and of the weights (trained or averaged), that the study's metric is of; no row
    where these have no classes.
    """
    metric = study.plan.metric
    prefix = f"{metric.name.partition('/')[0]}/{'ema-' * metric.averaged}{IOU}"
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
    """Images, labels and every variant's predictions with the first seed; None without any.

    Below them the classes that occur, and the weights that predict, where the cells say so.
    """
    shown, legends = {}, {}
    for variant in study.plan.variants:
        cell = study.of(variant.name)[0]
        folder = cell.folder / "pictures"
        if cell.result is not None and (panels := _panels(folder)):
            shown[variant.name] = panels
            if legend := _legend(folder / "legend.json"):
                legends[variant.name] = legend
    if not shown:
        return None
    first = next(iter(shown.values()))
    rows = {"image": [panel[0] for panel in first], "labels": [panel[1] for panel in first]}
    rows |= {name: [panel[2] for panel in panels] for name, panels in shown.items()}
    colours = _colours(list(legends.values()))
    columns = _columns(list(colours))
    title = _weights(legends)
    lines = 1 + title.count("\n") + -(-len(colours) // columns) if legends else 0
    figure = new_figure(1.05 * len(rows) + LINE * lines)
    grid = figure.subplots(len(rows), len(first), squeeze=False)
    for line, (name, pictures) in zip(grid, rows.items(), strict=True):
        for axes, picture in zip(line, pictures, strict=False):
            _show(axes, picture)
        line[0].set_ylabel(name, rotation="horizontal", ha="right", va="center")
    if legends:
        _add_legend(figure, colours, columns, title)
    return figure


def _legend(path: Path) -> Legend | None:
    """How to read the pictures beside `path`; None of a cell that did not say it yet."""
    return Legend.model_validate_json(path.read_bytes()) if path.exists() else None


def _colours(legends: list[Legend]) -> dict[str, tuple[int, int, int]]:
    """The classes that occur for any variant, in their set's order, with their colours.

    Classes of one colour, of which ADE20K has two, share an entry.
    """
    occur = {name for legend in legends for name in legend.shown}
    names: dict[tuple[int, int, int], list[str]] = {}
    for name, colour in [item for legend in legends[:1] for item in legend.classes.items()]:
        if name in occur:
            names.setdefault(colour, []).append(name)
    return {" / ".join(same): colour for colour, same in names.items()}


def _weights(legends: dict[str, Legend]) -> str:
    """Which weights predict; by variant where they are not the same, in lines that fit."""
    of: dict[str, list[str]] = {}
    for name, legend in legends.items():
        of.setdefault(WEIGHTS[legend.weights], []).append(name)
    if len(of) == 1:
        return f"Predictions of {next(iter(of))}"
    lines = [f"Predictions of {which}: {', '.join(variants)}" for which, variants in of.items()]
    return "\n".join(
        textwrap.fill(line, int(WIDTH / LETTER), break_on_hyphens=False) for line in lines
    )


def _columns(names: list[str]) -> int:
    """How many entries as wide as the longest name stand side by side."""
    longest = max(map(len, names), default=0)
    return max(1, min(len(names), int(WIDTH / (0.5 + LETTER * longest))))


def _add_legend(
    figure: "Figure", colours: dict[str, tuple[int, int, int]], columns: int, title: str
) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=(r / 255, g / 255, b / 255), edgecolor=GREY, linewidth=0.4, label=name)
        for name, (r, g, b) in colours.items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, title=title)


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
