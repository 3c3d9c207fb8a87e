"""Tests of the steps of `replace_attention`: all or nothing, chosen layers, refused options."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from helpers.replaced_models import assert_refused, assert_unchanged, describe, layers
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from lit_attn import replace_attention
from lit_attn.replace import ADAPTERS, Projections, linear
from lit_attn.replace import replacement as replace
from lit_attn.replace.adapter import Adapter, is_neutral
from lit_attn.schema.errors import ConfigError

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
TEXT = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
TRANSFORMER = {"d_model": 16, "nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}
TRANSFORMER |= {"dim_feedforward": 24, "batch_first": True}


def make_vit(**changes: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **TINY | {"num_classes": 3} | changes)


def make_text(kind: str, factory: Any = AutoModelForCausalLM, **changes: Any) -> nn.Module:
    return factory.from_config(AutoConfig.for_model(kind, **TEXT | changes))


class Mixed(nn.Module):
    """Two layers that can be replaced, and one of a class without adapter between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.second = timm.create_model("xcit_nano_12_p16_224", **TINY | {"depth": 1}).blocks[0]
        self.third = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "davit": (lambda: timm.create_model("davit_tiny", embed_dims=(16, 32, 64, 64)), "standard"),
    "mixed": (Mixed, "standard"),
    "transformer": (lambda: nn.Transformer(**TRANSFORMER), "belief2"),
    "gpt2": (lambda: make_text("gpt2", n_embd=32, n_head=4), {"kv_heads": 2}),
    "bart": (
        lambda: make_text(
            "bart",
            AutoModelForSeq2SeqLM,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        ),
        "standard",
    ),
    "t5": (lambda: make_text("t5", AutoModel, d_model=16, num_layers=1), "belief2"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:enable_nested")
def test_a_refusal_leaves_the_model_as_it_is(name: str) -> None:
    make, spec = REFUSED[name]
    model = make()
    # Some parts differ from the rest in the training mode and in requires_grad.
    parts = list(model.children())
    parts[0].eval()
    next(parts[-1].parameters()).requires_grad_(False)
    handle = model.register_forward_hook(lambda *_: None)
    assert_refused(model, spec, r"^replace_attention: .*\w \(\w+\): ")
    handle.remove()
    assert not model._forward_hooks


def test_a_refused_model_computes_the_same_as_before() -> None:
    """davit_tiny has window attention, which fits, before channel attention, which does not."""
    model = timm.create_model("davit_tiny", embed_dims=(16, 32, 64, 64), num_heads=(2, 2, 2, 2))
    images = torch.randn(1, 3, 64, 64)
    expected = model.eval()(images)
    with pytest.raises(ConfigError, match="ChannelAttention"):
        replace_attention(model, "mgk")
    assert torch.equal(model(images), expected)


class Own(nn.Module):
    """Attention with the usual projections, for adapters that fail."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj((q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v)


class Untidy(Adapter):
    """Adapter that changes the original at once, as it was usual, and then fails."""

    failure: Exception = ValueError("it fails")

    def read(self, original: Any) -> Projections:
        qkv = original.qkv
        proj = original.proj
        del original.qkv
        original.register_forward_hook(lambda *_: None)
        if len(proj.weight) == 7:
            raise self.failure
        return Projections(1, linear(qkv.weight, qkv.bias), proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ValueError("it fails"), r"1 \(Own\): it fails$"),
        (KeyError("size"), r"1 \(Own\): its adapter fails with KeyError: 'size'$"),
        (AttributeError("no q_proj"), r"1 \(Own\): its adapter fails with AttributeError: no q_pr"),
    ],
)
def test_an_adapter_that_changes_the_original_and_fails_changes_nothing(
    failure: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ADAPTERS, f"{__name__}:Own", Untidy)
    monkeypatch.setattr(Untidy, "failure", failure)
    model = nn.Sequential(Own(), Own())
    model[1].proj = nn.Linear(8, 7)
    assert_refused(model, "mgk", message)
    assert len(layers(replace_attention(model, "mgk", only=0))) == 1


def test_an_interrupted_replacement_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_vit()
    before = describe(model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replace, "_copy_training_mode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_attention(model, "mgk")
    assert_unchanged(before, model)


def test_modes_and_frozen_weights_stay() -> None:
    model = make_vit(proj_drop_rate=0.1)
    model.requires_grad_(False).train()
    model.blocks[0].attn.proj_drop.eval()
    for name, parameter in model.blocks[1].named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    replace_attention(model, "mgk")
    first, second = (block.attn for block in model.blocks)
    assert not first.qkv.weight.requires_grad
    assert not first.proj.weight.requires_grad
    assert second.qkv.bias.requires_grad
    assert not second.qkv.weight.requires_grad
    # The parameters of the mechanism have to be trained.
    assert first.similarity.more.weight.requires_grad
    assert first.similarity.training


def test_partly_frozen_projections_are_refused() -> None:
    model = make_text("llama")
    model.model.layers[1].self_attn.k_proj.requires_grad_(False)
    assert_refused(model, "standard", r"layers\.1\.self_attn .*are frozen and others are not")


CHOICES: list[tuple[dict[str, Any], list[int]]] = [
    ({"only": 0}, [0]),
    ({"only": -1}, [3]),
    ({"only": [0, 2]}, [0, 2]),
    ({"only": "blocks.1.attn"}, [1]),
    ({"only": "blocks.1"}, [1]),
    ({"only": "blocks.[23].attn"}, [2, 3]),
    ({"only": ["blocks.0.attn", -1]}, [0, 3]),
    ({"skip": "blocks.0*"}, [1, 2, 3]),
    ({"only": "blocks", "skip": [0, "*.3.attn"]}, [1, 2]),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_layers_can_be_chosen(choice: dict[str, Any], expected: list[int]) -> None:
    model = make_vit(depth=4).eval()
    images = torch.randn(1, 3, 32, 32)
    before = model(images)
    replace_attention(model, "standard", **choice)
    assert layers(model) == [f"blocks.{index}.attn" for index in expected]
    torch.testing.assert_close(model(images), before)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"only": "blocks.1.atn"},
            r"only: 'blocks\.1\.atn' names no .*; did you mean 'blocks\.\d\.attn'\?$",
        ),
        ({"skip": "head"}, r"skip: 'head' names no attention layer; choose from blocks\.0\.attn, "),
        ({"only": 2}, r"only: the model has 2 layers, so there is no layer 2; indices start"),
        ({"only": 1.5}, r"only: 1\.5 is no path, pattern or index of a layer"),
        ({"only": [True]}, r"only: True is no path, pattern or index of a layer"),
        ({"skip": "blocks"}, "`only` and `skip` leave no layer to replace"),
        ({"only": []}, "`only` and `skip` leave no layer to replace"),
    ],
)
def test_a_wrong_choice_is_one_line(choice: dict[str, Any], message: str) -> None:
    assert_refused(make_vit(), "standard", message, **choice)


def test_skipped_layers_may_be_of_any_class() -> None:
    model = Mixed()
    replace_attention(model, "belief2", skip="second")
    assert layers(model) == ["first.self_attn.layer", "third.self_attn.layer"]
    message = r"^replace_attention: second\.attn \(XCA\)"
    assert_refused(Mixed(), "belief2", message, only=["first", "second"])


def test_a_shared_layer_is_chosen_by_any_of_its_paths() -> None:
    shared = nn.MultiheadAttention(16, 2, batch_first=True)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.MultiheadAttention(16, 2)})
    replace_attention(model, "standard", only="b")
    assert model["a"] is model["b"]
    assert layers(model) == ["a.layer"]


@pytest.mark.slow
def test_a_replaced_model_is_saved_and_loaded() -> None:
    images = torch.randn(1, 3, 32, 32)
    tokens = torch.randint(0, 50, (1, 7))
    swin = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (1, 1)}
    swin |= {"num_heads": (2, 4)}
    cases: list[tuple[Callable[[], nn.Module], Any]] = [
        (make_vit, images),
        (lambda: timm.create_model("eva02_tiny_patch14_224", **TINY), images),
        (lambda: timm.create_model("beit_base_patch16_224", **TINY), images),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224", **swin), images),
        (lambda: timm.create_model("cait_xxs24_224", **TINY), images),
        (lambda: make_text("llama"), tokens),
        (lambda: make_text("bert", AutoModel), tokens),
        (lambda: nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), torch.randn(2, 5, 16)),
    ]
    for make, inputs in cases:
        for spec in ("standard", "mgk"):
            first, second = (replace_attention(make().eval(), spec) for _ in range(2))
            second.load_state_dict(first.state_dict())
            outputs = [model(inputs) for model in (first, second)]
            a, b = (output if isinstance(output, Tensor) else output[0] for output in outputs)
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (make_vit, r"blocks\.0\.attn \(Attention\)"),
        (lambda: make_text("llama"), r"model\.layers\.0\.self_attn \(Hub\)"),
        (lambda: nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), r"self_attn \(Torch\)"),
    ],
)
def test_a_replaced_model_is_not_replaced_again(make: Any, path: str) -> None:
    model = replace_attention(make(), "standard")
    assert_refused(model, "mgk", f"^replace_attention: {path}: it is a layer of lit_attn")


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("olmo", {"clip_qkv": 3.0}, r"option `config\.clip_qkv` \(3\.0\) is unknown"),
    ("diffllama", {}, r"option `lambda_init` \(0\.2"),
    ("llama4_text", {}, r"option `attn_scale` \(0\.1\)"),
    ("hunyuan_v1_dense", {}, r"option `query_layernorm` \(a module HunYuanDenseV1RMSNorm\)"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), OPTIONS)
def test_an_option_that_an_adapter_does_not_know_is_refused(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    message = rf"^replace_attention: model\.layers\.0\..*{message}"
    assert_refused(make_text(kind, **changes), "standard", message)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("residual_dropout", 0.0, True),
        ("residual_dropout", 0, True),
        ("residual_dropout", 0.1, False),
        ("resid_pdrop", 0.0, True),
        ("hidden_dropout_prob", 1e-9, False),
        ("drop_path", nn.Dropout(0.0), True),
        ("scale", 0.0, False),
        ("window", 0, False),
        ("dropout", torch.zeros(1), False),
    ],
)
def test_only_rates_of_zero_are_neutral(name: str, value: Any, expected: bool) -> None:
    assert is_neutral(value, name) == expected


def test_masks_of_another_implementation_are_refused() -> None:
    model = make_text("llama")
    model.config._attn_implementation = "flex_attention"
    assert_refused(model, "standard", "self_attn .*attn_implementation is flex_attention")


@pytest.mark.parametrize("name", ["qkv", "proj"])
def test_projections_that_compute_more_are_refused(name: str) -> None:
    model = make_vit()
    parametrizations.weight_norm(model.blocks[1].attn.get_submodule(name))
    assert_refused(model, "standard", rf"blocks\.1\.attn .*its `{name}` is a .*Parametrized")


@pytest.mark.parametrize("path", ["blocks.1.attn", "blocks.1.attn.qkv"])
def test_hooks_that_would_stop_are_refused(path: str) -> None:
    model = make_vit()
    handle = model.get_submodule(path).register_forward_hook(lambda *_: None)
    assert_refused(model, "standard", r"blocks\.1\.attn .* has hooks, which would not")
    handle.remove()
    assert layers(replace_attention(model, "standard"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda attn: setattr(attn, "softcap", 30.0), r"option `softcap` \(30\.0\)"),
        (lambda attn: attn.register_parameter("sink", nn.Parameter(torch.ones(2))), "`sink`"),
        (lambda attn: setattr(attn, "forward", lambda x: x), "`forward`"),
        (lambda attn: setattr(attn, "gate", nn.Linear(32, 32)), "its output is gated"),
    ],
)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_an_option_of_timm_that_no_adapter_knows_is_refused(
    name: str, change: Callable[[nn.Module], None], message: str
) -> None:
    model = timm.create_model(name, **TINY)
    change(model.blocks[1].attn)
    assert_refused(model, "standard", rf"blocks\.1\.attn \(\w+\): .*{message}")
