"""Keys and values from one latent of each token (MLA)."""

from typing import Any

import pytest
import timm
import torch
from helpers.attention_checks import DIM, HEADS, assert_same, tokens
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.attention.rotary import rotary
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.language import GPT, GPTConfig
from lit_attn.replace import replace_attention
from lit_attn.schema.errors import ConfigError

LATENT: dict[str, Any] = {"latent": {"rank": 8, "rotary": 4}}
WITH_QUERIES: dict[str, Any] = {"latent": {"rank": 8, "rotary": 4, "query_rank": 10}}
WIDTH = DIM // HEADS
CASES = [
    LATENT,
    WITH_QUERIES,
    {"latent": {}},
    {**LATENT, "kv_heads": 2, "window": 3},
    {**LATENT, "residual": "split", "gate": "head", "normaliser": "sink"},
    {**WITH_QUERIES, "residual": "perpendicular", "compose": "query+key"},
    {**LATENT, "normaliser": "differential", "bias": "alibi"},
    {**LATENT, "similarity": "gaussian", "scale": "ssmax"},
    {**LATENT, "filter": "selective", "normaliser": "sigmoid"},
]
every_case = pytest.mark.parametrize("choices", CASES, ids=str)


def make_layer(choices: Any) -> Attention:
    torch.manual_seed(0)
    layer = attn_layer(choices)(DIM, HEADS, qkv_bias=True).double().eval()
    number_layers(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


@every_case
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "additive"])
def test_values_and_gradients_equal_the_reference(
    choices: dict[str, Any], is_causal: bool, mask: str
) -> None:
    arguments: dict[str, Any] = {"is_causal": is_causal, "rotary": rotary(torch.arange(7), 4)}
    if mask == "padding":
        arguments["attn_mask"] = torch.ones(2, 1, 1, 7, dtype=torch.bool)
        arguments["attn_mask"][1, ..., 5:] = False
    elif mask == "additive":
        arguments["attn_mask"] = torch.randn(1, HEADS, 7, 7, dtype=torch.double)
    assert_same(make_layer(choices), tokens(7), **arguments)


def decode(layer: Attention, x: Tensor, cuts: list[int]) -> tuple[Tensor, Any]:
    """Return the output for the pieces of x between `cuts`, and the cache after them."""
    cache = layer.new_cache()
    outputs = []
    start = 0
    for stop in [*cuts, x.shape[1]]:
        angles = rotary(torch.arange(start, stop), 4)
        outputs.append(layer(x[:, start:stop], is_causal=True, rotary=angles, cache=cache))
        start = stop
    return torch.cat(outputs, 1), cache


@every_case
@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5, 6, 7, 8], [5], [5, 6, 8]], ids=str)
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_decoding_gives_the_output_of_the_sequence(
    choices: dict[str, Any], cuts: list[int], form: str
) -> None:
    """A projection with a hook is called, so its weight cannot be part of the query."""
    layer, x = make_layer(choices), tokens(9)
    assert layer.latent is not None
    if form == "expanded":
        layer.latent.up.register_forward_hook(lambda *_: None)
    assert layer.latent.can_absorb == (form == "absorbed")
    with torch.no_grad():
        expected = layer(x, is_causal=True, rotary=rotary(torch.arange(9), 4))
        decoded, cache = decode(layer, x, cuts)
    torch.testing.assert_close(decoded, expected, rtol=1e-10, atol=1e-11)
    assert not {"keys", "values"} & set(cache.buffers)
    stored = cache.buffers["latents"].tokens
    assert stored.shape[:3] == (2, 1, 1)
    assert stored.shape[-1] == layer.latent.rotary_width + layer.latent.rank


def test_gradients_pass_through_the_absorbed_form() -> None:
    layer, x = make_layer(WITH_QUERIES), tokens(6)
    parameters = list(layer.parameters())
    by = rotary(torch.arange(6), 4)
    out = layer(x, is_causal=True, rotary=by)
    expected = torch.autograd.grad(out.square().sum(), parameters)
    decoded, _ = decode(layer, x, [3, 4, 5])
    torch.testing.assert_close(torch.autograd.grad(decoded.square().sum(), parameters), expected)


