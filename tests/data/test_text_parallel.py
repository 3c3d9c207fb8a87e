"""Sentence pairs: byte-pair encoding, batches by tokens, shares of processes, wrong files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import sentence_pairs
from helpers.paths import SHARED

from lit_attn.data.text.ids import END, IGNORED, PADDING
from lit_attn.data.text.parallel import ParallelData, ParallelText, Subwords, cut_batches
from lit_attn.schema.errors import ConfigError


def write(folder: Path, **changes: str) -> ParallelText:
    """Write 120 training pairs and 7 pairs of each evaluated split."""
    sentence_pairs.write(folder)
    values: dict[str, Any] = {"name": "own", "folder": folder, "vocabulary": 60}
    values |= {"batch_size": 64, "context": 30, "eval_batch_size": 4}
    return ParallelText.model_validate(values | changes)


def build(data: ParallelText, seed: int = 0) -> ParallelData:
    return ParallelData(data, seed, torch.device("cpu"))


class Ranked(ParallelData):
    """Data of one of several processes."""

    rank, world = 0, 1


def test_an_epoch_has_every_pair_once_in_batches_of_few_tokens(tmp_path: Path) -> None:
    data = build(write(tmp_path))
    for epoch in (0, 1):
        rows = []
        for step in range(data.steps_per_epoch):
            source, inputs, targets, mean = data.batch(epoch * data.steps_per_epoch + step)
            assert len(source) * max(source.shape[1], inputs.shape[1]) <= 64
            assert mean.sum().item() == pytest.approx((targets != IGNORED).sum().item())
            rows += [tuple(row[row != PADDING].tolist()) for row in source]
        expected = [(*source.tolist(), END) for source, _ in data.pairs["train"]]
        assert sorted(rows) == sorted(expected)


def test_a_batch_has_sources_inputs_and_targets_one_token_later(tmp_path: Path) -> None:
    data = build(write(tmp_path))
    pairs = {(*s.tolist(), END): t.tolist() for s, t in data.pairs["train"]}
    source, inputs, targets, _ = data.batch(0)
    for row in range(len(source)):
        ids = pairs[tuple(source[row][source[row] != PADDING].tolist())]
        n = len(ids) + 1
        assert inputs[row].tolist() == [END, *ids] + [PADDING] * (inputs.shape[1] - n)
        assert targets[row].tolist() == [*ids, END] + [IGNORED] * (inputs.shape[1] - n)


def test_batches_depend_on_the_seed_and_the_step_alone(tmp_path: Path) -> None:
    data = write(tmp_path)
    one, two, other = build(data), build(data), build(data, seed=1)
    step = one.steps_per_epoch + 2
    for first, second in zip(one.batch(step), two.batch(step), strict=True):
        assert torch.equal(first, second)
    assert one.fingerprint() == two.fingerprint() == other.fingerprint()
    assert any(not torch.equal(one.batch(step)[0], other.batch(step)[0]) for step in range(3))
    orders = [
        [one.batch(epoch * one.steps_per_epoch + i)[0].shape for i in range(5)] for epoch in (0, 1)
    ]
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (3, 1), (2, 2)])
def test_processes_and_micro_batches_share_a_step(
    tmp_path: Path, world: int, accumulate: int
) -> None:
    """The rows of all shares are those of one process, and so is the mean times the rows."""
    size = 60
    config = write(tmp_path, batch_size=size, accumulate=accumulate)
    alone = build(config.model_copy(update={"accumulate": 1}))
    for step in range(alone.steps_per_epoch):
        shared, counted = [], 0.0
        for rank in range(world):
            data = Ranked(config, 0, torch.device("cpu"))
            data.rank, data.world = rank, world
            source, _, targets, mean = data.batch(step)
            assert len(source) % accumulate == 0
            counted += mean.sum().item()
            kept = (targets != IGNORED).any(1)
            shared += [tuple(row[row != PADDING].tolist()) for row in source[kept]]
        source, _, targets, _ = alone.batch(step)
        assert sorted(shared) == sorted(tuple(r[r != PADDING].tolist()) for r in source)
        assert counted == pytest.approx((targets != IGNORED).sum().item())


def test_evaluation_has_every_pair_once_with_its_place(tmp_path: Path) -> None:
    data = build(write(tmp_path))
    loader = data.evaluation_loader("val")
    places: list[int] = []
    for rows, (source, _, targets) in zip(loader.units, loader, strict=True):
        for place, ids, target in zip(rows, source, targets, strict=True):
            if place < 7:
                expected = [*data.pairs["val"][place][0].tolist(), END]
                assert ids[ids != PADDING].tolist() == expected
                places.append(place)
            else:
                assert (target == IGNORED).all()
    assert sorted(places) == list(range(7))
    lengths = [len(data.pairs["val"][place][0]) for place in places]
    assert lengths == sorted(lengths)


def test_rows_beyond_a_multiple_of_eight_start_the_next_batch() -> None:
    lengths = np.full(30, 3)
    sizes = [len(batch) for batch in cut_batches(np.arange(30), lengths, 3 * 19)]
    assert sizes == [16, 14]
    sizes = [len(batch) for batch in cut_batches(np.arange(30), lengths, 3 * 5)]
    assert sizes == [5] * 6


def test_a_long_sentence_ends_the_batch_and_what_it_would_not_fit_with() -> None:
    """Ten rows of 3 tokens, then one of 28: eight rows, two rows, one row."""
    lengths = np.array([3] * 10 + [28])
    assert [len(b) for b in cut_batches(np.arange(11), lengths, 40)] == [8, 2, 1]


def test_long_pairs_are_left_out_of_training_and_refused_in_evaluation(tmp_path: Path) -> None:
    data = write(tmp_path)
    with (tmp_path / "train.de").open("a", encoding="utf-8") as file:
        file.write("hund " * 40 + "\n")
    with (tmp_path / "train.en").open("a", encoding="utf-8") as file:
        file.write("hund\n")
    built = build(data)
    assert len(built.pairs["train"]) == 121
    assert sum(map(len, built.batches)) == 120
    (tmp_path / "test.en").write_text("hund\n" * 3 + "hund " * 40 + "\nhund\nhund\nhund\n")
    with pytest.raises(ConfigError, match=r"test\.en:4: has 41 subwords with its end; set data"):
        build(data)


def test_the_encoding_is_equal_for_equal_texts_and_gives_the_words_back(tmp_path: Path) -> None:
    data = write(tmp_path)
    built = build(data)
    assert build(data).encoder.tokenizer.to_str() == built.encoder.tokenizer.to_str()
    lines = (tmp_path / "train.de").read_text(encoding="utf-8").splitlines()
    for line, (source, _) in zip(lines, built.pairs["train"], strict=True):
        assert built.encoder.decode(source.tolist()) == line
        assert source.min() > END


def test_unknown_characters_and_names_of_special_tokens() -> None:
    encoder = Subwords([["ab ab"], ["a b < / s >"]], 30)
    unknown, special = encoder.encode(["ab☃", "</s>"])
    assert 2 in unknown.tolist()
    assert encoder.decode(unknown.tolist()) == "ab<unk>"
    assert END not in special.tolist()
    assert encoder.decode(special.tolist()) == "</s>"


def test_a_vocabulary_below_the_number_of_characters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.vocabulary: 5 is less than the 8 characters"):
        Subwords([["abcd"], ["a"]], 5)


def test_files_of_different_lengths_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path)
    with (tmp_path / "valid.en").open("a") as file:
        file.write("hund\n")
    with pytest.raises(ConfigError, match=r"valid\.en: has 8 lines, and valid\.de has 7"):
        build(data)


def test_missing_files_are_named(tmp_path: Path) -> None:
    data = write(tmp_path)
    (tmp_path / "test.en").unlink()
    with pytest.raises(ConfigError, match=r"test\.en: cannot be read: No such file"):
        build(data)


def test_pairs_that_no_batch_can_contain_are_left_out(tmp_path: Path) -> None:
    data = build(write(tmp_path, context=128, batch_size=8))
    sizes = [max(map(len, pair)) + 1 for pair in data.pairs["train"]]
    kept = [row for batch in data.batches for row in batch]
    assert sorted(kept) == [row for row, size in enumerate(sizes) if size <= 8]
    assert 0 < len(kept) < 120
    with pytest.raises(ConfigError, match=r"data\.context: every pair of train is longer"):
        build(write(tmp_path, context=128, batch_size=1))


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "multi30k").is_dir(), reason="needs Multi30k")
def test_multi30k_is_encoded_without_loss() -> None:
    names = {"train_name": "train.lc.norm.tok", "val_name": "val.lc.norm.tok"}
    data = ParallelText(
        name="multi30k",
        folder=SHARED / "multi30k",
        test_name="test_2016_flickr.lc.norm.tok",
        vocabulary=8000,
        context=128,
        **names,
    )
    data.check_files()
    built = build(data)
    assert {split: len(pairs) for split, pairs in built.pairs.items()} == {
        "train": 29_000,
        "val": 1014,
        "test": 1000,
    }
    lines = (SHARED / "multi30k" / f"{data.test_name}.de").read_text(encoding="utf-8").splitlines()
    decoded = [built.encoder.decode(ids.tolist()) for ids in built.encoder.encode(lines)]
    assert (
        sum(text != " ".join(line.split()) for text, line in zip(decoded, lines, strict=True)) < 5
    )
    assert built.encoder.tokenizer.get_vocab_size() == 8000
    padded = sum(
        len(b) * (1 + max(max(map(len, built.pairs["train"][r])) for r in b)) for b in built.batches
    )
    tokens = sum(max(map(len, pair)) + 1 for pair in built.pairs["train"])
    assert padded < 1.25 * tokens
