"""Decoding with a cache gives the causal output of the whole sequence, for every part."""

import random
from itertools import pairwise

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, HEADS, make, tokens
from torch import Tensor

from lit_attn.attention import cache, dispatch, formed
from lit_attn.attention.compose import KeyComposeConfig
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.mixture import MixtureConfig
from lit_attn.attention.rotary import rotary
from lit_attn.attention.spec import PRESETS, AttentionSpec

SPECS = attention_cases.all_specs()
every_spec = pytest.mark.parametrize("spec", SPECS, ids=attention_cases.label)
# Every choice of every part once, for what a part does whatever stands beside it.
CHOICES = attention_cases.covering_specs()
every_choice = pytest.mark.parametrize("spec", CHOICES, ids=attention_cases.label)
every_softmax = pytest.mark.parametrize(
    "spec",
    [spec for spec in CHOICES if not isinstance(spec.similarity, LinearConfig)],
    ids=attention_cases.label,
)
every_windowed = pytest.mark.parametrize(
    "spec",
    [spec for spec in CHOICES if attention_cases.takes_window(spec)],
    ids=attention_cases.label,
)

N = 11


def decode(layer: Attention, x: Tensor, cuts: list[int], is_rotated: bool = False) -> Tensor:
    """Return the layer's output for x, passed in pieces that end at `cuts`."""
    cache, outputs = layer.new_cache(), []
    for start, stop in pairwise([0, *cuts, x.shape[1]]):
        assert cache.position == start
        by = rotary(torch.arange(start, stop), layer.head_dim) if is_rotated else None
        outputs.append(layer(x[:, start:stop], is_causal=True, rotary=by, cache=cache))
    return torch.cat(outputs, dim=1)


def assert_decodes(layer: Attention, x: Tensor, cuts: list[int], is_rotated: bool = False) -> None:
    n = x.shape[1]
    by = rotary(torch.arange(n), layer.head_dim) if is_rotated else None
    with torch.no_grad():
        expected = layer(x, is_causal=True, rotary=by)
        torch.testing.assert_close(
            decode(layer, x, cuts, is_rotated), expected, rtol=1e-10, atol=1e-11
        )


def random_cuts(n: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return sorted(drawn.sample(range(1, n), drawn.randrange(1, n - 1)))


def cache_bytes(layer: Attention, n: int, size: int) -> int:
    """Return the bytes of a cache after n tokens, `size` at a time."""
    cache = layer.new_cache()
    with torch.no_grad():
        for part in tokens(n, batch=1).split(size, dim=1):
            layer(part, is_causal=True, cache=cache)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in cache.tensors()}
    return sum(storage.nbytes() for storage in storages.values())


@every_spec
def test_decoding_token_by_token_gives_the_output_of_the_sequence(spec: AttentionSpec) -> None:
    assert_decodes(make(spec), tokens(N), list(range(1, N)))


@every_choice
def test_decoding_after_a_prompt_gives_the_output_of_the_sequence(spec: AttentionSpec) -> None:
    assert_decodes(make(spec), tokens(N), list(range(6, N)), is_rotated=True)


@pytest.mark.slow
@every_choice
def test_pieces_of_any_length_give_the_output_of_the_sequence(spec: AttentionSpec) -> None:
    assert_decodes(make(spec), tokens(N), random_cuts(N, 1))


@pytest.mark.slow
@every_choice
def test_windows_and_shared_keys_decode(spec: AttentionSpec) -> None:
    """Layers that take no window are decoded without one."""
    window = 4 if attention_cases.takes_window(spec) else None
    for kv_heads in (1, None):
        layer = make(spec.model_copy(update={"window": window, "kv_heads": kv_heads}))
        assert_decodes(layer, tokens(N), random_cuts(N, 3), is_rotated=True)
        assert_decodes(layer, tokens(N), [7, 8, 9, 10])


@every_windowed
def test_the_narrowest_window_decodes(spec: AttentionSpec) -> None:
    """With a window of 1 the cache stays empty."""
    layer = make(spec.model_copy(update={"window": 1}))
    assert_decodes(layer, tokens(N), [1, 2, 5, 6])


@every_softmax
def test_local_self_attention_decodes(spec: AttentionSpec) -> None:
    """No token attends to itself, so the first one attends to nothing."""
    layer = make(spec, lsa=True)
    assert_decodes(layer, tokens(N), list(range(1, N)))
    assert_decodes(layer, tokens(N), [4, 6])