def test_gradients_pass_gradcheck() -> None:
    layer = make_layer(WITH_QUERIES)
    assert torch.autograd.gradcheck(layer, (tokens(3, batch=1).requires_grad_(),), fast_mode=True)


@pytest.mark.slow
def test_a_compiled_layer_computes_the_same_for_two_lengths() -> None:
    torch.compiler.reset()
    layer = make_layer(WITH_QUERIES)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for n in (4, 7, 9):
        by = rotary(torch.arange(n), 4)
        x = tokens(n)
        expected = layer(x, is_causal=True, rotary=by)
        computed = compiled(x, is_causal=True, rotary=by)
        torch.testing.assert_close(computed, expected)
        weights = list(layer.parameters())
        torch.testing.assert_close(
            torch.autograd.grad(computed.sum(), weights),
            torch.autograd.grad(expected.sum(), weights),
        )


def join_pairs(rows: Tensor) -> Tensor:
    """Return the rows of DeepSeek's pairs (0, 1), (2, 3), ... in the order of our halves."""
    return torch.cat([rows[0::2], rows[1::2]])


@pytest.mark.parametrize("query_rank", [None, 10])
def test_values_equal_those_of_deepseek_v3(query_rank: int | None) -> None:
    """Weights are copied. Its RMSNorm computes in float32, so that of torch takes its place."""
    torch.manual_seed(1)
    rank, turned, width = 8, 4, WIDTH
    config = DeepseekV3Config(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=query_rank,
        kv_lora_rank=rank,
        qk_rope_head_dim=turned,
        qk_nope_head_dim=width,
        v_head_dim=width,
        attention_bias=False,
        attn_implementation="sdpa",
    )
    theirs = DeepseekV3Attention(config, 0).double().eval()
    ours = attn_layer({"latent": {"rank": rank, "rotary": turned, "query_rank": query_rank}})(
        DIM, HEADS, proj_bias=False
    )
    ours = ours.double().eval()
    assert ours.latent is not None
    theirs.kv_a_layernorm = nn.RMSNorm(rank, eps=1e-6).double()
    queries = theirs.q_proj if query_rank is None else theirs.q_b_proj
    with torch.no_grad():
        nn.init.normal_(theirs.kv_a_layernorm.weight, 1.0, 0.2)
        if query_rank is not None:
            theirs.q_a_layernorm = nn.RMSNorm(query_rank, eps=1e-6).double()
            nn.init.normal_(theirs.q_a_layernorm.weight, 1.0, 0.2)
            ours.latent.query_norm.weight.copy_(theirs.q_a_layernorm.weight)
            ours.latent.query_down.weight.copy_(theirs.q_a_proj.weight)
        rows = []
        for head in queries.weight.unflatten(0, (HEADS, -1)):
            rows += [join_pairs(head[width:]), head[:width]]
        ours.qkv.weight.copy_(torch.cat(rows))
        down = theirs.kv_a_proj_with_mqa.weight
        ours.latent.down.weight.copy_(torch.cat([join_pairs(down[rank:]), down[:rank]]))
        ours.latent.norm.weight.copy_(theirs.kv_a_layernorm.weight)
        up = theirs.kv_b_proj.weight.unflatten(0, (HEADS, -1))
        ours.latent.up.weight.copy_(
            torch.cat([up[:, :width].flatten(0, 1), up[:, width:].flatten(0, 1)])
        )
        ours.proj.weight.copy_(theirs.o_proj.weight)
    n = 9
    by = rotary(torch.arange(n), turned)
    positions = [torch.cat([part, part], -1)[None].double() for part in by]
    mask = torch.full((n, n), -torch.inf, dtype=torch.double).triu(1)[None, None]
    x = tokens(n)
    expected, _ = theirs(x, tuple(positions), mask)
    torch.testing.assert_close(ours(x, is_causal=True, rotary=by), expected, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        decoded, _ = decode(ours, x, [4, 5, 6, 7, 8])
    torch.testing.assert_close(decoded, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 0, DIM), (0, 3, DIM)], ids=str)
