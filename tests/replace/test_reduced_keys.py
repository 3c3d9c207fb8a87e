"""Layers whose keys belong to fewer tokens than their queries: SegFormer, PVT v2 and Twins."""

from typing import Any

import pytest
import timm
import torch
import transformers
from helpers.replaced_models import assert_refused, layers
from torch import Tensor, nn

from lit_attn import replace_attention

SIZES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "sr_ratios": [8, 4, 2, 1]}
SIZES |= {"num_attention_heads": [1, 2, 2, 4], "mlp_ratios": [2, 2, 2, 2], "num_labels": 5}
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)).double()


def make_segformer() -> Any:
    config = transformers.SegformerConfig(**SIZES, decoder_hidden_size=16)
    return transformers.SegformerForSemanticSegmentation(config)


def make_pvt(linear: bool = False) -> Any:
    config = transformers.PvtV2Config(**SIZES, image_size=64, linear_attention=linear)
    return transformers.PvtV2ForImageClassification(config)


def make_timm_pvt() -> nn.Module:
    options = {"embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4)}
    model: nn.Module = timm.create_model("pvt_v2_b0", num_classes=5, **options)
    return model


def make_twins(name: str = "twins_svt_small", depth: int = 2) -> nn.Module:
    """Return a small Twins with the published reduction ratios 8, 4, 2 and 1."""
    options = {"embed_dims": (8, 16, 16, 32), "depths": (depth,) * 4, "num_heads": (1, 2, 2, 4)}
    model: nn.Module = timm.create_model(name, img_size=64, num_classes=5, **options)
    return model


MODELS: dict[str, tuple[Any, str, str]] = {
    "segformer": (
        make_segformer,
        "segformer.stages.[0-2]",
        "segformer.stages.0.blocks.0.attention",
    ),
    "pvt_v2": (make_pvt, "*.layers.[0-2]", "pvt_v2.encoder.layers.0.blocks.0.attention"),
    "linear pvt_v2": (
        lambda: make_pvt(linear=True),
        "",
        "pvt_v2.encoder.layers.0.blocks.0.attention",
    ),
    "timm pvt_v2": (make_timm_pvt, "stages.[0-2]", "stages.0.blocks.0.attn"),
    "twins": (make_twins, "blocks.[0-2].1", "blocks.0.1.attn"),
    "twins pcpvt": (
        lambda: make_twins("twins_pcpvt_small", depth=1),
        "blocks.[0-2]",
        "blocks.0.0.attn",
    ),
}
"""Each model, the layers that reduce their keys, and the path of the first of them."""

NEEDS_OWN_TOKEN = ["belief", "belief-star", "belief2", "xsa", {"zz": True}]
NEEDS_OWN_TOKEN += [{"residual": {"kind": "split", "activation": "silu"}}]


def make(name: str) -> Any:
    """Return a model in float64, with attention weights that are five times as large."""
    torch.manual_seed(0)
    model = MODELS[name][0]().double().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter += 0.05 * torch.randn_like(parameter)
            if "attn" in path or "attention" in path:
                parameter *= 5 if parameter.ndim == 2 else 1
    return model


def compute(model: Any) -> Tensor:
    with torch.no_grad():
        output = model(IMAGES)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_reduced_keys_computes_the_same(name: str) -> None:
    model = make(name)
    expected = compute(model)
    replace_attention(model, "standard")
    assert len(layers(model)) >= 4
    torch.testing.assert_close(compute(model), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mechanism", NEEDS_OWN_TOKEN, ids=str)
def test_a_mechanism_of_the_query_s_own_token_is_refused(name: str, mechanism: Any) -> None:
    """The values of a reduced map belong to no single token."""
    path = MODELS[name][2].replace(".", r"\.")
    reason = r"its keys belong to (reduced|pooled) tokens: ((?!cross_attention`).)*"
    assert_refused(make(name), mechanism, rf"{path} \(\w+\): {reason}; name it in `skip`")


@pytest.mark.parametrize("name", [name for name in MODELS if name != "linear pvt_v2"])
def test_the_layers_with_reduced_keys_can_be_left_out(name: str) -> None:
    model = make(name)
    expected = compute(model)
    replace_attention(model, "belief2", skip=MODELS[name][1])
    assert layers(model)
    assert not torch.allclose(compute(model), expected)


@pytest.mark.parametrize("name", ["segformer", "pvt_v2", "timm pvt_v2"])
def test_every_weight_of_another_mechanism_is_trained(name: str) -> None:
    model = replace_attention(make(name), "mgk")
    output = model(IMAGES)
    logits = output if isinstance(output, Tensor) else output.logits
    logits.square().sum().backward()
    prefixes = tuple(layers(model))
    for path, parameter in model.named_parameters():
        if path.startswith(prefixes):
            assert parameter.grad is not None, path


@pytest.mark.parametrize("name", ["segformer", "pvt_v2"])
def test_weights_are_not_returned(name: str) -> None:
    model = replace_attention(make(name), "standard")
    with pytest.raises(ValueError, match="`output_attentions`: a replaced layer returns no weig"):
        model(IMAGES, output_attentions=True)
