"""Tests of rotary positions and head widths against the reference."""

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, HEADS, assert_same, make, tokens

from lit_attn.attention.layer import attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.attention.rotary import rotary, rotate
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.layers import HeadNorm

every_choice = pytest.mark.parametrize(
    "spec", attention_cases.covering_specs(), ids=attention_cases.label
)

every_softmax = pytest.mark.parametrize(
    "spec",
    [s for s in attention_cases.covering_specs() if s.similarity.kind != "linear"],
    ids=attention_cases.label,
)


@pytest.mark.slow
@every_choice
def test_value_and_gradient_equal_the_formula(spec: AttentionSpec) -> None:
    assert_same(make(spec), tokens(7), is_causal=True, rotary=rotary(torch.arange(7), DIM // HEADS))


@every_softmax
def test_only_distances_matter(spec: AttentionSpec) -> None:
    """Linear keys are another matter, because phi comes after the rotation."""
    layer, x = make(spec), tokens(6)
    original = layer(x, rotary=rotary(torch.arange(6), DIM // HEADS))
    shifted = layer(x, rotary=rotary(torch.arange(6) + 40, DIM // HEADS))
    torch.testing.assert_close(original, shifted, rtol=1e-3, atol=1e-4)


def test_z_is_normalised_and_rotated_like_k() -> None:
    """Scaling W_Z then changes nothing, and only distances matter."""
    torch.manual_seed(0)
    spec = AttentionSpec(zz="like-k")
    layer = attn_layer(spec)(DIM, HEADS, qk_norm=True, norm_layer=HeadNorm).double().eval()
    x = tokens(6)
    by = rotary(torch.arange(6), DIM // HEADS)
    assert_same(layer, x, rotary=by)
    original = layer(x, rotary=by)
    shifted = layer(x, rotary=rotary(torch.arange(6) + 40, DIM // HEADS))
    torch.testing.assert_close(original, shifted, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        layer.z_norm.weight.mul_(3)
    assert (layer(x, rotary=by) - original).abs().max() > 1e-3
    with torch.no_grad():
        layer.z_norm.weight.div_(3)
        layer.z.weight.mul_(3)
    torch.testing.assert_close(layer(x, rotary=by), original, rtol=1e-4, atol=1e-5)


def test_z_is_neither_normalised_nor_rotated_by_default() -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(zz=True)
    layer = attn_layer(spec)(DIM, HEADS, qk_norm=True, norm_layer=HeadNorm).double().eval()
    assert not list(layer.z_norm.parameters())
    assert_same(layer, tokens(6), rotary=rotary(torch.arange(6), DIM // HEADS))


def test_positions_change_the_output() -> None:
    layer, x = make(AttentionSpec()), tokens(6)
    turned = layer(x, rotary=rotary(torch.arange(6), DIM // HEADS))
    assert (turned - layer(x)).abs().max() > 1e-3


def test_angles_equal_a_computation_by_hand() -> None:
    """At position 3 with head width 4, pairs (0, 2) and (1, 3) have the angles 3 and 3 / 100."""
    x = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.double).reshape(1, 1, 1, 4)
    angles = torch.tensor([3.0, 0.03], dtype=torch.double)
    expected = [angles[0].cos(), -2 * angles[1].sin(), angles[0].sin(), 2 * angles[1].cos()]
    turned = rotate(x, rotary(torch.tensor([3]), 4))
    torch.testing.assert_close(turned.flatten(), torch.stack(expected), rtol=1e-6, atol=1e-6)


def test_odd_head_width_is_refused() -> None:
    with pytest.raises(ValueError, match="an even head width, not 5"):
        rotary(torch.arange(3), 5)


@every_choice
def test_heads_of_another_width(spec: AttentionSpec) -> None:
    """The widths of three heads do not add up to the layer's width."""
    torch.manual_seed(0)
    head_dim = 4
    layer = attn_layer(spec)(DIM, HEADS, attn_head_dim=head_dim, qkv_bias=True).double().eval()
    number_layers(layer)
    assert layer.proj.in_features == HEADS * head_dim
    assert_same(layer, tokens(7), rotary=rotary(torch.arange(7), head_dim))
