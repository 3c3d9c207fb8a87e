"""Tests of `order: endless`, in which the Long Range Arena's code reads labelled sequences.

Samples are texts of one letter, so their tokens tell them apart.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_ranks import on_rank
from pydantic import ValidationError
from torch import Tensor

from lit_attn.data.module import numpy_generator
from lit_attn.data.text.ids import IGNORED
from lit_attn.data.text.labelled import LabelledData, LabelledText
from lit_attn.schema.errors import ConfigError

LETTERS = {"train": "abcdefghijk", "val": "lmnopqr", "test": "stuvw"}
SEED = 3


def letters(tokens: Tensor, labels: Tensor) -> str:
    rows = tokens[labels != IGNORED].flatten()
    return "".join(chr(token - 1) for token in rows.tolist() if token)


def reading(folder: Path, **changes: object) -> LabelledData:
    for split, text in LETTERS.items():
        rows = "".join(f"{number % 2}\t{letter}\n" for number, letter in enumerate(text))
        (folder / f"{split}.tsv").write_text(rows)
    fields = {"name": "letters", "folder": folder, "context": 1, "order": "endless"}
    fields |= {"batch_size": 4, "eval_batch_size": 2, **changes}
    return LabelledData(LabelledText.model_validate(fields), SEED, torch.device("cpu"))


def endless(split: str) -> Iterator[str]:
    """Yield the samples of a split on and on: in the order of the file, then in random orders."""
    yield from LETTERS[split]
    number = 0
    while True:
        number += 1
        drawn = numpy_generator(SEED, split, number).permutation(len(LETTERS[split]))
        yield from np.array([*LETTERS[split]])[drawn]


def evaluated(module: LabelledData, split: str) -> str:
    loader = module.val_dataloader()[module.splits.index(split)]
    evaluated_letters = ""
    for number, (tokens, _, labels) in enumerate(loader):
        # A rank without samples has a batch of padding, which the task does not count.
        if loader.count_samples(number):
            evaluated_letters += letters(tokens, labels)
    return evaluated_letters


def test_training_continues_over_the_ends_of_passes(tmp_path: Path) -> None:
    module = reading(tmp_path)
    read = "".join(letters(*module.batch(step)[::2]) for step in range(8))
    assert read == "".join(islice(endless("train"), 32))
    # A step depends on its number alone.
    assert letters(*reading(tmp_path).batch(5)[::2]) == read[20:24]


@pytest.mark.parametrize("every", [1, 2])
def test_an_evaluation_of_val_continues_where_the_last_one_ended(
    every: int, tmp_path: Path
) -> None:
    module, expected = reading(tmp_path), endless("val")
    for number in range(5):
        on_rank(module, step=every * (number + 1) * module.steps_per_epoch, every=every)
        assert evaluated(module, "val") == "".join(islice(expected, 6))
        assert evaluated(module, "test") == "stuv"


def test_an_evaluation_after_a_part_of_an_epoch_is_the_next_one(tmp_path: Path) -> None:
    """A training may end within an epoch, by `max_steps`."""
    module, expected = reading(tmp_path, epoch_steps=4), "".join(islice(endless("val"), 18))
    for step, start in ((4, 0), (8, 6), (10, 12)):
        on_rank(module, step=step)
        assert evaluated(module, "val") == expected[start : start + 6]
    on_rank(module, step=11, every=3)
    assert evaluated(module, "val") == expected[:6]


def test_processes_share_the_full_batches(tmp_path: Path) -> None:
    module, expected = reading(tmp_path), "".join(islice(endless("val"), 6, 12))
    shares = [
        evaluated(on_rank(module, rank, 2, step=2 * module.steps_per_epoch), "val")
        for rank in (0, 1)
    ]
    assert shares == [expected[:2] + expected[4:], expected[2:4]]


def test_a_split_without_a_full_batch_is_one_line(tmp_path: Path) -> None:
    module = reading(tmp_path, eval_batch_size=6)
    with pytest.raises(
        ConfigError,
        match=r"^data\.eval_batch_size: 6 is more than the 5 samples of test; 5 at most$",
    ):
        module.val_dataloader()


def test_an_evaluation_can_read_fewer_batches_than_val_has(tmp_path: Path) -> None:
    module, expected = reading(tmp_path, val_batches=2), endless("val")
    for epoch in range(4):
        on_rank(module, step=(epoch + 1) * module.steps_per_epoch)
        assert evaluated(module, "val") == "".join(islice(expected, 4))
        assert evaluated(module, "test") == "stuv"
    with pytest.raises(ValidationError, match="val_batches: needs `order: endless`"):
        reading(tmp_path, val_batches=2, order="random")
