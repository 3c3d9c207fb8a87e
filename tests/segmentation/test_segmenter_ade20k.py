"""A cell trains on, and predicts, real images in ADE20K's layout.

The available annotations belong to other images, so a model can only memorise them. The cell
therefore evaluates its training images.
"""

import shutil
from pathlib import Path

import pytest
from helpers.finished_cells import train_cell
from helpers.paths import ADE20K
from helpers.training_cells import cell_of, result_of
from PIL import Image

from lit_attn.attention.spec import PRESETS
from lit_attn.cells.rows import read_metrics

pytest.importorskip("mmseg")


pytestmark = pytest.mark.skipif(not ADE20K.is_dir(), reason="no ADE20K images at hand")


def evaluate_training_images(root: Path) -> Path:
    """Return ADE20K's folder with its seven training images as evaluation images.

    Their height and width are halved, because predictions of 150 classes at full size take long.
    """
    filters = {"images": Image.Resampling.BILINEAR, "annotations": Image.Resampling.NEAREST}
    for kind, resampling in filters.items():
        copies = root / kind / "training"
        copies.mkdir(parents=True)
        for path in (ADE20K / kind / "training").iterdir():
            image = Image.open(path)
            size = (image.width // 2, image.height // 2)
            image.resize(size, resampling).save(copies / path.name)
        shutil.copytree(copies, root / kind / "validation")
    return root


@pytest.mark.slow
def test_sgd_overfits_real_pairs_and_the_mean_iou_climbs(tmp_path: Path) -> None:
    """All seven images are one batch; predictions have the size of the images."""
    experiment = {
        "task": "segmentation",
        "data": {
            "kind": "ade20k",
            "root": str(evaluate_training_images(tmp_path / "ade20k")),
            "crop": 64,
            "short_side": 64,
            "batch_size": 7,
            "workers": 0,
            "augment": [
                {"kind": "rescale", "ratio": [1, 1]},
                {"kind": "category-crop", "most": 1},
            ],
        },
        "model": {
            "kind": "segmenter",
            "attention": PRESETS["belief2"].model_dump(mode="json"),
            "dim": 64,
            "depth": 4,
            "heads": 4,
            "patch": 8,
            "ffn": {"width": 128},
            "drop_path": 0,
            "decoder_depth": 1,
            "decoder_dropout": 0,
        },
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "schedule": {"kind": "trapezoid", "warmup": 10},
        "training": {"epochs": 100, "evaluate_every": 25, "clip": 1.0, "accelerator": "cpu"},
    }
    metric = {"name": "test/mIoU", "label": "mIoU (%)"}
    folder = train_cell(cell_of(experiment, metric=metric), tmp_path / "cell")
    climbed = [
        row.value for row in read_metrics(folder / "metrics.csv") if row.name == metric["name"]
    ]
    assert len(climbed) == 4
    assert climbed[-1] > max(0.2, 2 * climbed[0])
    metrics = result_of(folder).metrics
    assert metrics["test/aAcc"] > 0.7
    assert 20 < sum(name.startswith("test/IoU:") for name in metrics) <= 150
