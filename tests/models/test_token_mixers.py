"""Tests of layers of users in the place of attention (docs/mixers.md)."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import gpt_cases, studies
from torch import Tensor, nn

from lit_attn.ablate import match
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.mixer import InputCache, TokenMixer
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models import factory, translation
from lit_attn.models.base import FFN
from lit_attn.models.own_trial import MixerTrial, Use
from lit_attn.models.translation import EncoderDecoderConfig
from lit_attn.models.vit import ViTConfig
from lit_attn.replace import replace_attention
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ImageLabels

SIZES: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "ffn": FFN(width=24)}


class Averages(nn.Module):
    """Mean of all tokens, or with `is_causal` of those up to the own one, without padding."""

    def __init__(self, dim: int, heads: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((heads, 1), scale))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, is_causal: bool = False, present: Tensor | None = None) -> Tensor:
        counted = torch.ones(x.shape[:2], device=x.device) if present is None else present.to(x)
        values = self.proj(x) * counted.unsqueeze(-1)
        heads = values.unflatten(-1, (len(self.scale), -1)) * self.scale
        values = heads.flatten(2)
        if is_causal:
            return values.cumsum(1) / counted.cumsum(1).clamp_min(1).unsqueeze(-1)
        return (values.sum(1, keepdim=True) / counted.sum(1)[:, None, None]).expand_as(x)


class Both(Averages):
    """Averages in both directions."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Noisy(Averages):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + torch.randn_like(x)


class Mixed(Averages):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + x.mean(0, keepdim=True)


class Narrow(Averages):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[..., 1:]


class Unused(Averages):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.proj(x)


class Cut(Averages):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.detach())


class Late(Averages):
    """Causal, but one token too late: token t sees token t + 1."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.roll(-1, 1), is_causal=True)


class Needy(Averages):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return x + positions


class Failing(Averages):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("no kernel")


class Float32(Averages):
    """Layer whose output is infinite in half precision."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) / (self.proj(x).dtype == torch.float32)


class Normed(Averages):
    """Layer with a norm over batch and tokens, which are those of the future too."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.norm = nn.BatchNorm1d(dim)

    def forward(  # type: ignore[override]
        self, x: Tensor, is_causal: bool = False, present: Tensor | None = None
    ) -> Tensor:
        return super().forward(self.norm(x.mT).mT, is_causal, present)


class Relative(Averages):
    """Causal layer with weights that depend on the number of tokens of the call."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        ages = torch.arange(1, x.shape[1] + 1) / x.shape[1]
        return super().forward(x * ages.unsqueeze(-1), is_causal=True)


class Fixed(Averages):
    """Causal layer that takes twelve tokens only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * torch.ones(12, 1), is_causal=True)


class Sized(Averages):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * len(x)


class Paired(Averages):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x), None  # type: ignore[return-value]


class Single(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)


class Dropped(Averages):
    """Sound layer with dropout."""

    def forward(  # type: ignore[override]
        self, x: Tensor, is_causal: bool = False, present: Tensor | None = None
    ) -> Tensor:
        dropped = nn.functional.dropout(x, 0.5, self.training)
        return super().forward(dropped, is_causal, present)


class TrainedWithFuture(Averages):
    """Layer that sees later tokens in training only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, is_causal=not self.training)


class Declared(Averages):
    """Layer with FLOPs of its own, which cannot run on the meta device."""

    def forward(  # type: ignore[override]
        self, x: Tensor, is_causal: bool = False, present: Tensor | None = None
    ) -> Tensor:
        if x.is_meta:
            raise RuntimeError("the kernel needs values")
        return super().forward(x, is_causal, present)

    def flops(self, tokens: int) -> int:
        return 1000 * tokens


