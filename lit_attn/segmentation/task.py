"""Semantic segmentation, with mmsegmentation's own loss and inference.

Shapes: logits (K, h, w) float for K classes; labels and predictions (h, w) int64; the label of
pixels without a class is IGNORED. Batches are mmsegmentation's (lit_attn.segmentation.data).
"""

import contextlib
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torchmetrics import Metric

from lit_attn.cells.legend import Legend
from lit_attn.segmentation.data import SceneryData
from lit_attn.segmentation.label_masks import IGNORED
from lit_attn.segmentation.task_config import SegmentationConfig
from lit_attn.tasks.base import TaskModule
from lit_attn.tasks.pictures import (
    NO_LABEL,
    Pictures,
    choose_colours,
    choose_empty_colour,
    draw_picture,
)

if TYPE_CHECKING:
    from mmseg.models import EncoderDecoder


class Segmentation(TaskModule):
    """Cross-entropy of labelled pixels; mmsegmentation's scores and the IoU of every class.

    Evaluation is at the size of the labels, on whole images or in sliding windows, as the network's
    `test_cfg` says.
    """

    config: SegmentationConfig
    network: "EncoderDecoder"
    network_methods = ("loss", "predict")
    data: SceneryData

    def build_metrics(self, split: str) -> "Overlap":
        return Overlap(self.data.classes)

    def metric_names(self, split: str) -> list[str]:
        names = ["mIoU", "mAcc", "aAcc", "loss"]
        names += [f"IoU:{name}" for name in self.data.classes]
        return names

    def list_compiled(self) -> list[nn.Module]:
        """Return the modules that mmsegmentation calls: the encoder and the decoder's layers.

        A head of mmsegmentation without attention has no layers and is not compiled.
        """
        return [self.network.backbone, *getattr(self.network.decode_head, "layers", [])]

    def loss(self, batch: Any) -> Tensor:
        """Return the mean over the labelled pixels of the batch on all devices together."""
        prepared = self._prepared(batch, training=True)
        losses = self.network.loss(**prepared)
        # The sum of the losses of all heads; mmsegmentation returns accuracies beside them.
        mean: Tensor
        mean, _ = self.network.parse_losses(losses)
        if self.trainer.world_size == 1:
            return mean
        samples = prepared["data_samples"]
        labelled = sum((sample.gt_sem_seg.data != IGNORED).sum() for sample in samples)
        total = labelled.clone()
        distributed.all_reduce(total)
        # DDP and FSDP average the gradients over devices.
        return mean * labelled * self.trainer.world_size / total.clamp(min=1)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Return the first window of the image, of the size of a training window."""
        crop = self.data.data.crop
        return (self._prepared(batch, training=False)["inputs"][..., :crop, :crop],)

    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return prediction, labels and -log p of the labels for a batch of one image."""
        (sample,) = self.predict(batch)
        labels = sample.gt_sem_seg.data.long()
        logits = sample.seg_logits.data[None]
        nll = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return sample.pred_sem_seg.data[0], labels[0], nll[0]

    def unit_values(self, *arguments: Tensor) -> Tensor:
        predicted, labels, nll = arguments
        is_labelled = labels != IGNORED
        correct = (predicted == labels)[is_labelled].sum()
        return torch.stack([nll.sum(), is_labelled.sum(), correct]).float()[None]

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the predicted and the true classes of the labelled pixels."""
        predicted, labels, _ = evaluated
        is_labelled = labels != IGNORED
        return predicted[is_labelled], labels[is_labelled]

    def predict(self, batch: Any) -> list[Any]:
        """Return mmsegmentation's samples with `seg_logits` and `pred_sem_seg`."""
        return self.network.predict(**self._prepared(batch, training=False))

    @torch.no_grad()
    def draw_pictures(self, most: int, has_averaged: bool) -> Pictures | None:
        """Return pictures of image, labels and prediction in the colours of the data set."""
        count = min(most, self.config.pictures)
        if count == 0:
            return None
        palette = self.data.colours or choose_colours(len(self.data.classes))
        empty = choose_empty_colour(palette)
        colours = np.full((256, 3), empty, dtype=np.uint8)
        colours[: len(palette)] = palette
        drawn = []
        shown: set[int] = set()
        self.eval()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.evaluation_context())
            if has_averaged and self.average is not None:
                stack.enter_context(self.averaged_network(self.average))
            for batch in self.data.sample_images(count):
                (sample,) = self.predict(batch)
                labels = sample.gt_sem_seg.data[0].cpu().numpy().astype(np.uint8)
                prediction = sample.pred_sem_seg.data[0].cpu().numpy().astype(np.uint8)
                # OpenCV reads the channels in the order blue, green, red.
                image = batch["inputs"][0].flip(0).permute(1, 2, 0).numpy()
                drawn.append(draw_picture(image, labels, prediction, colours))
                shown.update(np.unique(labels).tolist(), np.unique(prediction).tolist())
        classes = dict(zip(self.data.classes, palette, strict=True))
        names = [name for number, name in enumerate(self.data.classes) if number in shown]
        if IGNORED in shown:
            classes[NO_LABEL] = empty
            names.append(NO_LABEL)
        weights: Literal["trained", "averaged"] = "averaged" if has_averaged else "trained"
        return Pictures(drawn, Legend(weights=weights, classes=classes, shown=names))

    def _prepared(self, batch: Any, training: bool) -> dict[str, Any]:
        """Return the batch on the device, normalised and padded by mmsegmentation."""
        # mmengine's preprocessor learns its device only from a call of its own method `to`.
        preprocessor = self.network.data_preprocessor.to(self.device)
        return preprocessor(dict(batch), training=training)


class Overlap(Metric):
    """mIoU, mAcc and aAcc of mmsegmentation's IoUMetric as fractions, the IoU of each class, loss.

    The loss is the mean -log p of labelled pixels. A class that is neither labelled nor predicted
    has no IoU, and a class that is not labelled has no accuracy; the means leave these out.
    """

    confusion: Tensor
    total: Tensor

    def __init__(self, classes: tuple[str, ...]) -> None:
        super().__init__()
        self.classes = classes
        square = torch.zeros(len(classes), len(classes), dtype=torch.int64)
        self.add_state("confusion", square, dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, labels: Tensor, nll: Tensor) -> None:
        """Add predictions, labels and -log p of one image; -log p is 0 where there is no label."""
        count = len(self.classes)
        labelled = labels != IGNORED
        pairs = labels[labelled] * count + predicted[labelled]
        self.confusion += torch.bincount(pairs, minlength=count**2).view(count, count)
        self.total += nll.sum(dtype=torch.float64)

    def compute(self) -> dict[str, Tensor]:
        confusion = self.confusion.double()
        correct = confusion.diag()
        labelled = confusion.sum(1)
        predicted = confusion.sum(0)
        union = labelled + predicted - correct
        iou = correct / union
        values = {
            "mIoU": iou[union > 0].mean(),
            "mAcc": (correct / labelled)[labelled > 0].mean(),
            "aAcc": correct.sum() / confusion.sum(),
            "loss": self.total / confusion.sum(),
        }
        for name, value, pixels in zip(self.classes, iou, union, strict=True):
            if pixels > 0:
                values[f"IoU:{name}"] = value
        return values
