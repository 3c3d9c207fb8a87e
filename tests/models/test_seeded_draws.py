"""Tests of random draws by seed and name: parameters that variants share start equal."""

import importlib
from collections.abc import Callable

import pytest
import timm
import torch
from helpers.paths import EXPERIMENTS
from torch import nn

from lit_attn.attention.spec import PRESETS
from lit_attn.models import language
from lit_attn.models.base import FFN, Model
from lit_attn.models.columns import FeatureTransformerConfig
from lit_attn.models.language import GPTConfig, SequenceClassifierConfig
from lit_attn.models.seeded_draws import by_name
from lit_attn.models.token_transformer import Init
from lit_attn.models.vit import ImageViTConfig, ViTConfig
from lit_attn.schema.plugins import load_parts
from lit_attn.segmentation.segmenter_config import SegmenterConfig
from lit_attn.signatures import ColumnLabels, ImageLabels

load_parts(
    [
        EXPERIMENTS / "imagenet_jit" / "imagenet_jit.py",
        EXPERIMENTS / "imagenet_local_vit" / "imagenet_local_vit.py",
    ]
)
jit = importlib.import_module("imagenet_jit")
local = importlib.import_module("imagenet_local_vit")

SMALL = {"dim": 16, "depth": 2, "heads": 2, "ffn": FFN(width=16)}
SWIGLU = {**SMALL, "ffn": FFN(width=16, activation="swiglu")}
SWISH = {**SMALL, "ffn": FFN(width=16, activation="hard-swish")}
TORCH = Init(matrices="torch", embedding="torch")


def images(model: Model) -> nn.Module:
    return model.build(ImageLabels((3, 16, 16), 5))


def classifier(model: SequenceClassifierConfig) -> nn.Module:
    return language.SequenceClassifier(model, 11, 8, 3, pairs=False)


FAMILIES: dict[str, tuple[Model, Callable[..., nn.Module]]] = {
    "vit-xavier": (ViTConfig(**SMALL, patch=4, init="xavier"), images),
    "vit-torch": (ViTConfig(**SMALL, patch=4, init="torch", patchify="shifted"), images),
    "vit-timm": (ViTConfig(**SMALL, patch=4, init="timm"), images),
    "imagenet-vit": (ImageViTConfig(**SMALL, patch=4), images),
    "local-vit": (local.LocalViTConfig(**SWISH, patch=4), images),
    "jit": (jit.JiTConfig(**SWIGLU, patch=4), images),
    "gpt": (GPTConfig(**SMALL), lambda model: language.GPT(model, 11, 8)),
    "gpt-torch": (
        GPTConfig(**SMALL, init=TORCH, head="untied"),
        lambda model: language.GPT(model, 11, 8),
    ),
    "sequence": (SequenceClassifierConfig(**SMALL), classifier),
    "columns": (
        FeatureTransformerConfig(**SMALL),
        lambda model: model.build(ColumnLabels(3, (4,), 5)),
    ),
}
ELSEWHERE = {"segmenter": (SegmenterConfig(**SMALL, patch=4), images)}


def started(family: str, preset: str = "standard", seed: int = 0, **changed: object) -> nn.Module:
    model, build = (FAMILIES | ELSEWHERE)[family]
    torch.manual_seed(seed)
    return build(model.model_copy(update={"attention": PRESETS[preset], **changed}))


def list_differences(ours: nn.Module, standard: nn.Module) -> list[str]:
    """Return the names of the standard network's parameters that differ in values or shape."""
    theirs = dict(ours.named_parameters())
    return [name for name, x in standard.named_parameters() if not torch.equal(theirs[name], x)]


# Every preset in one model, and in each model the presets that add most sorts of parameters.
# A latent replaces the projection of the standard layer.
CASES = [("vit-xavier", preset) for preset in PRESETS if preset != "mla"]
for family in FAMILIES:
    if family != "vit-xavier":
        CASES += [(family, preset) for preset in ("belief2", "mgk", "dcmha", "mgk-soft-e")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "preset"), CASES)
def test_a_variant_starts_as_the_standard_one(family: str, preset: str) -> None:
    assert not list_differences(started(family, preset), started(family))


@pytest.mark.parametrize("preset", ["belief-star", "belief2", "mgk", "dcmha"])
def test_a_segmenter_starts_as_the_standard_one(preset: str) -> None:
    pytest.importorskip("mmseg")
    assert not list_differences(started("segmenter", preset), started("segmenter"))


@pytest.mark.parametrize("family", FAMILIES)
def test_another_ffn_width_changes_only_the_ffn(family: str) -> None:
    model, _ = FAMILIES[family]
    ffn = model.ffn.model_copy(update={"width": 24})
    other = list_differences(started(family, ffn=ffn), started(family))
    assert other
    assert all({"mlp", "ffn"} & set(name.split(".")) for name in other)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_decides_all_initial_values(family: str) -> None:
    one, again, other = (dict(started(family, "dcmha", s).named_parameters()) for s in (0, 0, 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    random = [name for name in one if one[name].unique().numel() > 2]
    assert len(random) > len(one) / 4
    assert not any(torch.equal(one[name], other[name]) for name in random)


def test_parameters_differ_from_each_other_and_from_draw_to_draw() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(0)
    with by_name(network):
        first, second = (layer.weight.detach().clone() for layer in network)
        nn.init.uniform_(network[0].weight.flatten(), -0.5, 0.5)
    assert not torch.equal(first, second)
    assert not torch.equal(first, network[0].weight)


def test_the_state_of_torchs_generator_does_not_change() -> None:
    """The construction of a network does not affect later random draws."""
    network = nn.Linear(4, 4)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with by_name(network):
        nn.init.normal_(network.weight)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "model",
    [ViTConfig(**SMALL | {"dim": 128}, patch=4), ImageViTConfig(**SMALL | {"dim": 128}, patch=4)],
)
def test_the_timm_initialisation_equals_that_of_timm(model: Model) -> None:
    """Matrices are N(0, 0.02), biases zero; the patch embedding keeps PyTorch's default."""
    torch.manual_seed(0)
    published = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=4,
        embed_dim=128,
        depth=2,
        num_heads=2,
        mlp_ratio=0.125,
        num_classes=5,
    )
    ours = dict(images(model).named_parameters())
    for name, parameter in published.named_parameters():
        if name.endswith("qkv.bias") and not getattr(model, "qkv_bias", True):
            continue
        assert ours[name].shape == parameter.shape
        expected = pytest.approx(parameter.std().item(), rel=0.2)
        if parameter.numel() > 200:
            assert ours[name].std().item() == expected, name
        elif name.endswith("bias") and "patch" not in name:
            assert not ours[name].any(), name


def test_the_distribution_is_the_initialisers_own() -> None:
    network = nn.Linear(300, 300)
    with by_name(network):
        pass
    assert network.weight.abs().max() <= 300**-0.5
    assert network.weight.std().item() == pytest.approx((300 * 3) ** -0.5, rel=0.02)
    with by_name(network):
        nn.init.trunc_normal_(network.weight, std=0.02)
    assert network.weight.std().item() == pytest.approx(0.02, rel=0.02)
