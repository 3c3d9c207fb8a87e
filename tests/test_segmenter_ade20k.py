"""The Segmenter trains on, and predicts, real images in ADE20K's layout.

The annotations at hand are not of the images that stand beside them, so a prediction can only show
what was learned by heart.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image

from lit_attn.attention.spec import preset
from lit_attn.config.model import FFN
from lit_attn.config.segmentation import Ade20k, CategoryCrop, Rescale, Segmenter
from lit_attn.data.ade20k import EvaluationLoader, SceneryData, pipeline
from lit_attn.models import segmenter

if TYPE_CHECKING:
    from mmseg.datasets import BaseSegDataset

pytest.importorskip("mmseg")

ADE20K = Path(__file__).parents[2] / "shared" / "data" / "ade20k" / "ADEChallengeData2016"

pytestmark = pytest.mark.skipif(not ADE20K.is_dir(), reason="no ADE20K images at hand")


def evaluate(
    network: torch.nn.Module, data: SceneryData, pictures: Path | None = None
) -> dict[str, float]:
    """mmsegmentation's scores in the sliding windows over the training images, as fractions."""
    from mmseg.evaluation import IoUMetric

    areas = []
    network.eval()
    for index, batch in enumerate(EvaluationLoader(data, trained_on(data))):
        given = network.data_preprocessor(batch)
        with torch.no_grad():
            (found,) = network.predict(given["inputs"], given["data_samples"])
        predicted, known = found.pred_sem_seg.data[0], found.gt_sem_seg.data[0]
        assert predicted.shape == known.shape
        areas.append(IoUMetric.intersect_and_union(predicted, known, 150, 255))
        if pictures is not None:
            draw(batch["inputs"][0], known, predicted, data, pictures / f"{index}.png")
    network.train()
    totals = [sum(parts) for parts in zip(*areas, strict=True)]
    scores = IoUMetric.total_area_to_metrics(*totals, ["mIoU"])
    return {"mIoU": float(np.nanmean(scores["IoU"])), "aAcc": float(scores["aAcc"])}


def trained_on(data: SceneryData) -> "BaseSegDataset":
    """The training images as evaluation sees images: whole and in their order."""
    from mmseg.datasets import ADE20KDataset

    return ADE20KDataset(
        data_root=str(data.root),
        data_prefix={"img_path": "images/training", "seg_map_path": "annotations/training"},
        pipeline=pipeline(data.data, augmented=False),
    )


def draw(
    image: torch.Tensor,
    known: torch.Tensor,
    predicted: torch.Tensor,
    data: SceneryData,
    path: Path,
) -> None:
    """The image (3, h, w, BGR), its labels and the prediction, side by side."""
    colours = np.array([*data.palette, *[[0, 0, 0]] * 106], dtype=np.uint8)
    seen = Image.fromarray(image.numpy()[::-1].transpose(1, 2, 0)).resize(known.shape[::-1])
    parts = [np.asarray(seen), colours[known.numpy()], colours[predicted.numpy()]]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(parts, axis=1)).save(path)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["standard", "belief2"])
def test_sgd_overfits_real_pairs_and_the_mean_iou_climbs(attention: str, tmp_path: Path) -> None:
    """All seven training images as one batch; the prediction is made at their full size."""
    chosen = Ade20k(
        root=ADE20K,
        crop=64,
        short_side=64,
        batch_size=7,
        workers=0,
        augment=(Rescale(ratio=(1, 1)), CategoryCrop(most=1.0)),
    )
    data = SceneryData(chosen, seed=0)
    torch.manual_seed(0)
    model = Segmenter(
        attention=preset(attention),
        dim=64,
        depth=4,
        heads=4,
        patch=8,
        ffn=FFN(width=128),
        drop_path=0.0,
        decoder_depth=1,
        decoder_dropout=0.0,
    )
    network = segmenter.build(model, chosen.image_shape, 150)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, nesterov=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    (batch,) = data.train_dataloader()
    before = evaluate(network, data)
    for _ in range(100):
        given = network.data_preprocessor(dict(batch), training=True)
        loss = network.loss(**given)["decode.loss_ce"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
    after = evaluate(network, data, tmp_path)
    assert before["mIoU"] < 0.02
    assert after["mIoU"] > 0.2
    assert after["aAcc"] > 0.7
    assert len(list(tmp_path.glob("*.png"))) == 7
