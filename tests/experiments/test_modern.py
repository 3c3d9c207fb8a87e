"""The plug-ins and the recipes of experiments/modern."""

import importlib
from typing import Any

import pytest
import torch
from helpers.paths import EXPERIMENTS, ROOT
from pydantic import ValidationError
from torch import Tensor

from lit_attn.attention.spec import PRESETS
from lit_attn.config.study import read_studies
from lit_attn.schema.plugins import load_parts
from lit_attn.signatures import TokenStream

FOLDER = EXPERIMENTS / "modern"
load_parts([FOLDER / "nanochat.py", FOLDER / "normuon.py", FOLDER / "write_recipes.py"])
plugin = importlib.import_module("nanochat")
optimizer_plugin = importlib.import_module("normuon")
rule = importlib.import_module("write_recipes")

SIGNATURE = TokenStream(vocabulary=50, context=16)
TINY: dict[str, Any] = {
    "dim": 32,
    "depth": 4,
    "heads": 2,
    "ffn": {"width": 64, "activation": "relu2"},
    "positions": "rotary",
    "norm": "rmsnorm-unweighted",
    "qk_norm": "unweighted",
    "qk_gain": 1.2,
    "windows": [5, 5, 5, None],
    "value_embeddings": {},
    "head": "untied",
    "logit_cap": 15.0,
}


def network(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = plugin.NanochatConfig.model_validate(TINY | changes)
    return model.build(SIGNATURE, "cpu").double()


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(seed))


def take_step(model: Any) -> float:
    """Make one step of the optimiser, and return how much the loss of its batch has fallen."""
    optimizer = optimizer_plugin.NanochatOptimizer(
        lr=0.002, weight_decay=0.1, head_lr=0.004, embedding_lr=0.01, scalar_lr=0.01
    ).build(model, fused=False)
    before = model.nll(tokens(), tokens(1)).mean()
    before.backward()
    optimizer.step()
    after: Tensor = model.nll(tokens(), tokens(1)).mean()
    return (before - after).item()


@pytest.mark.parametrize("depth", rule.DEPTHS)
def test_the_experiments_follow_the_rule(depth: int) -> None:
    assert (FOLDER / f"d{depth}.yaml").read_text() == rule.write_text(depth)


def test_the_rule_at_the_reference_depth_has_the_numbers_of_nanochat() -> None:
    """At depth 12 no rate is scaled: these are the defaults of scripts/base_train.py."""
    recipe = rule.make_recipe(12, rule.Shape(vocabulary=32_768))
    assert (recipe.dim, recipe.heads, recipe.batch) == (768, 6, 2**19)
    rates = (recipe.lr, recipe.weight_decay, recipe.head_lr, recipe.embedding_lr, recipe.scalar_lr)
    assert rates == pytest.approx((0.02, 0.28, 0.008, 0.3, 0.5))
    assert recipe.parameters == 12 * 12 * 768**2 + 6 * 12 * 6 + 32_768 * 768
    assert recipe.windows == [513, 513, 513, None] * 3
    assert recipe.tokens == pytest.approx(12 * recipe.parameters, rel=0.005)


def test_the_page_has_the_table_of_the_rule() -> None:
    assert rule.write_table() in (ROOT / "docs" / "modern.md").read_text()


def test_the_last_layer_of_any_depth_has_no_window() -> None:
    assert rule.find_windows(6, 2048) == [513, 513, 513, None, 513, None]
    assert rule.find_width(5, rule.NANOCHAT) == 384


def test_the_network_has_the_stream_of_its_formula() -> None:
    """The blocks are replaced by maps of their number, and the rest is computed by hand."""
    model = network().eval()
    trunk = model.trunk
    with torch.no_grad():
        for parameter in (trunk.smear, trunk.middle_factor):
            parameter.fill_(0.7)
    ids = tokens()
    embedded = trunk.tokens.weight[ids]
    first = embedded / (embedded.square().mean(-1, keepdim=True) + trunk.model.norm_eps).sqrt()
    start = first.clone()
    for place in range(1, 16):
        gate = 0.7 / (1 + torch.exp(-(first[:, place, :24] @ trunk.smear_gate.weight[0])))
        start[:, place] += gate[:, None] * first[:, place - 1]
    torch.testing.assert_close(trunk.embed(ids, torch.arange(16)), start)
    stream = start
    outputs = []
    for number in range(4):
        stream = trunk.stream_factors[number] * stream + trunk.input_factors[number] * start
        stream = stream * (number + 2)
        outputs.append(stream)
    expected = outputs[3] - 0.7 * outputs[2]
    actual = trunk.pass_blocks(start, lambda number, x: x * (number + 2))
    torch.testing.assert_close(actual, expected)


def test_a_new_network_predicts_all_tokens_alike_but_for_its_embeddings() -> None:
    """Matrices that write to the stream are zero, and factors fall from layer to layer."""
    model = network()
    for block in model.trunk.blocks:
        assert not block.attn.proj.weight.any()
        assert not block.ffn.down.weight.any()
        assert block.attn.qkv.weight.abs().max() <= (3 / 32) ** 0.5
    factors = model.trunk.stream_factors.tolist()
    assert factors == pytest.approx([1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05])
    assert model.trunk.input_factors.tolist() == pytest.approx([0.2, 0.15, 0.1, 0.05])


# A latent has no queries and keys that the recipe could normalise; linear keys have no window.
REFUSED = {"differential", "linear", "mlk", "smlk", "mla"}


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - REFUSED))
def test_every_mechanism_learns_in_the_recipe(preset: str) -> None:
    changes: dict[str, Any] = {"attention": PRESETS[preset]}
    if PRESETS[preset].filter.kind != "none":
        # A filter needs the logits of all earlier tokens, and refuses a window in one line.
        changes["windows"] = [None]
    model = network(**changes)
    assert 0 < take_step(model) < 3


