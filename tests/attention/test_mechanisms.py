"""Properties of single mechanisms: mixtures, linear keys, composition and windows."""

import math
from typing import Any

import pytest
import torch
from timm.models.cait import TalkingHeadAttn
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lit_attn.attention import masks, reference
from lit_attn.attention.compose import QueryKeyComposeConfig, StaticConfig
from lit_attn.attention.formed import ONE_CHUNK_UP_TO
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.mixture import MixtureConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec

DIM, HEADS = 16, 2


def make(spec: AttentionSpec | str, dim: int = DIM, heads: int = HEADS) -> Attention:
    torch.manual_seed(0)
    return attn_layer(spec)(dim, heads).double()


def parameters(layer: Attention) -> int:
    return sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize(
    ("dim", "heads", "extra"), [(1024, 16, 344_064), (384, 6, 48_384), (2560, 32, 1_703_936)]
)
def test_composition_has_the_published_parameters(dim: int, heads: int, extra: int) -> None:
    """4 (d Hid + Hid^2) + 4 d H with Hid = 4 H (docs/setups.md)."""
    with torch.device("meta"):
        composed = attn_layer("dcmha")(dim, heads)
        plain = attn_layer("standard")(dim, heads)
    hidden = 4 * heads
    assert 4 * (dim * hidden + hidden**2) + 4 * dim * heads == extra
    assert parameters(composed) - parameters(plain) == extra


def test_talking_heads_add_two_matrices() -> None:
    assert parameters(make("talking-heads")) - parameters(make("standard")) == 2 * HEADS**2


def test_talking_heads_train_as_timms_layer() -> None:
    """timm's layer has biases of the head maps, which the paper lacks; they stay at zero."""
    torch.manual_seed(1)
    theirs = TalkingHeadAttn(DIM, HEADS, qkv_bias=True).double()
    ours = attn_layer("talking-heads")(DIM, HEADS, qkv_bias=True).double()
    pairs = {
        "qkv.weight": theirs.qkv.weight,
        "qkv.bias": theirs.qkv.bias,
        "proj.weight": theirs.proj.weight,
        "proj.bias": theirs.proj.bias,
        "composers.pre.matrix": theirs.proj_l.weight,
        "composers.post.matrix": theirs.proj_w.weight,
    }
    parameters_of_ours = dict(ours.named_parameters())
    assert parameters_of_ours.keys() == pairs.keys()
    with torch.no_grad():
        for name, parameter in parameters_of_ours.items():
            parameter.copy_(pairs[name])
        theirs.proj_l.bias.zero_()
        theirs.proj_w.bias.zero_()
    optimizers = [torch.optim.AdamW(list(p), lr=0.01) for p in (pairs.values(), ours.parameters())]
    for _ in range(20):
        x, target = torch.randn(2, 3, 7, DIM, dtype=torch.float64)
        for layer, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            (layer(x) - target).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-9, atol=1e-9)
    for name, parameter in parameters_of_ours.items():
        torch.testing.assert_close(parameter, pairs[name], rtol=1e-9, atol=1e-9)


def test_mixtures_add_the_expected_parameters() -> None:
    plain = parameters(make("standard"))
    assert parameters(make("mgk")) - plain == DIM * DIM + 2 * HEADS
    assert parameters(make("smgk")) - plain == 2 * DIM + 2 * HEADS
    assert parameters(make("mgk-hard")) - plain == DIM * DIM
    half = attn_layer("mgk")(DIM, HEADS // 2, attn_head_dim=DIM // HEADS)
    assert half.proj.in_features == DIM // 2


@pytest.mark.parametrize(
    "spec",
    [
        PRESETS["mgk-hard"],
        PRESETS["dcmha"],
        PRESETS["talking-heads"],
        AttentionSpec(
            similarity=MixtureConfig(variance=(1, 3)), compose=QueryKeyComposeConfig(), window=50
        ),
    ],
    ids=["mgk-hard", "dcmha", "talking-heads", "mixture-composed-window"],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_chunks_give_the_result_of_the_full_sequence(spec: AttentionSpec, is_causal: bool) -> None:
    """Value and gradient of several chunks, the last one shorter, equal the reference's."""
    n = ONE_CHUNK_UP_TO + 13
    layer = make(spec, 8, 2)
    x = torch.randn(1, n, 8, dtype=torch.double, requires_grad=True)
    bias = torch.randn(n, n, dtype=torch.double)
    fast = layer(x, attn_mask=bias, is_causal=is_causal)
    plain = reference.attention(layer, x, attn_mask=bias, is_causal=is_causal)
    torch.testing.assert_close(fast, plain)
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (fast, plain)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["mgk-hard", "dcmha", "talking-heads", "mlk"])
def test_no_tensor_of_size_n_squared_is_kept(name: str) -> None:
    """The memory kept for the backward pass is O(n chunk H), even where logits are formed."""
    n = 1024
    layer = attn_layer(name)(DIM, HEADS)
    largest = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(1, n, DIM, requires_grad=True), is_causal=True)
    assert largest <= n * masks.CHUNK * HEADS


