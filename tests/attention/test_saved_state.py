"""A layer's state dict and specification determine what it computes."""

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, HEADS, make, tokens
from helpers.saved_state import forget_values

from lit_attn.attention.layer import attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.attention.spec import AttentionSpec


@pytest.mark.parametrize("spec", attention_cases.covering_specs(), ids=attention_cases.label)
def test_a_layer_from_the_meta_device_computes_what_the_saved_layer_computes(
    spec: AttentionSpec,
) -> None:
    # With a temperature, unless linear keys never form the logits that it multiplies.
    lsa = spec.similarity.has_logits
    layer = make(spec, lsa=lsa)
    with torch.device("meta"):
        loaded = attn_layer(spec, local_self_attention=lsa)(DIM, HEADS, qkv_bias=True)
    number_layers(loaded)
    loaded = loaded.double().eval()
    forget_values(loaded)
    loaded.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(loaded(tokens(9)), layer(tokens(9)))
    assert dict(loaded.named_buffers()).keys() <= loaded.state_dict().keys()
