"""Configuration of the task of segmentation, as far as YAML and a dry run need to know."""

from typing import Annotated

from pydantic import Field

from lit_attn import signatures
from lit_attn.schema.base import outside_identity
from lit_attn.tasks.metrics import MetricInfo, percent
from lit_attn.tasks.task import MOST_PICTURES, Task


class SegmentationConfig(Task, kind="segmentation"):
    """Semantic segmentation with mmsegmentation's loss and inference."""

    takes = (signatures.ImageMasks,)
    module = "lit_attn.segmentation.task:Segmentation"
    predicts = ("classes", "classes")

    pictures: Annotated[int, Field(ge=0, le=MOST_PICTURES)] = outside_identity(
        4,
        "evaluated images whose labels and predictions are drawn after the training, spread evenly "
        "over the first split; 0: none",
    )

    def metrics(self, signature: signatures.ImageMasks) -> tuple[MetricInfo, ...]:
        # A star stands for the names of classes that only the files know.
        names = signature.names or ("*",)
        class_metrics = [percent(f"IoU:{name}", f"IoU of {name}") for name in names]
        return (
            percent("mIoU", "mIoU"),
            percent("mAcc", "mean class accuracy"),
            percent("aAcc", "pixel accuracy"),
            MetricInfo("loss", "loss (nats)"),
            *class_metrics,
        )
