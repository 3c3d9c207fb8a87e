"""The Runner of mmengine and this project's runner compute the same losses in float64.

Both train the Segmenter of this package, from one configuration file and from one experiment, with
the same images in the same order, the same initial weights and the same optimiser.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.paths import ADE20K
from helpers.training_cells import cell_of, folder_of
from PIL import Image
from torch import Tensor

from lit_attn.config.cell import Cell
from lit_attn.extras import require_mmseg
from lit_attn.segmentation.data import SceneryData
from lit_attn.segmentation.task import Segmentation
from lit_attn.tasks.base import TaskModule
from lit_attn.train import run_cell

pytest.importorskip("mmseg")
require_mmseg("tests")

from mmengine.config import Config  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402
from mmengine.registry import DATA_SAMPLERS, HOOKS  # noqa: E402
from mmengine.runner import Runner  # noqa: E402

CROP = 32
BATCH = 2
IMAGES = 6
STEPS = 6
LR = 3e-3

MODEL: dict[str, Any] = {
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "patch": 8,
    "ffn": {"width": 24},
    "drop_path": 0.0,
    "decoder_depth": 1,
    "decoder_dropout": 0.0,
}

CONFIGURATION = """
custom_imports = dict(imports=["lit_attn.segmentation.segmenter"])
default_scope = "mmseg"
segmenter = {model}
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        type="SegDataPreProcessor", mean=[127.5] * 3, std=[127.5] * 3, bgr_to_rgb=True,
        pad_val=0, seg_pad_val=255, size=(32, 32),
    ),
    backbone=dict(type="AttentionViT", model=segmenter, crop=32),
    decode_head=dict(type="AttentionMaskHead", model=segmenter, num_classes={classes}),
    test_cfg=dict(mode="slide", crop_size=(32, 32), stride=(32, 32)),
)
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    sampler=dict(type="ListedOrder", order={order}),
    dataset=dict(
        type="BaseSegDataset", data_root="{root}", img_suffix="{suffix}", seg_map_suffix=".png",
        data_prefix=dict(img_path="images/training", seg_map_path="annotations/training"),
        metainfo=dict(classes=tuple(str(number) for number in range({classes}))),
        reduce_zero_label=True,
        pipeline=[
            dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"),
            dict(type="PackSegInputs"),
        ],
    ),
)
train_cfg = dict(by_epoch=False, max_iters={steps})
optim_wrapper = dict(
    type="OptimWrapper", optimizer=dict(type="AdamW", lr={lr}, weight_decay=0.05),
)
custom_hooks = [dict(type="LossRecorder")]
default_hooks = dict(checkpoint=None, logger=None)
work_dir = "{work}"
"""


@DATA_SAMPLERS.register_module(force=True)
class ListedOrder:
    """Sampler of images in a listed order."""

    def __init__(self, dataset: Any, order: list[int], seed: int | None = None) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


@HOOKS.register_module(force=True)
class LossRecorder(Hook):
    """Hook that disturbs the initial weights, and records them and the loss of each step."""

    losses: list[float]
    start: dict[str, Tensor]

    def before_train(self, runner: Any) -> None:
        """Record the weights after the Runner has initialised the model."""
        self.losses = []
        with torch.no_grad():
            # Without noise the logits would be nearly equal.
            for parameter in runner.model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        self.start = {name: value.clone() for name, value in runner.model.state_dict().items()}

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.losses.append(outputs["loss"].item())


def shrink_ade20k(root: Path) -> Path:
    """Write ADE20K's samples as images of one window, so that neither side cuts them at random."""
    for split in ("training", "validation"):
        for kind, suffix, method in (
            ("images", ".jpg", Image.Resampling.BILINEAR),
            ("annotations", ".png", Image.Resampling.NEAREST),
        ):
            folder = root / kind / split
            folder.mkdir(parents=True)
            for path in sorted((ADE20K / kind / split).glob(f"*{suffix}"))[:IMAGES]:
                Image.open(path).resize((CROP, CROP), method).save(folder / path.name)
    return root


def make_cell(data: dict[str, Any], attention: str) -> Cell:
    experiment = {
        "task": {"kind": "segmentation", "pictures": 0},
        "data": {
            "crop": CROP,
            "short_side": CROP,
            "batch_size": BATCH,
            "workers": 0,
            "augment": [{"kind": "category-crop", "most": 1}],
            **data,
        },
        "model": {"kind": "segmenter", "attention": {"preset": attention}, **MODEL},
        "optimizer": {"kind": "adamw", "lr": LR, "weight_decay": 0.05},
        "training": {"epochs": STEPS * BATCH // IMAGES, "accelerator": "cpu"},
    }
    return cell_of(experiment, metric={"name": "test/mIoU"})


def train_with_mmengine(
    data: SceneryData, attention: str, folder: Path
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss of each step of mmengine's Runner, and the initial weights."""
    order: list[int] = []
    for step in range(STEPS):
        order += [index for index, _, _ in data.samples(step)]
    text = CONFIGURATION.format(
        model={**MODEL, "attention": attention},
        classes=len(data.classes),
        order=order,
        root=data.root,
        suffix=Path(data.train.pairs[0][0]).suffix,
        steps=STEPS,
        lr=LR,
        work=folder / "work",
    )
    path = folder / "segmenter.py"
    path.write_text(text)
    runner = Runner.from_cfg(Config.fromfile(path))
    runner.model.double()
    runner.train()
    (recorder,) = [hook for hook in runner.hooks if isinstance(hook, LossRecorder)]
    dataset = runner.train_dataloader.dataset
    paths = [dataset.get_data_info(index)["img_path"] for index in range(len(dataset))]
    assert [Path(path).name for path in paths] == [Path(pair[0]).name for pair in data.train.pairs]
    return recorder.losses, recorder.start


def train_with_this_project(
    cell: Cell, start: dict[str, Tensor], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Return the loss of each step of a cell in float64 with the initial weights `start`."""
    losses: list[float] = []
    configure = TaskModule.configure_optimizers
    compute = Segmentation.loss

    def begin(task: TaskModule) -> Any:
        task.double()
        task.network.load_state_dict(start)
        return configure(task)

    def record(task: Segmentation, batch: Any) -> Tensor:
        loss = compute(task, batch)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(TaskModule, "configure_optimizers", begin)
    monkeypatch.setattr(Segmentation, "loss", record)
    run_cell(folder_of(cell, folder / "cell"))
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "attention"), [("scenes", "standard"), ("scenes", "belief2"), ("ade20k", "belief2")]
)
def test_both_runners_compute_the_same_losses(
    kind: str, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "ade20k":
        if not ADE20K.is_dir():
            pytest.skip("no ADE20K images at hand")
        options = {"kind": kind, "root": str(shrink_ade20k(tmp_path / "ade20k"))}
    else:
        options = {"kind": kind, "root": str(tmp_path / "scenes")}
        options |= {"training_images": IMAGES, "evaluation_images": 1}
    cell = make_cell(options, attention)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        L.seed_everything(0, verbose=False)
        data = SceneryData(cell.experiment.data, cell.seed, torch.device("cpu"))
        theirs, start = train_with_mmengine(data, attention, tmp_path)
        ours = train_with_this_project(cell, start, tmp_path, monkeypatch)
    finally:
        torch.set_default_dtype(before)
    assert len(theirs) == STEPS
    assert len(set(theirs)) == STEPS
    assert ours == pytest.approx(theirs, rel=1e-12)
