"""The encoder-decoder equals torch's Transformer, decodes with caches, and searches by beams."""

import itertools
import math

import pytest
import torch
from helpers import attention_cases
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.mixture import MixtureConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.data.text.ids import END, IGNORED, PADDING
from lit_attn.models import factory
from lit_attn.models.base import FFN
from lit_attn.models.token_transformer import Init
from lit_attn.models.translation import EncoderDecoder, EncoderDecoderConfig
from lit_attn.models.trunk import sinusoids
from lit_attn.tasks.beam_search import translate
from lit_attn.tasks.task import TranslationConfig

WIDTH, HEADS, DEPTH, VOCABULARY = 24, 4, 2, 13


def config(**choices: object) -> EncoderDecoderConfig:
    values = {
        "dim": WIDTH,
        "depth": DEPTH,
        "heads": HEADS,
        "ffn": FFN(width=40, activation="relu"),
        "norm": "layernorm",
        "norm_order": "post",
        "bias": "all",
        "positions": "sinusoidal",
        "embedding_scale": "sqrt-dim",
        "init": Init(matrices="fairseq", depth_scaled=False),
    }
    return EncoderDecoderConfig.model_validate(values | choices)


def network(**choices: object) -> EncoderDecoder:
    torch.manual_seed(0)
    built = EncoderDecoder(config(**choices), VOCABULARY, 64).double().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return built


def sentences() -> tuple[Tensor, Tensor, Tensor]:
    """Return source, inputs and targets of three pairs, the last two with padding."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(3, VOCABULARY, (3, 7), generator=generator)
    inputs = torch.randint(3, VOCABULARY, (3, 6), generator=generator)
    inputs[:, 0] = END
    targets = torch.cat([inputs[:, 1:], torch.full((3, 1), END)], 1)
    for row, (m, n) in enumerate([(7, 6), (4, 3), (5, 6)]):
        source[row, m - 1], source[row, m:] = END, PADDING
        inputs[row, n:], targets[row, n:], targets[row, n - 1] = PADDING, IGNORED, END
    return source, inputs, targets


def copy_weights(ours: EncoderDecoder, theirs: nn.Transformer) -> None:
    """Copy the weights of our blocks to torch's Transformer."""

    def copy(target: nn.MultiheadAttention, layer: nn.Module) -> None:
        target.in_proj_weight.copy_(layer.qkv.weight)
        target.in_proj_bias.copy_(layer.qkv.bias)
        target.out_proj.load_state_dict(layer.proj.state_dict())

    with torch.no_grad():
        for block, layer in zip(ours.encoder.blocks, theirs.encoder.layers, strict=True):
            copy(layer.self_attn, block.attn)
            pairs = [(layer.norm1, block.norm1), (layer.norm2, block.norm2)]
            pairs += [(layer.linear1, block.ffn.up), (layer.linear2, block.ffn.down)]
            for target, part in pairs:
                target.load_state_dict(part.state_dict())
        for block, layer in zip(ours.decoder.blocks, theirs.decoder.layers, strict=True):
            copy(layer.self_attn, block.attn)
            copy(layer.multihead_attn, block.cross)
            pairs = [(layer.norm1, block.norm1), (layer.norm2, block.norm3)]
            pairs += [(layer.norm3, block.norm2)]
            pairs += [(layer.linear1, block.ffn.up), (layer.linear2, block.ffn.down)]
            for target, part in pairs:
                target.load_state_dict(part.state_dict())
        if isinstance(ours.encoder.norm, nn.LayerNorm):
            theirs.encoder.norm.load_state_dict(ours.encoder.norm.state_dict())
            theirs.decoder.norm.load_state_dict(ours.decoder.norm.state_dict())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("order", ["post", "pre"])
