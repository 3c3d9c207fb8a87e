"""Value residual in models of others: channels from the first layer of each stack of blocks."""

import copy
from typing import Any

import pytest
import timm
import torch
import transformers
from helpers.replaced_models import assert_refused, find_layers, make_hub
from torch import Tensor, nn

from lit_attn import replace_attention

TEXT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": None}
VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER |= {"intermediate_size": 48, "projection_dim": 16}


def make_llama() -> Any:
    return make_hub("llama", TEXT).double().eval()


def make_tokens() -> Tensor:
    return torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))


def test_later_layers_of_llama_mix_the_values_of_the_first() -> None:
    """The values of each layer are computed here once more, by hooks of the projections."""
    model = replace_attention(make_llama(), "value-residual")
    layer_values: list[Tensor] = []
    used: list[Tensor] = []

    def note_values(module: nn.Module, arguments: Any, output: Tensor) -> None:
        rows = 2 * 8
        layer_values.append(output[..., -rows:].unflatten(-1, (2, 8)))

    for layer in find_layers(model):
        layer.qkv.register_forward_hook(note_values)
        attend = layer.similarity.attend

        def note_inputs(inputs: Any, attend: Any = attend) -> Tensor:
            used.append(inputs.v)
            heads: Tensor = attend(inputs)
            return heads

        layer.similarity.attend = note_inputs  # type: ignore[method-assign]
    with torch.no_grad():
        model(make_tokens())
    assert torch.equal(used[0], layer_values[0])
    for number in (1, 2):
        torch.testing.assert_close(used[number], 0.5 * layer_values[0] + 0.5 * layer_values[number])


def test_learned_factors_belong_to_the_layers_after_the_first() -> None:
    model = replace_attention(make_llama(), "value-residual-learned")
    factors = [layer.values.factors is not None for layer in find_layers(model)]
    assert factors == [False, True, True]
    model(make_tokens()).logits.square().sum().backward()
    assert find_layers(model)[2].values.factors.grad.abs().min() > 0


def test_a_layer_that_mixes_alone_reads_a_first_layer_that_does_not() -> None:
    chosen = {"layers": {"last": 1, "use": "value-residual"}}
    model = replace_attention(make_llama(), chosen)
    plain = replace_attention(make_llama(), "standard")
    assert not torch.allclose(model(make_tokens()).logits, plain(make_tokens()).logits)


def test_a_copy_has_a_channel_of_its_own() -> None:
    model = replace_attention(make_llama(), "value-residual")
    again = copy.deepcopy(model)
    tokens = make_tokens()
    expected = model(tokens).logits
    model(tokens.flip(1))
    assert torch.equal(again(tokens).logits, expected)


@pytest.mark.parametrize("kind", ["clip", "t5"])
def test_each_stack_has_a_first_layer(kind: str) -> None:
    """The second tower of CLIP has other widths, and T5's decoder another length."""
    model: Any
    inputs: dict[str, Tensor]
    torch.manual_seed(0)
    if kind == "clip":
        text = TOWER | {"vocab_size": 50, "max_position_embeddings": 16}
        vision = TOWER | {"hidden_size": 48, "image_size": 16, "patch_size": 4}
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
        model = replace_attention(transformers.CLIPModel(config), "value-residual")
        inputs = {"input_ids": make_tokens(), "pixel_values": torch.randn(2, 3, 16, 16)}
    else:
        config = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=50
        )
        model = transformers.T5Model(config)
        replace_attention(model, "value-residual", skip="*.EncDecAttention")
        inputs = {"input_ids": make_tokens(), "decoder_input_ids": make_tokens()[:, :4]}
    firsts = [layer.is_first for layer in find_layers(model)]
    assert firsts == [True, False, True, False]
    first, second, third, fourth = find_layers(model)
    assert first.first_values is second.first_values
    assert third.first_values is fourth.first_values
    assert first.first_values is not third.first_values
    output = model(**inputs)
    assert all(value.isfinite().all() for value in output.values() if isinstance(value, Tensor))


def test_a_vision_transformer_is_connected() -> None:
    """The second layer's own values get no gradient if only those of the first layer count."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **VIT)
    replace_attention(model, {"values": {"kind": "first", "first": 1.0, "layer": 0.0}})
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    first, second = (block.attn.qkv.weight.grad.chunk(3)[2] for block in model.blocks)
    assert first.abs().max() > 0
    assert second.abs().max() == 0


def make_swin() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16}
    model: nn.Module = timm.create_model(
        "swin_tiny_patch4_window7_224", depths=[2], num_heads=[2], num_classes=3, **sizes
    )
    return model


class Shared(nn.Module):
    """One block that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.blocks = nn.ModuleList([block, block, block])


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "windows": (
        make_swin,
        {},
        r"layers\.0\.blocks\.0\.attn \(WindowAttention\): values: mixes .* but its adapter Swin",
    ),
    "first layer kept": (
        make_llama,
        {"only": [-2, -1]},
        r"model\.layers\.1\.self_attn \(LlamaAttention\): values: mixes the values of the first "
        r"layer of model\.layers, which is in its item 0 and remains as it is; replace it too",
    ),
    "shared": (Shared, {}, r"blocks\.0\.self_attn \(.*\): .* but it is also at blocks\.1\.self_a"),
    "alone": (
        lambda: nn.TransformerEncoderLayer(16, 2, 24, batch_first=True),
        {},
        r"self_attn \(.*\): .* but it is in no ModuleList or Sequential of several replaced",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_without_a_first_layer_is_refused(name: str) -> None:
    make, choice, message = REFUSED[name]
    assert_refused(make(), "value-residual", message, **choice)
