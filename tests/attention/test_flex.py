"""The formulation for flex_attention has the reference's values and gradients, on a CPU."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, HEADS, assert_same, make, tokens
from helpers.flex_on_cpu import flex_by_formula, flex_of_torch, use_flex
from torch import Tensor

from lit_attn.attention import flex, formed, reference
from lit_attn.attention.dispatch import Path, choose_path
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.masks import Masks
from lit_attn.attention.spec import PRESETS, AttentionSpec

N = 9


def takes_flex(spec: AttentionSpec) -> bool:
    """Return True if a GPU computes a causal layer with these parts on the path FLEX."""
    similarity = spec.similarity
    layer = attn_layer(spec)(DIM, HEADS)
    softmaxes = layer.normaliser.softmaxes
    path = choose_path(
        keys=getattr(similarity, "keys", 1),
        is_hard=getattr(similarity, "assignment", "soft") == "hard",
        has_z=bool(spec.zz),
        chooses_blocks=False,
        needs_weights=layer.filter.is_active or len(layer.composers) > 0 or not softmaxes,
        has_sink=layer.normaliser.sink() is not None,
        mask="causal" if spec.window is None else "order",
        dropout=0.0,
        device="flex",
    )
    return similarity.has_logits and path is Path.FLEX


SPECS = [spec for spec in attention_cases.all_specs() if takes_flex(spec)]
HARD = {"kind": "mixture", "assignment": "hard"}
SPECS += [
    AttentionSpec.model_validate({"similarity": {**HARD, "keys": 3}, "zz": True, "window": 4}),
    AttentionSpec.model_validate({"preset": "mgk", "window": 3, "normaliser": "offset-softmax"}),
    AttentionSpec.model_validate({"preset": "mgk", "bias": "forgetting", "normaliser": "sink"}),
    AttentionSpec.model_validate({"preset": "differential", "zz": True}),
]
# In a window, one key for every token takes the path without another mask alone.
SPECS = [spec for spec in SPECS if spec.window is None or spec.similarity.kind == "mixture"]
WINDOWED = [
    AttentionSpec.model_validate({"preset": name, "window": 3})
    for name in ("standard", "gaussian", "sink", "alibi", "forgetting", "differential")
]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=attention_cases.label)
# Every choice of these layers once.
CHOICES = attention_cases.covering(SPECS)
every_choice = pytest.mark.parametrize("spec", CHOICES, ids=attention_cases.label)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[flex.Scores]]:
    """Compute the path FLEX on this CPU by the documented formula of flex_attention."""
    scores = use_flex(monkeypatch, flex_by_formula, flex.weighted_sums)
    yield scores
    assert scores


def padding(absent: slice) -> Tensor:
    present = torch.ones(2, 1, 1, N, dtype=torch.bool)
    present[1, ..., absent] = False
    return present


def test_every_preset_of_mixtures_and_of_belief2_takes_the_path(calls: list[flex.Scores]) -> None:
    names = {name for name, spec in PRESETS.items() if spec in SPECS}
    assert {"belief2", "mgk", "smgk", "mgk-soft-e", "softmax-mgk"} <= names
    assert {"mgk-hard", "smgk-hard"} <= names
    make(PRESETS["mgk"])(tokens(N), is_causal=True)
    assert calls[0].k.shape == (2, HEADS, 2, N, DIM // HEADS)


@every_spec
def test_value_and_gradient_equal_the_reference(spec: AttentionSpec) -> None:
    assert_same(make(spec), tokens(2))
    assert_same(make(spec), tokens(33), is_causal=True)


@pytest.mark.parametrize("spec", WINDOWED, ids=attention_cases.label)
def test_one_key_in_a_window_equals_the_reference(spec: AttentionSpec) -> None:
    assert_same(make(spec), tokens(N))
    assert_same(make(spec), tokens(N), is_causal=True)


@every_choice
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_equal_the_reference(spec: AttentionSpec, is_causal: bool) -> None:
    layer = make(spec)
    for absent in (slice(6, 9), slice(0, 3)):
        assert_same(layer, tokens(N), attn_mask=padding(absent), is_causal=is_causal)
    generator = torch.Generator().manual_seed(3)
    pairs = torch.rand(1, HEADS, N, N, generator=generator) > 0.4
    # A query without keys.
    pairs[:, :, 4] = False
    assert_same(layer, tokens(N), attn_mask=pairs, is_causal=is_causal)
    bias = torch.randn(2, 1, N, N, dtype=torch.double, generator=generator)
    assert_same(layer, tokens(N), attn_mask=bias, is_causal=is_causal)


@pytest.mark.parametrize("shape", [(N, N), (1, HEADS, 1, N), (2, 1, N, 1), (1,)], ids=str)
def test_a_learned_bias_of_pairs_gets_its_gradient(shape: tuple[int, ...]) -> None:
    layer = make(PRESETS["mgk"])
    bias = torch.randn(shape, dtype=torch.double, requires_grad=True)
    gradients = []
    for compute in (layer, lambda *a, **k: reference.attention(layer, *a, **k)):
        out = compute(tokens(N), attn_mask=bias)
        gradients += torch.autograd.grad(out.square().sum(), bias)
    torch.testing.assert_close(gradients[0], gradients[1])


@every_choice
def test_several_queries_after_a_cache_equal_the_sequence(spec: AttentionSpec) -> None:
    layer = make(spec)
    x = tokens(N)
    cache = layer.new_cache()
    pieces = [slice(0, 4), slice(4, 5), slice(5, N)]
    with torch.no_grad():
        outputs = [layer(x[:, piece], is_causal=True, cache=cache) for piece in pieces]
        expected = layer(x, is_causal=True)
    torch.testing.assert_close(torch.cat(outputs, 1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["belief2", "mgk", "mgk-hard"])
def test_half_precision_agrees_to_rounding(
    name: str, dtype: torch.dtype, calls: list[flex.Scores]
) -> None:
    layer = make(PRESETS[name])
    x = tokens(N).requires_grad_()
    results = []
    exact = reference.attention(layer, x, is_causal=True)
    results.append([exact, *torch.autograd.grad(exact.square().sum(), x)])
    with torch.autocast("cpu", dtype):
        half = layer.float()(x.float(), is_causal=True)
    results.append([half, *torch.autograd.grad(half.double().square().sum(), x)])
    assert calls[-1].q.dtype == dtype
    for plain, rounded in zip(*results, strict=True):
        error = (rounded.double() - plain).norm() / plain.norm()
        assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["belief2", "mgk"])
def test_a_query_without_keys_gets_zeros_and_finite_gradients(
    name: str, calls: list[flex.Scores]
) -> None:
    layer = make(PRESETS[name])
    mask = torch.ones(N, N, dtype=torch.bool)
    mask[3] = False
    x = tokens(N).requires_grad_()
    heads = layer.similarity.attend(layer.inputs(x, mask, False, None))
    assert (heads[:, :, 3] == 0).all()
    gradient = torch.autograd.grad(heads.sum(), x)[0]
    assert gradient.isfinite().all()


def make_scores(
    m: int, dropout: float, sink: float | None, hard: bool = False
) -> tuple[flex.Scores, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        numbers = torch.randn(shape, dtype=torch.double, generator=generator)
        return numbers.requires_grad_()

    masks = Masks(None, None, is_causal=True, window=None, without_self=False)
    scores = flex.Scores(
        q=draw(2, 3, N, 5),
        k=draw(2, 3, m, N, 5),
        key_bias=draw(2, 3, m, N),
        masks=masks,
        scale=0.4,
        dropout=dropout,
        sink=None if sink is None else torch.tensor([[sink]], dtype=torch.double),
    )
    if hard:
        scores = scores._replace(largest=flex.LargestKeys.find(scores))
    return scores, draw(2, 3, N, 4)


def by_weights(scores: flex.Scores, v: Tensor, seed: Tensor) -> Tensor:
    """Return the sums of weights that are formed, dropped by the hash of `seed`."""
    assert scores.key_bias is not None
    logits = torch.einsum("bhie,bhrje->bhirj", scores.q, scores.k) * scores.scale
    logits = logits + scores.key_bias.unsqueeze(2)
    i = torch.arange(N).view(-1, 1)
    j = torch.arange(N)
    logits = logits.masked_fill((j > i).unsqueeze(1), -math.inf)
    is_hard = scores.largest is not None
    exponentials = logits.exp().amax(3) if is_hard else logits.exp().sum(3)
    total = exponentials.sum(-1, keepdim=True)
    if scores.sink is not None:
        total = total + scores.sink.exp()
    head = torch.arange(2 * 3).view(2, 3, 1, 1)
    stays = flex.is_kept(seed, head, i, j, scores.dropout)
    return (exponentials / total * stays / (1 - scores.dropout)) @ v


@pytest.mark.parametrize(("m", "hard"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("sink", [None, -1.0])
@pytest.mark.parametrize("dropout", [0.3, 0.9])
def test_dropped_sums_equal_those_of_dropped_weights(
    m: int, hard: bool, sink: float | None, dropout: float, calls: list[flex.Scores]
) -> None:
    scores, v = make_scores(m, dropout, sink, hard)
    calls.append(scores)
    torch.manual_seed(4)
    out = flex.weighted_sums(scores, v)
    torch.manual_seed(4)
    seed = torch.randint(2**31 - 1, (), dtype=torch.int32)
    expected = by_weights(scores, v, seed)
    torch.testing.assert_close(out, expected)
    inputs = [scores.q, scores.k, scores.key_bias, v]
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.double).view_as(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, direction),
        torch.autograd.grad(expected, inputs, direction),
    )
    if dropout == 0.9:
        # Every pair of the first query, which sees one token, is dropped in some head.
        assert (out[:, :, 0] == 0).all(-1).any()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("m", "size"), [(2, 2), (3, 3), (4, 3), (5, 5), (16, 5)])
def test_the_largest_key_of_every_visible_pair_is_kept_in_few_bits(
    m: int,
    size: int,
    is_causal: bool,
    window: int | None,
    calls: list[flex.Scores],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nine tokens take two bytes with one bit, three with two bits and five with four bits."""
    monkeypatch.setattr(formed, "CHUNK", 2)
    monkeypatch.setattr(formed, "FEW_BYTES", 1)
    scores, _ = make_scores(m, 0.0, None)
    masks = scores.masks._replace(is_causal=is_causal, window=window)
    scores = scores._replace(masks=masks)
    calls.append(scores)
    largest = flex.LargestKeys.find(scores)
    assert largest.packed.dtype == torch.uint8
    assert largest.packed.shape == (2, 3, N, size)
    assert not largest.packed.requires_grad
    sizes = (2, 3, N, N)
    places = [torch.arange(length) for length in sizes]
    numbers = largest.at(*torch.meshgrid(*places, indexing="ij"))
    logits = torch.einsum("bhie,bhrje->bhrij", scores.q, scores.k) * scores.scale
    assert scores.key_bias is not None
    expected = (logits + scores.key_bias.unsqueeze(3)).argmax(2)
    every_token = slice(0, N)
    visible = masks.chunk(every_token, every_token, N, torch.device("cpu"))
    if visible is None:
        visible = torch.ones(N, N, dtype=torch.bool)
    hidden = (~visible).expand(sizes)
    assert torch.equal(numbers.masked_fill(hidden, 0), expected.int().masked_fill(hidden, 0))