def test_outputs_loss_and_gradients_equal_those_of_torch(order: str) -> None:
    ours = network(norm_order=order)
    theirs = nn.Transformer(
        WIDTH, HEADS, DEPTH, DEPTH, 40, 0.0, batch_first=True, norm_first=order == "pre"
    ).double()
    if order == "post":
        theirs.encoder.norm = theirs.decoder.norm = None
    copy_weights(ours, theirs)
    source, inputs, targets = sentences()

    def embed(tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        places = sinusoids(torch.arange(tokens.shape[1]), WIDTH)
        return embedding(tokens) * WIDTH**0.5 + places

    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.double)
    hidden = theirs(
        embed(source, ours.encoder.tokens),
        embed(inputs, ours.decoder.tokens),
        tgt_mask=causal,
        src_key_padding_mask=source == PADDING,
        memory_key_padding_mask=source == PADDING,
    )
    expected = hidden @ ours.decoder.tokens.weight.T
    logits = ours(source, inputs)
    counted = targets != IGNORED
    torch.testing.assert_close(logits[counted], expected[counted], rtol=1e-10, atol=1e-10)
    losses = [
        F.cross_entropy(values.transpose(1, 2), targets, ignore_index=IGNORED)
        for values in (logits, expected)
    ]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    shared = [ours.encoder.tokens.weight, ours.decoder.tokens.weight]
    for parameter, gradient, other in zip(
        shared,
        torch.autograd.grad(losses[0], shared, retain_graph=True),
        torch.autograd.grad(losses[1], shared, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10)
        assert gradient.abs().sum() > 0, parameter.shape
    losses[0].backward()
    losses[1].backward()
    last, layer = ours.decoder.blocks[-1], theirs.decoder.layers[-1]
    first, first_layer = ours.encoder.blocks[0], theirs.encoder.layers[0]
    for mine, torchs in (
        (last.cross.qkv.weight, layer.multihead_attn.in_proj_weight),
        (last.cross.proj.weight, layer.multihead_attn.out_proj.weight),
        (last.attn.qkv.bias, layer.self_attn.in_proj_bias),
        (first.attn.qkv.weight, first_layer.self_attn.in_proj_weight),
        (first.ffn.up.weight, first_layer.linear1.weight),
    ):
        torch.testing.assert_close(mine.grad, torchs.grad, rtol=1e-10, atol=1e-10)


def meaningful(spec: AttentionSpec) -> bool:
    """Return True if cross-attention can have the same layer."""
    return not spec.find_cross_problem()


SPECS = [spec for spec in PRESETS.values() if meaningful(spec)]
every_preset = pytest.mark.parametrize("spec", SPECS, ids=attention_cases.label)


@every_preset
def test_decoding_with_caches_gives_the_output_of_the_sequence(spec: AttentionSpec) -> None:
    """The source has padding; the keys of the memory are computed by the first call."""
    built = network(attention=spec)
    source, inputs, _ = sentences()
    inputs = inputs.clamp_min(3)
    with torch.no_grad():
        expected = built(source, inputs)
        memory, caches = built.encode(source), built.decoder.new_caches()
        outputs = [
            built.logits(built.decoder(token, None, caches, memory))
            for token in inputs.split(1, dim=1)
        ]
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-9, atol=1e-10)


@every_preset
def test_padding_changes_no_logits(spec: AttentionSpec) -> None:
    built = network(attention=spec)
    source, inputs, _ = sentences()
    alone = built(source[1:2, :4], inputs[1:2, :3])
    torch.testing.assert_close(built(source, inputs)[1:2, :3], alone, rtol=1e-9, atol=1e-10)


def test_own_token_mechanisms_need_another_cross_attention() -> None:
    source, inputs, _ = sentences()
    with pytest.raises(ValueError, match=r"attention\.residual: 'perpendicular' uses the value"):
        config(attention="belief")
    with pytest.raises(ValueError, match=r"cross_attention\.zz: relates two tokens"):
        config(cross_attention={"zz": True})
    built = network(attention="belief", cross_attention="mgk")
    assert built.decoder.blocks[0].cross.spec == PRESETS["mgk"]
    assert built(source, inputs).isfinite().all()


def test_the_m_step_does_not_count_padding() -> None:
    """A batch of one sentence and the same sentence with padding have the same responsibilities."""
    source, inputs, _ = sentences()
    priors = []
    for rows in ((source[1:2, :4], inputs[1:2, :3]), (source[1:2], inputs[1:2])):
        built = network(attention=AttentionSpec(similarity=MixtureConfig(prior="m-step"))).train()
        built(*rows)
        block = built.decoder.blocks[0]
        priors.append([block.attn.similarity.prior, block.cross.similarity.prior])
    for alone, padded in zip(*priors, strict=True):
        torch.testing.assert_close(alone, padded)