def test_a_call_without_tokens_returns_none(shape: tuple[int, ...]) -> None:
    layer = make_layer(LATENT)
    assert layer(torch.zeros(shape, dtype=torch.double), is_causal=True).shape == shape


def test_a_language_model_decodes_with_a_small_cache() -> None:
    model = GPTConfig(
        dim=24, depth=2, heads=4, ffn=None, positions="rotary", attention={"latent": {"rank": 8}}
    )
    network = GPT(model, vocabulary=11, context=16).double().eval()
    ids = torch.randint(11, (2, 9))
    caches = network.trunk.new_caches()
    with torch.no_grad():
        expected = network.trunk(ids)
        parts = [network.trunk(part, caches=caches) for part in ids.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    stored = [sum(tensor.numel() for tensor in cache.tensors()) for cache in caches]
    assert stored == [2 * 9 * (8 + WIDTH)] * 2


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"zz": True}, "zz has no definition with it"),
        ({"similarity": "mixture"}, "similarity 'mixture' computes further keys"),
        ({"similarity": "linear"}, "similarity 'linear' forms no logits"),
        ({"transform": "linear"}, "transform 'linear' maps k and v"),
        ({"values": "first"}, "values 'first' mixes values of the layer itself"),
        ({"convolution": "short"}, "convolution 'short' is of q, k or v"),
        ({"pair": "difference"}, "pair 'difference' projects queries of the width of a head"),
        ({"kv_from": "previous"}, "latent: computes keys and values"),
        ({"layers": {"every": 2, "use": {"latent": None, "kv_from": "previous"}}}, "has a latent"),
    ],
    ids=str,
)
def test_parts_without_a_meaning_are_refused(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec.model_validate({**LATENT, **others}).by_layer(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {},
            r"attention\.latent\.rotary: 4 components of the keys are rotated, and the positions "
            r"of layer 2 rotate 6; write `rotary: 6`, or a `rotary_share` of 0\.666667",
        ),
        ({"rotations": ["model", "none"]}, None),
        ({"rotary_share": 0.67}, None),
        ({"positions": "learned"}, None),
        ({"positions": "learned", "qk_norm": True}, "qk_norm: the latents of layer 2 have norms"),
    ],
    ids=str,
)
def test_a_configuration_rotates_at_most_the_rotated_part(
    changes: dict[str, Any], message: str | None
) -> None:
    sizes = {"dim": 24, "depth": 2, "heads": 4, "ffn": None, "positions": "rotary"}
    choices = {**sizes, "attention": {"layers": ["standard", LATENT]}, **changes}
    if message is None:
        GPTConfig.model_validate(choices)
        return
    with pytest.raises(ValueError, match=message):
        GPTConfig.model_validate(choices)


def test_a_model_of_timm_is_built_with_a_latent() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", depth=1, img_size=32, attn_layer=attn_layer(LATENT)
    )
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    layer = model.blocks[0].attn
    assert layer.latent.down.weight.shape == (4 + 8, 192)
    assert all(parameter.grad.abs().max() > 0 for parameter in layer.parameters())


def test_layers_and_models_refuse_what_a_latent_lacks() -> None:
    layer = make_layer(LATENT)
    with pytest.raises(ValueError, match=r"latent\.rotary: the positions rotate 6 components"):
        layer(tokens(3), is_causal=True, rotary=rotary(torch.arange(3), WIDTH))
    with pytest.raises(ValueError, match="latent: has no norms of q and k"):
        attn_layer(LATENT)(DIM, HEADS, qk_norm=True, norm_layer=nn.LayerNorm)
    with pytest.raises(ValueError, match="latent: stands for the tokens of one sequence"):
        layer(tokens(3), memory=tokens(4))
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    with pytest.raises(ConfigError, match="latent: has projections that no layer of another"):
        replace_attention(model, LATENT)
    with pytest.raises(ValueError, match="value_embeddings: layer 2 has `latent`"):
        GPTConfig(
            dim=24,
            depth=2,
            heads=4,
            ffn=None,
            attention={"layers": ["standard", LATENT]},
            value_embeddings={"every": 1},
        )
