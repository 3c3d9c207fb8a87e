"""Tests of language models and classifiers: causality, windows, heads, initial values."""

from typing import Any

import pytest
import torch
from helpers import gpt_cases
from pydantic import ValidationError
from torch.nn import functional as F

from lit_attn.attention import reference
from lit_attn.attention.layer import Attention
from lit_attn.attention.residual import SplitConfig
from lit_attn.attention.rotary import Rotary, rotary, rotate
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.data.text.ids import IGNORED
from lit_attn.models import language
from lit_attn.models.base import FFN
from lit_attn.models.feed_forward import ACTIVATIONS, GATES, FeedForward
from lit_attn.models.language import GPTConfig, SequenceClassifierConfig
from lit_attn.models.layers import HeadNorm
from lit_attn.models.token_transformer import Init
from lit_attn.models.vit import ViTConfig
from lit_attn.signatures import TokenStream

every_choice = pytest.mark.parametrize("name", gpt_cases.CHOICES)


@every_choice
def test_no_token_sees_a_later_one(name: str) -> None:
    network, tokens = gpt_cases.network(name), gpt_cases.tokens()
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % gpt_cases.VOCABULARY
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().max() > 1e-6


@every_choice
def test_nll_is_the_cross_entropy_of_the_logits(name: str) -> None:
    network, tokens = gpt_cases.network(name), gpt_cases.tokens()
    targets = gpt_cases.tokens(seed=2)
    targets[0, :3] = IGNORED
    expected = F.cross_entropy(
        network(tokens).transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    )
    losses = network.nll(tokens, targets)
    torch.testing.assert_close(losses, expected)
    assert (losses[0, :3] == 0).all()


@every_choice
def test_every_parameter_learns(name: str) -> None:
    network, tokens = gpt_cases.network(name).train(), gpt_cases.tokens()
    network.nll(tokens, gpt_cases.tokens(seed=2)).mean().backward()
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name


@pytest.mark.parametrize("preset", ["standard", "belief2", "mgk-soft-e", "dcmha", "linear"])
def test_presets_learn_to_copy(preset: str) -> None:
    """The second half of a sequence repeats the first, which only attention can predict."""
    torch.manual_seed(0)
    model = gpt_cases.config("nanogpt", attention=PRESETS[preset], depth=2)
    network = language.GPT(model, gpt_cases.VOCABULARY, gpt_cases.CONTEXT)
    tokens = gpt_cases.tokens(batch=4, n=8).repeat(1, 2)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    losses = []
    for _ in range(12):
        loss = network.nll(tokens[:, :-1], tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_a_window_hides_what_lies_before_it() -> None:
    """With one layer of window 4, a token affects itself and the next three tokens only."""
    network = gpt_cases.network("nanogpt", depth=1, windows=(4,))
    tokens = gpt_cases.tokens()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % gpt_cases.VOCABULARY
    moved = (network(tokens) - network(changed)).abs().amax((0, 2)) > 1e-9
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_windows_alternate_over_the_layers() -> None:
    wide = gpt_cases.network("nanogpt", windows=(gpt_cases.CONTEXT, None))
    every = gpt_cases.network("nanogpt")
    torch.testing.assert_close(wide(gpt_cases.tokens()), every(gpt_cases.tokens()))
    narrow = gpt_cases.network("nanogpt", windows=(2, None))
    assert (narrow(gpt_cases.tokens()) - every(gpt_cases.tokens())).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("every", "depth", "layers"),
    [(2, 4, [1, 3]), (2, 5, [0, 2, 4]), (1, 2, [0, 1]), (3, 4, [0, 3])],
)
def test_value_embeddings_are_counted_back_from_the_last_layer(
    every: int, depth: int, layers: list[int]
) -> None:
    network = gpt_cases.network("nanochat", depth=depth, value_embeddings={"every": every})
    chosen_layers = [
        number
        for number, block in enumerate(network.trunk.blocks)
        if block.value_embedding is not None
    ]
    assert chosen_layers == layers


