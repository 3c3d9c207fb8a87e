"""Tests of the groups of weight decay: those of docs/weight-decay.md, over all submodules."""

import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
import timm
import torch
from helpers.paths import ROOT
from torch import nn

from lit_attn import replace_attention
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.config.experiment import Experiment, find_exempt
from lit_attn.extras import require_mmseg
from lit_attn.models.columns import FeatureTransformerConfig
from lit_attn.models.language import GPTConfig, SequenceClassifierConfig
from lit_attn.models.translation import EncoderDecoderConfig
from lit_attn.models.vit import ImageViTConfig, ViTConfig
from lit_attn.optim.standard import SGD, AdamW
from lit_attn.segmentation.segmenter_config import SegmenterConfig
from lit_attn.signatures import (
    CausalTokens,
    ColumnLabels,
    ImageLabels,
    ImageMasks,
    LabelledTokens,
    ParallelTokens,
)

PAGE = (ROOT / "docs" / "weight-decay.md").read_text(encoding="utf-8")
RULES = ("matrices", "weights")
SPECS: dict[str, Any] = {
    **dict.fromkeys(PRESETS),
    "differential": {"normaliser": "differential"},
    "learned-variance": {"similarity": {"kind": "mixture", "variance": "learned"}},
    "positions": {
        "similarity": {"kind": "mixture", "prior_scope": "position", "source": "shifted"}
    },
    "zz": {"zz": True},
    "static": {"compose": "static"},
}


def read_page() -> list[tuple[list[str], dict[str, bool]]]:
    """Return the patterns of each row, and whether their parameters decay under each rule."""
    rows = re.findall(r"^\| (`[^|]*) \| [^|]* \| (yes|no) \| (yes|no) \| [^|]+ \|$", PAGE, re.M)
    return [
        (re.findall(r"`([^`]+)`", names), {"matrices": m == "yes", "weights": w == "yes"})
        for names, m, w in rows
    ]


def read_groups(network: nn.Module, **choices: Any) -> dict[str, bool]:
    """Return whether each trainable parameter decays."""
    optimizer = AdamW(lr=1e-3, weight_decay=0.1, **choices).build(network, fused=False)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert names[id(parameter)] not in groups
            groups[names[id(parameter)]] = group["weight_decay"] > 0
    trainable = {name for name, p in network.named_parameters() if p.requires_grad}
    assert groups.keys() == trainable
    return groups