def test_a_layer_of_queries_alone_learns() -> None:
    """The joined matrix of such a layer has no rows of keys and values."""
    shared = {"layers": {"every": 2, "use": {"kv_from": "previous"}}}
    model = network(attention=shared, value_embeddings=None, windows=[None])
    weights = [block.attn.qkv.weight for block in model.trunk.blocks]
    stacked = optimizer_plugin.find_stacked(model)
    assert [stacked[id(weight)] for weight in weights] == 2 * [[32, 32, 32], [32]]
    assert take_step(model) > 0


def test_layers_can_differ() -> None:
    choice = {"preset": "standard", "layers": [{"last": 2, "use": "xsa"}]}
    model = network(attention=choice)
    kinds = [block.attn.spec.residual.kind for block in model.trunk.blocks]
    assert kinds == ["full", "full", "perpendicular", "perpendicular"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": {"matrices": 0.1}}, "init: this model has the initial values of nanochat"),
        ({"bias": "all"}, "bias: this model has no biases"),
        ({"mup": {"dim": 32}}, "mup: the initial values of nanochat depend on the width already"),
        ({"dim": 16}, "dim: 16 is too narrow; choose at least 24"),
        ({"documents": "separate"}, "documents: this model adds to each token the one before it"),
    ],
)
def test_options_without_a_meaning_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        plugin.NanochatConfig.model_validate(TINY | changes)


@pytest.mark.parametrize("sizes", [[1] * 16, [5, 1, 7, 3]], ids=str)
def test_decoding_equals_the_complete_sequence(sizes: list[int]) -> None:
    """A cache has the embedding of the last token, of which the next token adds a share."""
    model = network().double().eval()
    with torch.no_grad():
        model.trunk.smear.fill_(0.7)
        for block in model.trunk.blocks:
            block.attn.proj.weight.normal_()
        ids = tokens()
        caches = model.trunk.new_caches()
        pieces = [model(piece, caches) for piece in ids.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_an_orthogonalised_matrix_keeps_its_singular_vectors(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    result = optimizer_plugin.orthogonalise(matrix, 5)
    equal_rows = matrix / matrix.norm(dim=1, keepdim=True)
    left, _, right = torch.linalg.svd(equal_rows, full_matrices=False)
    values = left.T @ result @ right.T
    sizes = values.diagonal()
    torch.testing.assert_close(values, sizes.diag(), rtol=0, atol=1e-6)
    assert 0.8 < sizes.min() < sizes.max() < 1.2
    assert result.norm().item() == pytest.approx(min(shape) ** 0.5)


def test_the_parameters_have_the_rates_of_their_kind() -> None:
    model = network(attention=PRESETS["dcmha"])
    settings = optimizer_plugin.NanochatOptimizer(
        lr=0.02, weight_decay=0.28, head_lr=0.008, embedding_lr=0.3, scalar_lr=0.5
    )
    optimizer = settings.build(model, fused=False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rates[names[id(parameter)]] = group["lr"]
    assert rates.keys() == dict(model.named_parameters()).keys()
    assert rates["head.weight"] == 0.008
    assert rates["trunk.tokens.weight"] == 0.3
    assert rates["trunk.blocks.1.value_embedding.embedding.weight"] == 0.15
    assert rates["trunk.blocks.1.value_embedding.gate.weight"] == 0.02
    assert rates["trunk.blocks.0.attn.qkv.weight"] == 0.02
    assert rates["trunk.stream_factors"] == 0.005
    assert rates["trunk.input_factors"] == 0.5
    assert rates["trunk.smear_gate.weight"] == 0.2


def test_a_saved_optimiser_continues_with_equal_steps() -> None:
    """The second step of a loaded optimiser is that of the one that was saved."""
    ends = []
    for is_loaded in (False, True):
        model = network()
        settings = optimizer_plugin.NanochatOptimizer(lr=0.02, weight_decay=0.28)
        optimizer = settings.build(model, fused=False)
        for step in range(2):
            if step == 1 and is_loaded:
                state = optimizer.state_dict()
                optimizer = settings.build(model, fused=False)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            model.nll(tokens(step), tokens(step + 1)).mean().backward()
            optimizer.step()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    for first, second in zip(*ends, strict=True):
        assert torch.equal(first, second)


def test_the_schedule_has_the_values_of_its_formula() -> None:
    schedule = plugin.NanochatSchedule()
    rates = [schedule.rate_at(step, 2.0, 100, 10) for step in (0, 39, 40, 350, 675, 1000)]
    assert rates == pytest.approx([0.05, 2.0, 2.0, 2.0, 2.0 * (0.5 + 0.5 * 0.05), 0.1])
    momentum = schedule.momentum(100, 10)
    assert momentum is not None
    assert [momentum(step) for step in (0, 200, 400, 1000)] == pytest.approx(
        [0.85, 0.91, 0.97 - 0.07 * 50 / 650, 0.9]
    )
    decay = schedule.weight_decay(100, 10)
    assert decay is not None
    assert [decay(step) for step in (0, 500, 1000)] == pytest.approx([1.0, 0.5, 0.0])


def test_the_study_compares_the_mechanisms_of_the_papers() -> None:
    study = read_studies(FOLDER / "studies.yaml")["modern"].study
    assert {"belief", "belief2", "attentionx", "xsa", "mgk", "dcmha", "gated"} <= set(study.cells)
