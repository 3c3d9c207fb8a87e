"""Identities that the papers prove about the parts, or that follow from their formulas."""

import pytest
import timm
import torch

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.residual import (
    ACTIVATIONS,
    DiscrepancyConfig,
    PerpendicularConfig,
    ProjectedConfig,
    SplitConfig,
    projected,
)
from lit_attn.attention.spec import AttentionSpec

DIM, HEADS = 24, 3


def layer_of(spec: AttentionSpec | str, seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    return attn_layer(spec)(DIM, HEADS).double()


def heads_and_values() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(2, 5, HEADS, 8, dtype=torch.double, generator=generator) for _ in range(2)
    )


@pytest.mark.parametrize("scope", ["global", "head", "both"])
def test_proposition_1_split_with_copied_weights_is_the_standard_layer(scope: str) -> None:
    copied = SplitConfig(activation="identity", init="copy", scope=scope)
    split = layer_of(AttentionSpec(residual=copied))
    standard = layer_of("standard", seed=9)
    standard.load_state_dict(
        {k: v for k, v in split.state_dict().items() if not k.startswith("residual")}
    )
    x = torch.randn(2, 7, DIM, dtype=torch.double)
    assert standard.proj.bias.abs().min() > 0  # W_p's copy must not add it a second time
    torch.testing.assert_close(split(x), standard(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scope", ["global", "head"])
def test_small_values_are_removed_as_completely_as_large_ones(scope: str) -> None:
    """The lower bound of <V, V> is for zeros: it must not show at values that a layer can have."""
    heads, values = heads_and_values()
    small = projected(heads, 1e-4 * values, scope)
    torch.testing.assert_close(small, projected(heads, values, scope))


@pytest.mark.parametrize("scope", ["global", "head"])
def test_perpendicular_is_orthogonal_shorter_and_complements_projected(scope: str) -> None:
    heads, values = heads_and_values()
    along = projected(heads, values, scope)
    across = heads - along
    axes = (-2, -1) if scope == "global" else (-1,)
    assert (across * values).sum(axes).abs().max() < 1e-12
    assert (across.square().sum(axes) <= heads.square().sum(axes) * (1 + 1e-12)).all()
    torch.testing.assert_close(along + across, heads)


@pytest.mark.parametrize("scope", ["global", "head"])
def test_perpendicular_plus_projected_is_full(scope: str) -> None:
    x = torch.randn(2, 7, DIM, dtype=torch.double)
    parts = [
        layer_of(AttentionSpec(residual=PerpendicularConfig(scope=scope))),
        layer_of(AttentionSpec(residual=ProjectedConfig(scope=scope))),
        layer_of("standard"),
    ]
    for part in parts[1:]:
        part.load_state_dict(parts[0].state_dict())
    across, along, full = (part(x) - part.proj.bias for part in parts)
    torch.testing.assert_close(across + along, full)


def test_both_scopes_of_the_components_add_to_the_full_signal_through_both_matrices() -> None:
    x = torch.randn(2, 7, DIM, dtype=torch.double)
    across = layer_of(AttentionSpec(residual=PerpendicularConfig(scope="both", bias=False)))
    along = layer_of(AttentionSpec(residual=ProjectedConfig(scope="both", bias=False)))
    along.load_state_dict(across.state_dict())
    full = layer_of("standard")
    standard_names = full.state_dict().keys()
    full.load_state_dict({name: across.state_dict()[name] for name in standard_names})
    expected = full(x) - full.proj.bias
    with torch.no_grad():
        full.proj.weight.copy_(across.residual.local.weight)
    expected = expected + full(x) - full.proj.bias
    total = across(x) + along(x) - 2 * across.proj.bias
    torch.testing.assert_close(total, expected)


def test_split_with_both_scopes_is_belief_star_plus_the_projected_components() -> None:
    """With the identity, (W, W^l) have the perpendicular parts and (W_p, W_p^l) the projected."""
    x = torch.randn(2, 7, DIM, dtype=torch.double)
    both = SplitConfig(activation="identity", scope="both", bias=False)
    split = layer_of(AttentionSpec(residual=both))
    weights = split.state_dict()
    across = layer_of(AttentionSpec(residual=PerpendicularConfig(scope="both", bias=False)))
    along = layer_of(AttentionSpec(residual=ProjectedConfig(scope="both", bias=False)))
    shared = {"qkv.weight": weights["qkv.weight"], "proj.bias": weights["proj.bias"]}
    across.load_state_dict(
        shared
        | {
            "proj.weight": weights["proj.weight"],
            "residual.local.weight": weights["residual.local.weight"],
        }
    )
    along.load_state_dict(
        shared
        | {
            "proj.weight": weights["residual.projected.weight"],
            "residual.local.weight": weights["residual.local_projected.weight"],
        }
    )
    torch.testing.assert_close(split(x), across(x) + along(x) - along.proj.bias)


@pytest.mark.parametrize(("scope", "count"), [("layer", 1), ("head", HEADS)])
def test_a_learned_gamma_starts_at_its_constant_and_learns(scope: str, count: int) -> None:
    fixed = layer_of(AttentionSpec(residual=DiscrepancyConfig(gamma=0.5)))
    learned = layer_of(AttentionSpec(residual=DiscrepancyConfig(gamma=0.5, gamma_scope=scope)))
    learned.load_state_dict(fixed.state_dict())
    x = torch.randn(2, 7, DIM, dtype=torch.double)
    out = learned(x)
    torch.testing.assert_close(out, fixed(x), rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    assert learned.residual.gamma.shape == (count,)
    assert (learned.residual.gamma.grad != 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("scope", "groups"), [("layer", 1), ("head", HEADS)])
def test_a_learned_phi_starts_as_its_activation_and_learns(
    activation: str, scope: str, groups: int
) -> None:
    fixed = layer_of(AttentionSpec(residual=SplitConfig(activation=activation)))
    part = SplitConfig(activation=activation, phi_scope=scope)
    learned = layer_of(AttentionSpec(residual=part))
    phi = learned.residual.phi
    learned.load_state_dict(fixed.state_dict() | {"residual.phi": phi.detach().clone()})
    x = torch.randn(2, 7, DIM, dtype=torch.double)
    out = learned(x)
    torch.testing.assert_close(out, fixed(x), rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    assert phi.shape == (groups, len(ACTIVATIONS))
    assert (phi.grad != 0).all()
    assert learned.no_weight_decay() == {"residual.phi"}


def test_xsa_is_belief_star_without_the_global_term() -> None:
    star, xsa = layer_of("belief-star"), layer_of("xsa")
    weights = star.state_dict()
    xsa.load_state_dict(
        {
            "qkv.weight": weights["qkv.weight"],
            "proj.weight": weights["residual.local.weight"],
            "proj.bias": weights["residual.local.bias"],
        }
    )
    with torch.no_grad():
        star.proj.weight.zero_()
        star.proj.bias.zero_()
    x = torch.randn(2, 7, DIM, dtype=torch.double)
    torch.testing.assert_close(star(x), xsa(x))


def test_one_token_has_no_perpendicular_component() -> None:
    """With one token MH = V, so the output of `belief` is the bias of W."""
    layer = layer_of("belief")
    out = layer(torch.randn(4, 1, DIM, dtype=torch.double))
    torch.testing.assert_close(out, layer.proj.bias.expand_as(out))


@pytest.mark.parametrize("name", ["standard", "belief-star", "belief2"])
def test_timm_models_accept_the_layer_and_standard_weights(name: str) -> None:
    torch.manual_seed(0)
    arguments = {"img_size": 32, "depth": 2, "num_classes": 3}
    pretrained = timm.create_model("vit_tiny_patch16_224", **arguments)
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=attn_layer(name), **arguments)
    assert model.load_state_dict(pretrained.state_dict(), strict=True)
    x = torch.randn(2, 3, 32, 32)
    same = torch.allclose(model(x), pretrained(x), atol=1e-5)
    assert same == (name == "standard")


@pytest.mark.parametrize(("scope", "phi_scope"), [("global", "fixed"), ("both", "head")])
def test_belief2_with_init_copy_keeps_a_pretrained_models_outputs(
    scope: str, phi_scope: str
) -> None:
    torch.manual_seed(0)
    choices = {"activation": "identity", "init": "copy", "scope": scope, "phi_scope": phi_scope}
    copied = SplitConfig(**choices)
    chosen = AttentionSpec(residual=copied)
    arguments = {"img_size": 32, "depth": 2, "num_classes": 3}
    pretrained = timm.create_model("vit_tiny_patch16_224", **arguments)
    with torch.no_grad():
        for block in pretrained.blocks:
            block.attn.proj.bias.normal_()
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=attn_layer(chosen), **arguments)
    model.load_state_dict(pretrained.state_dict(), strict=True)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(x), pretrained(x), rtol=1e-5, atol=1e-5)


def test_an_incomplete_checkpoint_is_an_error() -> None:
    """Only the weights of a standard layer are completed."""
    star = layer_of("belief-star")
    state = star.state_dict()
    del state["residual.local.bias"]
    with pytest.raises(RuntimeError, match=r"residual\.local\.bias"):
        star.load_state_dict(state)


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="5 heads do not divide a width of 24"):
        attn_layer("standard")(24, 5)
    with pytest.raises(ValueError, match="did you mean 'belief-star'"):
        attn_layer("belief_star")
    with pytest.raises(ValueError, match="scale_norm"):
        attn_layer("belief")(24, 3, scale_norm=True)
