"""Replacement keeps what parameters and modules have, or is refused: ties, hooks, tags, patches."""

import warnings
from typing import Any

import pytest
import timm
import torch
from helpers.replaced_models import assert_refused, count, make_hub
from torch import nn

from lit_attn import replace_attention
from lit_attn.schema.errors import ConfigError

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
LLAMA = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}


def make_vit() -> Any:
    return timm.create_model("vit_tiny_patch16_224", **VIT, num_classes=3)


def make_llama(**changes: Any) -> Any:
    return make_hub("llama", LLAMA | changes)


def make_tied_llama() -> Any:
    """Return a Llama of two layers with the same weights of q, k and v."""
    model = make_llama()
    first, second = (layer.self_attn for layer in model.model.layers)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(second, name).weight = getattr(first, name).weight
    return model


def test_weights_that_layers_share_stay_shared() -> None:
    llama = make_tied_llama()
    vit = make_vit()
    vit.blocks[1].attn.qkv.weight = vit.blocks[0].attn.qkv.weight
    pair = nn.ModuleList(nn.MultiheadAttention(4, 2) for _ in range(2))
    pair[1].in_proj_weight = pair[0].in_proj_weight
    for model in (llama, vit, pair):
        parameters = count(model)
        replace_attention(model, "standard")
        assert count(model) == parameters
    first, second = (layer.self_attn.layer for layer in llama.model.layers)
    assert second.qkv.weight is first.qkv.weight
    assert second.proj.weight is not first.proj.weight


def share_one(model: Any) -> None:
    first, second = (layer.self_attn for layer in model.model.layers)
    second.k_proj.weight = first.k_proj.weight


def share_in_layer(model: Any) -> None:
    layer = model.model.layers[0].self_attn
    layer.v_proj = layer.k_proj


def share_outside(model: Any) -> None:
    layer = model.model.layers[0]
    layer.extra = nn.Linear(1, 1)
    layer.extra.weight = layer.self_attn.q_proj.weight


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (share_one, r"`k_proj.weight` is the weight of model.layers.1.self_attn.k_proj.weight too"),
        (share_in_layer, "its `k_proj.weight` is the weight of its `v_proj.weight` too"),
        (
            share_outside,
            r"its `q_proj.weight` is the weight of model\.layers\.0\.extra\.weight too",
        ),
    ],
)
def test_a_weight_that_would_become_two_is_refused(share: Any, message: str) -> None:
    model = make_llama()
    share(model)
    assert_refused(model, "standard", message)


def patch_projection(model: nn.Module) -> None:
    projection = model.get_submodule("model.layers.0.self_attn.q_proj")
    of_class = projection.forward
    projection.forward = lambda x: of_class(x) * 2


def hook_parameter(model: nn.Module) -> None:
    model.get_parameter("model.layers.0.self_attn.q_proj.weight").register_hook(lambda g: g * 0)


def hook_accumulation(model: nn.Module) -> None:
    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    weight.register_post_accumulate_grad_hook(lambda _: None)


def hook_state(model: nn.Module) -> None:
    module = model.get_submodule("model.layers.0.self_attn")
    module.register_state_dict_post_hook(lambda *_: None)


def tag_one(model: nn.Module) -> None:
    model.get_parameter("model.layers.0.self_attn.q_proj.weight").group = "slow"


@pytest.mark.parametrize(
    ("attach", "message"),
    [
        (patch_projection, "its `q_proj` has a `forward` that is not that of its class"),
        (hook_parameter, "its `q_proj.weight` has a hook of its gradient, which would not"),
        (hook_accumulation, "its `q_proj.weight` has a hook of its gradient, which would not"),
        (hook_state, "it has hooks, which would not be called any more"),
        (tag_one, "its `k_proj.weight` has other attributes .* than the projections beside it"),
    ],
)
def test_what_is_attached_to_an_old_layer_is_refused(attach: Any, message: str) -> None:
    model = make_llama()
    attach(model)
    assert_refused(model, "standard", message)


def test_hooks_and_tags_of_parameters_that_stay_are_kept() -> None:
    model = make_vit()
    weight = model.blocks[0].attn.qkv.weight
    weight.group = "slow"
    weight.register_hook(lambda gradient: gradient * 0)
    replace_attention(model, "standard")
    model(torch.randn(1, 3, 16, 16)).sum().backward()
    kept = model.blocks[0].attn.qkv.weight
    assert kept.group == "slow"
    assert not kept.grad.any()


def test_tags_of_projections_are_tags_of_their_matrix() -> None:
    model = make_llama()
    for name in ("q_proj", "k_proj", "v_proj"):
        model.get_parameter(f"model.layers.0.self_attn.{name}.weight").group = "slow"
    replace_attention(model, "standard")
    assert model.model.layers[0].self_attn.layer.qkv.weight.group == "slow"


def test_a_patched_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_vit()
    monkeypatch.setattr(type(model.blocks[0].attn), "forward", lambda module, x: x)
    assert_refused(model, "standard", "it has a `forward` that is not that of its class timm")


def test_quantised_projections_are_refused_by_their_class() -> None:
    model = make_vit()
    name = "blocks.0.attn.qkv"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(model, {name}, inplace=True)
    with pytest.raises(ConfigError, match=r"its `qkv` is a torch\.ao.*before a quantisat"):
        replace_attention(model, "standard")


def test_reentrant_checkpoints_are_refused_beside_a_value_residual() -> None:
    """Re-entrant checkpoints compute the values of the first layer without gradients."""
    tokens = torch.arange(6).view(1, 6)
    gradients = []
    for is_reentrant in (None, False, True):
        model = replace_attention(make_llama(), "value-residual").train()
        if is_reentrant is not None:
            options = {"use_reentrant": is_reentrant}
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        loss = model(tokens, labels=tokens).loss
        if is_reentrant:
            with pytest.raises(RuntimeError, match="use checkpoints with `use_reentrant=False`"):
                loss.backward()
            continue
        loss.backward()
        gradients.append(model.model.layers[0].self_attn.layer.qkv.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