@pytest.mark.parametrize("preset", ["standard", "belief", "belief2", "value-residual", "mgk"])
def test_value_embeddings_are_added_to_the_values_of_a_layer(preset: str) -> None:
    """The layer with its values is compared with its formulas, also with two heads of keys."""
    chosen = PRESETS[preset]
    if preset == "standard":
        chosen = chosen.model_copy(update={"kv_heads": 1})
    network = gpt_cases.network("nanochat", attention=chosen)
    tokens = gpt_cases.tokens()
    block = network.trunk.blocks[2]
    calls: list[Any] = []
    block.attn.register_forward_pre_hook(
        lambda _, inputs, named: calls.append((inputs, named)), with_kwargs=True
    )
    outputs: list[torch.Tensor] = []
    block.attn.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    network(tokens)
    (x, mask, is_causal, rotary), named = calls[0][0][:4], calls[0][1]
    gate = block.value_embedding.gate.weight
    embedded = block.value_embedding.embedding.weight[tokens]
    opened = 3 / (1 + torch.exp(-(x[..., :5] @ gate.T)))
    heads = embedded.unflatten(-1, (len(gate), -1))
    added = opened[..., None] * heads
    torch.testing.assert_close(named["added_values"], added)
    first_values = block.attn.first_values.values if block.attn.first_values else None
    expected = reference.attention(
        block.attn, x, mask, is_causal, rotary, first_values=first_values, added_values=added
    )
    torch.testing.assert_close(outputs[0], expected, rtol=1e-9, atol=1e-9)
    without = reference.attention(block.attn, x, mask, is_causal, rotary, first_values=first_values)
    assert (outputs[0] - without).abs().max() > 1e-6


def test_z_loss_belongs_to_training_alone() -> None:
    network = gpt_cases.network("nanochat", z_loss=0.5)
    tokens, targets = gpt_cases.tokens(), gpt_cases.tokens(seed=2)
    plain = network.nll(tokens, targets)
    expected = plain + 0.5 * network(tokens).logsumexp(-1).square()
    torch.testing.assert_close(network.train().nll(tokens, targets), expected)


def test_capped_logits_stay_below_the_cap() -> None:
    network, plain = gpt_cases.network("nanochat", logit_cap=0.5), gpt_cases.network("nanochat")
    with torch.no_grad():
        network.head.weight.mul_(20)
        plain.head.weight.mul_(20)
    plain.logit_cap = None
    logits = plain(gpt_cases.tokens())
    assert logits.abs().max() > 1
    capped = network(gpt_cases.tokens())
    assert capped.abs().max() <= 0.5
    torch.testing.assert_close(capped, 0.5 * torch.tanh(logits / 0.5))


def test_queries_and_keys_without_weights_have_the_gain_as_root_mean_square() -> None:
    layer = gpt_cases.network("nanochat").trunk.blocks[0].attn
    assert list(layer.q_norm.parameters()) == []
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    q = layer.inputs(x, None, True, None).q
    expected = torch.full(q.shape[:-1], 1.2, dtype=torch.float64)
    torch.testing.assert_close(q.square().mean(-1).sqrt(), expected, rtol=1e-4, atol=0)


def test_unweighted_norms_of_bfloat16_are_computed_in_float32() -> None:
    norm = HeadNorm(8, is_weighted=False, gain=1.2)
    x = torch.randn(3, 8).bfloat16()
    expected = 1.2 * F.rms_norm(x.float(), (8,), eps=1e-6)
    assert torch.equal(norm(x), expected.bfloat16())