def test_the_last_of_equal_keys_gets_the_gradient_as_in_formed_weights() -> None:
    scores, v = make_scores(3, 0.0, None)
    keys = scores.k[:, :, :1].detach().repeat(1, 1, 3, 1, 1).requires_grad_()
    bias = torch.zeros(2, 3, 3, N, dtype=torch.double)
    out = flex.attend(scores._replace(k=keys, key_bias=bias), v, hard=True)
    gradient = torch.autograd.grad(out.square().sum(), keys)[0]
    assert (gradient[:, :, :2] == 0).all()
    assert (gradient[:, :, 2] != 0).any()


def test_a_layer_drops_weights_in_training_only(calls: list[flex.Scores]) -> None:
    layer = make(PRESETS["mgk"])
    x = tokens(N)
    layer.attn_drop = 0.5
    expected = layer(x, is_causal=True)
    assert calls[-1].dropout == 0
    layer.train()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(layer(x, is_causal=True))
    assert calls[-1].dropout == 0.5
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], expected)


def test_kept_pairs_are_independent_and_as_many_as_they_should_be(
    calls: list[flex.Scores],
) -> None:
    calls.append(make_scores(1, 0.0, None)[0])
    head = torch.arange(8).view(-1, 1, 1)
    i = torch.arange(256).view(-1, 1)
    j = torch.arange(256)
    for seed in (0, 1, 2**31 - 2):
        number = torch.tensor(seed, dtype=torch.int32)
        kept = flex.is_kept(number, head, i, j, 0.1)
        # 524,288 pairs have a standard error of 0.0004.
        assert abs(kept.double().mean() - 0.9) < 0.002
        numbers = kept.double() - 0.9
        for axis in range(3):
            neighbours = numbers * numbers.roll(1, axis)
            # The variance of one pair is 0.09.
            assert abs(neighbours.mean()) < 0.09 * 0.01
        # Rows and columns differ in their counts as independent draws do.
        for axes in ((0, 1), (0, 2)):
            counts = numbers.sum(axes) / math.sqrt(0.09 * 8 * 256)
            assert 0.7 < counts.var() < 1.4


