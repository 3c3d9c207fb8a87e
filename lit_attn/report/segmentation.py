"""Results that only a study of segmentation has: the IoU of each class."""

import pandas as pd

from lit_attn.report.columns import format_spread
from lit_attn.report.formats import Cell, Table, named_table
from lit_attn.report.read import StudyRecord


def make_class_frame(study: StudyRecord) -> pd.DataFrame:
    """Return mean and standard deviation (ddof 1) of the IoU in percent, by class and variant.

    The values belong to the split and the weights (trained or averaged) of the study's metric.
    """
    metric = study.plan.metric
    prefix = f"metric {metric.name.partition('/')[0]}/{'ema-' * metric.averaged}IoU:"
    rows = [
        (name.removeprefix(prefix), cell.variant, 100 * value)
        for cell in study.finished_cells()
        for name, value in cell.measurements.items()
        if name.startswith(prefix)
    ]
    frame = pd.DataFrame(rows, columns=["class", "variant", "iou"]).astype({"iou": float})
    groups = frame.groupby(["class", "variant"], sort=False)["iou"]
    return groups.agg(mean="mean", sd="std", n="count").reset_index()


def make_class_table(classes: pd.DataFrame) -> Table:
    """Return the class frame as a table: classes down, variants across, best means bold."""
    variants = list(dict.fromkeys(classes["variant"]))
    rows = []
    for label, values in classes.set_index("variant").groupby("class", sort=False):
        # A mean over fewer seeds than another variant's is never the best one.
        best = values.loc[values["n"] == values["n"].max(), "mean"].max()
        measured = values[["mean", "sd"]].reindex(variants).itertuples(index=False)
        cells = (Cell(format_spread(mean, sd, 2), is_bold=mean == best) for mean, sd in measured)
        rows.append([Cell(str(label)), *cells])
    return named_table("classes", rows, variants)
