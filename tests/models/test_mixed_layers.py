"""Tests of models whose layers have different mechanisms (docs/layers.md)."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import gpt_cases, studies
from helpers.paths import ROOT
from torch import nn

from lit_attn.ablate.variants import Variant
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.models import factory, language, translation, vit
from lit_attn.models.base import FFN, Model
from lit_attn.models.language import SequenceClassifierConfig
from lit_attn.models.translation import EncoderDecoderConfig
from lit_attn.models.vit import ImageViTConfig, ViTConfig
from lit_attn.replace import replace_attention
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.segmentation.segmenter_config import SegmenterConfig
from lit_attn.signatures import ImageMasks

SIZES: dict[str, Any] = {"dim": 16, "depth": 3, "heads": 2, "ffn": FFN(width=24)}
LAST_IS_XSA = AttentionSpec.model_validate({"layers": {"last": 1, "use": "xsa"}})

EXPERIMENT = studies.EXPERIMENT.replace("depth: 1", "depth: 4")


def spec_of(written: Any) -> AttentionSpec:
    return AttentionSpec.model_validate(written)


def residuals(written: Any, depth: int = 4) -> list[str]:
    return [spec.residual.kind for spec in spec_of(written).by_layer(depth)]


def layer_specs(network: nn.Module) -> list[AttentionSpec]:
    return [module.spec for module in network.modules() if isinstance(module, Attention)]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["standard", "xsa", "standard", "xsa"], [1, 3]),
        ([{"use": "standard"}, "standard", "standard", {"residual": "perpendicular"}], [3]),
        ({"first": 2, "use": "xsa"}, [0, 1]),
        ({"last": 3, "use": "xsa"}, [1, 2, 3]),
        ({"every": 2, "use": "xsa"}, [1, 3]),
        ({"every": 2, "start": 1, "use": "xsa"}, [0, 2]),
        ({"every": 3, "use": "xsa"}, [2]),
        ([{"last": 2, "use": "xsa"}, {"every": 4, "use": "standard"}], [2]),
    ],
)
def test_lists_and_rules_choose_layers(layers: Any, expected: list[int]) -> None:
    kinds = residuals({"layers": layers})
    assert [number for number, kind in enumerate(kinds) if kind == "perpendicular"] == expected


def test_a_mapping_changes_the_shared_mechanism_and_a_preset_replaces_it() -> None:
    spec = spec_of(
        {
            "preset": "xsa",
            "window": 8,
            "layers": [{"last": 2, "use": {"window": None}}, {"last": 1, "use": "dcmha"}],
        }
    )
    first, second, third = spec.by_layer(3)
    assert first == PRESETS["xsa"].model_copy(update={"window": 8})
    assert second == PRESETS["xsa"]
    assert third == PRESETS["dcmha"]


def test_one_mechanism_keeps_its_identity_and_layers_are_part_of_it() -> None:
    assert PRESETS["xsa"].by_layer(2) == (PRESETS["xsa"],) * 2
    assert spec_of("xsa").identity() == {"residual": {"kind": "perpendicular", "scope": "head"}}
    identities = [
        spec_of({"layers": {"last": last, "use": use}}).identity_json()
        for last, use in [(1, "xsa"), (2, "xsa"), (1, "dcmha")]
    ]
    assert len(set(identities)) == 3


@pytest.mark.parametrize(
    "written",
    [
        {
            "preset": "mgk",
            "layers": [{"last": 1, "use": {"window": 4}}, {"first": 1, "use": "xsa"}],
        },
        {"layers": ["standard", "belief2"]},
    ],
)
def test_a_dumped_specification_is_read_as_the_same(written: Any) -> None:
    spec = spec_of(written)
    assert AttentionSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert AttentionSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("{layers: [xsa, standard]}", "attention.layers: 2 mechanisms for a model of 4 layers"),
        ("{layers: {last: 5, use: xsa}}", "attention.layers.0.last: 5 exceeds the 4 layers"),
        ("{layers: {every: 2, start: 6, use: xsa}}", "layers.0.start: 6 exceeds the 4 layers"),
        ("{layers: []}", "layers: is empty"),
        ("{layers: {last: 1}}", "layers.0.use: this key is required"),
        (
            "{layers: {every: 1, use: standard}}",
            "layers: the last rule names all layers; write its",
        ),
        ("{layers: [{last: 1, use: xsa}, {every: 1, start: 1, use: mgk}]}", "names all layers"),
        ("{layers: {last: 2, use: standard}}", "layers: the rules have the mechanism of the other"),
        ("{preset: xsa, layers: {last: 2, use: xsa}}", "layers: the rules have the mechanism of"),
        ("{layers: {last: 1, every: 2, use: xsa}}", "a rule has one of first, last and every"),
        ("{layers: {first: 1, start: 2, use: xsa}}", "start: is the first layer of `every`"),
        ("{layers: [xsa, {last: 1, use: xsa}]}", "layers: has rules .* and mechanisms"),
        ("{layers: {last: 1, use: xxsa}}", "layers.0.use: 'xxsa' is not a preset; did you mean"),
        ("{layers: {lsat: 1, use: xsa}}", "layers.0.lsat: unknown key 'lsat'; did you mean 'last'"),
        ("{layers: {last: 1, use: {layers: [xsa]}}}", "use: is the mechanism of one layer"),
        ("{layers: {last: 1, use: {kv_heads: 3}}}", "attention.kv_heads: 3 key heads do not"),
        ("{residual: nope, layers: {last: 1, use: {window: 2}}}", "residual: 'nope' is not"),
    ],
)
def test_wrong_layers_are_refused_in_one_line(tmp_path: Path, attention: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        studies.variants(
            tmp_path, f"baseline: a\ncells: {{a: {{}}, b: {{attention: {attention}}}}}", EXPERIMENT
        )
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "ablations.yaml") + ":8: tiny")


def test_local_self_attention_is_checked_in_every_layer() -> None:
    layers = spec_of({"layers": {"last": 1, "use": "linear"}})
    with pytest.raises(ValueError, match="local_self_attention: linear keys"):
        ViTConfig(**SIZES, patch=4, local_self_attention=True, attention=layers)


def test_windows_are_refused_for_a_linear_layer_only() -> None:
    layers = spec_of({"layers": {"last": 1, "use": "linear"}})
    with pytest.raises(ValueError, match="windows: not supported by linear keys"):
        gpt_cases.config("nanogpt", attention=layers, windows=(4,))
    gpt_cases.config("nanogpt", attention=layers, windows=(4, None, None))


def test_positions_of_every_layer_limit_the_tokens() -> None:
    limited = {"similarity": {"kind": "mixture", "prior_scope": "position", "positions": 8}}
    layers = spec_of({"layers": {"last": 1, "use": limited}})
    model = gpt_cases.config("nanogpt", attention=layers, positions="rotary")
    assert language.GPT(model, gpt_cases.VOCABULARY, 16, "meta").trunk.max_tokens == 8


def variant(tmp_path: Path, override: str, base: str = "standard") -> Variant:
    experiment = EXPERIMENT.replace("patch: 4,", f"patch: 4, attention: {base},")
    body = f"baseline: a\ncells: {{a: {{}}, b: {{{override}}}}}"
    return studies.variants(tmp_path, body, experiment)["b"]


@pytest.mark.parametrize(
    ("base", "override", "expected"),
    [
        ("standard", "layers: {last: 1, use: xsa}", [3]),
        ("{layers: {first: 1, use: xsa}}", "layers: {last: 1, use: xsa}", [3]),
        ("{layers: {first: 1, use: xsa}}", "attention.layers: null", []),
        ("{layers: {first: 1, use: xsa}}", "attention: standard", []),
        ("{layers: {first: 1, use: xsa}}", "attention: {zz: true}", [0]),
        ("{layers: {first: 1, use: {zz: true}}}", "residual: perpendicular", [0, 1, 2, 3]),
    ],
)
def test_variants_replace_layers_and_change_what_they_share(
    tmp_path: Path, base: str, override: str, expected: list[int]
) -> None:
    specs = variant(tmp_path, override, base).experiment.model.attention.by_layer(4)
    perpendicular = [n for n, spec in enumerate(specs) if spec.residual.kind == "perpendicular"]
    assert perpendicular == expected


def test_parameters_and_flops_count_every_layer(tmp_path: Path) -> None:
    chosen = variant(tmp_path, "layers: {every: 2, use: belief2}")
    data = chosen.experiment.data

    def cost(attention: Any) -> factory.Budget:
        model = chosen.experiment.model.model_copy(update={"attention": spec_of(attention)})
        return factory.describe(model, data)

    standard = cost("standard")
    belief2 = cost("belief2")
    mixed = cost({"layers": {"every": 2, "use": "belief2"}})
    assert 2 * mixed.parameters == standard.parameters + belief2.parameters
    assert 2 * mixed.flops == standard.flops + belief2.flops
    matched = factory.resolve(chosen.experiment.model, chosen.match_to, data)
    assert matched.ffn is not None
    assert matched.ffn.width is not None
    assert matched.ffn.width < 32


def vision_transformer(model: Any) -> nn.Module:
    build = vit.build if isinstance(model, ViTConfig) else vit.build_image_vit
    return build(model, (3, 16, 16), 5)


NETWORKS = {
    "vit": lambda spec: vision_transformer(ViTConfig(**SIZES, patch=4, attention=spec)),
    "image-vit": lambda spec: vision_transformer(ImageViTConfig(**SIZES, patch=4, attention=spec)),
    "gpt": lambda spec: gpt_cases.network("nanogpt", attention=spec),
    "sequence-classifier": lambda spec: language.SequenceClassifier(
        SequenceClassifierConfig(**SIZES, attention=spec), 20, 8, 3
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_model_has_the_mechanism_of_each_layer(name: str) -> None:
    specs = [PRESETS["standard"], PRESETS["standard"], PRESETS["xsa"]]
    assert layer_specs(NETWORKS[name](LAST_IS_XSA)) == specs


def test_equal_layers_are_those_of_a_single_mechanism() -> None:
    torch.manual_seed(0)
    single = NETWORKS["vit"](PRESETS["belief2"])
    torch.manual_seed(0)
    listed = NETWORKS["vit"](spec_of({"layers": ["belief2"] * 3}))
    states = zip(single.state_dict().items(), listed.state_dict().items(), strict=True)
    for (name, expected), (listed_name, value) in states:
        assert listed_name == name
        assert torch.equal(value, expected)


def test_encoder_decoder_has_layers_in_both_parts_and_in_cross_attention() -> None:
    model = EncoderDecoderConfig(**SIZES, attention=LAST_IS_XSA, cross_attention=PRESETS["dcmha"])
    network = translation.EncoderDecoder(model, 20, 8)
    standard, xsa, dcmha = (PRESETS[name] for name in ("standard", "xsa", "dcmha"))
    assert layer_specs(network.encoder) == [standard, standard, xsa]
    assert layer_specs(network.decoder) == [standard, dcmha, standard, dcmha, xsa, dcmha]


def test_cross_attention_refuses_a_layer_without_a_meaning() -> None:
    with pytest.raises(ValueError, match=r"attention.residual: 'perpendicular' .* cross-attention"):
        EncoderDecoderConfig(**SIZES, attention=LAST_IS_XSA)


def test_segmenter_has_layers_in_its_encoder() -> None:
    with pytest.raises(ValueError, match=r"decoder_attention: attention.layers are those of the"):
        SegmenterConfig(depth=3, dim=24, attention=LAST_IS_XSA)
    pytest.importorskip("mmseg")
    model = SegmenterConfig(
        depth=3, dim=24, attention=LAST_IS_XSA, decoder_attention="standard", decoder_depth=1
    )
    specs = layer_specs(model.build(ImageMasks((3, 32, 32), 4, 255), "meta"))
    assert [spec.residual.kind for spec in specs] == ["full", "full", "perpendicular", "full"]


def test_windows_come_from_the_model_and_from_the_layers() -> None:
    layers = spec_of({"window": 3, "layers": {"every": 3, "use": {"window": None}}})
    network = gpt_cases.network("nanogpt", attention=layers)
    assert [spec.window for spec in layer_specs(network)] == [3, 3, None]


@pytest.mark.parametrize(
    "layers",
    [
        ["linear", "standard", "dcmha"],
        [{"window": 4}, {"kv_heads": 1}, "belief2"],
        {"every": 3, "use": {"preset": "forgetting"}},
    ],
    ids=["mechanisms", "shapes", "rule"],
)
def test_decoding_equals_the_full_sequence(layers: Any) -> None:
    network = gpt_cases.network("nanogpt", attention=spec_of({"layers": layers}))
    gpt_cases.assert_decodes(network, [5, 6, 7])


def test_differential_attention_knows_the_depth_of_its_layer() -> None:
    layers = spec_of({"layers": ["differential", "standard", "differential"]})
    expected = {0: 0.2, 2: 0.8 - 0.6 * 0.5488116360940264}
    networks = [
        NETWORKS["vit"](layers),
        gpt_cases.network("nanogpt", attention=layers, heads=4),
        replace_attention(tiny_timm(depth=3), layers),
    ]
    for network in networks:
        modules = [module for module in network.modules() if isinstance(module, Attention)]
        for number, value in expected.items():
            assert modules[number].normaliser.lambda_init == pytest.approx(value)


def tiny_timm(depth: int = 4) -> nn.Module:
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": depth, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **sizes).eval()


def test_replacement_gives_each_layer_its_mechanism() -> None:
    model = tiny_timm()
    images = torch.randn(2, 3, 16, 16)
    expected = model(images)
    split = {"residual": {"kind": "split", "activation": "identity", "init": "copy"}}
    replace_attention(model, {"layers": {"every": 2, "use": split}})
    kinds = [spec.residual.kind for spec in layer_specs(model)]
    assert kinds == ["full", "split", "full", "split"]
    torch.testing.assert_close(model(images), expected)


def test_replacement_counts_the_layers_that_it_replaces() -> None:
    model = tiny_timm()
    replace_attention(model, {"layers": ["differential", "xsa"]}, only=["blocks.1", "blocks.3"])
    assert [spec.residual.kind for spec in layer_specs(model)] == ["full", "perpendicular"]
    with pytest.raises(ConfigError, match="replace_attention: layers: 1 mechanism for a model of"):
        replace_attention(tiny_timm(), {"layers": ["xsa"]})


def test_one_class_of_layers_refuses_mechanisms_that_differ() -> None:
    with pytest.raises(ConfigError, match=r"attn_layer: attention.layers: one class cannot build"):
        attn_layer(LAST_IS_XSA)


def test_every_model_with_a_depth_checks_its_layers() -> None:
    with_depth = [
        member
        for member in Model.family.values()
        if "depth" in member.model_fields and member.__module__.startswith("lit_attn.")
    ]
    wrong = spec_of({"layers": ["standard", "standard"]})
    for member in with_depth:
        sizes = SIZES | ({"patch": 4} if "patch" in member.model_fields else {})
        with pytest.raises(ValueError, match=r"attention.layers: 2 mechanisms for a model of 3"):
            member(**sizes, attention=wrong)


def test_examples_of_the_page_are_variants(tmp_path: Path) -> None:
    """The YAML of docs/layers.md on layers, as the cells of a study."""
    page = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    section = page.partition("\n## ")[0]
    (cells,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    body = "baseline: xsa-last\ncells:\n" + textwrap.indent(cells, "  ")
    variants = studies.variants(tmp_path, body, EXPERIMENT)
    specs = {
        name: variant.experiment.model.attention.by_layer(4) for name, variant in variants.items()
    }
    assert [spec.residual.kind for spec in specs["xsa-last"]] == ["full", *["perpendicular"] * 3]
    dcmha = [spec == PRESETS["dcmha"] for spec in specs["dcmha-every-second"]]
    assert dcmha == [False, True, False, True]
    assert [spec.window for spec in specs["windows"]] == [16, 16, 16, None]
    assert [spec.window for spec in specs["windows-but-the-first"]] == [None, 16, 16, None]
    assert [spec.window for spec in specs["listed"]] == [None, None, 16, None]
    assert specs["listed"][3] == PRESETS["belief2"]


def test_the_example_of_positions_on_the_page_is_a_model() -> None:
    page = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    section = page.partition("## Positions per layer")[2]
    example = parse_plain(section.partition("```yaml\n")[2].partition("```")[0], "text")["model"]
    model = Model.family[example["kind"]].model_validate(example)
    assert len(model.rotations) == model.depth == 6