FORMULAS: dict[str, Any] = {
    "gelu": lambda x, g: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "relu": lambda x, g: (x + x.abs()) / 2,
    "relu2": lambda x, g: ((x + x.abs()) / 2) ** 2,
    "silu": lambda x, g: x / (1 + torch.exp(-x)),
    "swiglu": lambda x, g: g / (1 + torch.exp(-g)) * x,
    "geglu": lambda x, g: 0.5 * g * (1 + torch.erf(g / 2**0.5)) * x,
    "reglu": lambda x, g: (g + g.abs()) / 2 * x,
}


@pytest.mark.parametrize("activation", FORMULAS)
def test_feed_forward_networks_equal_their_formulas(activation: str) -> None:
    torch.manual_seed(0)
    ffn = FeedForward(6, FFN(width=5, activation=activation), has_bias=True).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    up = x @ ffn.up.weight.T + ffn.up.bias
    gate = torch.zeros_like(up)
    if ffn.gate is not None:
        gate = x @ ffn.gate.weight.T + ffn.gate.bias
    hidden = FORMULAS[activation](up, gate)
    expected = hidden @ ffn.down.weight.T + ffn.down.bias
    torch.testing.assert_close(ffn(x), expected, rtol=1e-12, atol=1e-12)


def test_every_activation_of_the_models_has_a_module() -> None:
    assert set(GPTConfig.activations) == set(ACTIVATIONS) | set(GATES)


def test_adaptive_softmax_is_a_distribution() -> None:
    network = gpt_cases.network("wikitext")
    total = network(gpt_cases.tokens()).logsumexp(-1)
    torch.testing.assert_close(total, torch.zeros_like(total), atol=1e-12, rtol=0)


def test_adaptive_softmax_equals_a_computation_by_hand() -> None:
    """The rule is p(id) = p(class) p(id | class); id 30 is in the second rare class (25 and up)."""
    network = gpt_cases.network("wikitext")
    tokens = gpt_cases.tokens(batch=1, n=1)
    head, weight = network.head, network.trunk.tokens.weight
    hidden = network.trunk(tokens)[0, 0]
    scores = weight @ hidden + head.bias
    classes = head.classes(hidden)
    p_class = torch.cat([scores[:10], classes]).softmax(0)[11]
    expected = p_class * scores[25:].softmax(0)[5]
    torch.testing.assert_close(network(tokens)[0, 0, 30].exp(), expected)


def test_nanogpt_initialisation() -> None:
    """Matrices are N(0, 0.02); residual output matrices are divided by sqrt(2 L)."""
    torch.manual_seed(0)
    model = GPTConfig(
        dim=256, depth=4, heads=4, ffn=FFN(width=512), attention=PRESETS["belief-star"]
    )
    block = language.GPT(model, 500, 64).trunk.blocks[0]
    projection = 0.02 / 8**0.5
    for linear, std in (
        (block.attn.qkv, 0.02),
        (block.ffn.up, 0.02),
        (block.attn.proj, projection),
        (block.attn.residual.local, projection),
        (block.ffn.down, projection),
    ):
        assert linear.weight.std().item() == pytest.approx(std, rel=0.03)


def test_torch_initialisation_of_a_tied_embedding() -> None:
    torch.manual_seed(0)
    weight = gpt_cases.network("casted").trunk.tokens.weight
    bound = 24**-0.5
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_norms_start_around_one() -> None:
    torch.manual_seed(0)
    model = gpt_cases.config("wikitext", dim=240, init=Init(norms=0.02))
    weight = language.GPT(model, 50, 16).trunk.blocks[0].norm1.weight
    assert weight.mean().item() == pytest.approx(1, abs=0.01)
    assert weight.std().item() == pytest.approx(0.02, rel=0.3)


def test_copied_projection_survives_initialisation() -> None:
    spec = AttentionSpec(residual=SplitConfig(activation="identity", init="copy"))
    split = gpt_cases.network("nanogpt", attention=spec)
    standard = gpt_cases.network("nanogpt")
    standard.load_state_dict(
        {k: v for k, v in split.state_dict().items() if k in standard.state_dict()}
    )
    torch.testing.assert_close(split(gpt_cases.tokens()), standard(gpt_cases.tokens()))