def test_windows_skip_keys_that_no_query_sees() -> None:
    causal = masks.Masks(None, None, True, 256, False)
    assert causal.visible(slice(512, 640), 2048) == slice(257, 640)
    both_ways = masks.Masks(None, None, False, 256, False)
    assert both_ways.visible(slice(512, 640), 2048) == slice(257, 895)
    assert masks.Masks(None, None, False, None, False).visible(slice(0, 128), 300) == slice(0, 300)


@pytest.mark.parametrize("name", ["standard", "belief2", "mgk"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_mask_of_a_window_has_size_n_squared(
    name: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of queries has a mask for the keys in their windows only."""
    window = 64
    layer = attn_layer({"preset": name, "window": window})(DIM, HEADS)
    kernel, sizes = F.scaled_dot_product_attention, []

    def record(*arguments: Any, **keywords: Any) -> Tensor:
        sizes.append(arguments[3].numel())
        return kernel(*arguments, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    layer(torch.randn(1, 1000, DIM), is_causal=is_causal)
    keys = 2 if name == "mgk" else 1
    assert len(sizes) == 8
    assert max(sizes) <= masks.CHUNK * keys * (masks.CHUNK + 2 * window)


@pytest.mark.parametrize("name", ["talking-heads", "mgk-hard", "dcmha"])
def test_flops_count_all_queries_and_keys(name: str) -> None:
    """FLOPs are a n + b n^2, as for one kernel call, although chunks skip masked keys."""
    with torch.device("meta"):
        layer = attn_layer(name)(DIM, HEADS).eval()

    def flops(n: int) -> int:
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            layer(torch.empty(1, n, DIM, device="meta"), is_causal=True)
        return counter.get_total_flops()

    n = ONE_CHUNK_UP_TO // 2
    assert flops(3 * n) - 3 * flops(2 * n) + 3 * flops(n) == 0


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_counts_the_token_itself(window: int) -> None:
    """A window of w contains the keys i - w + 1 to i, as in the released JAX code."""
    layer = make(AttentionSpec(window=window))
    x = torch.randn(1, 9, DIM, dtype=torch.double)
    out = layer(x, is_causal=True)
    for i in range(9):
        alone = layer(x[:, max(0, i - window + 1) : i + 1], is_causal=True)
        torch.testing.assert_close(out[:, i], alone[:, -1])


def test_the_m_step_sets_the_mean_responsibility() -> None:
    """The expectation loops over every pair that attends; the step itself uses the old pi.

    The end of the backward pass is the end of the step.
    """
    layer = make(AttentionSpec(similarity=MixtureConfig(keys=3, prior="m-step"))).train()
    x = torch.randn(2, 5, DIM, dtype=torch.double)
    q, keys, _ = reference.project(layer, x, None)
    before = layer.similarity.prior.clone()
    out = layer(x, is_causal=True)
    assert torch.equal(layer.similarity.prior, before)
    out.sum().backward()
    responsibilities = torch.zeros(HEADS, 3, dtype=torch.double)
    pairs = 0
    for b in range(2):
        for i in range(5):
            for j in range(i + 1):
                distance = torch.stack(
                    [(q[b, :, i] - k[b, :, j]).square().sum(-1) for k in keys], 1
                )
                s = -distance / (2 * math.sqrt(DIM / HEADS)) + before[..., 0].T.log()
                responsibilities += s.exp() / (s.exp().sum(1, keepdim=True) + 1e-6)
                pairs += 1
    mean = responsibilities / (pairs + 1e-6)
    mean[:, -1] = 1 - mean[:, :-1].sum(1)
    torch.testing.assert_close(layer.similarity.prior[..., 0].T, mean)
    layer.similarity.prior.copy_(before)
    torch.testing.assert_close(layer.eval()(x, is_causal=True), out)
    torch.testing.assert_close(layer.similarity.prior, before)


def test_more_tokens_than_weights_per_position_are_refused() -> None:
    layer = make(AttentionSpec(similarity=MixtureConfig(prior_scope="position", positions=6)))
    layer(torch.randn(1, 6, DIM, dtype=torch.double))
    with pytest.raises(ValueError, match="7 tokens, but the mixture's weights are for 6 positions"):
        layer(torch.randn(1, 7, DIM, dtype=torch.double))


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"preset": "belief2", "residual": "value"}, "zz: has no effect, because `residual: value"),
        ({"residual": "value", "compose": "key"}, "compose: has no effect"),
        ({"residual": "value", "window": 4}, "window: has no effect"),
        ({"residual": "value", "normaliser": "sigmoid"}, "normaliser: 'sigmoid' has no effect"),
        ({"preset": "mgk", "residual": "value"}, "similarity: 'mixture' has no effect"),
        ({"similarity": "linear", "compose": "static"}, "compose: linear keys never form"),
        ({"similarity": "linear", "zz": "with"}, "zz: linear keys never form"),
        ({"similarity": "linear", "window": 4}, "window: linear keys never form"),
        ({"similarity": {"kind": "linear", "prior": "m-step"}}, "responsibilities need the logits"),
        ({"similarity": {"kind": "mixture", "variance": [1]}}, "variance: has 1 values for 2 keys"),
        (
            {"similarity": {"kind": "mixture", "kernel": "dot", "variance": [1, 2]}},
            "variance: has no effect with `kernel: dot`",
        ),
        (
            {"compose": {"kind": "query", "projection": False, "gate": False}},
            "needs `projection: true` or `gate: true`",
        ),
        ({"compose": "queries"}, "did you mean 'query'"),
    ],
)
def test_invalid_combinations_are_refused_with_a_reason(
    choices: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        AttentionSpec.model_validate(choices)


@pytest.mark.parametrize("name", ["standard", "belief"])
def test_one_call_copies_no_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values as wide as the queries are passed without a copy."""
    n, tensors = 512, []
    layer = attn_layer(name)(16, 2)
    call = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: (tensors.extend(a[:3]), call(*a, **k))[1]
    )
    projected = []
    layer.qkv.register_forward_hook(lambda module, inputs, output: projected.append(output))
    layer(torch.randn(1, n, 16))
    assert {part.untyped_storage().data_ptr() for part in tensors} == {
        projected[0].untyped_storage().data_ptr()
    }


def test_composition_starts_near_the_identity() -> None:
    x = torch.randn(2, 7, 64)
    torch.manual_seed(0)
    composed = attn_layer("dcmha")(64, 4)
    plain = attn_layer("standard")(64, 4)
    plain.load_state_dict({k: v for k, v in composed.state_dict().items() if "compos" not in k})
    difference = (composed(x) - plain(x)).norm() / plain(x).norm()
    assert 0 < difference < 0.2


def test_static_composition_with_skip_adds_the_identity() -> None:
    layer = make(AttentionSpec(compose=StaticConfig(skip=True, place="post")))
    with torch.no_grad():
        layer.composers["post"].matrix.zero_()
    plain = make("standard")
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "compos" not in k})
    x = torch.randn(2, 7, DIM, dtype=torch.double)
    torch.testing.assert_close(layer(x), plain(x))


def test_a_causal_prefix_of_linear_keys_ignores_later_tokens() -> None:
    """The prefix goes over several chunks."""
    layer = make(AttentionSpec(similarity=LinearConfig(keys=2)))
    x = torch.randn(1, 150, DIM, dtype=torch.double)
    expected = layer(x, is_causal=True)
    for n in (1, 63, 64, 65, 129):
        torch.testing.assert_close(layer(x[:, :n], is_causal=True), expected[:, :n])