class Wrapped(nn.Module):
    """Layer of a user that contains a layer of this package."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.layer = attn_layer("standard")(dim, heads)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


def mixer(name: str = "Averages", **arguments: Any) -> dict[str, Any]:
    return {"kind": "module", "import": f"{__name__}:{name}", "arguments": arguments}


def spec_of(written: Any) -> AttentionSpec:
    return AttentionSpec.model_validate(written)


def use(name: str, is_causal: bool = False, has_padding: bool = False) -> Use:
    return Use(spec_of(mixer(name)), 8, 2, 12, is_causal, has_padding)


def test_a_class_is_called_with_width_heads_and_arguments() -> None:
    layer = attn_layer(mixer(scale=3.0))(8, 2)
    assert isinstance(layer, TokenMixer)
    assert layer.layer.scale.shape == (2, 1)
    assert layer.layer.scale.unique().item() == 3
    assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 8)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sound_layer_passes_the_trial(is_causal: bool) -> None:
    for precision in ("fp32", "bf16"):
        MixerTrial(use("Averages", is_causal, has_padding=True)).run(precision)


@pytest.mark.parametrize(
    ("name", "needs", "message"),
    [
        ("Both", {"is_causal": True}, "needs causal order, but a later token changes an earlier"),
        ("Late", {"is_causal": True}, "needs causal order, but a later token changes an earlier"),
        ("Both", {"has_padding": True}, "the data have padding, which changes the outputs"),
        ("Noisy", {}, "two evaluations of one input differ"),
        ("Mixed", {}, "a sample of a batch changes the output of another sample"),
        ("Narrow", {}, r"must return the shape of its tokens, \(2, 12, 8\), but .* \(2, 12, 7\)"),
        ("Normed", {}, "in training a sample of a batch changes the output of another sample"),
        ("TrainedWithFuture", {"is_causal": True}, "in training .*a later token changes"),
        ("Relative", {"is_causal": True}, "the first 6 of 12 tokens have other outputs without"),
        ("Fixed", {"is_causal": True}, "for tokens 2 x 6 x 8: RuntimeError: "),
        ("Sized", {}, "the size of the batch changes the output of a sample"),
        ("Paired", {}, "must return a tensor, not tuple"),
        ("Unused", {}, "its output does not depend on its parameter `scale`"),
        ("Cut", {}, "its output does not depend on its tokens"),
        ("Failing", {}, "for tokens 2 x 12 x 8.*RuntimeError: no kernel"),
        ("Float32", {}, "returns numbers that are not finite in bfloat16"),
    ],
)
def test_a_layer_without_a_needed_property_is_refused(
    name: str, needs: dict[str, bool], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        MixerTrial(use(name, **needs)).run("bf16")
    assert str(caught.value).startswith(f"attention: {__name__}:{name} ({__file__}:")
    assert "\n" not in str(caught.value)


def test_a_property_that_no_task_needs_is_not_required() -> None:
    MixerTrial(use("Dropped", is_causal=True, has_padding=True)).run("fp32")
    MixerTrial(use("Fixed")).run("fp32")
    MixerTrial(use("Relative")).run("fp32")
    MixerTrial(use("Both")).run("fp32")
    MixerTrial(use("Float32")).run("fp32")


def test_causal_layers_need_no_mask_for_padding_at_the_end() -> None:
    causal = spec_of(mixer("Averages"))
    MixerTrial(Use(causal, 8, 2, 12, is_causal=True, has_padding=True)).run("fp32")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (mixer() | {"window": 3}, "window: is a part of attention"),
        (mixer() | {"zz": True}, "zz: is a part of attention"),
        ({"kind": "modul"}, "kind: unknown kind 'modul'"),
        (mixer() | {"argumnets": {}}, "unknown key 'argumnets'; did you mean 'arguments'?"),
        ({"kind": "module", "improt": "a:B"}, "unknown key 'improt'; did you mean 'import'?"),
        (mixer() | {"xyz": {}}, "unknown key 'xyz'; choose from import, arguments"),
        ({"kind": "module"}, "mixer.import: this key is required"),
        ({"import": "a:B"}, "import: unknown key 'import'"),
        (mixer() | {"layers": {"last": 1, "use": {"window": 3}}}, "window: is a part of"),
    ],
)
def test_wrong_keys_are_refused(written: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attn_layer(written)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (mixer("Nothing"), "has no 'Nothing'"),
        (
            {"kind": "module", "import": f"{__name__}:Single"},
            rf"arguments: .*Single \({__file__}:\d+\), called as Single\(8, 2, \.\.\.\): T",
        ),
        (mixer(size=3), r"arguments: .*Averages.*unexpected keyword argument 'size'"),
        (mixer("Needy"), "its forward needs an argument `positions`"),
        (mixer() | {"import": "os:system"}, "os:system is not a subclass of torch.nn.Module"),
    ],
)
def test_wrong_classes_are_refused(written: Any, message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        attn_layer(written)(8, 2)


def test_a_specification_is_dumped_hashed_and_pickled() -> None:
    spec = spec_of(mixer(scale=2.0) | {"layers": {"last": 1, "use": "xsa"}})
    assert AttentionSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.needs_foreign_code
    assert spec_of({"layers": ["standard", mixer()]}).needs_foreign_code
    assert not spec_of("xsa").needs_foreign_code
    assert hash(spec_of(mixer())) == hash(spec_of(mixer()))
    assert spec_of(mixer()).identity() == {
        "mixer": {"target": f"{__name__}:Averages"},
    }
    layer = attn_layer(mixer())(8, 2)
    x = torch.randn(1, 4, 8)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), layer(x))


@pytest.mark.parametrize("layers", [None, {"every": 2, "use": "standard"}], ids=["all", "hybrid"])
def test_a_language_model_decodes_with_the_layer(layers: Any) -> None:
    network = gpt_cases.network("nanogpt", attention=spec_of(mixer() | {"layers": layers}))
    assert isinstance(network.trunk.new_caches()[0], InputCache)
    gpt_cases.assert_decodes(network, [5, 6, 7])


def test_translation_needs_attention_to_the_source() -> None:
    with pytest.raises(ValueError, match=r"attention.kind: 'module' .* cross-attention does not"):
        EncoderDecoderConfig(**SIZES, attention=spec_of(mixer()))
    model = EncoderDecoderConfig(
        **SIZES, attention=spec_of(mixer()), cross_attention=spec_of("standard")
    )
    torch.manual_seed(0)
    network = translation.EncoderDecoder(model, 20, 8).eval()
    source = torch.randint(1, 20, (2, 6))
    padded = torch.cat([source, torch.zeros(2, 2, dtype=torch.long)], 1)
    inputs = torch.randint(1, 20, (2, 5))
    torch.testing.assert_close(network(padded, inputs), network(source, inputs))


def test_layers_keep_the_initial_values_of_their_constructor() -> None:
    network = gpt_cases.network("nanogpt", attention=spec_of(mixer(scale=7.0)))
    mixers = [module for module in network.modules() if isinstance(module, TokenMixer)]
    for layer in mixers:
        assert layer.layer.scale.unique().item() == 7
        # GPT draws biases as zeros and matrices with a deviation of 0.02.
        assert layer.layer.proj.bias.abs().max() > 0
        assert layer.layer.proj.weight.std() > 0.05
    first, second, *_ = mixers
    assert not torch.equal(first.layer.proj.weight, second.layer.proj.weight)


def test_flops_are_counted_or_declared(tmp_path: Path) -> None:
    def budget(name: str) -> tuple[factory.Budget, int]:
        attention = f'{{kind: module, import: "{__name__}:{name}"}}'
        body = f"baseline: a\ncells: {{a: {{}}, b: {{attention: {attention}, match: none}}}}"
        variant = studies.variants(tmp_path, body)["b"]
        experiment = variant.experiment
        return (
            factory.describe(experiment.model, experiment.data),
            match.count_step_flops(variant),
        )

    counted, counted_step = budget("Averages")
    declared, declared_step = budget("Declared")
    tokens = 5  # four patches and the class token
    products = 2 * tokens * 16 * 16
    assert declared.parameters == counted.parameters
    assert declared.flops == counted.flops - products + 1000 * tokens
    assert declared_step == counted_step + 64 * 3 * (1000 * tokens - products)


@pytest.mark.parametrize("attention", ["belief2", mixer(), mixer("Wrapped")])
def test_each_layer_of_a_network_counts_once(attention: Any) -> None:
    model = ViTConfig(**SIZES, patch=4, attention=spec_of(attention))
    network = model.build(ImageLabels((1, 8, 8), 10), "meta")
    assert model.count_layers(network) == (2, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mixed", "a sample of a batch changes the output"),
        ("Narrow", r"must return the shape of its tokens, \(1, 5, 16\), but returns \(1, 5, 15\)"),
        ("Paired", "must return a tensor, not tuple"),
        ("Single", r"called as Single\(16, 2, \.\.\.\): TypeError: "),
        ("Failing", "RuntimeError: no kernel, on the meta device"),
    ],
)
def test_a_mistake_in_a_layer_names_its_file_and_the_line_of_the_variant(
    name: str, message: str, tmp_path: Path
) -> None:
    attention = f'{{kind: module, import: "{__name__}:{name}"}}'
    body = f"baseline: a\ncells: {{a: {{}}, b: {{attention: {attention}}}}}"
    with pytest.raises(ConfigError, match=message) as caught:
        studies.variants(tmp_path, body)
    place = f"{tmp_path / 'ablations.yaml'}:8: tiny: variant 'b': model: attention: "
    assert str(caught.value).startswith(place)
    assert f":{name} ({__file__}:" in str(caught.value)
    assert "class ViTConfig" not in str(caught.value)


PART = """
from torch import nn
from lit_attn import Residual, ResidualConfig