def find_rows(name: str) -> list[dict[str, bool]]:
    """Return the rows that describe a parameter; the first one decides."""
    return [
        decays
        for patterns, decays in read_page()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def assert_as_page(network: nn.Module) -> None:
    for rule in RULES:
        for name, is_decayed in read_groups(network, decay=rule).items():
            rows = find_rows(name)
            assert rows, f"{name} is in no row of docs/weight-decay.md"
            assert is_decayed is rows[0][rule], f"{name} with {rule}"


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_of_every_part_decays_as_the_page_says(name: str) -> None:
    spec = PRESETS.get(name) or AttentionSpec.model_validate(SPECS[name])
    with torch.device("meta"):
        for local in (False, True):
            is_plain = spec.similarity.has_logits and spec.latent is None
            if local and (spec.window or not is_plain):
                continue
            layer = attn_layer(spec, local_self_attention=local)(16, 4, qkv_bias=True)
            assert_as_page(nn.ModuleDict({"attn": layer}))


SMALL: dict[str, Any] = {"dim": 16, "depth": 1, "heads": 2, "ffn": {"width": 8}}
MODELS: dict[str, tuple[Any, Any]] = {
    "image-vit": (ImageViTConfig(**SMALL, patch=4), ImageLabels((3, 16, 16), 4)),
    "vit": (ViTConfig(**SMALL, patch=4), ImageLabels((3, 16, 16), 4)),
    "gpt": (GPTConfig(**SMALL), CausalTokens(20, 8)),
    "gpt-swiglu": (
        GPTConfig(
            **SMALL | {"ffn": {"width": 8, "activation": "swiglu"}}, qk_norm=True, bias="all"
        ),
        CausalTokens(20, 8),
    ),
    "classifier": (SequenceClassifierConfig(**SMALL), LabelledTokens(20, 8, 3)),
    "columns": (FeatureTransformerConfig(**SMALL), ColumnLabels(2, (3,), 4)),
    "encoder-decoder": (EncoderDecoderConfig(**SMALL), ParallelTokens(20, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_every_model_decays_as_the_page_says(name: str) -> None:
    model, signature = MODELS[name]
    assert_as_page(model.build(signature, "meta"))


def test_positions_and_class_tokens_of_the_segmenter_do_not_decay() -> None:
    pytest.importorskip("mmseg")
    require_mmseg("tests")
    model = SegmenterConfig(**SMALL, patch=8, decoder_depth=1)
    network = model.build(ImageMasks((3, 32, 32), 5, 255), "meta")
    groups = read_groups(network, decay="weights")
    exempt = {name for name, p in network.named_parameters() if p.ndim > 1 and not groups[name]}
    tokens = {"backbone.vit.cls_token", "backbone.vit.pos_embed", "decode_head.cls_emb"}
    assert exempt == tokens
    assert_as_page(network)


def test_declarations_of_submodules_and_of_timm_are_respected() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.strength = nn.Parameter(torch.ones(2, 1, 1))
            self.weights = nn.ParameterList([torch.ones(2, 2), torch.ones(2, 2)])

        def no_weight_decay(self) -> set[str]:
            return {"strength", "weights.*"}

    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (1, 1)}
    swin = timm.create_model("swin_tiny_patch4_window7_224", num_heads=(2, 4), **sizes)
    network = nn.ModuleDict({"gate": Gate(), "swin": replace_attention(swin, "mgk")})
    groups = read_groups(network, decay="weights")
    assert not any(groups[name] for name in groups if name.startswith("gate."))
    tables = [name for name in groups if "relative_position_bias_table" in name]
    priors = [name for name in groups if name.endswith("similarity.prior")]
    assert len(tables) == len(priors) == 2
    assert not any(groups[name] for name in (*tables, *priors))
    assert groups["swin.layers.0.blocks.0.mlp.fc1.weight"]


def test_positions_of_transformers_do_not_decay() -> None:
    transformers = pytest.importorskip("transformers")
    from lit_attn.replace.transformers_models import Logits

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": 20}
    exempt = {
        "bert": ["model.embeddings.position_embeddings.weight"],
        "gpt2": ["model.wpe.weight"],
        "vit": ["model.embeddings.cls_token", "model.embeddings.position_embeddings"],
    }
    for kind, names in exempt.items():
        changes = {"n_embd": 16, "n_head": 2, "n_layer": 1} if kind == "gpt2" else sizes
        config = transformers.AutoConfig.for_model(kind, **changes)
        with torch.device("meta"):
            network = Logits(transformers.AutoModel.from_config(config), lambda model, x: model(x))
        groups = read_groups(network, decay="weights")
        matrices = [name for name, p in network.named_parameters() if p.ndim > 1]
        assert sorted(name for name in matrices if not groups[name]) == names


def test_frozen_parameters_have_no_group() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].requires_grad_(False)
    for rule in ("all", *RULES):
        assert len(read_groups(network, decay=rule)) == 2


def test_the_other_rules_decay_everything() -> None:
    layer = attn_layer("mgk")(16, 4)
    assert all(read_groups(layer, decay="all").values())
    groups = SGD(lr=0.1, weight_decay=0.1).build(layer, fused=False).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1]


CASES: list[tuple[str, str, list[str]]] = [
    ("mgk", "all", []),
    ("mgk", "matrices", []),
    ("mgk", "weights", ["prior"]),
    ("smgk", "weights", ["prior", "shift"]),
    ("mgk-hard", "weights", []),
    ("gaussian", "weights", []),
    ("standard", "weights", []),
    ("dcmha", "weights", []),
    ("differential", "all", []),
    ("differential", "matrices", ["vectors"]),
    ("differential", "weights", ["vectors"]),
]


@pytest.mark.parametrize(("name", "rule", "expected"), CASES)
def test_an_identity_names_the_parameters_whose_group_has_changed(
    name: str, rule: str, expected: list[str]
) -> None:
    """Cells of earlier versions decayed them, so their results are others."""
    spec = PRESETS.get(name) or AttentionSpec.model_validate(SPECS[name])
    model = ViTConfig(**SMALL | {"heads": 4}, patch=4, attention=spec)
    assert find_exempt(model, rule) == expected
    experiment = Experiment.model_validate(
        {
            "data": {"kind": "digits"},
            "model": {"kind": "vit", **SMALL, "heads": 4, "patch": 4, "attention": spec},
            "optimizer": {"kind": "adamw", "lr": 1e-3, "decay": rule},
            "training": {"epochs": 1},
        }
    )
    assert experiment.identity().get("no_weight_decay", []) == expected
    # The names are those of parameters with two or more axes.
    layer = attn_layer(spec)(16, 4)
    shapes = {parameter.rpartition(".")[2]: p.ndim for parameter, p in layer.named_parameters()}
    assert all(shapes[parameter] > 1 for parameter in expected)


def test_an_identity_names_positions_and_class_tokens() -> None:
    assert find_exempt(GPTConfig(**SMALL), "weights") == ["positions"]
    assert find_exempt(GPTConfig(**SMALL, positions="rotary"), "weights") == []
    assert find_exempt(GPTConfig(**SMALL), "matrices") == []
    segmenter = SegmenterConfig(**SMALL, patch=8)
    assert find_exempt(segmenter, "weights") == ["cls_emb", "cls_token", "pos_embed"]
