"""Tests of `replace_attention` on the backbones of mmsegmentation."""

from typing import Any

import pytest
import torch
from helpers.replaced_models import assert_refused, layers
from torch import Tensor, nn

from lit_attn import replace_attention
from lit_attn.extras import require_mmseg

pytest.importorskip("mmseg")
require_mmseg("tests")

from mmseg.registry import MODELS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid")

VIT = {"img_size": 32, "patch_size": 8, "embed_dims": 16, "num_layers": 2, "num_heads": 2}
VIT |= {"out_indices": [1]}
MIT = {"embed_dims": 8, "num_layers": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]}
MIT |= {"sr_ratios": [8, 4, 2, 1]}
SWIN = {"embed_dims": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
SWIN |= {"out_indices": (0, 1), "strides": (4, 2)}
BACKBONES: dict[str, dict[str, Any]] = {
    "VisionTransformer": VIT,
    "MixVisionTransformer": MIT,
    "SwinTransformer": SWIN,
    "BEiT": VIT,
    "MAE": VIT | {"init_values": 0.1},
}
SIZES = {"MixVisionTransformer": 64, "SwinTransformer": 40}
"""Sizes of the images, if not 32; Swin pads and shifts windows of 10 x 10 tokens."""

OWN_VALUE = "its keys belong to another sequence: residual: .* uses the value of the query's own"


def make(name: str, **changes: Any) -> nn.Module:
    """Return a backbone in float64 with disturbed weights and large logits."""
    torch.manual_seed(0)
    model: nn.Module = MODELS.build({"type": f"mmseg.{name}", **BACKBONES[name], **changes})
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter += 0.3 * torch.randn_like(parameter)
            if parameter.ndim > 1 and ("attn" in path or "w_msa" in path):
                parameter *= 3
    # The `eval` of some models of mmsegmentation returns nothing.
    model.double().eval()
    return model


def make_images(name: str) -> Tensor:
    size = SIZES.get(name, 32)
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("is_tracked", [True, False])
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_computes_the_same(name: str, is_tracked: bool) -> None:
    """mmcv passes transposed views of one tensor; a reduced map of keys is cross-attention."""
    images = make_images(name)
    with torch.set_grad_enabled(is_tracked):
        expected = make(name)(images)
        model = replace_attention(make(name), "standard")
        ours = model(images)
    assert len(layers(model)) >= 2
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BACKBONES)
def test_every_weight_of_another_mechanism_is_trained(name: str) -> None:
    model = replace_attention(make(name), "mgk")
    sum(out.square().sum() for out in model(make_images(name))).backward()
    prefixes = tuple(layers(model))
    gradients = {}
    for path, parameter in model.named_parameters():
        if path.startswith(prefixes):
            gradients[path] = parameter.grad
    assert gradients
    assert [path for path, gradient in gradients.items() if gradient is None] == []


def test_a_backbone_that_does_not_fit_is_refused_with_its_path() -> None:
    vit = replace_attention(make("VisionTransformer"), "belief2")
    assert vit(make_images("VisionTransformer"))[0].isfinite().all()
    mit = make("MixVisionTransformer")
    assert_refused(mit, "belief2", rf"layers\.0\.1\.0\.attn\.attn \(.*\): {OWN_VALUE}")
    # Without reduced maps, it is self-attention.
    mit = replace_attention(make("MixVisionTransformer", sr_ratios=[1, 1, 1, 1]), "belief2")
    assert all(out.isfinite().all() for out in mit(make_images("MixVisionTransformer")))


@pytest.mark.parametrize("name", ["SwinTransformer", "BEiT"])
def test_a_position_bias_refuses_attention_without_logits(name: str) -> None:
    message = r"\((WindowMSA|BEiTAttention)\): 'linear' attention has"
    assert_refused(make(name), "linear", message)