class HalfConfig(ResidualConfig, kind="half-as-wide"):
    def build(self, shape):
        return Half(self, shape)

    def reference(self, module, x, heads, values):
        return heads

class Half(Residual):
    def forward(self, x, heads, values, project):
        return project(heads.flatten(-2))[..., :8]
"""


def test_a_part_of_a_wrong_shape_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "half_as_wide.py").write_text(PART)
    body = "baseline: a\nparts: [half_as_wide.py]\n"
    body += "cells: {a: {}, b: {attention: {residual: half-as-wide}}}"
    with pytest.raises(ConfigError) as caught:
        studies.variants(tmp_path, body)
    line = f"{tmp_path / 'half_as_wide.py'}:14: Half.forward returned a Tensor of shape "
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parameters_are_matched(tmp_path: Path) -> None:
    attention = f'{{kind: module, import: "{__name__}:Averages"}}'
    body = f"baseline: a\ncells: {{a: {{}}, b: {{attention: {attention}}}}}"
    variant = studies.variants(tmp_path, body)["b"]
    experiment = variant.experiment
    matched = factory.resolve(experiment.model, variant.match_to, experiment.data)
    counts = [
        factory.describe(model, experiment.data).parameters
        for model in (matched, variant.match_to)
        if model is not None
    ]
    assert counts[0] == pytest.approx(counts[1], rel=0.01)


def test_replacement_inserts_the_layer_with_its_own_weights() -> None:
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **sizes).eval()
    replace_attention(model, mixer() | {"layers": {"every": 4, "use": "standard"}})
    kinds = [type(block.attn) for block in model.blocks]
    assert [issubclass(kind, TokenMixer) for kind in kinds] == [True, True, True, False]
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 3)


@pytest.mark.parametrize("is_padded", [False, True])
def test_replacement_reads_masks_of_padding_and_of_later_tokens(is_padded: bool) -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    replace_attention(model, mixer())
    x = torch.randn(2, 6, 16)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 4:] = is_padded
    later = nn.Transformer.generate_square_subsequent_mask(6).isinf()
    output = model(x, src_mask=later, src_key_padding_mask=padding)
    changed = x.clone()
    changed[:, 3:] = torch.randn(2, 3, 16)
    others = model(changed, src_mask=later, src_key_padding_mask=padding)
    torch.testing.assert_close(others[:, :3], output[:, :3])
    both = model(x, src_key_padding_mask=padding)
    changed = x.clone()
    changed[:, 4:] = torch.randn(2, 2, 16)
    is_equal = torch.allclose(model(changed, src_key_padding_mask=padding)[:, :4], both[:, :4])
    assert is_equal == is_padded


def test_other_masks_are_refused() -> None:
    layer = attn_layer(mixer())(8, 2)
    x = torch.randn(1, 4, 8)
    band = torch.ones(4, 4, dtype=torch.bool).tril().triu(-1)
    with pytest.raises(ValueError, match="neither padding nor later ones"):
        layer(x, band)
    with pytest.raises(ValueError, match="adds a position bias"):
        layer(x, torch.randn(4, 4))


def test_local_self_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="a layer of `kind: module` has no logits"):
        ViTConfig(**SIZES, patch=4, local_self_attention=True, attention=spec_of(mixer()))
