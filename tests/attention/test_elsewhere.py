"""Use of the layer in other code: documented calls, mappings as choices, pickles and copies."""

import copy
import multiprocessing
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.attention_checks import compute_outputs
from helpers.paths import ROOT
from torch import nn

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.attention.residual import SplitConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.schema.errors import ConfigError

IDENTITY = {"residual": {"kind": "split", "activation": "identity", "init": "copy"}}


class Mine(attn_layer("belief2")):
    """Subclass as a user would write it."""


def timm_model(chosen: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "depth": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", attn_layer=chosen, **sizes).eval()


def test_the_documented_calls_work() -> None:
    """The calls are executed as printed, without the download of pretrained weights."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert code.count("replace_attention(") == 2
    names: dict[str, Any] = {}
    first, _, second = code.replace("pretrained=True", "pretrained=False").partition("split = ")
    exec(first, names)
    assert names["model"].blocks[0].attn.layer.spec == PRESETS["belief2"]
    exec(f"split = {second}", names)
    assert names["model"].blocks[0].attn.spec == AttentionSpec(
        residual=SplitConfig(activation="identity", init="copy")
    )


@pytest.mark.parametrize(
    ("chosen", "meant"),
    [
        (
            {"residual": {"kind": "split", "activation": "silu"}},
            {"residual": SplitConfig(activation="silu")},
        ),
        ({"zz": "with", "kv_heads": 1}, {"zz": True, "kv_heads": 1}),
        ({"preset": "belief2"}, dict(PRESETS["belief2"])),
        (
            {"preset": "belief2", "residual": {"activation": "silu"}},
            {"zz": True, "residual": SplitConfig(activation="silu")},
        ),
        ({"similarity": {"kind": "mixture", "variance": [1, 3]}, "compose": "query"}, None),
        ({}, {}),
    ],
)
def test_mappings_mean_the_same_as_in_yaml(chosen: Any, meant: Any) -> None:
    layer_class = attn_layer(chosen)
    expected = AttentionSpec(**meant) if meant is not None else AttentionSpec.model_validate(chosen)
    assert layer_class.spec == expected
    assert layer_class is attn_layer(expected)
    assert layer_class(24, 3)(torch.randn(2, 5, 24)).shape == (2, 5, 24)


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        ({"residul": "full"}, "residul: unknown key 'residul'; did you mean 'residual'?"),
        (
            {"residual": "splitt"},
            "residual: 'splitt' is not a known residual; did you mean 'split'?",
        ),
        (
            {"residual": {"kind": "split", "activation": "sillu"}},
            "residual.activation: 'sillu' is not a choice; did you mean 'silu'?",
        ),
        ({"preset": "belif2"}, "'belif2' is not a preset; did you mean 'belief2'?"),
        ({3: "full"}, "3: unknown key '3'; choose from preset, similarity"),
        ("belif2", "'belif2' is not a preset; did you mean 'belief2'?"),
        (3, "needs a preset's name or a mapping, not 3"),
    ],
)
def test_an_invalid_choice_is_one_line(chosen: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        attn_layer(chosen)
    assert str(caught.value).startswith(f"attn_layer: attention: {line}")
    assert "\n" not in str(caught.value)


CHOICES = [*PRESETS, IDENTITY]


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_layers_can_be_pickled_and_copied(chosen: Any) -> None:
    spec = AttentionSpec.model_validate(chosen)
    lsa = spec.similarity.has_logits and spec.latent is None
    layer_class = attn_layer(chosen, local_self_attention=lsa)
    assert pickle.loads(pickle.dumps(layer_class)) is layer_class
    layer = layer_class(24, 4).eval()
    x = torch.randn(2, 5, 24)
    number_layers(layer)
    for again in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(again) is layer_class
        assert again.qkv.weight is not layer.qkv.weight
        torch.testing.assert_close(again(x), layer(x), rtol=0, atol=0)


def test_a_subclass_is_pickled_by_its_name() -> None:
    layer = Mine(24, 3)
    assert type(pickle.loads(pickle.dumps(layer))) is Mine
    assert type(copy.deepcopy(layer)) is Mine
    assert type(pickle.loads(pickle.dumps(Attention(24, 3)))) is Attention


@pytest.mark.parametrize(
    "chosen", ["standard", "belief2", "mgk", "mlk", "dcmha-all", IDENTITY], ids=str
)
def test_models_can_be_saved_and_loaded(chosen: Any, tmp_path: Path) -> None:
    model, images = timm_model(attn_layer(chosen)), torch.randn(2, 3, 32, 32)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(again.blocks[0].attn) is type(model.blocks[0].attn)
    for same in (again, copy.deepcopy(model)):
        torch.testing.assert_close(same(images), model(images), rtol=0, atol=0)


@pytest.mark.slow
def test_models_can_be_sent_to_a_spawned_process() -> None:
    layer_class, images = attn_layer(IDENTITY), torch.randn(2, 3, 32, 32)
    model = timm_model(layer_class)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        outputs, same = pool.apply(compute_outputs, (model, layer_class, images))
    assert same
    torch.testing.assert_close(torch.tensor(outputs).view(2, 3), model(images).detach())