def test_depth_scaled_attention_branch() -> None:
    network = gpt_cases.network("casted", ffn=None, depth=1)
    block = network.trunk.blocks[0]
    x = torch.randn(1, 5, 24, dtype=torch.double)
    attended = block.attn(block.norm1(x), is_causal=True)
    torch.testing.assert_close(block(x, None, True, None), x + attended / 2**0.5)


def test_parallel_branches_read_the_input_of_the_block() -> None:
    block = gpt_cases.network("pythia", depth=1).trunk.blocks[0]
    x = torch.randn(1, 5, 24, dtype=torch.double)
    attended = block.attn(block.norm1(x), is_causal=True)
    expected = x + attended + block.ffn(block.norm2(x))
    torch.testing.assert_close(block(x, None, True, None), expected)


def test_rotary_share_and_base_select_the_rotated_components() -> None:
    """A quarter of 8 components are one pair, which turns by one radian at every position."""
    network = gpt_cases.network("pythia", depth=1)
    angles: list[Rotary] = []
    block = network.trunk.blocks[0]
    block.register_forward_pre_hook(lambda _, inputs: angles.append(inputs[3]))
    network(gpt_cases.tokens())
    assert angles[0].cos.shape == (gpt_cases.CONTEXT, 1)
    torch.testing.assert_close(angles[0].sin[:, 0], torch.arange(16.0).sin())
    x = torch.randn(1, 3, 16, 8, dtype=torch.double)
    turned = rotate(x, angles[0])
    assert torch.equal(turned[..., 2:], x[..., 2:])
    assert (turned[..., 1:, :2] - x[..., 1:, :2]).abs().amin() > 0
    half = gpt_cases.config("pythia", rotary_share=0.5)
    turn = rotary(torch.tensor([1]), half.rotated_width, half.rotary_base)
    torch.testing.assert_close(turn.sin[0], torch.tensor([1.0, 500**-0.5]).sin())


