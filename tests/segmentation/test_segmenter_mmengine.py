"""The Segmenter in a configuration file of mmengine: read, dumped, and trained by its Runner."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lit_attn.extras import require_mmseg
from lit_attn.schema.errors import ConfigError
from lit_attn.segmentation.segmenter_config import SegmenterConfig

pytest.importorskip("mmseg")
require_mmseg("tests")

from mmengine.config import Config  # noqa: E402
from mmengine.registry import DefaultScope  # noqa: E402
from mmengine.runner import Runner  # noqa: E402
from mmseg.registry import MODELS  # noqa: E402

from lit_attn.segmentation import segmenter  # noqa: E402

CROP = 32
CLASSES = 3

CONFIGURATION = """
custom_imports = dict(imports=["lit_attn.segmentation.segmenter"])
default_scope = "mmseg"
segmenter = dict(
    dim=16, depth=1, heads=2, patch=8, ffn=dict(width=24), decoder_depth=1,
    attention=ATTENTION,
)
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(
        type="SegDataPreProcessor", mean=[127.5] * 3, std=[127.5] * 3, bgr_to_rgb=True,
        pad_val=0, seg_pad_val=255, size=(32, 32),
    ),
    backbone=dict(type="AttentionViT", model=segmenter, crop=32),
    decode_head=dict(type="AttentionMaskHead", model=segmenter, num_classes=3),
    test_cfg=dict(mode="slide", crop_size=(32, 32), stride=(32, 32)),
)
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type="BaseSegDataset", data_root="ROOT", img_suffix=".png", seg_map_suffix=".png",
        data_prefix=dict(img_path="images", seg_map_path="labels"),
        metainfo=dict(classes=("sky", "tree", "road")),
        pipeline=[
            dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"),
            dict(type="PackSegInputs"),
        ],
    ),
)
train_cfg = dict(by_epoch=False, max_iters=2)
optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=0.001))
randomness = dict(seed=0)
work_dir = "ROOT/work"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with four images and their labels."""
    generator = np.random.default_rng(0)
    for name, shape in (("images", (CROP, CROP, 3)), ("labels", (CROP, CROP))):
        (tmp_path / name).mkdir()
        for index in range(4):
            pixels = generator.integers(0, 255 if name == "images" else CLASSES, shape)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / name / f"{index}.png")
    return tmp_path


def read(folder: Path, attention: Any) -> Config:
    text = CONFIGURATION.replace("ATTENTION", repr(attention)).replace("ROOT", str(folder))
    path = folder / "segmenter.py"
    path.write_text(text)
    return Config.fromfile(path)


@pytest.mark.parametrize("attention", ["belief2", {"preset": "mgk", "zz": True}])
def test_a_configuration_file_is_dumped_and_builds_the_same_network(
    folder: Path, attention: Any
) -> None:
    config = read(folder, attention)
    config.dump(folder / "dumped.py")
    again = Config.fromfile(folder / "dumped.py")
    assert "AttentionViT" in again.pretty_text
    options = config.segmenter.to_dict()
    model = SegmenterConfig.model_validate(options)
    expected = segmenter.build(model, (3, CROP, CROP), CLASSES).eval()
    with DefaultScope.overwrite_default_scope("mmseg"):
        built = MODELS.build(again.model).eval()
    built.load_state_dict(expected.state_dict())
    images = torch.randn(1, 3, CROP, CROP)
    assert torch.equal(built(images), expected(images))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_runner_of_mmengine_trains_it(folder: Path) -> None:
    config = read(folder, "belief2")
    runner = Runner.from_cfg(config)
    before = {name: value.clone() for name, value in runner.model.state_dict().items()}
    runner.train()
    changed = {
        name
        for name, value in runner.model.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert any("backbone.vit.blocks.0.attn.residual" in name for name in changed)
    assert any("decode_head.layers.0.attn.qkv" in name for name in changed)
    assert list((folder / "work").glob("*.pth"))
    dumped = next((folder / "work").glob("*/vis_data/config.py"))
    assert "belief2" in dumped.read_text()


@pytest.mark.parametrize("part", ["AttentionViT", "AttentionMaskHead"])
def test_a_mistake_in_a_configuration_is_one_line(part: str) -> None:
    values = {"type": f"mmseg.{part}", "model": {"dim": 16, "attenton": "belief2"}}
    values |= {"crop": 32} if part == "AttentionViT" else {"num_classes": 3}
    with pytest.raises(ConfigError, match=rf"{part}: model.*attenton.*attention") as caught:
        MODELS.build(values)
    assert "\n" not in str(caught.value)
