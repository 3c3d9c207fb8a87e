"""Recorded diagnostics equal the papers' formulas and do not affect training."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import attention_cases, gpt_cases
from torch import Tensor, nn

from lit_attn.attention import reference, residual
from lit_attn.attention.layer import Attention
from lit_attn.attention.linear import LinearConfig
from lit_attn.attention.mixture import MixedKeysConfig, MixtureConfig
from lit_attn.attention.rotary import rotary
from lit_attn.attention.similarity import DotConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.config.training import DiagnosticsConfig
from lit_attn.models import language, vit
from lit_attn.models.base import FFN
from lit_attn.models.language import SequenceClassifierConfig
from lit_attn.models.trunk import sinusoids
from lit_attn.models.vit import ViTConfig
from lit_attn.training import diagnostics as recorded
from lit_attn.training.diagnostics import NetworkDiagnostics, diagnose

EVERYTHING = DiagnosticsConfig(kinds=("residual", "rank", "maps", "heads", "mixture"))
KEYS = DiagnosticsConfig(kinds=("keys", "likelihood"))
DIM, HEADS, WIDTH = 16, 4, 4

Values = dict[tuple[int, int | None, str], float]


def vision(spec: AttentionSpec) -> nn.Module:
    """Return a float64 ViT with 17 tokens whose parameters are all nonzero."""
    torch.manual_seed(0)
    model = ViTConfig(dim=DIM, depth=2, heads=HEADS, patch=2, ffn=FFN(width=8), attention=spec)
    network = vit.build(model, (1, 8, 8), 10).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return network


def images(count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 8, 8, dtype=torch.double, generator=generator)


def diagnose_network(
    network: nn.Module, *inputs: Tensor, settings: DiagnosticsConfig = EVERYTHING
) -> NetworkDiagnostics:
    return diagnose(network, [inputs], settings, 7)


def values(recorded: NetworkDiagnostics) -> Values:
    assert {row.step for row in recorded.rows} <= {7}
    return {(row.layer, row.head, row.name): row.value for row in recorded.rows}


@torch.no_grad()
def by_definition(
    layer: Attention, stream: Tensor, x: Tensor, first_values: Tensor | None
) -> Iterator[tuple[Any, str, float]]:
    """Yield head, name and value for a bidirectional layer from the reference, with numpy loops."""
    batch, n, _ = x.shape
    q, keys, v = reference.project(layer, x, None, first_values=first_values)
    all_see = reference.may_attend(n, None, False, False)
    if isinstance(layer.spec.similarity, LinearConfig):
        weights = layer.spec.similarity.reference_weights(layer.similarity, q, keys, all_see, False)
    else:
        weights = reference.weights(layer, x, q, keys, all_see, None)
    h = layer.spec.normaliser.reference_heads(layer.normaliser, weights @ v)
    h = layer.spec.filter.reference_heads(layer.filter, h)
    h = layer.spec.pair.reference(layer.pair, x, h)
    weights = layer.spec.pair.reference(layer.pair, x, weights)
    v = v[:, :: layer.spec.pair.queries]
    for m in range(HEADS):
        ranks = [np.linalg.matrix_rank(weights[b, m].numpy(), tol=1e-6) for b in range(batch)]
        yield m + 1, "rank", float(np.mean(ranks))

    actual: dict[str, list[list[float]]] = {}
    w = layer.proj.weight.numpy().T
    for b in range(batch):
        for i in range(n):
            mh, value = h[b, :, i].flatten().numpy(), v[b, :, i].flatten().numpy()
            delta = mh - (mh @ value) / (value @ value) * value
            into = stream[b, i].numpy()
            for name, vector in (("mh", mh), ("delta", delta)):
                out = vector @ w
                cosine = out @ into / math.sqrt((out @ out) * (into @ into))
                actual.setdefault(f"norm-{name}", []).append([i, math.sqrt(vector @ vector)])
                actual.setdefault(f"cos-{name}", []).append([i, cosine])
    for name, pairs in actual.items():
        yield None, name, float(np.mean([value for _, value in pairs]))
        yield None, f"{name}@1", float(np.mean([value for i, value in pairs if i == 0]))

    def rows(weight: Tensor, m: int) -> np.ndarray:
        return weight[m * WIDTH : (m + 1) * WIDTH].detach().numpy()

    w_q, w_k, w_v = layer.qkv.weight.chunk(3)
    all_keys = [w_k]
    if (more := getattr(layer.similarity, "more", None)) is not None:
        all_keys += list(more.weight.chunk(len(keys) - 1))
    qk, ov = np.zeros((DIM, DIM)), np.zeros((DIM, DIM))
    for m in range(HEADS):
        qk += sum(rows(w_q, m).T @ rows(key, m) for key in all_keys)
        ov += rows(w_v, m).T @ rows(layer.proj.weight.T, m)
        if layer.pair.projection is not None:
            qk += rows(layer.pair.projection.weight, m).T @ rows(w_k, m)
        if layer.z is not None:
            qk += rows(layer.z.weight, m).T @ rows(layer.z.weight, m)
    for name, product in (("qk", qk), ("ov", ov)):
        squares = np.linalg.svd(product, compute_uv=False) ** 2
        shares = [squares[:k].sum() / squares.sum() for k in range(1, DIM + 1)]
        yield None, f"captured-{name}", float(np.mean(shares))

    part = layer.spec.similarity
    learns = isinstance(part, MixedKeysConfig) and part.keys > 1 and part.prior != "fixed"
    if learns and getattr(part, "assignment", "soft") == "soft":
        for r in range(part.keys):
            pi = layer.spec.similarity.reference_log_prior(layer.similarity, r, n).exp()
            for m in range(HEADS):
                yield m + 1, f"pi-{r + 1}", pi[m, 0].item()


@pytest.mark.parametrize(
    "attention",
    ["mla", {"layers": {"every": 1, "start": 2, "use": {"kv_from": "previous"}}}],
    ids=["latent", "shared keys"],
)
def test_layers_without_a_projection_of_keys_record_the_rest(attention: Any) -> None:
    """W_K and the circuits of the heads are left out, as other quantities that a layer lacks."""
    network = vision(AttentionSpec.model_validate(attention)).eval()
    names = {name for layer, _, name in values(diagnose_network(network, images())) if layer == 2}
    assert "norm-mh" in names
    assert "captured-qk" not in names
    arrays = diagnose_network(network, images(), settings=KEYS).arrays
    assert "keys.2" in arrays
    assert "key-weights.2" not in arrays


PROJECTED = {name: spec for name, spec in PRESETS.items() if spec.latent is None}
# Every choice of the presets once.
CHOICES = attention_cases.covering(PROJECTED.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROJECTED if PROJECTED[name] in CHOICES])
def test_every_choice_has_the_diagnostics_of_the_formulas(name: str) -> None:
    network = vision(PRESETS[name]).eval()
    with torch.no_grad():
        x = network._pos_embed(network.patch_embed(images()))
        expected: Values = {}
        first_values = None
        for number, block in enumerate(network.blocks, start=1):
            normed = block.norm1(x)
            for head, quantity, value in by_definition(block.attn, x, normed, first_values):
                expected[number, head, quantity] = value
            if first_values is None:
                first_values = reference.project(block.attn, normed, None)[2].transpose(1, 2)
            x = block(x)
    actual = values(diagnose_network(network, images()))
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key] == pytest.approx(value, rel=1e-8, abs=1e-12), key
    assert 0.5 < actual[1, None, "captured-qk"] < 1


@pytest.mark.slow
def test_arrays_are_named_by_layer() -> None:
    network = vision(PRESETS["mgk"])
    recorded = diagnose_network(network, images())
    assert set(recorded.arrays) == {"rank.1", "map.1", "rank.2", "map.2"}
    assert recorded.arrays["rank.1"].shape == (3, HEADS)
    one = recorded.arrays["map.2"]
    assert one.shape == (HEADS, 17, 17)
    np.testing.assert_allclose(one.sum(-1), 1, rtol=1e-5)
    ranks = values(recorded)
    assert ranks[2, 3, "rank"] == recorded.arrays["rank.2"][:, 2].mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "mgk", "smgk", "mgk-hard", "gaussian"])
def test_the_likelihood_of_queries_is_that_of_the_mixture_of_keys(name: str) -> None:
    """The sum of densities over all keys, pair by pair, without their constant factor."""
    variance = (1.5, 0.5) if name == "mgk" else (1.0, 1.0)
    preset = PRESETS[name]
    if name == "mgk":
        preset = PRESETS[name].model_copy(
            update={"similarity": MixtureConfig(keys=2, variance=variance)}
        )
    network = vision(preset).eval()
    actual = values(diagnose_network(network, images(), settings=KEYS))
    with torch.no_grad():
        x = network._pos_embed(network.patch_embed(images()))
        layer = network.blocks[0].attn
        q, keys, _ = reference.project(layer, network.blocks[0].norm1(x), None)
        weighted = isinstance(layer.spec.similarity, MixedKeysConfig) and name != "mgk-hard"
        losses = torch.zeros(q.shape[:-1])
        n = q.shape[-2]
        for index in np.ndindex(*q.shape[:-1]):
            density = 0.0
            for r, key in enumerate(keys):
                pi = 1 / len(keys)
                if weighted:
                    log_pi = layer.spec.similarity.reference_log_prior(layer.similarity, r, n)
                    pi = float(log_pi.exp()[index[1] % 4, 0])
                squares = (key[index[0], index[1]] - q[index]).square().sum(-1)
                terms = torch.exp(-squares / (2 * variance[r] * math.sqrt(WIDTH)))
                density += pi * terms.sum().item()
            losses[index] = -math.log(density / n)
    assert actual[1, None, "query-nll"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert actual[1, None, "query-nll@1"] == pytest.approx(losses[:, :, 0].mean().item(), rel=1e-6)


@pytest.mark.slow
def test_pictures_of_keys_have_every_projected_key() -> None:
    """The keys of the first sample are the products of its inputs and the pictured weights."""
    network = vision(PRESETS["mgk"]).eval()
    pictures = diagnose_network(network, images(), settings=KEYS).arrays
    with torch.no_grad():
        x = network._pos_embed(network.patch_embed(images()))
        layer, inputs = network.blocks[0].attn, network.blocks[0].norm1(x)
        _, keys, _ = reference.project(layer, inputs, None)
    assert pictures["key-weights.1"].shape == (2 * HEADS, DIM, WIDTH)
    expected = torch.cat([key[0] for key in keys])
    np.testing.assert_allclose(pictures["keys.1"], expected, rtol=1e-5, atol=1e-6)
    products = inputs[0].numpy() @ pictures["key-weights.1"]
    np.testing.assert_allclose(products, expected, rtol=1e-4, atol=1e-5)
    shifted = diagnose_network(vision(PRESETS["smgk"]), images(), settings=KEYS).arrays
    assert shifted["key-weights.1"].shape == (HEADS, DIM, WIDTH)
    assert shifted["keys.1"].shape == (2 * HEADS, 17, WIDTH)


@pytest.mark.slow
def test_maps_of_long_sequences_are_means_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    network = vision(PRESETS["linear"])
    complete = diagnose_network(network, images()).arrays["map.1"]
    monkeypatch.setattr(recorded, "MAP_SIZE", 1)
    pooled = diagnose_network(network, images()).arrays["map.1"]
    np.testing.assert_allclose(pooled, complete.mean((1, 2), keepdims=True), rtol=1e-5)


@pytest.mark.slow
def test_samples_come_from_several_batches_of_different_lengths() -> None:
    torch.manual_seed(0)
    model = SequenceClassifierConfig(dim=24, depth=1, heads=3, ffn=FFN(width=32))
    network = language.SequenceClassifier(model, 50, 16, classes=10).double()
    batches = [(torch.randint(50, (2, n)), torch.ones(2, n, dtype=torch.bool)) for n in (5, 9)]
    together = diagnose(network, batches, EVERYTHING, 7)
    parts = [diagnose(network, [batch], EVERYTHING, 7) for batch in batches]
    ranks = np.concatenate([part.arrays["rank.1"] for part in parts])
    np.testing.assert_array_equal(together.arrays["rank.1"], ranks)
    norms = [values(part)[1, None, "norm-mh"] for part in parts]
    expected = (10 * norms[0] + 18 * norms[1]) / 28
    assert values(together)[1, None, "norm-mh"] == pytest.approx(expected)


@pytest.mark.slow
def test_a_head_without_queries_has_rank_1() -> None:
    """All rows of its attention matrix are equal, because all queries are equal."""
    network = vision(AttentionSpec())
    attn = network.blocks[0].attn
    with torch.no_grad():
        attn.qkv.weight[:WIDTH] = 0
    ranks = diagnose_network(network, images()).arrays["rank.1"]
    assert (ranks[:, 0] == 1).all()
    assert (ranks[:, 1:] >= 16).all()


@pytest.mark.slow
def test_copied_heads_capture_more_variance() -> None:
    """The product of heads that are copies of one head has rank D."""
    network = vision(AttentionSpec())
    attn = network.blocks[0].attn
    with torch.no_grad():
        for weight in attn.qkv.weight.chunk(3):
            for m in range(1, HEADS):
                weight[m * WIDTH : (m + 1) * WIDTH] = weight[:WIDTH]
    actual = values(diagnose_network(network, images()))
    assert actual[1, None, "captured-qk"] > 1 - WIDTH / DIM
    assert actual[1, None, "captured-qk"] > actual[2, None, "captured-qk"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (AttentionSpec(similarity=MixtureConfig(prior_scope="layer")), {None: [0.5, 0.5]}),
        (
            AttentionSpec(similarity=MixtureConfig(prior_scope="position", positions=17)),
            {1: [0.5, 0.5]},
        ),
        (AttentionSpec(similarity=MixtureConfig(prior="clamped", keys=3)), {4: [1 / 3] * 3}),
        (AttentionSpec(similarity=MixtureConfig(prior="fixed")), {}),
        (AttentionSpec(similarity=MixtureConfig(assignment="hard")), {}),
        (AttentionSpec(similarity=DotConfig()), {}),
    ],
)
def test_pi_of_mixtures_is_recorded(
    spec: AttentionSpec, expected: dict[int | None, list[float]]
) -> None:
    torch.manual_seed(0)
    model = ViTConfig(dim=DIM, depth=1, heads=HEADS, patch=2, ffn=FFN(width=8), attention=spec)
    network = vit.build(model, (1, 8, 8), 10)
    actual = values(
        diagnose(network, [(images().float(),)], DiagnosticsConfig(kinds=("mixture",)), 7)
    )
    for head, of_keys in expected.items():
        assert [actual[1, head, f"pi-{r}"] for r in range(1, len(of_keys) + 1)] == pytest.approx(
            of_keys
        )
    assert bool(actual) == bool(expected)


@pytest.mark.slow
def test_shared_keys_count_as_copies_for_every_head() -> None:
    """The circuits equal those of a layer in which every head has a copy of the shared keys."""
    grouped = vision(AttentionSpec(kv_heads=2))
    copied = vision(AttentionSpec())
    shared_attn, copied_attn = grouped.blocks[0].attn, copied.blocks[0].attn
    with torch.no_grad():
        q, k, v = shared_attn.qkv.weight.split([DIM, 2 * WIDTH, 2 * WIDTH])
        copies = [w.unflatten(0, (2, WIDTH)).repeat_interleave(2, 0).flatten(0, 1) for w in (k, v)]
        copied_attn.qkv.weight.copy_(torch.cat([q, *copies]))
        copied_attn.proj.weight.copy_(shared_attn.proj.weight)
    settings = DiagnosticsConfig(kinds=("heads",))
    actual, expected = (
        values(diagnose_network(n, images(), settings=settings)) for n in (grouped, copied)
    )
    for name in ("captured-qk", "captured-ov"):
        assert actual[1, None, name] == pytest.approx(expected[1, None, name])


@pytest.mark.slow
@pytest.mark.parametrize("choice", gpt_cases.CHOICES)
@torch.no_grad()
def test_causal_layers_are_diagnosed_with_their_masks_and_rotations(choice: str) -> None:
    """Layers have causal masks, windows, rotary positions, and norms before or after them."""
    network, tokens = gpt_cases.network(choice), gpt_cases.tokens()
    trunk = network.trunk
    x = trunk.tokens(tokens) * trunk.embedding_scale
    n = tokens.shape[1]
    turn = None
    if trunk.positions is not None:
        x = x + trunk.positions.weight[:n]
    elif trunk.model.positions == "rotary":
        turn = rotary(torch.arange(n), trunk.model.rotated_width, trunk.model.rotary_base)
    else:
        x = x + sinusoids(torch.arange(n), 24)
    actual = values(diagnose_network(network, tokens))
    for number, block in enumerate(trunk.blocks, start=1):
        layer = block.attn
        inside = block.norm1(x) if block.pre else x
        added_values = None
        if block.value_embedding is not None:
            added_values = block.value_embedding(inside, tokens)
        q, keys, v = reference.project(layer, inside, turn, added_values=added_values)
        mask = reference.may_attend(n, layer.spec.window, False, True)
        weights = reference.weights(layer, inside, q, keys, mask, None)
        mh = residual.join_heads(weights @ v)
        cosine = torch.cosine_similarity(mh @ layer.proj.weight.T, x, dim=-1)
        assert actual[number, None, "norm-mh"] == pytest.approx(mh.norm(dim=-1).mean().item())
        assert actual[number, None, "cos-mh"] == pytest.approx(cosine.mean().item())
        # The first token attends to itself alone: MH = V, and Delta has no direction.
        assert actual[number, None, "norm-delta@1"] == pytest.approx(0, abs=1e-12)
        assert (number, None, "cos-delta@1") not in actual
        assert (number, None, "cos-delta") in actual
        for m in range(layer.num_heads):
            rank = torch.linalg.matrix_rank(weights[:, m], atol=1e-6, rtol=0).double().mean()
            assert actual[number, m + 1, "rank"] == rank.item()
        x = block(x, None, True, turn, tokens=tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "dcmha", "mlk"])
def test_padding_does_not_count(name: str) -> None:
    """Two documents of six tokens have the same diagnostics with and without padding."""
    torch.manual_seed(0)
    model = SequenceClassifierConfig(
        dim=24, depth=2, heads=3, ffn=FFN(width=32), attention=PRESETS[name]
    )
    network = language.SequenceClassifier(model, 50, 16, classes=10, pairs=True).double()
    tokens = torch.randint(50, (3, 2, 9))
    present = torch.ones(3, 2, 9, dtype=torch.bool)
    present[..., 6:] = False
    padded = diagnose_network(network, tokens, present)
    alone = diagnose_network(network, tokens[..., :6], present[..., :6])
    expected = values(alone)
    actual = values(padded)
    assert actual.keys() == expected.keys()
    assert {key: actual[key] for key in expected} == {
        key: pytest.approx(value, rel=1e-9) for key, value in expected.items()
    }
    # Three pairs are six documents.
    assert padded.arrays["rank.1"].shape == (6, 3)
    np.testing.assert_array_equal(padded.arrays["rank.1"], alone.arrays["rank.1"])
    np.testing.assert_allclose(padded.arrays["map.1"], alone.arrays["map.1"], rtol=1e-5)
    padded = diagnose_network(network, tokens, present, settings=KEYS)
    alone = diagnose_network(network, tokens[..., :6], present[..., :6], settings=KEYS)
    assert values(padded) == pytest.approx(values(alone), rel=1e-9)
    assert len(values(padded)) == (0 if name == "mlk" else 4)
    np.testing.assert_allclose(padded.arrays["keys.1"], alone.arrays["keys.1"], rtol=1e-5)


@pytest.mark.slow
def test_a_sample_of_padding_alone_has_no_map() -> None:
    torch.manual_seed(0)
    model = SequenceClassifierConfig(dim=24, depth=1, heads=3, ffn=FFN(width=32))
    network = language.SequenceClassifier(model, 50, 16, classes=10).double()
    present = torch.ones(2, 9, dtype=torch.bool)
    present[0] = False
    settings = DiagnosticsConfig(kinds=("maps", "keys"))
    arrays = diagnose_network(
        network, torch.zeros(2, 9, dtype=torch.long), present, settings=settings
    ).arrays
    assert not {"map.1", "keys.1"} & arrays.keys()


@pytest.mark.slow
def test_samples_may_be_diagnosed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    network = vision(PRESETS["mgk"])
    together = diagnose_network(network, images(5))
    monkeypatch.setattr(recorded, "MAX_WEIGHTS", 2 * HEADS * 2 * 17 * 17)
    parts = diagnose_network(network, images(5))
    assert values(parts) == pytest.approx(values(together), rel=1e-12)
    for name, array in together.arrays.items():
        np.testing.assert_allclose(parts.arrays[name], array, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["network", "trunk", "blocks"])
@torch.no_grad()
def test_diagnostics_of_a_compiled_network_compile_nothing(part: str) -> None:
    """The network was compiled before the hooks of the diagnostics were added."""
    torch.compiler.reset()
    network, tokens = gpt_cases.network("nanogpt"), gpt_cases.tokens()
    expected = values(diagnose_network(network, tokens))
    before = network(tokens)
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    if part == "blocks":
        for block in network.trunk.blocks:
            block.forward = torch.compile(block.forward, backend=backend)
    else:
        (network if part == "network" else network.trunk).compile(backend=backend)
    torch.testing.assert_close(network(tokens), before)
    graphs = len(compiled)
    assert graphs > 0
    assert values(diagnose_network(network, tokens)) == expected
    torch.testing.assert_close(network(tokens), before)
    assert len(compiled) == graphs
    torch.compiler.reset()


@pytest.mark.slow
def test_diagnostics_change_no_state() -> None:
    network = vision(PRESETS["mgk-soft-e"]).float().train()
    network.blocks[1].eval()
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    modes = [module.training for module in network.modules()]
    random = torch.get_rng_state()
    diagnose(network, [(images().float(),)], EVERYTHING, 7)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    assert all(tensor.dtype == torch.float32 for tensor in network.parameters())
    assert not any(module._forward_pre_hooks for module in network.modules())


@pytest.mark.slow
def test_diagnostics_of_weights_need_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    network = vision(PRESETS["mgk"])
    monkeypatch.setattr(network, "forward", None)
    recorded = diagnose(network, [(images(),)], DiagnosticsConfig(kinds=("heads", "mixture")), 7)
    assert {row.name for row in recorded.rows} == {"captured-qk", "captured-ov", "pi-1", "pi-2"}
    assert recorded.arrays == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["standard", "mgk", "dcmha", "linear", "belief2"])
def test_a_gpu_gives_the_same_diagnostics(name: str) -> None:
    network = vision(PRESETS[name])
    expected = values(diagnose_network(network, images()))
    actual = values(diagnose_network(network.cuda(), images().cuda()))
    assert actual == pytest.approx(expected, rel=1e-6, abs=1e-9)
