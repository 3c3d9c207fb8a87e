"""FFN widths of timm's models that have no argument for them, so that parameters can match."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import timm
import torch
from torch import nn

from lit_attn.attention.spec import PRESETS
from lit_attn.data.base import Data
from lit_attn.models import factory
from lit_attn.models.seeded_draws import by_shape
from lit_attn.replace.ffn_resize import resize_ffns
from lit_attn.replace.timm_models import TimmConfig
from lit_attn.signatures import ImageLabels

IMAGES = ImageLabels((3, 240, 240), 5)
DATA = cast("Data", SimpleNamespace(signature=lambda: IMAGES))
MODELS: dict[str, dict[str, Any]] = {
    "caformer_s18": {},
    "crossvit_9_240": {},
    "fastvit_sa12": {"embed_dims": (16, 16, 32, 32), "layers": (1, 1, 1, 1)},
    "mobilevit_xxs": {},
    "pvt_v2_b0": {},
}
FIRST = {
    "caformer_s18": 256,
    "crossvit_9_240": 384,
    "fastvit_sa12": 64,
    "mobilevit_xxs": 128,
    "pvt_v2_b0": 256,
}
"""Hidden units of the first FFN."""


def make_timm(name: str, **changes: Any) -> TimmConfig:
    return TimmConfig.model_validate({"name": name, "arguments": MODELS.get(name, {})} | changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_parameters_match_where_timm_has_no_ratio_of_all_ffns(name: str) -> None:
    standard = make_timm(name)
    # Belief2 has no meaning for pooled keys.
    preset = "mgk" if name.startswith("pvt") else "belief2"
    other = standard.model_copy(update={"attention": PRESETS[preset]})
    target = factory.count(factory.build(standard, DATA, "meta"))
    before = factory.count(factory.build(other, DATA, "meta"))
    matched = factory.resolve(other, standard, DATA)
    after = factory.count(factory.build(matched, DATA, "meta"))
    assert before != target
    assert abs(after - target) < min(abs(before - target), 0.01 * target)
    assert matched.ffn is not None
    assert matched.ffn.width not in (None, FIRST[name])
    assert factory.describe(matched, DATA).ffn_width == matched.ffn.width


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_ffns_have_one_factor_and_the_network_still_computes(name: str) -> None:
    before, after = (
        model.build(IMAGES, "meta").eval()
        for model in (make_timm(name), make_timm(name).with_width(FIRST[name] // 2))
    )
    shapes = dict(before.named_parameters())
    changed = {n: p for n, p in after.named_parameters() if p.shape != shapes[n].shape}
    assert changed
    assert all(2 * p.numel() == shapes[n].numel() for n, p in changed.items())
    names = {"fc1", "fc2"} | ({"dwconv"} if name.startswith("pvt") else set())
    assert {n.split(".")[-2] for n in changed} == names
    out = after(torch.empty(2, 3, 240, 240, device="meta"))
    assert out.shape == (2, 5)
    out.sum().backward()
    assert all(p.grad is not None and p.shape == p.grad.shape for p in changed.values())


def test_a_width_that_the_model_has_changes_nothing() -> None:
    torch.manual_seed(0)
    before = make_timm("crossvit_9_240").build(IMAGES).state_dict()
    torch.manual_seed(0)
    after = make_timm("crossvit_9_240").with_width(384).build(IMAGES).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_new_weights_have_the_distribution_of_the_initial_ones() -> None:
    torch.manual_seed(0)
    with by_shape():
        model: Any = timm.create_model("crossvit_9_240", img_size=64)
        before = model.blocks[0].blocks[0][0].mlp.fc1.weight.detach().clone()
        resize_ffns(model, 1024)
    ffn = model.blocks[0].blocks[0][0].mlp
    assert (ffn.fc1.out_features, ffn.fc2.in_features) == (1024, 1024)
    assert ffn.fc1.weight.shape == (1024, 128)
    assert torch.isin(ffn.fc1.weight, before).all()
    assert ffn.fc1.weight.std().item() == pytest.approx(before.std().item(), rel=0.02)
    assert not torch.equal(ffn.fc1.weight[0], ffn.fc1.weight[384])
    assert not torch.equal(ffn.fc1.weight, model.blocks[1].blocks[0][0].mlp.fc1.weight)


def test_equal_seeds_draw_equal_weights_whatever_the_attention() -> None:
    values = []
    for preset in ("standard", "belief2"):
        torch.manual_seed(3)
        model = make_timm("crossvit_9_240", attention=PRESETS[preset]).with_width(100)
        values.append(model.build(IMAGES).get_parameter("blocks.0.blocks.0.0.mlp.fc2.weight"))
    assert torch.equal(*values)


def test_a_classifier_is_no_ffn() -> None:
    model: Any = timm.create_model("caformer_s18", num_classes=512)
    before = model.head.fc.fc1.weight.shape
    resize_ffns(model, 8)
    assert model.head.fc.fc1.weight.shape == before
    with pytest.raises(ValueError, match=r"ffn\.width: it has no FFN .*; set `match: none`"):
        resize_ffns(nn.Sequential(nn.Linear(3, 4)), 8)


@pytest.mark.parametrize("name", ["crossvit_9_240", "vit_tiny_patch16_224"])
def test_pretrained_weights_refuse_another_width(name: str) -> None:
    model = make_timm(name, pretrained=True)
    native = FIRST.get(name, 768)
    assert factory.count(model.with_width(native).build(IMAGES, "meta"))
    with pytest.raises(ValueError, match=r"ffn\.width: pretrained weights have another width"):
        model.with_width(native + 1).build(IMAGES, "meta")