@pytest.mark.parametrize(("shared", "count"), [("separate", 3), ("decoder", 2), ("all", 1)])
def test_embeddings_are_shared_as_configured(shared: str, count: int) -> None:
    sizes = [EncoderDecoder(config(embeddings=shared), v, 64) for v in (VOCABULARY, VOCABULARY + 1)]
    assert factory.count(sizes[1]) - factory.count(sizes[0]) == count * WIDTH


def test_initial_values_are_those_of_fairseq() -> None:
    torch.manual_seed(0)
    built = EncoderDecoder(config(dim=256, attention="mgk"), 300, 64)
    for layer in (built.encoder.blocks[0].attn, built.decoder.blocks[1].cross):
        for weight in (layer.qkv.weight, layer.similarity.more.weight):
            bound = math.sqrt(6 / (256 + 256)) / math.sqrt(2)
            assert weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        bound = math.sqrt(6 / (256 + 256))
        assert layer.proj.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert not layer.proj.bias.any()
    for trunk in (built.encoder, built.decoder):
        assert trunk.tokens.weight.std().item() == pytest.approx(0.02, rel=0.03)
        assert (trunk.tokens.weight == 0).all(1).nonzero().tolist() == [[PADDING]]


def log_probability(built: EncoderDecoder, source: Tensor, ids: list[int]) -> float:
    """Return log p(ids, END | source) without padding as a next token, by one uncached call."""
    inputs, targets = torch.tensor([[END, *ids]]), torch.tensor([*ids, END])
    log_p = built(source, inputs).log_softmax(-1)[0]
    return log_p.gather(1, targets[:, None]).sum().item()


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_wide_beam_equals_an_exhaustive_search(penalty: float) -> None:
    """A vocabulary of 5 ids (padding, END, and three others), and at most 3 tokens before END."""
    torch.manual_seed(3)
    built = EncoderDecoder(config(), 5, 64).double().eval()
    sources = torch.tensor([[2, 3, END, PADDING], [4, 4, 3, END], [3, END, PADDING, PADDING]])
    translated = translate(
        built, sources, TranslationConfig(beams=200, length_penalty=penalty, ratio=0.0, extra=3)
    )
    for source, ids in zip(sources, translated, strict=True):
        row = source[None, source != PADDING]
        best = max(
            (log_probability(built, row, list(words)) / (length + 1) ** penalty, list(words))
            for length in (1, 2, 3)
            for words in itertools.product((2, 3, 4), repeat=length)
        )
        assert ids == best[1]


@torch.no_grad()
def plain_search(built: EncoderDecoder, source: Tensor, search: TranslationConfig) -> list[int]:
    """Search one sentence, hypothesis by hypothesis, without caches."""
    limit = 1 + int(search.ratio * source.shape[1] + search.extra)
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for step in range(limit):
        candidates = []
        for score, ids in beams:
            log_p = built(source, torch.tensor([[END, *ids]])).log_softmax(-1)[0, -1].tolist()
            for token in range(1, len(log_p)):
                is_allowed = token == END if step == limit - 1 else token != END or step > 0
                if is_allowed:
                    candidates.append((score + log_p[token], [*ids, token]))
        candidates.sort(reverse=True)
        for score, ids in candidates[: search.beams]:
            if ids[-1] == END and len(finished) < search.beams:
                finished.append((score / (step + 1) ** search.length_penalty, ids[:-1]))
        beams = [one for one in candidates if one[1][-1] != END][: search.beams]
        if len(finished) == search.beams:
            break
    return max(finished)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "mgk", "smgk-hard", "dcmha", "linear"])
def test_the_search_equals_a_plain_one(name: str) -> None:
    """Sentences of one batch have different lengths and limits.

    The search reorders the caches of its hypotheses; each preset here has caches of another kind.
    """
    built, (source, _, _) = network(attention=PRESETS[name]), sentences()
    search = TranslationConfig(beams=3, length_penalty=1.0, ratio=0.8, extra=3)
    assert translate(built, source, search) == [
        plain_search(built, row[None, row != PADDING], search) for row in source
    ]


def test_a_translation_is_no_longer_than_the_learned_positions() -> None:
    torch.manual_seed(0)
    built = EncoderDecoder(config(positions="learned"), VOCABULARY, 7).eval()
    source, _, _ = sentences()
    assert max(map(len, translate(built, source, TranslationConfig(extra=50)))) <= 6
