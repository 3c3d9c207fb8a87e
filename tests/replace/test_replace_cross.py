"""Tests of `replace_attention` on cross-attention: replaced exactly, or refused with its path."""

from typing import Any

import pytest
import torch
from helpers.replaced_models import assert_refused, layers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, EncoderDecoderConfig, EncoderDecoderModel

from lit_attn import replace_attention

SIZES = {"d_model": 16, "nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}
SIZES |= {"dim_feedforward": 24}
OWN_VALUE = "its keys belong to another sequence: residual: .* uses the value of the query's own"


def disturb(model: nn.Module, scale: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn_like(parameter)
    # The `eval` of some models of mmsegmentation returns nothing.
    model.eval()
    return model


@pytest.mark.parametrize("scale", [0.05, 2.0])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings(
    "ignore:enable_nested", "ignore:The PyTorch API of nested", "ignore:Support for mis"
)
def test_a_transformer_of_pytorch_computes_the_same(batch_first: bool, scale: float) -> None:
    torch.manual_seed(0)
    model = disturb(nn.Transformer(**SIZES, batch_first=batch_first), scale).double()
    source = torch.randn(2, 7, 16).double()
    target = torch.randn(2, 5, 16).double()
    if not batch_first:
        source = source.transpose(0, 1)
        target = target.transpose(0, 1)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    cases: list[dict[str, Any]] = [
        {},
        {"tgt_mask": causal, "tgt_is_causal": True},
        {"memory_key_padding_mask": padding, "memory_mask": torch.randn(5, 7).double()},
        {"memory_mask": torch.rand(4, 5, 7) < 0.3},
    ]
    with torch.no_grad():
        expected = [model(source, target, **case) for case in cases]
        replace_attention(model, "standard")
        assert len(layers(model)) == 6
        for case, theirs in zip(cases, expected, strict=True):
            torch.testing.assert_close(model(source, target, **case), theirs)


@pytest.mark.parametrize("preset", ["mgk", "dcmha", "linear", "gaussian"])
def test_a_mechanism_that_fits_cross_attention_replaces_it(preset: str) -> None:
    model = replace_attention(nn.TransformerDecoderLayer(16, 2, 24, batch_first=True), preset)
    x = torch.randn(2, 5, 16)
    memory = torch.randn(2, 7, 16)
    model(x, memory).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.filterwarnings("ignore:enable_nested")
@pytest.mark.parametrize("spec", ["belief2", "xsa", {"window": 3}, {"zz": True}])
def test_a_mechanism_that_does_not_fit_cross_attention_is_refused_at_once(spec: Any) -> None:
    model = nn.Transformer(**SIZES, batch_first=True)
    path = r"decoder\.layers\.0\.multihead_attn \(MultiheadAttention\)"
    assert_refused(model, spec, rf"^replace_attention: {path}: its keys belong to ano")
    decoder_layer = nn.TransformerDecoderLayer(16, 2)
    assert_refused(decoder_layer, spec, r"^replace_attention: multihead_attn \(")
    replace_attention(model, spec, skip="*.multihead_attn")
    assert len(layers(model)) == 4
    assert model(torch.randn(1, 7, 16), torch.randn(1, 5, 16)).isfinite().all()


class Reader(nn.Module):
    """Module whose class does not tell how it calls its attention."""

    def __init__(self, values: str = "memory") -> None:
        super().__init__()
        self.read = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.values = values

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norm(x)
        keys = memory if self.values == "memory" else memory + 1
        return self.read(x, keys, memory)[0]


def test_a_call_that_cannot_be_computed_names_the_path() -> None:
    model = nn.ModuleDict({"reader": Reader()})
    replace_attention(model, "belief2")
    message = rf"^reader\.read \(MultiheadAttention\): {OWN_VALUE}.*; name this layer in `skip`"
    with pytest.raises(ValueError, match=message):
        model["reader"](torch.randn(2, 5, 16), torch.randn(2, 7, 16))
    other = replace_attention(Reader(values="other"), "standard")
    with pytest.raises(ValueError, match=r"^read \(MultiheadAttention\): it is called with other"):
        other(torch.randn(2, 5, 16), torch.randn(2, 7, 16))


@pytest.mark.parametrize("as_names", [True, False])
def test_an_example_finds_calls_that_cannot_be_computed(as_names: bool) -> None:
    inputs: Any = (torch.randn(2, 5, 16), torch.randn(2, 7, 16))
    if as_names:
        inputs = dict(zip(("x", "memory"), inputs, strict=True))
    model = Reader()
    model.read.eval()
    message = rf"^replace_attention: read \(.*\): {OWN_VALUE}"
    assert_refused(model, "belief2", message, example=inputs)
    message = r"^replace_attention: read \(.*\): it is called with oth"
    assert_refused(Reader(values="other"), "standard", message, example=inputs)
    assert layers(replace_attention(model, "mgk", example=inputs)) == ["read.layer"]


@pytest.mark.filterwarnings("ignore:enable_nested")
def test_an_example_of_self_attention_is_accepted() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    model = replace_attention(
        nn.TransformerEncoder(layer, 2), "belief2", example=torch.ones(1, 3, 16)
    )
    assert len(layers(model)) == 2


def test_one_sequence_without_a_batch_computes_the_same() -> None:
    for batch_first in (True, False):
        attention = nn.MultiheadAttention(16, 2, batch_first=batch_first).eval()
        x = torch.randn(16, 16)
        memory = torch.randn(7, 16)
        hidden = torch.zeros(7, dtype=torch.bool)
        hidden[5:] = True
        expected = attention(x, x, x)[0], attention(x, memory, memory, hidden)[0]
        ours = replace_attention(attention, "standard")
        torch.testing.assert_close(ours(x, x, x)[0], expected[0])
        torch.testing.assert_close(ours(x, memory, memory, hidden)[0], expected[1])


def test_an_order_without_a_mask_is_refused_as_pytorch_does() -> None:
    ours = replace_attention(nn.MultiheadAttention(16, 2), "standard")
    x = torch.randn(3, 1, 16)
    with pytest.raises(ValueError, match="`is_causal` and without `attn_mask`"):
        ours(x, x, x, is_causal=True)


def test_decoders_of_transformers_are_refused_with_their_path() -> None:
    text = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    configs = [AutoConfig.for_model("bert", num_attention_heads=4, **text) for _ in range(2)]
    both = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*configs))
    message = r"^replace_attention: decoder\..*crossattention \(BertAttention\): it is cross-attent"
    assert_refused(both, "standard", message)
    replace_attention(both, "standard", skip="*.crossattention")
    assert len(layers(both)) == 2
    gpt2 = AutoConfig.for_model("gpt2", n_embd=32, n_head=4, n_layer=1, add_cross_attention=True)
    message = r"crossattention \(GPT2Attention\): it is cross-attention"
    assert_refused(AutoModel.from_config(gpt2), "standard", message)
