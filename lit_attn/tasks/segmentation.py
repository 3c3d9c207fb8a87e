"""Semantic segmentation, with mmsegmentation's own loss and inference.

Shapes: logits (K, h, w) float for K classes; labels and predictions (h, w) int64, labels IGNORED
where a pixel has none. Batches are mmsegmentation's (lit_attn.data.ade20k).
"""

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, distributed
from torch.nn import functional as F
from torchmetrics import Metric

from lit_attn.cells.records import Legend
from lit_attn.config.data.segmentation import IGNORED
from lit_attn.config.metrics import NAMES
from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Rate
from lit_attn.data.ade20k import SceneryData
from lit_attn.tasks.base import Pictures, Task

if TYPE_CHECKING:
    from mmseg.models import EncoderDecoder

# Of the pictures that stand beside a result: how many, and the pixels that one is high at most.
PICTURES, HEIGHT = 4, 256


class Segmentation(Task):
    """Cross-entropy of labelled pixels; mmsegmentation's scores, and every class's, of each split.

    Evaluation goes over whole images or in sliding windows as the network's `test_cfg` says, at the
    size of the labels. `classes` are the classes' names.
    """

    network: "EncoderDecoder"

    def __init__(
        self,
        network: "EncoderDecoder",
        splits: list[str],
        optimizer: Optimizer,
        rate: Rate,
        classes: tuple[str, ...],
    ) -> None:
        self.classes = classes
        super().__init__(network, splits, optimizer, rate)

    def metrics_of(self, split: str) -> "Overlap":
        return Overlap(self.classes)

    def names_of(self, split: str) -> list[str]:
        return [*NAMES["segmentation"], *(f"IoU:{name}" for name in self.classes)]

    def compile_network(self) -> None:
        """What mmsegmentation calls as modules: the encoder, and the decoder's layers."""
        self.network.backbone.compile()
        for layer in self.network.decode_head.layers:
            layer.compile()

    def loss(self, batch: Any) -> Tensor:
        """The mean over the labelled pixels of the whole batch, whatever share a device has."""
        given = self._prepared(batch, training=True)
        losses = self.network.loss(**given)
        mean: Tensor = sum(value for name, value in losses.items() if "loss" in name)
        if self.trainer.world_size == 1:
            return mean
        labelled = sum(
            (sample.gt_sem_seg.data != IGNORED).sum() for sample in given["data_samples"]
        )
        everywhere = labelled.clone()
        distributed.all_reduce(everywhere)
        # Gradients are averaged over devices.
        return mean * labelled * self.trainer.world_size / everywhere.clamp(min=1)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """The first window of the image."""
        height, width = self.network.test_cfg.crop_size
        return (self._prepared(batch, training=False)["inputs"][..., :height, :width],)

    def measured(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The prediction, the labels and -log p of the labels, of a batch of one image."""
        (sample,) = self.predict(batch)
        labels = sample.gt_sem_seg.data.long()
        logits = sample.seg_logits.data[None]
        nll = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return sample.pred_sem_seg.data[0], labels[0], nll[0]

    def predict(self, batch: Any) -> list[Any]:
        """mmsegmentation's inference: its samples with `seg_logits` and `pred_sem_seg`."""
        samples: list[Any] = self.network.predict(**self._prepared(batch, training=False))
        return samples

    def pictures(self, data: SceneryData, device: torch.device, averaged: bool) -> Pictures:
        """An image, its labels and the prediction side by side, in the set's colours.

        Black is what has no label.
        """
        colours = np.zeros((IGNORED + 1, 3), dtype=np.uint8)
        colours[: len(data.palette)] = data.palette
        self.to(device).eval()
        drawn, shown = [], set()
        for batch in data.sample_images(PICTURES):
            image = batch["inputs"][0].flip(0).permute(1, 2, 0).numpy()
            with torch.no_grad(), self.with_average() if averaged else contextlib.nullcontext():
                (sample,) = self.predict(batch)
            known, found = (
                part.data[0].cpu().numpy() for part in (sample.gt_sem_seg, sample.pred_sem_seg)
            )
            shown |= {*np.unique(known).tolist(), *np.unique(found).tolist()}
            height = min(HEIGHT, len(known))
            size = (round(known.shape[1] * height / len(known)), height)
            panels = [Image.fromarray(image).resize(size)]
            panels += [
                Image.fromarray(colours[labels]).resize(size, Image.Resampling.NEAREST)
                for labels in (known, found)
            ]
            drawn.append(np.concatenate([np.asarray(panel) for panel in panels], axis=1))
        self.cpu()
        legend = Legend(
            weights="averaged" if averaged else "trained",
            classes=dict(zip(self.classes, map(tuple, data.palette), strict=True)),
            shown=[name for number, name in enumerate(self.classes) if number in shown],
        )
        return Pictures(drawn, legend)

    def _prepared(self, batch: Any, training: bool) -> dict[str, Any]:
        # Only a call of its own `to` tells mmengine's preprocessor where it is.
        preprocessor = self.network.data_preprocessor.to(self.device)
        prepared: dict[str, Any] = preprocessor(dict(batch), training=training)
        return prepared


class Overlap(Metric):
    """mIoU, mAcc and aAcc as mmsegmentation's IoUMetric has them, as fractions; the mean -log p of
    labelled pixels; `IoU:<class>` of each class.

    A class that is neither labelled nor predicted anywhere has no IoU, one that is not labelled no
    accuracy; means leave it out.
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
        """Add an image's predictions, labels and -log p of them, 0 where there is no label."""
        count = len(self.classes)
        known = labels != IGNORED
        pairs = labels[known] * count + predicted[known]
        self.confusion += torch.bincount(pairs, minlength=count**2).view(count, count)
        self.total += nll.sum(dtype=torch.float64)

    def compute(self) -> dict[str, Tensor]:
        confusion = self.confusion.double()
        right, labelled, predicted = confusion.diag(), confusion.sum(1), confusion.sum(0)
        union = labelled + predicted - right
        iou = right / union
        found = {
            "mIoU": iou[union > 0].mean(),
            "mAcc": (right / labelled)[labelled > 0].mean(),
            "aAcc": right.sum() / confusion.sum(),
            "loss": self.total / confusion.sum(),
        }
        for name, value, pixels in zip(self.classes, iou, union, strict=True):
            if pixels > 0:
                found[f"IoU:{name}"] = value
        return found
