"""Tests of labelled sequences: batches of ListOps, and files of text."""

from pathlib import Path

import pytest
import torch
from helpers.data_ranks import on_rank
from pydantic import ValidationError

from lit_attn.data.text.ids import IGNORED, SPLITS
from lit_attn.data.text.labelled import LabelledData, LabelledText
from lit_attn.data.text.listops import ListOps, evaluate
from lit_attn.schema.errors import ConfigError

CPU = torch.device("cpu")

SMALL = {"lengths": (5, 40), "depth": 4, "context": 40, "train": 24, "val": 7, "test": 5}


def data(seed: int = 0, **changes: object) -> LabelledData:
    return LabelledData(ListOps(**{**SMALL, "batch_size": 8, **changes}), seed, CPU)


def test_batches_depend_on_seed_and_step_alone() -> None:
    first, again = data(), data()
    again.batch(3)
    for one, other in zip(first.batch(4), again.batch(4), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(first.batch(4)[0], data(seed=1).batch(4)[0])
    assert first.fingerprint() == data(seed=1).fingerprint()
    assert first.steps_per_epoch == 3


def test_a_pass_shows_every_sample_once() -> None:
    module = data()
    rows = torch.cat([module.batch(step)[0] for step in range(3)])
    assert len(rows.unique(dim=0)) == 24


def test_padding_is_marked_as_absent() -> None:
    tokens, present, labels = data().batch(0)
    assert tokens.shape == (8, 40)
    assert torch.equal(present, tokens > 0)
    for row, label in zip(tokens, labels, strict=True):
        assert evaluate(row[row > 0].tolist()) == label


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_sample_is_evaluated_once(world: int) -> None:
    rows, batches = [], set()
    for rank in range(world):
        module = data(eval_batch_size=2)
        on_rank(module, rank, world)
        val, _ = module.val_dataloader()
        batches.add(len(list(val)))
        for tokens, present, labels in val:
            assert present.any(-1).all()
            rows += [tuple(row.tolist()) for row in tokens[labels != IGNORED]]
    assert len(set(rows)) == len(rows) == 7
    assert len(batches) == 1


def test_micro_batches_make_up_the_batch() -> None:
    module = data(accumulate=2)
    parts = list(module.train_dataloader())
    assert len(parts) == len(module.train_dataloader()) == 6
    torch.testing.assert_close(torch.cat([parts[0][0], parts[1][0]]), module.batch(0)[0])


def text(folder: Path, rows: str, **changes: object) -> LabelledData:
    for split in SPLITS:
        (folder / f"{split}.tsv").write_text(rows)
    fields = {"name": "x", "folder": folder, "context": 4, "batch_size": 2, **changes}
    return LabelledData(LabelledText.model_validate(fields), 0, CPU)


def test_labelled_text_is_cut_and_padded(tmp_path: Path) -> None:
    tokens, present, labels = text(tmp_path, "1\tabcdef\n0\tg\n").batch(0)
    rows = dict(zip(labels.tolist(), tokens.tolist(), strict=True))
    assert rows == {1: [98, 99, 100, 101], 0: [104, 0, 0, 0]}
    assert present.sum() == 5


def test_positions_beyond_the_tokens_are_padding(tmp_path: Path) -> None:
    """The arena's repositories read 4,000 tokens of a text into 4,096 positions."""
    tokens, present, _ = text(tmp_path, "1\tabcdef\n0\tabcdef\n", max_tokens=3).batch(0)
    assert tokens.tolist() == [[98, 99, 100, 0]] * 2
    assert present.sum() == 6
    with pytest.raises(
        ValidationError, match="max_tokens: 5 tokens do not fit into a context of 4"
    ):
        text(tmp_path, "1\ta\n", max_tokens=5)


def test_pairs_have_an_axis_of_documents(tmp_path: Path) -> None:
    tokens, present, _ = text(tmp_path, "1\tab\tc\n0\td\te\n", pairs=True).batch(0)
    assert tokens.shape == present.shape == (2, 2, 4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1\tab\n2\tc\n", r"train.tsv:2: label '2' is not one of 0 to 1"),
        ("1 ab\n", r"train.tsv:1: needs 2 columns"),
        ("1\t\n", r"train.tsv:1: needs 2 columns with text"),
        ("1\ta\n", r"data.batch_size: 2 is more than the 1 samples of an epoch"),
        ("", r"train.tsv: is empty"),
    ],
)
def test_malformed_labelled_text_is_refused(tmp_path: Path, rows: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        text(tmp_path, rows)
