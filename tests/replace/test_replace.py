"""Tests of `replace_attention`: the standard layer leaves the outputs of other models unchanged.

All models are tiny and have random weights, to which noise is added: many position biases start at
zero, which would hide that they are missing.
"""

from typing import Any

import pytest
import timm
import torch
from helpers.replaced_models import assert_refused, count, enlarge, find_layers, make_hub
from torch import Tensor, nn

from lit_attn import replace_attention
from lit_attn.attention.residual import Full
from lit_attn.attention.spec import PRESETS
from lit_attn.replace import ADAPTERS, Adapter, Projections, build_layer, linear
from lit_attn.replace.projections import QueryValueLinear

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
STAGES = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16}
STAGES |= {"depths": (2, 2), "num_heads": (2, 4)}
MAXVIT = {"img_size": 64, "embed_dim": (32, 64), "depths": (1, 1)}

TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": TINY,
    "vit_base_patch16_siglip_224": TINY,
    "deit_tiny_distilled_patch16_224": TINY,
    "deit3_small_patch16_224": TINY,
    "vit_small_patch14_reg4_dinov2": TINY,
    "vit_small_patch16_dinov3": TINY,
    "vit_relpos_small_patch16_224": TINY,
    "vit_pe_core_tiny_patch16_384": TINY,
    "vit_small_patch16_rope_mixed_224": TINY,
    "eva02_tiny_patch14_224": TINY,
    "eva02_base_patch14_224": TINY,
    "beit_base_patch16_224": TINY,
    "cait_xxs24_224": TINY,
    "swin_tiny_patch4_window7_224": STAGES,
    "maxvit_rmlp_pico_rw_256": MAXVIT,
    "maxvit_tiny_tf_224": MAXVIT,
    "hiera_tiny_224": {"img_size": 64, "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1)},
    "pit_ti_224": {"img_size": 64},
    "caformer_s18": {},
    "coatnet_rmlp_nano_rw_224": {
        "img_size": 64,
        "embed_dim": (32, 32, 64, 128),
        "depths": (1, 1, 2, 2),
    },
    "crossvit_9_240": {},
    "fastvit_sa12": {"embed_dims": (16, 16, 32, 32), "layers": (1, 1, 1, 1)},
    "swinv2_tiny_window8_256": STAGES,
    "tiny_vit_5m_224": {"depths": (1, 1, 1, 1)},
    "tnt_s_patch16_224": {"img_size": 32, "depth": 2},
    "visformer_tiny": {"img_size": 64, "embed_dim": 48, "depth": (1, 1, 1)},
    "nest_tiny": {"img_size": 64},
    "pvt_v2_b0": {},
    "pvt_v2_b2_li": {"depths": (1, 1, 1, 1)},
    "sam2_hiera_tiny": {},
    "swinv2_cr_tiny_224": {"img_size": 64, "window_size": 4, "depths": (1, 1, 2, 1)},
    "twins_pcpvt_small": {"img_size": 96, "depths": (1, 1, 1, 1)},
    "twins_svt_small": {"img_size": 96, "depths": (2, 2, 2, 2)},
}
SIZES = {"pvt_v2_b0": 96, "pvt_v2_b2_li": 96, "sam2_hiera_tiny": 96}
"""Sizes of the images for models without `img_size`, if not 32."""

DECODER = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
DECODER |= {"num_attention_heads": 4, "max_position_embeddings": 64, "num_key_value_heads": 2}
DECODER |= {"bos_token_id": 1, "eos_token_id": None}
DECODERS: dict[str, dict[str, Any]] = {"llama": DECODER, "mistral": DECODER | {"sliding_window": 5}}