@every_choice
def test_several_chunks_of_queries_decode(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer pieces take several chunks of queries, with an empty and with a filled cache."""
    monkeypatch.setattr(formed, "ONE_CHUNK_UP_TO", 2)
    monkeypatch.setattr(dispatch, "CHUNK", 3)
    monkeypatch.setattr(formed, "CHUNK", 3)
    assert_decodes(make(spec), tokens(N), [4])
    if attention_cases.takes_window(spec):
        assert_decodes(make(spec.model_copy(update={"window": 4})), tokens(N), [5])


@pytest.mark.parametrize("scope", ["head", "layer", "position"])
@pytest.mark.parametrize("part", [MixtureConfig, LinearConfig])
def test_keys_keep_the_weights_of_their_positions(
    part: type[MixtureConfig | LinearConfig], scope: str
) -> None:
    """The same is true with a window."""
    similarity = part(keys=2, prior_scope=scope, **{"positions": N} if scope == "position" else {})
    for window in (None, 3) if part is MixtureConfig else (None,):
        layer = make(AttentionSpec(similarity=similarity, window=window))
        assert_decodes(layer, tokens(N), list(range(1, N)))
        assert_decodes(layer, tokens(N), [2, 7])
    if scope == "position":
        cache = layer.new_cache()
        layer(tokens(N), is_causal=True, cache=cache)
        with pytest.raises(ValueError, match=f"{N + 1} tokens, .* for {N} positions"):
            layer(tokens(1), is_causal=True, cache=cache)


def test_one_query_forms_no_matrix_for_every_key() -> None:
    """The maps of cached keys have low rank; H x H matrices of them would be used only once."""
    heads, n, rank = 12, 64, 2
    spec = AttentionSpec(compose=KeyComposeConfig(rank=rank))
    composer = attn_layer(spec)(24, heads).composers["pre"]
    maps, a = composer.maps(torch.randn(1, n, 24))["key"], torch.randn(1, heads, 2, n)
    expected = composer(a, None, maps)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        alone = composer(a[:, :, :1], None, maps)
    torch.testing.assert_close(alone, expected[:, :, :1], rtol=1e-5, atol=1e-6)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 4 * n * rank * heads < 4 * n * heads * heads


@pytest.mark.parametrize("width", [127, 128])
@pytest.mark.parametrize("keys", [1, 2])
def test_one_query_is_multiplied_with_keys_of_any_width(width: int, keys: int) -> None:
    q = torch.randn(2, 3, 1, width, dtype=torch.float64)
    # The view of a cache is not contiguous.
    k = torch.randn(2, 3, keys, 9, width, dtype=torch.float64)[..., 1:8, :]
    products = formed.multiply_query(q, k, 0.5)
    torch.testing.assert_close(products, torch.einsum("bhqe,bhrne->bhrqn", 0.5 * q, k))


def test_linear_keys_decode_beyond_one_chunk() -> None:
    """150 tokens are more than one chunk of causal linear attention."""
    x = tokens(150)
    assert_decodes(make(PRESETS["mlk"]), x, [70, 71, 140])


@every_softmax
def test_decoding_under_autocast_agrees_to_rounding(spec: AttentionSpec) -> None:
    """In bfloat16 the difference is as small as the rounding error."""
    layer = make(spec).float()
    x = tokens(N).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, is_causal=True).float()
        error = decode(layer, x, list(range(1, N))).float() - expected
    assert error.norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", ["linear", "mlk", "smlk"])
def test_the_cache_of_linear_keys_has_a_constant_size(name: str) -> None:
    layer = make(PRESETS[name])
    width = DIM // HEADS
    for n in (1, 20, 100):
        assert cache_bytes(layer, n, 1) == 8 * HEADS * (width * width + width)


@pytest.mark.parametrize("name", ["standard", "mgk", "belief2", "dcmha"])
def test_a_window_bounds_the_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is true token by token and after a long prompt in one piece."""
    monkeypatch.setattr(cache, "SPARE", 0)
    layer = make(PRESETS[name].model_copy(update={"window": 5}))
    most = cache_bytes(layer, 4, 1)
    assert cache_bytes(layer, 3, 1) < most
    assert cache_bytes(layer, 60, 1) == most
    assert cache_bytes(layer, 60, 60) == most


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        (AttentionSpec(), 2 * DIM),
        (AttentionSpec(kv_heads=1), 2 * DIM // HEADS),
        (PRESETS["belief-star"], 2 * DIM),
        (PRESETS["belief2"], 3 * DIM),
        # The features of each key include its offset.
        (PRESETS["mgk"], 3 * DIM + 2 * HEADS),
        (PRESETS["mgk"].model_copy(update={"kv_heads": 1}), 3 * DIM // HEADS),
        (PRESETS["talking-heads"], 2 * DIM),
        # Two places, each with two vectors of rank 2 over the heads, and the gate.
        (PRESETS["dcmha"], 2 * DIM + 2 * (2 * 2 * HEADS + HEADS)),
        (PRESETS["dcmha-query"], 2 * DIM),
    ],
    ids=lambda value: attention_cases.label(value) if isinstance(value, AttentionSpec) else "",
)
def test_the_numbers_that_a_cache_stores_for_a_token(
    spec: AttentionSpec, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache stores keys and values of key heads, all keys of a mixture, z, and maps of keys."""
    monkeypatch.setattr(cache, "SPARE", 0)
    layer = make(spec)
    assert cache_bytes(layer, 9, 1) == 9 * 8 * numbers


@pytest.mark.parametrize("name", ["standard", "mgk", "belief2", "dcmha"])
@pytest.mark.parametrize("window", [None, 5])
def test_most_new_tokens_copy_no_cached_token(name: str, window: int | None) -> None:
    """Only a full buffer is copied, and then it has memory for SPARE further tokens."""
    layer = make(PRESETS[name].model_copy(update={"window": window}))
    decoded, copies, pointers = layer.new_cache(), 0, set()
    with torch.no_grad():
        for token in tokens(2 * cache.SPARE, batch=1).split(1, dim=1):
            layer(token, is_causal=True, cache=decoded)
            storages = {tensor.untyped_storage().data_ptr() for tensor in decoded.tensors()}
            copies += bool(storages - pointers)
            pointers = storages
    assert copies <= 4
    assert decoded.buffers
    for buffer in decoded.buffers.values():
        assert buffer.tensor.shape[buffer.axis] <= decoded.length + 2 * cache.SPARE


@pytest.mark.parametrize("name", ["standard", "mgk", "belief2", "dcmha"])
def test_a_cache_can_leave_inference_mode(name: str) -> None:
    layer, x = make(name), tokens(N)
    caches = layer.new_cache()
    with torch.inference_mode():
        layer(x[:, :5], is_causal=True, cache=caches)
        layer(x[:, 5:6], is_causal=True, cache=caches)
    with torch.no_grad():
        rest = [layer(x[:, i : i + 1], is_causal=True, cache=caches) for i in range(6, N)]
        torch.testing.assert_close(torch.cat(rest, 1), layer(x, is_causal=True)[:, 6:])


@pytest.mark.parametrize("name", ["standard", "mgk", "belief2", "dcmha"])
def test_gradients_pass_through_a_cache(name: str) -> None:
    layer, x = make(name), tokens(N)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(layer(x, is_causal=True).square().sum(), parameters)
    decoded = decode(layer, x, list(range(3, N)))
    torch.testing.assert_close(torch.autograd.grad(decoded.square().sum(), parameters), expected)


@every_softmax
def test_a_mask_can_replace_causality(spec: AttentionSpec) -> None:
    """The mask has a row for each new token and a column for each token up to the last one."""
    layer, x = make(spec), tokens(N)
    present = torch.ones(2, 1, 1, N, dtype=torch.bool)
    present[1, ..., :3] = False
    visible = torch.ones(N, N, dtype=torch.bool).tril() & present | torch.eye(N, dtype=torch.bool)
    cache, outputs = layer.new_cache(), []
    with torch.no_grad():
        for start, stop in pairwise([0, 4, 5, N]):
            mask = visible[..., start:stop, cache.position - cache.length : stop]
            outputs.append(layer(x[:, start:stop], attn_mask=mask, cache=cache))
        # Parts that ask for the order of the call must be told, as a cache tells them.
        expected = layer(x, attn_mask=visible, is_causal=True)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-10, atol=1e-11)


def test_a_cache_is_for_causal_inference() -> None:
    layer = make(AttentionSpec())
    with pytest.raises(ValueError, match="a cache needs `is_causal` or `attn_mask`"):
        layer(tokens(3), cache=layer.new_cache())
    layer.train()
    with pytest.raises(ValueError, match="evaluation mode"):
        layer(tokens(3), is_causal=True, cache=layer.new_cache())
    linear, mask = make(PRESETS["linear"]), torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="without a mask for a cache"):
        linear(tokens(3), attn_mask=mask, cache=linear.new_cache())


def test_two_caches_are_independent() -> None:
    layer, x = make(PRESETS["dcmha"]), tokens(4)
    first, second = layer.new_cache(), layer.new_cache()
    layer(x, is_causal=True, cache=first)
    out = layer(x, is_causal=True, cache=second)
    torch.testing.assert_close(out, layer(x, is_causal=True))


@pytest.mark.gpu
@every_choice
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_on_a_gpu_agrees(spec: AttentionSpec, dtype: torch.dtype) -> None:
    layer = make(spec).to("cuda", dtype)
    x = tokens(33).to("cuda", dtype)
    with torch.no_grad():
        expected = layer(x, is_causal=True)
        error = decode(layer, x, [9, *range(20, 33)]) - expected
    # Two crosses with multi-token attention are off by 30 and 42 eps in float32 on an H100.
    assert error.double().norm() < 100 * torch.finfo(dtype).eps * expected.double().norm()


@pytest.mark.parametrize("name", ["standard", "gaussian", "mgk"])
def test_dropout_acts_on_one_query(name: str) -> None:
    layer = make(PRESETS[name]).train()
    layer.attn_drop = 0.5
    x, memory = tokens(1), tokens(9)
    assert not torch.equal(layer(x, memory=memory), layer(x, memory=memory))