def test_more_tokens_than_learned_positions_are_an_error() -> None:
    network = gpt_cases.network("nanogpt")
    with pytest.raises(ValueError, match="17 tokens are more than the 16 positions"):
        network(gpt_cases.tokens(n=17))
    assert gpt_cases.network("casted")(gpt_cases.tokens(n=17)).shape == (2, 17, 50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads: 5 heads do not divide dim 24"),
        ({"heads": 8, "positions": "rotary"}, "positions: rotary needs heads of an even width"),
        (
            {"positions": "rotary", "rotary_share": 0.4},
            "an even width, not 8 times rotary_share 0.4",
        ),
        ({"positions": "rotary", "rotary_share": 0.1}, "an even width"),
        ({"positions": "rotary", "rotary_share": 0}, "greater than 0"),
        ({"rotary_base": 500.0}, "rotary_share, rotary_base: need `positions: rotary`"),
        ({"qk_norm_eps": 1e-5}, "qk_norm_eps: needs `qk_norm: true`"),
        ({"qk_gain": 1.2}, "qk_gain: needs `qk_norm: true` or `unweighted`"),
        ({"logit_cap": 0}, "greater than 0"),
        ({"value_embeddings": {"channels": 25}}, "channels: 25 exceeds dim 24; choose at most 24"),
        ({"value_embeddings": {"evry": 2}}, "did you mean 'every'"),
        (
            {"value_embeddings": {}, "attention": {"kind": "module", "import": "mine:Layer"}},
            "value_embeddings: layer 1 is of `kind: module` and has no values",
        ),
        (
            {"head": "adaptive", "cutoffs": [10], "logit_cap": 15},
            "logit_cap: `head: adaptive` has no logits",
        ),
        (
            {"head": "adaptive", "cutoffs": [10], "z_loss": 1e-4},
            "z_loss: `head: adaptive` has no logits",
        ),
        ({"branches": "parallel", "norm_order": "post"}, "parallel needs `norm_order: pre`"),
        ({"branches": "parallel", "ffn": "none"}, "parallel needs `norm_order: pre` and an ffn"),
        ({"head": "adaptive"}, "cutoffs: `head: adaptive` needs cutoffs"),
        ({"head": "adaptive", "cutoffs": [20, 10]}, "cutoffs: must increase"),
        ({"positons": "rotary"}, "did you mean 'positions'"),
        ({"ffn": {"width": 8, "activation": "swigl"}}, "activation"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GPTConfig.model_validate(
            {"dim": 24, "depth": 1, "heads": 3, "ffn": {"width": 8}, **changes}
        )


def test_a_cutoff_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cutoffs: 25 is beyond the vocabulary of 20"):
        gpt_cases.config("wikitext").build(TokenStream(20, 16))


def test_a_vit_has_no_swiglu() -> None:
    with pytest.raises(ValidationError, match="no activation 'swiglu'"):
        ViTConfig(dim=24, depth=1, heads=3, patch=2, ffn=FFN(width=8, activation="swiglu"))


def classifier(pool: str, pairs: bool = False) -> language.SequenceClassifier:
    torch.manual_seed(0)
    model = SequenceClassifierConfig(
        dim=24, depth=2, heads=3, head_dim=4, ffn=FFN(width=32), norm="layernorm", pool=pool
    )
    return language.SequenceClassifier(model, 50, 16, classes=10, pairs=pairs).double().eval()


@pytest.mark.parametrize("pool", ["tokens", "zero-padded"])
def test_padding_counts_as_zero_vectors_or_is_ignored(pool: str) -> None:
    """transformer-mgk multiplies the last norm's output by the mask and takes the mean over n."""
    network, tokens = classifier(pool), gpt_cases.tokens(n=9)
    present = torch.ones(2, 9, dtype=torch.bool)
    present[:, 6:] = False
    padded = network.document(tokens, present)
    alone = network.document(tokens[:, :6], present[:, :6])
    share = 6 / 9 if pool == "zero-padded" else 1.0
    torch.testing.assert_close(padded, alone * share)


def test_pairs_are_classified_by_four_features() -> None:
    """The features are [x0, x1, x0 x1, x0 - x1]; equal documents give a zero difference."""
    network = classifier("tokens", pairs=True)
    document = gpt_cases.tokens(n=9)
    present = torch.ones(2, 9, dtype=torch.bool)
    x = network.document(document, present)
    expected = network.classifier(torch.cat([x, x, x * x, torch.zeros_like(x)], -1))
    both = torch.stack([document, document], 1)
    torch.testing.assert_close(network(both, torch.stack([present, present], 1)), expected)


def test_order_of_tokens_matters_to_a_classifier() -> None:
    network, tokens = classifier("tokens"), gpt_cases.tokens(n=9)
    present = torch.ones(2, 9, dtype=torch.bool)
    assert (network(tokens, present) - network(tokens.flip(1), present)).abs().max() > 1e-9
    assert any(isinstance(module, Attention) for module in network.modules())


@every_choice
def test_bfloat16_autocast_stays_near_single_precision(name: str) -> None:
    network, tokens = gpt_cases.network(name).float(), gpt_cases.tokens()
    exact = network.nll(tokens, gpt_cases.tokens(seed=2))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network.nll(tokens, gpt_cases.tokens(seed=2))
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.03, atol=0.03)
    rounded.mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nanogpt", "casted", "transformer++"])
def test_the_compiled_model_agrees(name: str) -> None:
    torch.compiler.reset()
    network, tokens = gpt_cases.network(name).float(), gpt_cases.tokens()
    expected = network(tokens)
    torch.testing.assert_close(torch.compile(network)(tokens), expected, rtol=1e-4, atol=1e-5)