OWN: dict[str, tuple[object, Callable[[], dict[str, Tensor | bool]]]] = {
    "keys in causal order": ("mgk", lambda: {"is_causal": True}),
    "z in a window": ({"preset": "belief2", "window": 3}, lambda: {"is_causal": True}),
    "padding": ("gaussian", lambda: {"attn_mask": padding(slice(6, 9))}),
    "a bias of pairs": (
        "softmax-smgk",
        lambda: {"attn_mask": torch.randn(1, HEADS, N, N, dtype=torch.double)},
    ),
    "a hard mixture in a window": ({"preset": "mgk-hard", "window": 3}, dict),
    "a query without keys": (
        "mgk",
        lambda: {"attn_mask": torch.ones(N, N, dtype=torch.bool).tril(-1)},
    ),
}


@pytest.fixture
def of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the path FLEX by PyTorch's own operator, traced but not compiled."""
    torch.compiler.reset()
    traced = torch.compile(flex.weighted_sums, backend="eager", fullgraph=True)
    use_flex(monkeypatch, flex_of_torch, traced)


@pytest.mark.usefixtures("of_torch")
@pytest.mark.parametrize("name", OWN)
def test_the_operator_of_torch_equals_the_reference(name: str, calls: list[flex.Scores]) -> None:
    choices, masks = OWN[name]
    calls.append(make_scores(1, 0.0, None)[0])
    assert_same(make(AttentionSpec.model_validate(choices)), tokens(N), **masks())