def disturb(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def make_timm(name: str) -> tuple[nn.Module, Tensor]:
    arguments = TIMM[name]
    torch.manual_seed(0)
    size = arguments.get("img_size", SIZES.get(name, 32))
    return disturb(timm.create_model(name, num_classes=5, **arguments)), torch.randn(
        2, 3, size, size
    )


def make_decoder(kind: str, implementation: str = "sdpa") -> nn.Module:
    return disturb(make_hub(kind, DECODERS[kind], implementation))


def results(model: nn.Module, *inputs: Any, **arguments: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the gradients of the first parameters: embeddings or convolutions."""
    out = model(*inputs, **arguments)
    out = getattr(out, "logits", out)
    first = list(model.parameters())[:3]
    gradients = torch.autograd.grad(out.square().sum(), first)
    return out.detach(), list(gradients)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


# The layers of Hiera that pool queries stay, and a warning says so.
@pytest.mark.filterwarnings("ignore:.*attention layers:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_a_timm_model_computes_the_same_also_with_large_logits(name: str) -> None:
    """Computed in float64: with large logits, rounding errors grow from layer to layer."""
    model, images = make_timm(name)
    model, images = model.double(), images.double()
    expected, gradients = results(model, images)
    parameters = count(model)
    replaced = make_timm(name)[0].double()
    assert replace_attention(replaced, "standard") is replaced
    assert find_layers(replaced)
    assert count(replaced) == parameters
    out, computed = results(replaced, images)
    assert_close(out, expected)
    for ours, theirs in zip(computed, gradients, strict=True):
        assert_close(ours, theirs)
    with torch.no_grad():
        large = enlarge(model)(images)
        assert not torch.allclose(large, expected, rtol=0.01)
        assert_close(replace_attention(model, "standard")(images), large)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_a_mechanism_that_contains_the_standard_layer_starts_from_it(name: str) -> None:
    """Belief2's W_p is a copy of W, so without z the two parts add up to the standard output."""
    model, images = make_timm(name)
    expected = model(images)
    residual = {"kind": "split", "activation": "identity", "init": "copy"}
    replace_attention(model, {"residual": residual})
    assert not any(isinstance(layer.residual, Full) for layer in find_layers(model))
    assert_close(model(images), expected)


@pytest.mark.parametrize("preset", ["belief2", "mgk", "dcmha"])
@pytest.mark.parametrize("name", ["eva02_base_patch14_224", "swin_tiny_patch4_window7_224"])
def test_every_weight_of_another_mechanism_is_trained(preset: str, name: str) -> None:
    model, images = make_timm(name)
    replace_attention(model, preset)
    model(images).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_the_position_bias_of_swin_v2_cr_keeps_its_dropout() -> None:
    model, _ = make_timm("swinv2_cr_tiny_224")
    replace_attention(model, "standard")
    adapter = next(m for m in model.modules() if isinstance(m, Adapter))
    for is_random in (True, False):
        first, second = (adapter.train(is_random)._get_rel_pos_bias() for _ in range(2))
        assert torch.equal(first, second) is not is_random


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_beam_search_of_a_decoder_with_a_window_finds_the_same(implementation: str) -> None:
    """test_hub_families.py has the logits and the likeliest tokens of every family."""
    model = make_decoder("mistral", implementation)
    tokens = torch.randint(0, 50, (2, 11))
    present = torch.ones_like(tokens)
    present[1, :3] = 0
    options = {"attention_mask": present, "max_new_tokens": 6, "num_beams": 3}
    options |= {"do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = model.generate(tokens, **options)
        assert torch.equal(
            replace_attention(model, "standard").generate(tokens, **options), expected
        )


def test_linear_attention_has_no_cache_of_transformers() -> None:
    model = replace_attention(make_decoder("llama"), "linear")
    tokens = torch.randint(0, 50, (1, 5))
    assert model(tokens).logits.isfinite().all()
    with pytest.raises(ValueError, match="'linear' attention has no keys and values to cache"):
        model(tokens, use_cache=True)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested")
def test_an_encoder_of_pytorch_computes_the_same(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first)
    model = disturb(nn.TransformerEncoder(layer, 2))
    x = torch.randn(2, 7, 32) if batch_first else torch.randn(7, 2, 32)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    cases: list[dict[str, Any]] = [
        {},
        {"src_key_padding_mask": padding},
        {"mask": causal, "is_causal": True},
        {"mask": causal != 0, "src_key_padding_mask": padding},
        {"mask": torch.randn(8, 7, 7)},
    ]
    shown = ~padding if batch_first else ~padding.T
    with torch.no_grad():
        # PyTorch's fused path returns NaN for a mask of each head.
        torch.backends.mha.set_fastpath_enabled(False)
        expected = [model(x, **case)[shown] for case in cases]
        torch.backends.mha.set_fastpath_enabled(True)
        replace_attention(model, "standard")
        for case, theirs in zip(cases, expected, strict=True):
            assert_close(model(x, **case)[shown], theirs)


@pytest.mark.parametrize(
    ("name", "arguments", "mechanism", "message"),
    [
        (
            "xcit_nano_12_p16_224",
            TINY,
            "belief2",
            r"blocks\.0\.attn \(XCA\): its weights relate ch",
        ),
        ("convit_tiny", TINY, "belief2", r"blocks\.0\.attn \(GPSA\): it mixes attention with"),
        (
            "edgenext_xx_small",
            {},
            "belief2",
            r"xca \(CrossCovarianceAttn\): its weights relate chan",
        ),
        (
            "levit_128s",
            {},
            "belief2",
            r"stages\.0\.blocks\.0\.attn \(Attention\): its values are w",
        ),
        ("resnet18", {}, "belief2", "ResNet has no self-attention layers"),
        (
            "swin_tiny_patch4_window7_224",
            STAGES,
            "linear",
            r"attn \(\w+\): 'linear' attention has no",
        ),
        ("cait_xxs24_224", TINY, "dcmha", r"attn \(\w+\): compose: 'query\+key' would mix heads"),
        ("vit_tiny_patch16_224", TINY, {"kv_heads": 1}, r"attn \(\w+\): kv_heads: 1, but .* 2 key"),
    ],
)
def test_layers_and_mechanisms_that_do_not_fit_are_refused_with_their_path(
    name: str, arguments: dict[str, Any], mechanism: Any, message: str
) -> None:
    model = timm.create_model(name, **arguments)
    assert_refused(model, mechanism, f"^replace_attention: .*{message}")


def test_another_scale_of_the_logits_changes_queries_alone() -> None:
    torch.manual_seed(0)
    x, qkv, proj = torch.randn(1, 4, 8), nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
    biases = [nn.Parameter(torch.randn(8)) for _ in range(2)]
    q, k, v = QueryValueLinear(qkv, *biases)(x).unflatten(-1, (3, 2, 4)).unbind(2)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    heads = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.9)
    expected = proj(heads.transpose(1, 2).flatten(2))
    with torch.no_grad():
        source = Projections(2, QueryValueLinear(qkv, *biases), proj, scale=0.9)
        assert_close(build_layer(source, PRESETS["standard"])(x), expected.detach())


class Single(nn.Module):
    """Attention of one head, with a sign that its adapter has to respect."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.sign = -1.0

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.queries(x) @ self.keys(x).transpose(-1, -2) / 8**0.5).softmax(-1)
        return self.sign * self.out(weights @ x)


class SingleAttention(Single):
    """A class without adapter."""


def test_a_class_of_ones_own_needs_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 5, 8)
    message = r"0 \(SingleAttention\): its class has no adapter"
    assert_refused(nn.Sequential(SingleAttention()), "standard", message)

    class SingleAdapter(Adapter):
        moved = ("queries", "keys", "out")

        def read(self, original: Single) -> Projections:
            values = torch.eye(8)
            weight = torch.cat([original.queries.weight, original.keys.weight, values])
            biases = [original.queries.bias, original.keys.bias, torch.zeros(8)]
            return Projections(1, linear(weight, torch.cat(biases)), original.out)

        def forward(self, x: Tensor) -> Tensor:
            return self.sign * self.layer(x)

    monkeypatch.setitem(ADAPTERS, f"{__name__}:Single", SingleAdapter)
    model = nn.Sequential(Single())
    expected = model(x)
    assert_close(replace_attention(model, "standard")(x), expected)
    assert len(find_layers(model)) == 1
