"""Tests of packed text: no attention across documents, and positions that start again."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gpt_cases
from helpers.finished_cells import train_cell
from helpers.gpt_cases import CONTEXT, VOCABULARY
from helpers.training_cells import text_cell
from torch import Tensor

from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.cells.rows import read_metrics
from lit_attn.data.text.plain_text import PythonText
from lit_attn.data.text.tokenizers import Bytes, Gpt2, GptNeox, Words
from lit_attn.models.language import GPT, Sampling, continuation
from lit_attn.signatures import CausalTokens, TokenStream
from lit_attn.training import diagnostics

END = 0
"""Token that separates the documents of these tests."""

SEPARABLE = [name for name in gpt_cases.FITTING if not PRESETS[name].find_document_problem()]


def make_network(name: str, **changes: Any) -> GPT:
    """Return a model in float64 whose documents are separate."""
    network = gpt_cases.network(name, **changes)
    network.trunk.document_end = END
    return network


def pack_tokens() -> tuple[Tensor, list[list[slice]]]:
    """Return packed rows (2, CONTEXT), and the places of the documents of each row.

    The first row begins within a document, the second one with a separator. Two separators follow
    each other in the second row, so that one document is empty.
    """
    tokens = gpt_cases.tokens().clamp_min(1)
    borders = [[0, 5, 11, CONTEXT], [0, 2, 3, 9, CONTEXT]]
    tokens[0, [5, 11]] = END
    tokens[1, [0, 2, 3, 9]] = END
    return tokens, [[slice(*ends) for ends in pairwise(row)] for row in borders]


def assert_separate(network: GPT) -> None:
    """Check that packed documents have the outputs and gradients that each has alone."""
    tokens, documents = pack_tokens()
    packed = network.trunk(tokens)
    weights = torch.randn(packed.shape, dtype=packed.dtype)
    gradients = torch.autograd.grad(
        (packed * weights).sum(), list(network.trunk.parameters()), allow_unused=True
    )
    rows = []
    for row, places in zip(tokens, documents, strict=True):
        rows.append(torch.cat([network.trunk(row[None, place])[0] for place in places]))
    alone = torch.stack(rows)
    expected_gradients = torch.autograd.grad(
        (alone * weights).sum(), list(network.trunk.parameters()), allow_unused=True
    )
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-10)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", gpt_cases.CHOICES)
def test_a_packed_document_computes_what_it_computes_alone(name: str) -> None:
    assert_separate(make_network(name))


@pytest.mark.parametrize("preset", SEPARABLE)
def test_every_mechanism_keeps_documents_apart(preset: str) -> None:
    """The mixture with an M-step has statistics of the batch, which evaluation leaves alone."""
    # A filter needs all earlier tokens.
    windows = (None,) if PRESETS[preset].filter.kind != "none" else (None, 4)
    assert_separate(make_network("casted", attention=PRESETS[preset], windows=windows))


def test_blocks_of_keys_start_again_with_each_document() -> None:
    chosen = {"filter": {"kind": "moba", "block": 2, "blocks": 2}}
    assert_separate(make_network("casted", attention=AttentionSpec.model_validate(chosen)))


def test_joined_documents_differ() -> None:
    tokens, _ = pack_tokens()
    separate = make_network("nanogpt")
    joined = gpt_cases.network("nanogpt")
    assert (separate(tokens) - joined(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["nanogpt", "transformer++", "wikitext"])
@pytest.mark.parametrize("cuts", [list(range(1, CONTEXT)), [4, 10, 11]], ids=len)
def test_decoding_keeps_documents_apart(name: str, cuts: list[int]) -> None:
    """Rows start documents at different places, and the layers of transformer++ have windows."""
    tokens, _ = pack_tokens()
    gpt_cases.assert_decodes(make_network(name), cuts, tokens)


def test_a_continuation_depends_on_the_last_document_alone() -> None:
    network = make_network("casted", init={"matrices": 0.5, "embedding": 0.5}, head="untied")
    sampling = Sampling(temperature=1.0, seed=3)
    document = [END, 3, 1, 4]
    drawn = list(continuation(network, document, 8, VOCABULARY, sampling))
    packed = list(continuation(network, [7, 2, *document], 8, VOCABULARY, sampling))
    assert packed == drawn
    joined = gpt_cases.network("casted", init={"matrices": 0.5, "embedding": 0.5}, head="untied")
    assert list(continuation(joined, [7, 2, *document], 8, VOCABULARY, sampling)) != drawn


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"similarity": "linear"}, "attention.similarity: 'linear' adds up all earlier tokens"),
        ("selective", "attention.filter: 'selective' changes the logits of a query"),
        ("multi-token", "attention.filter: 'multi-token' changes the logits of a query"),
        (
            {"similarity": {"kind": "mixture", "prior_scope": "position", "positions": 16}},
            "attention.similarity: 'mixture' has parameters for places of the sequence",
        ),
        (
            {"layers": [{"last": 1, "use": "linear"}]},
            "attention.similarity: 'linear' adds up all earlier tokens",
        ),
        (
            {"kind": "module", "import": "torch.nn.Identity"},
            "attention.kind: 'module' mixes the tokens of one sequence",
        ),
    ],
    ids=["linear", "selective", "multi-token", "position", "layers", "module"],
)
def test_mechanisms_that_masks_cannot_separate_are_refused(attention: Any, message: str) -> None:
    chosen = AttentionSpec.model_validate(attention)
    gpt_cases.config("casted", attention=chosen)
    with pytest.raises(ValueError, match=message):
        gpt_cases.config("casted", attention=chosen, documents="separate")


def test_the_data_names_the_token_that_separates_documents() -> None:
    model = gpt_cases.config("casted", documents="separate")
    network = model.build(TokenStream(VOCABULARY, CONTEXT, document_end=END))
    assert network.trunk.document_end == END
    assert (
        gpt_cases.config("casted").build(TokenStream(50, 16, document_end=0)).trunk.document_end
        is None
    )
    assert PythonText().signature().document_end == Bytes().document_end == 0
    assert Gpt2().document_end == 50_256
    assert GptNeox().document_end == 0


@pytest.mark.parametrize("is_added", [True, False])
def test_another_tokenizer_file_separates_documents_at_its_own_token(
    is_added: bool, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models

    words = {"a": 0, "b": 1, "c": 2}
    if not is_added:
        words["<|endoftext|>"] = 3
    tokenizer = Tokenizer(models.BPE(words, []))
    if is_added:
        tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chosen = GptNeox(file=tmp_path / "tokenizer.json", size=4)
    assert chosen.document_end == chosen.encoder(()).end == 3


@pytest.mark.parametrize("text", ['{"model": 0, "<|endoftext|>": 7}', '{"<|endoftext|>": 7}'])
def test_another_vocabulary_of_gpt2_separates_documents_at_its_own_token(
    text: str, tmp_path: Path
) -> None:
    assert Gpt2(folder=tmp_path / "absent").document_end == 50_256
    (tmp_path / "encoder.json").write_text(text)
    assert Gpt2(folder=tmp_path).document_end == 7


@pytest.mark.parametrize("signature", [TokenStream(50, 16), CausalTokens(50, 16)], ids=str)
def test_data_without_such_a_token_are_refused(signature: CausalTokens) -> None:
    assert Words(size=10).document_end is None
    with pytest.raises(ValueError, match="documents: separate needs a token that separates"):
        gpt_cases.config("casted", documents="separate").check(signature)


def test_diagnostics_of_packed_text_split_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample has a mask and rotary positions of its own."""
    network = make_network("casted")
    tokens, _ = pack_tokens()
    layer = network.trunk.blocks[0].attn
    (calls,) = diagnostics.record_calls(network, [layer], (tokens,))
    (call,) = calls
    expected = layer.record(**call.arguments).heads
    monkeypatch.setattr(diagnostics, "MAX_WEIGHTS", 1)
    parts = [
        layer.record(**part.arguments).heads for part, _ in diagnostics.split_calls(layer, calls)
    ]
    assert len(parts) == 2
    torch.testing.assert_close(torch.cat(parts), expected)


def test_a_cell_trains_on_separate_documents(tmp_path: Path) -> None:
    """Losses differ from those of joined documents. Byte 0 in a text ends a document."""
    text = "\0".join("abcd" * (number % 4) for number in range(60))
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text(text)
    data = {split: str(tmp_path / f"{split}.txt") for split in ("train", "test")}
    losses = []
    for documents in ("joined", "separate"):
        cell = text_cell(
            data=data,
            model={"documents": documents, "positions": "rotary"},
            training={"epochs": 2, "diagnostics": {"kinds": ["residual", "rank"]}},
        )
        folder = train_cell(cell, tmp_path / documents)
        rows = read_metrics(folder / "metrics.csv")
        losses.append([row.value for row in rows if row.name == "val/loss"])
    assert losses[0]
    assert losses[0] != losses[1]


def test_a_signature_with_further_fields_keeps_their_places() -> None:
    """Data outside the package pass the fields of their own signatures by place."""

    @dataclass(frozen=True)
    class Stream(TokenStream):
        floor: float = 0.0

    assert Stream(50, 16, 0.25) == Stream(50, 16, floor=0.25)
    assert Stream(50, 16, 0.25).document_end is None