@pytest.mark.usefixtures("of_torch")
def test_the_operator_of_torch_drops_pairs(calls: list[flex.Scores]) -> None:
    """The operator returns a log-sum-exp with the precision of float32."""
    scores, v = make_scores(2, 0.5, -1.0)
    calls.append(scores)
    torch.manual_seed(4)
    out = flex._compiled()(scores, v)
    torch.manual_seed(4)
    expected = by_weights(scores, v, torch.randint(2**31 - 1, (), dtype=torch.int32))
    rounding = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(out, expected, **rounding)
    inputs = [scores.q, scores.k, scores.key_bias, v]
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        **rounding,
    )


def test_another_number_of_keys_is_compiled_anew(
    calls: list[flex.Scores], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With M as a variable of the compiled code PyTorch 2.11 fails on a GPU."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    traced = torch.compile(flex.weighted_sums, backend=keep, fullgraph=True)
    monkeypatch.setattr(flex, "flex_attention", flex_of_torch)
    monkeypatch.setattr(flex, "_compiled", lambda: traced)
    for keys in (1, 3):
        scores, v = make_scores(keys, 0.0, None)
        calls.append(scores)
        flex.attend(scores, v)
    sizes_of_keys = []
    for node in graphs[-1].graph.find_nodes(op="placeholder"):
        value = node.meta["example_value"]
        if isinstance(value, Tensor) and value.ndim == 5:
            sizes_of_keys.append(value.shape[2])
    assert len(graphs) == 2
    assert [type(size) for size in sizes_of_keys] == [int]
